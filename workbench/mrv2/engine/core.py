"""The engine core: admission, the step loop, live knobs.

With async scheduling (depth 2) the host runs one step ahead of the device:

    host   | S(n) E(n) T(n) | S(n+1) E(n+1) T(n+1) | wait out(n) -> U(n) | S(n+2) ...
    main   |      [prepare n][forward n][logits+sample n][post-update n] [prepare n+1][forward n+1] ...
    copy   |                                             [D2H out n]

S schedule, E execute_model, T sample_tokens, U update_from_output.  Without it the depth is 1: every
step is waited for before the next is scheduled.

A request that follows a grammar may yield only what its mask (G) allows, and the mask of n+1 takes the
token of n.  So the forward of n+1 is launched first, and the mask is made while it runs:

    host    | S(n+1) E(n+1) | wait out(n) -> U(n) G(n+1) T(n+1) | S(n+2) E(n+2) | wait out(n+1) -> ...
    main    | [sample n] [prepare n+1][forward n+1] ...           [mask+sample n+1][prepare n+2][forward n+2]
    grammar |                                        [H2D mask n+1]

At most one step is launched but not sampled, so at most two are in flight, whatever the knobs say.
With drafts a request has a mask behind each of them, so that G(n+1) also waits for the drafts of n.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from mrv2.config import V1_VERIFICATIONS, EngineConfig, Knobs
from mrv2.device import Device
from mrv2.engine.adaptive_drafts import AdaptiveDrafts
from mrv2.engine.executor import UniProcExecutor
from mrv2.engine.grammar.backend import AnyTokenMatcher
from mrv2.engine.grammar.chains import chains_of
from mrv2.engine.grammar.masks import fill_masks
from mrv2.engine.grammar.queue import GrammarQueue
from mrv2.engine.kv_cache_manager import KVCacheManager
from mrv2.engine.messages import CaptureTime, EngineRequest, EngineSnapshot, KnobChange
from mrv2.engine.request import Request
from mrv2.engine.row_sampling import row_sampling
from mrv2.engine.scheduler import Scheduler
from mrv2.engine.scheduler_stats import SchedulerStats
from mrv2.engine.seeds import resolve_seed
from mrv2.engine.step_outputs import EngineOutputs
from mrv2.errors import EngineDeadError, RequestError
from mrv2.instrument import set_step, stage, stages
from mrv2.logits_processor import check_arguments
from mrv2.runner.protocol import AsyncOutput, GrammarMask, SchedulerOutput
from mrv2.sampling_params import SamplingParams


class EngineCore:
    """Serves sequences step by step; not thread-safe, one client drives it.

    Args:
        config: load-time settings and the first knobs.
        device: a ready device (tests: delays, poison); by default one is made from the config.
    """

    def __init__(self, config: EngineConfig, device: Device | None = None) -> None:
        self.config = config
        self.executor = UniProcExecutor(config, device)
        self.device = self.executor.device
        self.model_config = self.executor.model_config
        self.max_model_len = self.executor.max_model_len
        self.knobs = config.knobs
        self._change = KnobChange()
        self.kv = KVCacheManager(
            self.executor.num_kv_blocks,
            config.block_size,
            self.executor.num_groups,
            enable_prefix_caching=config.enable_prefix_caching,
            num_drafters=len(self.executor.drafters),
        )
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
        )
        self._tell_scheduler()
        self._in_flight: deque[AsyncOutput] = deque()
        # what the next `step` returns
        self._ready = EngineOutputs()
        self._num_admitted = 0
        self.grammars = GrammarQueue(
            None if config.skip_tokenizer_init else config.tokenizer or self.executor.model_folder,
            self.executor.vocab_size,
            load_now=config.grammar_backend != "auto",
        )
        self._warm_up()

    @property
    def has_unfinished(self) -> bool:
        """True while `step` has something to do or to return."""
        return bool(self._ready or self._in_flight or self.scheduler.has_unfinished or self.executor.graphs.is_pending)

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    def add_request(self, message: EngineRequest) -> None:
        """Queue a sequence; raises `RequestError` with the numbers if it can never be served."""
        params = message.params
        max_tokens = self._check_servable(message)
        check_arguments(self.executor.processors, message.req_id, params)
        arrival = self._num_admitted
        seed = resolve_seed(
            params.seed,
            engine_seed=self.config.seed,
            admission_index=arrival if message.parent_index is None else message.parent_index,
            sample_index=message.sample_index,
        )
        stop_ids = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else frozenset(message.eos_token_ids)
        )
        request = Request(
            message=message,
            sampling=row_sampling(
                message,
                seed=seed,
                stop_ids=stop_ids,
                vocab_size=self.executor.vocab_size,
                max_logprobs=self.config.max_logprobs,
            ),
            max_tokens=max_tokens,
            max_model_len=self.max_model_len,
            stop_ids=stop_ids,
            arrival=arrival,
        )
        if params.structured_outputs is not None:
            self.grammars.add(request)
        self.scheduler.add(request)
        self._num_admitted += 1

    def abort(self, req_ids: list[str]) -> None:
        """End sequences in any state; each that was alive reports ``finish_reason="abort"`` from the next `step`."""
        self._ready += self.scheduler.abort(req_ids)

    @torch.no_grad()
    def step(self) -> EngineOutputs:
        """Advance by one turn of the loop; return what became known meanwhile (possibly nothing)."""
        if self.grammars:
            for request, reason in self.grammars.take_compiled():
                self._ready.append(self.scheduler.fail(request, reason))
        if self.executor.graphs.is_due(self.scheduler.has_unfinished):
            self.drain()
            with stage(stages.CAPTURE_GRAPHS):
                self.executor.graphs.in_a_pause(self.knobs)
        if self.knobs.async_scheduling:
            self._overlapped_step()
        else:
            self._normal_step()
        if self.config.debug_checks:
            self.scheduler.check()
        outputs, self._ready = self._ready, EngineOutputs()
        return outputs

    def set_knobs(self, *, capture: CaptureTime = "now", **changes: Any) -> Knobs:
        """Change live switches at a step boundary: steps in flight drain, running requests go on.

        Graphs that are missing are captured now, or between the steps to come.
        Raises `ConfigError` for an unknown knob or an illegal value; then nothing has changed.
        """
        knobs = self.knobs.with_changes(**changes)
        self.config.check_knobs(knobs)
        change = KnobChange(step=self.scheduler.step, num_drained=len(self._in_flight))
        self.drain()
        num_preemptions = self.scheduler.stats.num_preemptions
        self.executor.set_knobs(knobs)
        change.num_graphs = self.executor.graphs.num_missing(knobs)
        if capture == "now":
            self.executor.capture_graphs()
        else:
            self.executor.graphs.postpone(knobs)
        if not knobs.keeps_rows_of(self.knobs):
            self.scheduler.forget_rows()
        rules = [(k.spec_method, k.verification, k.draft_sampling, k.grammar_drafts) for k in (self.knobs, knobs)]
        if rules[0] != rules[1]:
            self.scheduler.forget_drafts()
        self.knobs = knobs
        change.num_caught_up = self._tell_scheduler()
        change.num_recomputed = self.scheduler.stats.num_preemptions - num_preemptions
        self._change = change
        return knobs

    @torch.no_grad()
    def drain(self) -> None:
        """Wait for every step in flight; what they bring is returned by the next `step`."""
        while self._in_flight:
            self._settle_oldest()

    def snapshot(self) -> EngineSnapshot:
        """Return a picture of the engine between two steps."""
        pool, scheduler = self.kv.pool, self.scheduler
        scheduler.bring_up_to_date()
        num_grammar_running = sum(r.grammar is not None for r in scheduler.running)
        return EngineSnapshot(
            step=scheduler.step,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            steps_in_flight=len(self._in_flight),
            kv_blocks_total=pool.num_usable,
            kv_blocks_used=pool.num_usable - pool.num_free,
            kv_blocks_cached=pool.num_cached_free,
            num_preemptions=scheduler.stats.num_preemptions,
            effective_depth=min(self.knobs.depth, 2) if num_grammar_running else self.knobs.depth,
            num_grammar_running=num_grammar_running,
            num_grammar_compiling=len(self.grammars),
            waits=dict(self.device.waits),
            knobs=self.knobs.as_dict(),
            change=self._change,
            capture=self.executor.graphs.progress(self.knobs),
            num_drafted=list(scheduler.stats.num_drafted),
            num_accepted=list(scheduler.stats.num_accepted),
            num_forced_drafted=sum(scheduler.stats.forced.num_drafted),
            num_forced_accepted=sum(scheduler.stats.forced.num_accepted),
            requests={r.req_id: (r.num_computed, r.num_known) for r in scheduler.running},
        )

    def shutdown(self) -> None:
        """Drop every request, finish queued device work and release the device."""
        self._in_flight.clear()
        self.grammars.close()
        self.executor.shutdown()

    def _tell_scheduler(self) -> int:
        """Tell the scheduler who drafts, how much, and how far prompts may stretch a step of decodes.

        Returns how many running requests a draft model had to read first.
        """
        knobs = self.knobs
        self.scheduler.leave_decodes()
        self.scheduler.prefill_chunk = knobs.prefill_chunk
        self.scheduler.num_spec_tokens = knobs.num_spec_tokens if knobs.drafting else 0
        self.scheduler.num_forced_tokens = knobs.num_spec_tokens if knobs.grammar_drafts else 0
        # what was learnt of one way of drafting says nothing of another
        self.scheduler.adaptive = AdaptiveDrafts(self.config.draft_cost) if knobs.adaptive_drafts else None
        filling, extra, behind = 0, 1, []
        for bit, drafter in enumerate(self.executor.drafters):
            if drafter.method == knobs.spec_method:
                filling, extra = 1 << bit, drafter.extra
        if filling and extra:
            # it needs their tokens only, where a head needs the target's hidden states once more
            behind = [r for r in self.scheduler.running if r.has_row and filling & ~r.filled]
            self.executor.catch_up(knobs.spec_method, {r.req_id: r.num_computed for r in behind})
            for request in behind:
                request.filled = filling
        # a draft model reads the sampled token too, even if it drafts nothing: what has no block may hold NaN
        lookahead = max(knobs.num_spec_tokens, extra) if filling else 0
        self.scheduler.use_drafter(filling, lookahead=lookahead, reads_ahead=not extra)
        return len(behind)

    def _normal_step(self) -> None:
        """Schedule, launch, wait, update."""
        self._launch_next()
        if self._in_flight:
            self._settle_oldest()

    def _overlapped_step(self) -> None:
        """Launch ahead until the queue is full; only then wait for the oldest step."""
        launched = self._launch_next()
        if self._in_flight and not (launched and len(self._in_flight) < self.knobs.depth):
            self._settle_oldest()

    def _launch_next(self) -> bool:
        """Schedule and launch one step; return False if nothing can run before an output arrives."""
        step = self.scheduler.step
        set_step(step)
        with stage(stages.SCHEDULE, step):
            scheduled = self.scheduler.schedule()
        if scheduled is None:
            if not self._in_flight and self.scheduler.has_unfinished:
                self._wait_for_grammar()
            return False
        blocking = self.knobs.grammar_overlap == "blocking"
        grammar = self._grammar_mask(scheduled) if blocking else None
        self.executor.execute_model(scheduled)
        if not blocking:
            grammar = self._grammar_mask(scheduled)
        self._in_flight.append(self.executor.sample_tokens(step, grammar))
        return True

    def _grammar_mask(self, scheduled: SchedulerOutput) -> GrammarMask | None:
        """Return what the requests of the step just scheduled that follow a grammar may yield, if there are any."""
        rows = self.scheduler.grammar_rows() if scheduled.has_grammar else []
        if not rows:
            return None
        # a mask follows from every token before it; one in flight is this step's own
        while self._await_tokens(rows):
            self._settle_oldest()
        set_step(scheduled.step)
        alive = [(row, request) for row, request in rows if not request.finished]
        if not alive:
            return None
        counts = [int(scheduled.num_draft_tokens[row]) for row, _ in alive]
        num_forced = self.scheduler.num_forced_tokens
        drafted = [request.req_id for (_, request), count in zip(alive, counts, strict=True) if count]
        found = iter(self.executor.take_drafts(drafted).tolist() if drafted else [])
        drafts = [next(found)[:count] if count else [] for count in counts]
        with stage(stages.FILL_GRAMMAR_MASK, scheduled.step):
            bits = self.executor.take_grammar_bits(scheduled.step, len(alive) + sum(counts))
            requests = [request for _, request in alive]
            filled = fill_masks(requests, drafts, bits, 1 + num_forced if num_forced else 0)
            chains = chains_of([row for row, _ in alive], requests, filled, num_forced) if num_forced else None
        batch_rows = np.repeat(np.array([row for row, _ in alive], dtype=np.int32), [1 + n for n in counts])
        places = np.concatenate([np.arange(1 + n, dtype=np.int32) for n in counts])
        return GrammarMask(batch_rows, places, bits, chains)

    def _await_tokens(self, rows: list[tuple[int, Request]]) -> bool:
        """Say whether `rows` of the newest step follow tokens that are still in flight."""
        self.scheduler.bring_up_to_date([request for _, request in rows])
        return any(request.num_in_flight > 1 and not request.finished for _, request in rows)

    def _wait_for_grammar(self) -> None:
        """Nothing can run: a grammar is being compiled, or the engine is stuck."""
        if not self.grammars:
            raise EngineDeadError(
                f"nothing can be scheduled and nothing is in flight, yet {len(self.scheduler.requests)} requests "
                f"wait: {self.kv.pool.num_free} of {self.kv.pool.num_usable} KV blocks are free"
            )
        with stage(stages.WAIT_GRAMMAR):
            self.grammars.wait()

    def _settle_oldest(self) -> None:
        pending = self._in_flight.popleft()
        set_step(pending.step)
        with stage(stages.WAIT_OUTPUT, pending.step):
            output = pending.get()
        with stage(stages.UPDATE_FROM_OUTPUT, pending.step):
            self._ready += self.scheduler.update_from_output(output)

    def _check_servable(self, message: EngineRequest) -> int:
        """Refuse what can never be served; return the number of tokens to generate at most."""
        name, prompt_len = f"request {message.req_id}", len(message.prompt_token_ids)
        if message.req_id in self.scheduler.requests:
            raise RequestError(f"{name}: a request of this id is being served")
        if prompt_len == 0:
            raise RequestError(f"{name}: the prompt is empty; at least one token is needed")
        if prompt_len >= self.max_model_len:
            raise RequestError(
                f"{name}: the prompt has {prompt_len} tokens, max_model_len={self.max_model_len} leaves room for "
                f"{self.max_model_len - 1} and one generated token; shorten the prompt or raise max_model_len"
            )
        if message.priority and self.config.scheduling_policy != "priority":
            raise RequestError(
                f"{name}: priority={message.priority} needs scheduling_policy='priority', this engine was loaded with "
                f"{self.config.scheduling_policy!r}"
            )
        low, high = min(message.prompt_token_ids), max(message.prompt_token_ids)
        vocab_size = self.executor.vocab_size
        if low < 0 or high >= vocab_size:
            outside = low if low < 0 else high
            raise RequestError(f"{name}: token id {outside} is outside the vocabulary 0..{vocab_size - 1}")
        room = self.max_model_len - prompt_len
        max_tokens = min(message.params.max_tokens or room, room)
        needed, usable = self.kv.blocks_for(prompt_len + max_tokens), self.kv.pool.num_usable
        if needed > usable:
            raise RequestError(
                f"{name}: {prompt_len} prompt tokens and up to {max_tokens} generated ones need {needed} KV blocks of "
                f"{self.kv.block_size} tokens, the whole pool has {usable}; lower max_tokens or enlarge the pool"
            )
        if not self.config.enable_chunked_prefill and prompt_len > self.config.max_num_batched_tokens:
            raise RequestError(
                f"{name}: the prompt has {prompt_len} tokens, more than max_num_batched_tokens="
                f"{self.config.max_num_batched_tokens}, and enable_chunked_prefill is off"
            )
        return max_tokens

    def _warm_up(self) -> None:
        """Compile kernels through the real path and capture graphs, before the first request."""
        if self.device.type == "cuda":
            with self.executor.clock.part("warm-up requests"):
                self._serve_dummies()
        self.executor.capture_graphs()
        self.kv.pool.forget_all()
        self._num_admitted = 0
        # what the dummies did is nobody's: neither counted nor a guess at how often drafts are accepted
        self.scheduler.stats = SchedulerStats()
        self._tell_scheduler()

    def _serve_dummies(self) -> None:
        every_kind = self.config.warm_up == "all"
        # the dummies carry a mask and ask for log-probabilities, beside which nobody drafts
        scheduler = self.scheduler
        drafting = scheduler.num_spec_tokens, scheduler.num_forced_tokens
        scheduler.num_spec_tokens = scheduler.num_forced_tokens = 0
        vocab, limit = self.executor.vocab_size, min(self.max_model_len - 1, self.config.max_num_batched_tokens)
        variants = [
            SamplingParams(temperature=0.0, ignore_eos=True),
            SamplingParams(
                temperature=0.7,
                top_k=5,
                top_p=0.9,
                min_p=0.01,
                logprobs=2,
                prompt_logprobs=1,
                frequency_penalty=0.5,
                logit_bias={0: 1.0},
                bad_words=[[0, 0]],
                thinking_token_budget=1,
                thinking_start=[0],
                thinking_end=[0, 0],
                ignore_eos=True,
            ),
            SamplingParams(temperature=1.0, logprob_token_ids=[0], ignore_eos=True),
            # outlives the others: a truncated row beside a plain one, then alone, on logits as the model gives them
            SamplingParams(temperature=0.8, top_k=5, top_p=0.9, ignore_eos=True),
        ]
        for index, params in enumerate(variants[: self.config.max_num_seqs if every_kind else 1]):
            prompt = [(7 * i + index) % vocab for i in range(min(limit, 17 + index))]
            room = self.kv.pool.num_usable * self.kv.block_size - len(prompt)
            if room > 0:
                params = params.replace(max_tokens=min(3 + index, room))
                self.add_request(EngineRequest(req_id=f"warm-up-{index}", prompt_token_ids=prompt, params=params))
                if index == 0 and every_kind:
                    self.scheduler.requests["warm-up-0"].grammar = AnyTokenMatcher()
        while self.has_unfinished:
            self.step()
        scheduler.num_spec_tokens, scheduler.num_forced_tokens = drafting
        if every_kind and any(drafting) and self.kv.pool.num_usable > 2:
            self._serve_draft_dummies([0] * min(limit, 9))

    def _serve_draft_dummies(self, prompt: list[int]) -> None:
        """Verify drafts in each way, of a request that is truncated and of one that is not."""
        knobs = self.knobs
        ways = ("token_exact", "standard", "block")
        for verification in ways if knobs.runner == "v2" else [way for way in ways if way in V1_VERIFICATIONS]:
            # greedy drafts: what the engine keeps no memory for is not asked of it
            changes = {"verification": verification, "draft_sampling": "greedy", "cuda_graphs": "off"}
            self.executor.set_knobs(knobs.with_changes(**changes))
            for top_k in (0, 5):
                params = SamplingParams(temperature=0.5, top_k=top_k, max_tokens=8, ignore_eos=True)
                self.add_request(EngineRequest(req_id="warm-up-drafts", prompt_token_ids=prompt, params=params))
                if self.knobs.grammar_drafts:
                    self.scheduler.requests["warm-up-drafts"].grammar = AnyTokenMatcher()
                while self.has_unfinished:
                    self.step()
        self.executor.set_knobs(knobs)
