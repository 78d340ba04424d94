"""The engine core: admission, the step loop, live knobs.

With async scheduling (depth 2) the host runs one step ahead of the device:

    host   | S(n) E(n) T(n) | S(n+1) E(n+1) T(n+1) | wait out(n) -> U(n) | S(n+2) ...
    main   |      [prepare n][forward n][logits+sample n][post-update n] [prepare n+1][forward n+1] ...
    copy   |                                             [D2H out n]

S schedule, E execute_model, T sample_tokens, U update_from_output.  Without it the depth is 1: every
step is waited for before the next is scheduled.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from mrv2.config import EngineConfig, Knobs
from mrv2.device import Device
from mrv2.engine.executor import UniProcExecutor
from mrv2.engine.kv_cache_manager import KVCacheManager
from mrv2.engine.messages import EngineOutput, EngineRequest, EngineSnapshot
from mrv2.engine.request import Request
from mrv2.engine.scheduler import Scheduler
from mrv2.engine.seeds import resolve_seed
from mrv2.errors import EngineDeadError, RequestError
from mrv2.instrument import set_step, stage, stages
from mrv2.runner.protocol import AsyncOutput, RowSampling
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
        self.kv = KVCacheManager(
            self.executor.num_kv_blocks,
            config.block_size,
            self.executor.num_groups,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
        )
        self.scheduler.num_spec_tokens = self.knobs.num_spec_tokens if self.knobs.drafting else 0
        self._in_flight: deque[AsyncOutput] = deque()
        # outputs that arose outside `step`: aborts, drains
        self._ready: list[EngineOutput] = []
        self._num_admitted = 0
        self._warm_up()

    @property
    def has_unfinished(self) -> bool:
        """True while `step` has something to do or to return."""
        return bool(self._ready or self._in_flight or self.scheduler.has_unfinished)

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    def add_request(self, message: EngineRequest) -> None:
        """Queue a sequence; raises `RequestError` with the numbers if it can never be served."""
        params = message.params
        max_tokens = self._check_servable(message)
        arrival = self._num_admitted
        self._num_admitted += 1
        seed = resolve_seed(
            params.seed,
            engine_seed=self.config.seed,
            admission_index=arrival if message.parent_index is None else message.parent_index,
            sample_index=message.sample_index,
        )
        stop_ids = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else frozenset(message.eos_token_ids)
        )
        self.scheduler.add(
            Request(
                message=message,
                sampling=_row_sampling(params, seed),
                max_tokens=max_tokens,
                max_model_len=self.max_model_len,
                stop_ids=stop_ids,
                arrival=arrival,
            )
        )

    def abort(self, req_ids: list[str]) -> None:
        """End sequences in any state; each that was alive reports ``finish_reason="abort"`` from the next `step`."""
        self._ready += self.scheduler.abort(req_ids)

    @torch.no_grad()
    def step(self) -> list[EngineOutput]:
        """Advance by one turn of the loop; return what became known meanwhile (possibly nothing)."""
        outputs, self._ready = self._ready, []
        outputs += self._overlapped_step() if self.knobs.async_scheduling else self._normal_step()
        if self.config.debug_checks:
            self.scheduler.check()
        return outputs

    def set_knobs(self, **changes: Any) -> Knobs:
        """Change live switches at a step boundary: steps in flight drain, running requests go on.

        Raises `ConfigError` for an unknown knob or an illegal value; then nothing has changed.
        """
        knobs = self.knobs.with_changes(**changes)
        self.config.check_knobs(knobs)
        self.drain()
        self.executor.set_knobs(knobs)
        if knobs.runner != self.knobs.runner:
            self.scheduler.forget_rows()
        self.knobs = knobs
        self.scheduler.num_spec_tokens = knobs.num_spec_tokens if knobs.drafting else 0
        return knobs

    @torch.no_grad()
    def drain(self) -> None:
        """Wait for every step in flight; what they bring is returned by the next `step`."""
        while self._in_flight:
            self._ready += self._settle_oldest()

    def snapshot(self) -> EngineSnapshot:
        """Return a picture of the engine between two steps."""
        pool, scheduler = self.kv.pool, self.scheduler
        return EngineSnapshot(
            step=scheduler.step,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            steps_in_flight=len(self._in_flight),
            kv_blocks_total=pool.num_usable,
            kv_blocks_used=pool.num_usable - pool.num_free,
            kv_blocks_cached=pool.num_cached_free,
            num_preemptions=scheduler.stats.num_preemptions,
            waits=dict(self.device.waits),
            knobs=self.knobs.as_dict(),
            num_drafted=list(scheduler.stats.num_drafted),
            num_accepted=list(scheduler.stats.num_accepted),
            requests={r.req_id: (r.num_computed, r.num_known) for r in scheduler.running},
        )

    def shutdown(self) -> None:
        """Drop every request, finish queued device work and release the device."""
        self._in_flight.clear()
        self.executor.shutdown()

    def _normal_step(self) -> list[EngineOutput]:
        """Schedule, launch, wait, update."""
        self._launch_next()
        return self._settle_oldest() if self._in_flight else []

    def _overlapped_step(self) -> list[EngineOutput]:
        """Launch ahead until the queue is full; only then wait for the oldest step."""
        launched = self._launch_next()
        if launched and len(self._in_flight) < self.knobs.depth:
            return []
        return self._settle_oldest() if self._in_flight else []

    def _launch_next(self) -> bool:
        """Schedule and launch one step; return False if nothing can run before an output arrives."""
        step = self.scheduler.step
        set_step(step)
        with stage(stages.SCHEDULE, step):
            scheduled = self.scheduler.schedule()
        if scheduled is None:
            if not self._in_flight and self.scheduler.has_unfinished:
                raise EngineDeadError(
                    f"nothing can be scheduled and nothing is in flight, yet {len(self.scheduler.requests)} requests "
                    f"wait: {self.kv.pool.num_free} of {self.kv.pool.num_usable} KV blocks are free"
                )
            return False
        self._in_flight.append(self.executor.execute(scheduled))
        return True

    def _settle_oldest(self) -> list[EngineOutput]:
        pending = self._in_flight.popleft()
        set_step(pending.step)
        with stage(stages.WAIT_OUTPUT, pending.step):
            output = pending.get()
        with stage(stages.UPDATE_FROM_OUTPUT, pending.step):
            return self.scheduler.update_from_output(output)

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
        """Compile every kernel through the real path and capture the graphs, before the first request (CUDA)."""
        if self.device.type != "cuda":
            return
        self._serve_dummies()
        self.executor.capture_graphs()
        self.kv.pool.forget_all()
        self._num_admitted = 0

    def _serve_dummies(self) -> None:
        vocab, limit = self.executor.vocab_size, min(self.max_model_len - 1, self.config.max_num_batched_tokens)
        variants = [
            SamplingParams(temperature=0.0, ignore_eos=True),
            SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, logprobs=2, ignore_eos=True),
            SamplingParams(temperature=1.0, ignore_eos=True),
        ]
        for index, params in enumerate(variants[: self.config.max_num_seqs]):
            prompt = [(7 * i + index) % vocab for i in range(min(limit, 17 + index))]
            room = self.kv.pool.num_usable * self.kv.block_size - len(prompt)
            if room > 0:
                params = params.replace(max_tokens=min(3 + index, room))
                self.add_request(EngineRequest(req_id=f"warm-up-{index}", prompt_token_ids=prompt, params=params))
        while self.has_unfinished:
            self.step()


def _row_sampling(params: SamplingParams, seed: int) -> RowSampling:
    return RowSampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
    )
