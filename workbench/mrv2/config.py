"""Load-time settings (`EngineConfig`) and live switches (`Knobs`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mrv2.errors import ConfigError, nearest
from mrv2.speculators import LOADED_METHODS, MODEL_METHODS, parse_speculators

EffectClass = Literal["T", "D", "O"]  # same tokens, same distribution, changes the output
# values of the knob `sampler` that draw the same tokens, as does runner v1
SAME_TOKEN_SAMPLERS = ("gumbel_fused", "gumbel_two_pass", "softmax_race")

# what runner v1 has of the knobs `spec_method` and `verification`
V1_METHODS = ("ngram", "eagle3", "mtp")
V1_VERIFICATIONS = ("token_exact", "standard", "synthetic")


def _knob(default: Any, effect: EffectClass, help: str, look_for: str, values: tuple[Any, ...] = ()) -> Any:
    return field(default=default, metadata={"effect": effect, "help": help, "look_for": look_for, "values": values})


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Switches that may change between two steps of a running engine; steps in flight drain first."""

    runner: Literal["v2", "v1"] = _knob(
        "v2",
        "T",
        "Which runner prepares, samples and keeps the books; model, kernels and KV cache are shared.",
        "With v1 the host lane fills with NumPy preparation and bookkeeping between two forwards.",
    )
    async_scheduling: bool = _knob(
        True,
        "T",
        "Schedule and launch step n+1 before the tokens of step n have reached the host.",
        "Off: the device idles while the host works. On: forwards stand shoulder to shoulder.",
    )
    queue_depth: int = _knob(
        2,
        "T",
        "Steps in flight with async scheduling (v1: at most 2); a stopped request wastes up to depth - 1 steps.",
        "How far the host lane runs ahead of the device lane.",
        (1, 2, 3, 4),
    )
    input_prep: Literal["device", "host"] = _knob(
        "device",
        "T",
        "Who builds the inputs of a v2 step (v1: always the host, in its own way). 'device': kernels, from an index of "
        "the batch. 'host': NumPy, from what the host knows, uploaded array by array; sampled ids and drafts are put "
        "in on the device. The host then has to know how many drafts were accepted, so that with speculation it "
        "waits for each step before it can build the next; cuda_graphs='step' replays 'model'.",
        "host: build_inputs inside execute_model, which grows with the batch and its block tables; with drafts "
        "'wait: accepted tokens' before it, and a device that idles meanwhile.",
    )
    cuda_graphs: Literal["off", "model", "step"] = _knob(
        "model",
        "T",
        "What one CUDA graph per bucket replays: 'model' the forward pass; 'step' everything of a step of decodes or "
        "verifications, from staged writes to the drafts of the next step, and 'model' for the batches that this does "
        "not cover (prompts, sampler features, log probabilities, grammars, steps from one number of drafts to "
        "another, input_prep='host', runner v1); 'off' launches every kernel from Python.",
        "off: the host lane's forward stage grows to the sum of its launches. step: one step_graph stage in the main "
        "lane, and a short execute_model above it. Without CUDA only 'step' has an effect: the same stage, no graph.",
    )
    fetch_ahead: bool = _knob(
        True,
        "T",
        "With cuda_graphs='step': a graph brings what the host has already written for the next step, how many "
        "requests there are and what changed of them, from pinned memory while its logits are computed. Off, or if "
        "the host is late, the next graph begins with that way.",
        "Off: the upload at the head of a step graph takes some 15 us longer (granularity node shows it).",
    )
    spec_method: Literal["off", "ngram", "suffix", "draft_model", "eagle3", "mtp"] = _knob(
        "off",
        "T",
        "Who drafts tokens for the target to verify. 'ngram' looks up what followed the request's own suffix; the "
        "others must be loaded with `speculators`: 'suffix' looks for longer matches, also in recent requests; "
        "'draft_model' is a smaller language model, 'eagle3' and 'mtp' are heads on the target's hidden states. "
        "Switched on, a draft model first reads what running requests hold; for a head they are recomputed once.",
        "The draft stage behind post_update, and how many steps a request needs.",
    )
    num_spec_tokens: int = _knob(
        3,
        "T",
        "Drafts per request and step; at most max_num_spec_tokens, which is fixed at load.",
        "A longer forward stage against fewer steps.",
        tuple(range(9)),
    )
    adaptive_drafts: bool = _knob(
        False,
        "T",
        "Choose the drafts of each step, from none to num_spec_tokens, by how many were accepted lately: those that "
        "bring the most tokens for their cost (draft_cost at load).",
        "Draft stages that vanish, and forwards that get shorter, while drafts are refused.",
    )
    grammar_drafts: bool = _knob(
        False,
        "T",
        "Draft what a grammar forces, as the keys of a JSON object: up to num_spec_tokens tokens a step of the text "
        "that must follow, as the tokenizer spells it; beside spec_method, whose drafts stand back, or with "
        "spec_method='off' for requests under a grammar alone. It is known one step after what decided it.",
        "Fewer steps for structured outputs; a draft stage, and a longer forward, only while something is forced.",
    )
    verification: Literal["token_exact", "standard", "block", "synthetic"] = _knob(
        "token_exact",
        "D",
        "When a draft is accepted. token_exact: if it is the token that the target itself draws there, so that a "
        "request says the same with drafts and without. standard: with the probability that keeps the target's "
        "distribution (rejection sampling). block: the same for the drafts of a step together, which accepts at least "
        "as many. synthetic: by the rates given at load, whatever the target says; a benchmark, not a text.",
        "The verify stage, and the mean accepted length; synthetic shows what a better drafter would bring.",
    )
    draft_sampling: Literal["greedy", "sampled"] = _knob(
        "greedy",
        "T",
        "How drafters with weights choose drafts: the likeliest tokens, or draws with the request's temperature, "
        "top-k, top-p and min-p. With verification='token_exact' the draws share the target's noise, so that random "
        "requests agree more often; otherwise they have their own and the probabilities go to the verification.",
        "Acceptance of requests with a temperature, against a longer draft stage.",
    )
    output_copy: Literal["side_stream", "main_stream"] = _knob(
        "side_stream",
        "T",
        "Stream on which sampled tokens travel to the host.",
        "main_stream: the copy stands in the main lane, before post_update, instead of beside it.",
    )
    output_wait: Literal["spin", "sleep"] = _knob(
        "spin",
        "T",
        "How the host waits on a CUDA device, for the output of a step above all: 'spin' asks again and again, which "
        "keeps a CPU core busy and sees the end at once; 'sleep' leaves the core to others until the driver wakes it.",
        "sleep: some 60 us between the end of output_copy and update_from_output, and host stages that take longer "
        "the longer the wait before them, on a core that has cooled down. sync shows it most.",
    )
    sampler: Literal["gumbel_fused", "gumbel_two_pass", "softmax_race", "gumbel_blocked", "torch_sort"] = _knob(
        "gumbel_fused",
        "D",
        "How v2 draws tokens; v1 always does as softmax_race. gumbel_fused: one pass over the raw logits. "
        "gumbel_two_pass: fp32 copy, temperature, masks, noise and arg-max by block, arg-max of the blocks. "
        "softmax_race: probabilities divided by exponential noise. These three draw the same tokens; gumbel_blocked "
        "(noise for one block of tokens only) and torch_sort (plain torch) draw others of the same distribution.",
        "The length of the sample stage, and how many kernels it launches.",
    )
    prefill_chunk: int = _knob(
        0,
        "T",
        "Prompt tokens, all requests together, of a step in which some request decodes: 0 = as many as the step's "
        "token budget leaves. Needs enable_chunked_prefill.",
        "A long prompt beside running requests: few long steps, or more of them that are hardly longer than a decode.",
        (0, 16, 64, 128, 256, 512, 1024, 2048),
    )
    grammar_overlap: Literal["deferred", "blocking"] = _knob(
        "deferred",
        "T",
        "When the masks of structured outputs are made, which takes the tokens of the step before: while the forward "
        "pass runs, or before anything of the step is launched. Either way at most two steps are in flight.",
        "deferred: fill_grammar_mask stands under the forward. blocking: the device idles through the wait and fill.",
    )
    attention: Literal["triton", "sdpa"] = _knob(
        "triton",
        "T",
        "Attention of eager forwards on CUDA: our paged Triton kernels, or torch SDPA per request. "
        "The host backend always runs the torch reference.",
        "The length of the forward stage; sdpa never uses graphs.",
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value, legal = getattr(self, f.name), legal_values(f.name)
            if legal and (value not in legal or type(value) is not type(legal[0])):
                raise ConfigError(f"knob {f.name}={value!r}: legal values are {', '.join(map(repr, legal))}")
        if self.runner == "v1" and self.async_scheduling and self.queue_depth > 2:
            raise ConfigError(
                f"runner='v1' supports queue_depth <= 2, not {self.queue_depth}: its pinned buffers are shared "
                "between steps and guarded by one barrier event; set queue_depth=2 or runner='v2'"
            )

        if self.runner == "v1" and self.spec_method != "off":
            self._check_v1_speculation()

        if self.grammar_drafts:
            self._check_grammar_drafts()

        if self.runner == "v1" and self.sampler not in SAME_TOKEN_SAMPLERS:
            raise ConfigError(
                f"runner='v1' cannot draw the tokens of sampler={self.sampler!r}: set sampler='softmax_race', which is "
                "what it does, or one that draws the same tokens, or runner='v2'"
            )

    def _check_v1_speculation(self) -> None:
        """V1 looks n-grams up on the host and runs draft heads; it verifies in three ways."""
        if self.spec_method not in V1_METHODS:
            raise ConfigError(
                f"runner='v1' does not draft with spec_method={self.spec_method!r}: it has n-gram look-up on the host "
                f"and heads on the target's hidden states. Set spec_method to one of "
                f"{', '.join(map(repr, V1_METHODS))} or 'off', or runner='v2'"
            )
        if self.spec_method == "ngram" and self.async_scheduling:
            raise ConfigError(
                "runner='v1' drafts with spec_method='ngram' only with async_scheduling=False: the drafts of a step "
                "are looked up in the tokens of the one before, which the host must have; set async_scheduling=False, "
                "spec_method='eagle3' or 'mtp', or runner='v2'"
            )
        if self.verification not in V1_VERIFICATIONS:
            raise ConfigError(
                f"runner='v1' does not verify with verification={self.verification!r}: its rejection sampler looks at "
                f"one draft after the other. Set verification to one of {', '.join(map(repr, V1_VERIFICATIONS))}, "
                "runner='v2' or spec_method='off'"
            )

    def _check_grammar_drafts(self) -> None:
        if not self.num_spec_tokens:
            raise ConfigError("grammar_drafts=True drafts up to num_spec_tokens tokens a step: set it to at least 1")
        if self.runner == "v1":
            raise ConfigError(
                "runner='v1' cannot draft by grammar_drafts=True: what a grammar forces is staged on the device for "
                "the end of the step before, and v1 looks its up on the host; set runner='v2' or grammar_drafts=False"
            )
        if self.draft_sampling == "sampled" and self.verification in ("standard", "block"):
            raise ConfigError(
                f"grammar_drafts=True cannot be verified by {self.verification!r} with draft_sampling='sampled': what "
                "a grammar forces takes the place of drafts whose probabilities the verification would use; set "
                "draft_sampling='greedy' or verification='token_exact'"
            )

    @property
    def drafting(self) -> bool:
        """True if some method drafts for every request."""
        return self.spec_method != "off" and self.num_spec_tokens > 0

    def promises_tokens_of(self, other: Knobs) -> bool:
        """Say whether both settings give a request the same tokens, and not just the same distribution."""
        for knobs in (self, other):
            if knobs.verification != "token_exact" and (knobs.drafting or knobs.grammar_drafts):
                return False
        return self.sampler == other.sampler or {self.sampler, other.sampler} <= set(SAME_TOKEN_SAMPLERS)

    def keeps_rows_of(self, other: Knobs) -> bool:
        """Say whether a runner may go on under these knobs with the rows that it has under `other`."""
        return self.runner == other.runner and (self.runner == "v1" or self.input_prep == other.input_prep)

    @property
    def depth(self) -> int:
        """Steps in flight at most: 1 when async scheduling is off."""
        return self.queue_depth if self.async_scheduling else 1

    def with_changes(self, **changes: Any) -> Knobs:
        """Return a copy with `changes`; an unknown name or illegal value raises `ConfigError`."""
        names = [f.name for f in fields(self)]
        for name in changes:
            if name not in names:
                raise ConfigError(f"unknown knob {name!r}{nearest(name, names)}; knobs are {', '.join(names)}")
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def legal_values(knob: str) -> tuple[Any, ...]:
    """Return the legal values of a knob, from its type or its metadata."""
    spec = next(f for f in fields(Knobs) if f.name == knob)
    if spec.metadata["values"]:
        return spec.metadata["values"]
    hint = get_type_hints(Knobs)[knob]
    if get_origin(hint) is Literal:
        return get_args(hint)
    return (True, False) if hint is bool else ()


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that is fixed when the engine is loaded; sizes in tokens unless said otherwise."""

    model: str
    dtype: str = "auto"
    seed: int = 0
    # "auto" = cuda where there is one, else host
    device: Literal["auto", "cuda", "host"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    # "fp8" = the layers' products keep their weights as 8-bit floats with a scale for each output, quantised at load;
    # activations, embeddings and head stay in `dtype`
    quantization: Literal["fp8"] | None = None
    # "fp8" = keys and values, of drafters too, are kept as 8-bit floats (e4m3, no scale): twice the tokens in the same
    # memory; "auto" = in `dtype`
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    # overrides the size derived from free memory
    num_gpu_blocks: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    # largest prefill chunk of one request in a step; 0 = only the token budget limits it
    long_prefill_token_threshold: int = 0
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    # folder of the tokenizer, if it is not the model's; the engine reads it for structured outputs
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    # most drafts a request may get in a step: 0 = the engine cannot speculate
    max_num_spec_tokens: int = 0
    # drafters to load, each "method" or "method=model" (`mrv2.speculators`)
    speculators: tuple = ()
    # ended requests in whose texts spec_method="suffix" looks, too
    suffix_documents: int = 64
    # refuse a draft head that was trained on other weights than the target's, instead of warning
    strict_speculators: bool = False
    # keep memory for the probabilities of sampled drafts, which verification by 'standard' and 'block' needs
    draft_probabilities: bool = True
    # shortest and longest suffix that spec_method="ngram" looks for, in tokens
    ngram_min: int = 2
    ngram_max: int = 4
    # what one more draft takes of a decode step, for adaptive_drafts
    draft_cost: float = 0.08
    # verification="synthetic" may be chosen: what the engine says then means nothing
    benchmark: bool = False
    # how often draft 1, 2, ... is accepted after those before it, for verification="synthetic"
    synthetic_acceptance: tuple = ()
    # library for structured outputs: "auto" = loaded by the first request that needs it, "xgrammar" = at once
    grammar_backend: Literal["auto", "xgrammar"] = "auto"
    # classes, or texts "module:Class", beside those of installed packages (`mrv2.logits_processor`)
    logits_processors: tuple = ()
    # most log-probabilities a position may ask for; -1 = the whole vocabulary
    max_logprobs: int = 20
    # when kernels are compiled and CUDA graphs captured: "first_use" = before the first request what any request needs,
    # the rest when a step asks for it; "all" = everything before the first request, for measurements
    warm_up: Literal["first_use", "all"] = "first_use"
    # run Scheduler.check() after every step
    debug_checks: bool = False
    knobs: Knobs = field(default_factory=Knobs)

    def __post_init__(self) -> None:
        positive = ("max_num_seqs", "max_num_batched_tokens", "block_size")
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.block_size < 16 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size={self.block_size} must be a power of two of at least 16")
        if not 0 <= self.max_num_spec_tokens <= 8:
            raise ConfigError(f"max_num_spec_tokens={self.max_num_spec_tokens} must be in 0..8")
        if not 1 <= self.ngram_min <= self.ngram_max <= 16:
            raise ConfigError(
                f"ngram_min={self.ngram_min} and ngram_max={self.ngram_max} must satisfy 1 <= min <= max <= 16"
            )
        parse_speculators(self.speculators)
        if not 1 <= self.suffix_documents <= 1024:
            raise ConfigError(f"suffix_documents={self.suffix_documents} must be in 1..1024")
        if not 0.0 <= self.draft_cost <= 1.0:
            raise ConfigError(f"draft_cost={self.draft_cost} must be between 0 and 1, a share of a decode step")
        if not all(0.0 <= rate <= 1.0 for rate in self.synthetic_acceptance):
            raise ConfigError(f"synthetic_acceptance={self.synthetic_acceptance} must be rates between 0 and 1")
        self.check_knobs(self.knobs)
        if self.max_logprobs < -1:
            raise ConfigError(f"max_logprobs={self.max_logprobs} must be at least 0, or -1 (the whole vocabulary)")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization={self.gpu_memory_utilization} must be in (0, 1]")
        if self.quantization not in (None, "fp8"):
            raise ConfigError(f"quantization={self.quantization!r} must be None or 'fp8'")
        if self.kv_cache_dtype not in ("auto", "fp8"):
            raise ConfigError(f"kv_cache_dtype={self.kv_cache_dtype!r} must be 'auto' or 'fp8'")
        if self.warm_up not in ("first_use", "all"):
            raise ConfigError(f"warm_up={self.warm_up!r} must be 'first_use' or 'all'")
        if self.dtype not in ("auto", "float16", "bfloat16", "float32", "float64"):
            raise ConfigError(
                f"dtype={self.dtype!r} must be one of 'auto', 'float16', 'bfloat16', 'float32', 'float64'"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}: every running request needs one token a step"
            )

    def check_knobs(self, knobs: Knobs) -> None:
        """Raise `ConfigError` if `knobs` ask for more than was loaded."""
        method, loaded = knobs.spec_method, parse_speculators(self.speculators)
        if method in LOADED_METHODS and method not in loaded:
            raise ConfigError(
                f"spec_method={method!r}: the engine was loaded with speculators={self.speculators!r}, which keeps no "
                f"memory for it; load it with speculators=({method!r},), or with a model as '{method}=MODEL'"
            )
        if knobs.prefill_chunk and not self.enable_chunked_prefill:
            raise ConfigError(
                f"prefill_chunk={knobs.prefill_chunk} cuts prompts, which enable_chunked_prefill=False forbids; "
                "set one of them otherwise"
            )
        if (knobs.spec_method != "off" or knobs.grammar_drafts) and knobs.num_spec_tokens > self.max_num_spec_tokens:
            raise ConfigError(
                f"spec_method={knobs.spec_method!r}, grammar_drafts={knobs.grammar_drafts} with "
                f"num_spec_tokens={knobs.num_spec_tokens}: the engine was loaded with "
                f"max_num_spec_tokens={self.max_num_spec_tokens}; load it with more, or draft less"
            )
        by_probability = knobs.verification in ("standard", "block")
        if method in MODEL_METHODS and knobs.draft_sampling == "sampled" and by_probability:
            if not self.draft_probabilities:
                raise ConfigError(
                    f"draft_sampling='sampled' with verification={knobs.verification!r} needs the probabilities of "
                    "every draft, the engine was loaded with draft_probabilities=False, which keeps no memory for "
                    "them; load it without, or choose draft_sampling='greedy' or verification='token_exact'"
                )
        if knobs.verification == "synthetic":
            if not self.benchmark:
                raise ConfigError(
                    "verification='synthetic' accepts drafts by chance and not by the target: load the engine with "
                    "benchmark=True and synthetic_acceptance, or choose 'token_exact', 'standard' or 'block'"
                )
            if len(self.synthetic_acceptance) < knobs.num_spec_tokens:
                raise ConfigError(
                    f"verification='synthetic' with num_spec_tokens={knobs.num_spec_tokens} needs a rate for every "
                    f"draft, the engine was loaded with synthetic_acceptance={self.synthetic_acceptance}"
                )
