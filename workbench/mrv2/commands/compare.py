"""``mrv2 compare``: the demo. One engine, the same requests, each runner with and without async scheduling."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from mrv2.commands.arguments import add_engine_flags, add_knob_flags, add_model_flag, flag, given_options
from mrv2.commands.demo_prompts import DEMO_CONVERSATIONS
from mrv2.commands.generate import DEFAULT_MODEL
from mrv2.commands.loading import note_loading
from mrv2.commands.printing import note, number, percent, text_table
from mrv2.config import Knobs
from mrv2.errors import ConfigError

if TYPE_CHECKING:
    from mrv2.bench.agreement import Difference
    from mrv2.bench.harness import Variant
    from mrv2.bench.serving import ServedRun, StepProfile
    from mrv2.engine.core import EngineCore
    from mrv2.engine.messages import DraftCounts, EngineRequest, EngineSnapshot
    from mrv2.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 32
AXES: dict[str, tuple[Any, ...]] = {"runner": ("v1", "v2"), "async_scheduling": (False, True)}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "compare",
        help="the demo: both runners, sync and async, on the same requests",
        description="Serve the same chat requests with each runner, with and without async scheduling, and once more "
        "with n-gram drafts and with the draft heads that ship for the model, on one loaded engine whose knobs are "
        "switched between the runs. Prints the texts once, where the time of a step went, and whether every run "
        "generated the same tokens. Exit code 1 if they differ by more than a tie.",
    )
    add_model_flag(parser, DEFAULT_MODEL)
    parser.add_argument(
        "--requests",
        type=int,
        default=len(DEMO_CONVERSATIONS),
        metavar="N",
        help="use the first N requests of the demo",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"tokens of an answer at most (default: {DEFAULT_MAX_TOKENS})",
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        default=2,
        metavar="N",
        help="runs a setting, the fastest is shown (default: 2)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 = greedy (the default)")
    parser.add_argument("--random-prompts", action="store_true", help="random token ids instead of the questions")
    add_engine_flags(parser)
    add_knob_flags(parser, without=tuple(AXES))
    parser.set_defaults(run=run)
    return parser


@dataclass(frozen=True)
class _Measured:
    variant: Variant
    # the clock's run, and the recorded one (on the host the same)
    run: ServedRun
    profile: StepProfile
    # None = nobody drafted
    drafts: DraftCounts | None


def run(args: argparse.Namespace) -> int:
    """Load, serve under each setting, print; return 1 if the tokens differ and no tie explains it."""
    for name in ("requests", "max_tokens", "repetitions"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{flag(name)} {getattr(args, name)} must be at least 1")

    from mrv2.bench.agreement import find_differences
    from mrv2.bench.harness import make_variants
    from mrv2.device import make_device
    from mrv2.engine.core import EngineCore
    from mrv2.options import build_config
    from mrv2.tokenizer import Tokenizer
    from mrv2_models.registry import resolve_model

    options = given_options(args)
    note_loading(args.model)
    device = make_device(options.pop("device", "auto"))
    try:
        found = resolve_model(args.model)
        with_text = found.folder is not None and not args.random_prompts
        tokenizer = Tokenizer.from_folder(found.folder) if with_text and found.folder is not None else None
        prompts = _prompts(tokenizer, args.requests, found.config.vocab_size)
        longest = max(map(len, prompts)) + args.max_tokens + 1
        defaults = {
            "dtype": "float32",
            "warm_up": "all",
            "max_model_len": min(found.config.max_model_len, -(-longest // 64) * 64),
            "max_num_seqs": args.requests,
            "max_num_batched_tokens": max(1024, args.requests),
            "max_num_spec_tokens": options.get("num_spec_tokens", Knobs().num_spec_tokens),
            "speculators": _shipped_heads(args.model),
        }
        core = EngineCore(build_config(args.model, device=device.type, **{**defaults, **options}), device)
        requests = _requests(core, prompts, args, tokenizer)
        variants, refused = make_variants(core.knobs, AXES)
        variants += _with_drafts(core, variants[-1])
        for text in refused:
            note(f"left out: {text}")
        for variant in variants:
            note(f"warm-up: {variant.label}")
            _serve(core, variant, _short(requests) if device.type == "host" else requests)
        # there and back again, so that a drift of the machine hits all alike
        passes = [variants if n % 2 == 0 else variants[::-1] for n in range(args.repetitions)]
        measured = [_measure(core, variant, requests) for each in passes for variant in each]
        print(_texts(measured[0].run, tokenizer))
        print(_table([_fastest(measured, variant) for variant in variants]))
        differences = [
            (each, difference)
            for each in measured[1:]
            for difference in find_differences(core, requests, measured[0].run.tokens, each.run.tokens)
        ]
        print(_drafts([_fastest(measured, variant) for variant in variants]))
        return _verdict(measured[0], differences)
    finally:
        device.close()


def _shipped_heads(model: str) -> list[str]:
    """Return the methods for which a draft head ships that was trained on `model`."""
    from mrv2_models.drafters.loading import shipped_head_of

    return [method for method in ("eagle3", "mtp") if shipped_head_of(method, model) is not None]


def _with_drafts(core: EngineCore, variant: Variant) -> list[Variant]:
    """Return `variant` with each way of drafting that is loaded, as many as the knobs say; nothing if they say none."""
    from mrv2.bench.harness import Variant

    found = []
    for method in ("ngram", *(drafter.method for drafter in core.executor.drafters)):
        knobs = variant.knobs.with_changes(spec_method=method)
        if knobs.drafting:
            found.append(Variant(f"{variant.label} {method}", {**variant.setting, "spec_method": method}, knobs))
    return found


def _drafts(measured: list[_Measured]) -> str:
    """Say how the drafts of each setting fared."""
    lines = []
    for each in measured:
        method, counts = each.variant.knobs.spec_method, each.drafts
        if counts is None:
            continue
        length = counts.mean_accepted_length
        shares = ", ".join(percent(share) for share in counts.acceptance)
        told = (
            "none was proposed" if length is None else f"{length:.2f} tokens a verification; accepted by place {shares}"
        )
        lines.append(f"{method} drafts: {told}")
    return "\n" + "\n".join(lines) if lines else "\ndrafts: none was asked for"


def _prompts(tokenizer: Tokenizer | None, count: int, vocab_size: int) -> list[list[int]]:
    """Return the prompts of the demo; without a tokenizer random ids of about their lengths."""
    if tokenizer is None:
        from mrv2.bench.workloads import make_workload

        workload = make_workload("c", vocab_size=vocab_size, scale=2)
        if count > len(workload.requests):
            raise ConfigError(f"--requests {count}: with random prompts at most {len(workload.requests)}")
        return [list(r.prompt_token_ids[: 24 + 5 * i]) for i, r in enumerate(workload.requests[:count])]
    if count > len(DEMO_CONVERSATIONS):
        raise ConfigError(f"--requests {count}: the demo has {len(DEMO_CONVERSATIONS)}")
    texts = [tokenizer.apply_chat_template(conversation) for conversation in DEMO_CONVERSATIONS[:count]]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _requests(
    core: EngineCore, prompts: list[list[int]], args: argparse.Namespace, tokenizer: Tokenizer | None
) -> list[EngineRequest]:
    """Return the requests in their fixed order of arrival; each has a seed of its own."""
    from mrv2.engine.messages import EngineRequest
    from mrv2.sampling_params import SamplingParams

    eos = (*(tokenizer.eos_token_ids if tokenizer is not None else ()), *core.model_config.eos_token_ids)
    return [
        EngineRequest(
            req_id=str(index),
            prompt_token_ids=ids,
            params=SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=index),
            eos_token_ids=tuple(dict.fromkeys(eos)),
        )
        for index, ids in enumerate(prompts)
    ]


def _short(requests: list[EngineRequest]) -> list[EngineRequest]:
    """The first request with two tokens: enough to touch everything where nothing is compiled."""
    return [replace(requests[0], params=requests[0].params.replace(max_tokens=2))]


def _serve(core: EngineCore, variant: Variant, requests: list[EngineRequest]) -> ServedRun:
    from mrv2.bench.serving import serve

    core.set_knobs(**variant.knobs.as_dict())
    return serve(core, requests)


def _measure(core: EngineCore, variant: Variant, requests: list[EngineRequest]) -> _Measured:
    """Serve once for the clock and once under the recorder; on the host, where it costs nothing, at once."""
    from mrv2.bench.serving import profile

    note(f"serving {len(requests)} requests: {variant.label}")
    before = core.snapshot()
    run = _serve(core, variant, requests) if core.device.type == "cuda" else None
    core.set_knobs(**variant.knobs.as_dict())
    recorded, served = profile(core, requests)
    drafts = _drafts_since(before, core) if variant.knobs.drafting else None
    return _Measured(variant, run or served, recorded, drafts)


def _drafts_since(before: EngineSnapshot, core: EngineCore) -> DraftCounts:
    from mrv2.engine.messages import DraftCounts

    now = core.snapshot()
    pairs = zip_longest(now.num_drafted, before.num_drafted, fillvalue=0)
    drafted = [new - old for new, old in pairs]
    accepted = [new - old for new, old in zip_longest(now.num_accepted, before.num_accepted, fillvalue=0)]
    return DraftCounts(drafted, accepted) if any(drafted) else DraftCounts()


def _fastest(measured: list[_Measured], variant: Variant) -> _Measured:
    """Return the run of a variant that the rest of the machine disturbed least."""
    return max((each for each in measured if each.variant is variant), key=lambda each: each.run.tokens_per_second)


def _texts(run: ServedRun, tokenizer: Tokenizer | None) -> str:
    lines = []
    for req_id, ids in run.tokens.items():
        if tokenizer is None:
            lines += [f"[{req_id}] {' '.join(map(str, ids))}"]
            continue
        question = DEMO_CONVERSATIONS[int(req_id)][-1]["content"]
        answer = tokenizer.decode(ids).strip().replace("\n", "\n     ")
        lines += [f"[{req_id}] {question}", f"  -> {answer}"]
    return "\n".join(lines) + "\n"


def _table(measured: list[_Measured]) -> str:
    header = ("runner", "mode", "tok/s", "steps", "host ms/step", "device ms/step", "overlap", "waits per step")
    rows = []
    for each in measured:
        knobs, run, steps = each.variant.knobs, each.run, max(each.run.num_steps, 1)
        waits = ", ".join(f"{name} {count / steps:.2f}" for name, count in sorted(run.waits.items()))
        rows.append(
            (
                knobs.runner,
                ("async" if knobs.async_scheduling else "sync") + (f" + {knobs.spec_method}" if knobs.drafting else ""),
                number(run.tokens_per_second, 1),
                str(run.num_steps),
                number(each.profile.host_ms),
                number(each.profile.device_ms),
                percent(each.profile.overlap),
                waits or "none",
            )
        )
    return text_table(header, rows, left=2)


def _verdict(first: _Measured, differences: list[tuple[_Measured, Difference]]) -> int:
    """Print whether the runs agree; return the exit code."""
    if not differences:
        print("\nidentical tokens: yes")
        return 0
    all_ties = all(difference.is_tie for _, difference in differences)
    shown = next(((e, d) for e, d in differences if not d.is_tie), differences[0])
    print(f"\nidentical tokens: no, {len(differences)} answer(s) differ from the first run's ({first.variant.label})")
    print(f"{shown[0].variant.label}, {shown[1].describe()}")
    if all_ties:
        print("every difference is a tie: the two likeliest tokens are closer than the arithmetic resolves")
    return 0 if all_ties else 1
