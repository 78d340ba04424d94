"""Device, model, KV cache and runners; takes `SchedulerOutput`s, returns outputs in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from mrv2.config import EngineConfig, Knobs
from mrv2.device import Device, make_device
from mrv2.engine.graph_capture import GraphCapture
from mrv2.engine.startup_clock import StartupClock
from mrv2.errors import ConfigError
from mrv2.instrument import stage, stages
from mrv2.logits_processor import ProcessorSetup, processor_classes
from mrv2.runner.async_logprobs import MAX_CHUNK_ROWS
from mrv2.runner.forward import Buckets, ForwardBuffers, ForwardPass
from mrv2.runner.graph_demand import GraphDemand
from mrv2.runner.loaded_drafter import LoadedDrafter, load_drafters
from mrv2.runner.protocol import AsyncOutput, GrammarMask, Runner, SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v1.model_runner import ModelRunnerV1
from mrv2.runner.v2.model_runner import ModelRunnerV2
from mrv2.runner.v2.upload import step_words_capacity
from mrv2.speculators import parse_speculators
from mrv2_kernels._numerics import FP8, bytes_of
from mrv2_models.kv_cache import LayerCache, allocate_kv_caches, group_specs, kept_dtype
from mrv2_models.model_state import resolve_model_state
from mrv2_models.registry import load_model, resolve_model

MAX_QUEUE_DEPTH = 4
# mixed batches up to this many tokens replay graphs; launched one by one, a step of prompts takes the host longer than
# the GPU up to some 8,192 tokens of a small model
MAX_MIXED_GRAPH_TOKENS = 8192
# share of the host's free memory that the KV cache takes when no size is given
HOST_KV_SHARE = 0.25
# NaN as an 8-bit float
NAN_BYTE = 0x7F


class Executor(Protocol):
    """Seam below the scheduler: ids and arrays in, outputs in flight out."""

    num_kv_blocks: int
    num_groups: int
    max_model_len: int
    vocab_size: int
    drafters: Sequence[LoadedDrafter]
    graphs: GraphCapture

    def execute_model(self, scheduled: SchedulerOutput) -> None: ...

    def take_grammar_bits(self, step: int, num_masks: int) -> np.ndarray: ...

    def take_drafts(self, req_ids: list[str]) -> np.ndarray: ...

    def sample_tokens(self, step: int, grammar: GrammarMask | None) -> AsyncOutput: ...

    def set_knobs(self, knobs: Knobs) -> None: ...

    def capture_graphs(self) -> None: ...

    def shutdown(self) -> None: ...


class UniProcExecutor:
    """Everything in the calling process, on one device."""

    def __init__(self, config: EngineConfig, device: Device | None = None) -> None:
        self.config = config
        self.clock = StartupClock()
        with self.clock.part("device"):
            self.device = device or make_device(config.device)
        self.knobs = config.knobs
        self.device.sleeps = self.knobs.output_wait == "sleep"
        found = resolve_model(config.model)
        self.model_config = found.config
        # None for a preset, which has no files
        self.model_folder = found.folder
        with self.clock.part("weights"):
            self.model = load_model(
                found.folder if found.folder is not None else found.config,
                dtype=config.dtype,
                device=self.device.torch_device,
                load_format="dummy" if found.folder is None else config.load_format,
                seed=config.seed,
                max_model_len=config.max_model_len,
                quantization=config.quantization,
            )
            self.drafters = load_drafters(config, self.model, found.folder)
        if config.draft_probabilities and config.max_num_spec_tokens:
            for drafter in self.drafters:
                drafter.keep_probabilities(
                    self.device, max_num_seqs=config.max_num_seqs, max_num_spec_tokens=config.max_num_spec_tokens
                )
        self.vocab_size = self.model.config.vocab_size
        self.max_model_len = self.model.max_model_len
        self.model_state = resolve_model_state(self.model)
        kept = kept_dtype(config.kv_cache_dtype, self.device.torch_device)
        self.groups = group_specs(self.model_state.kv_cache_specs(config.block_size), kept)
        self.num_groups = len(self.groups)
        self.blocks_per_row = -(-self.max_model_len // config.block_size)
        setup = ProcessorSetup(self.device.torch_device, config.max_num_seqs, self.max_model_len, self.vocab_size)
        self.processors = [make(setup) for make in processor_classes(config.logits_processors)]
        self.processor_tables = setup.tables
        self.buffers = self._make_buffers()
        self.buckets = Buckets(
            config.max_num_seqs,
            max_mixed=min(MAX_MIXED_GRAPH_TOKENS, config.max_num_batched_tokens),
            padded=self.device.type == "cuda",
            max_uniform=1 + config.max_num_spec_tokens,
        )
        with self.clock.part("memory"):
            self.num_kv_blocks = config.num_gpu_blocks or self._blocks_that_fit()
            self.kv_caches = self._allocate_kv(self.num_kv_blocks)
        for drafter in self.drafters:
            drafter.allocate(self.num_kv_blocks, self.device.empty)
        self.model_state.initialize_kv_cache(self.groups, self.kv_caches)
        self.graph_demand = GraphDemand(lazy=config.warm_up == "first_use")
        self.forward = ForwardPass(
            self.device, self.model, self.model_state, self.kv_caches, self.buffers, self.buckets, self.graph_demand
        )
        self.resources = RunnerResources(
            device=self.device,
            model=self.model,
            forward=self.forward,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=config.block_size,
            blocks_per_row=self.blocks_per_row,
            num_groups=self.num_groups,
            vocab_size=self.vocab_size,
            max_queue_depth=MAX_QUEUE_DEPTH,
            max_num_spec_tokens=config.max_num_spec_tokens,
            ngram_lengths=(config.ngram_min, config.ngram_max),
            synthetic_acceptance=config.synthetic_acceptance,
            graph_demand=self.graph_demand,
            knobs=self.knobs,
            drafters=self.drafters,
            suffix_documents=config.suffix_documents if "suffix" in parse_speculators(config.speculators) else 0,
            processors=self.processors,
            processor_tables=self.processor_tables,
        )
        self._runners: dict[str, Runner] = {}
        with self.clock.part("runner"):
            self.runner = self._runner(self.knobs.runner)
        self.graphs = GraphCapture(self.device, lambda: (self.forward, *self.runner.graph_sets), self._make_inert)

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """Launch a step up to its logits."""
        if self.device.poison and scheduled.fresh_block_ids:
            self._poison_blocks(scheduled.fresh_block_ids)
        if self.graph_demand.asked:
            self.capture_graphs()
        with stage(stages.EXECUTE_MODEL, scheduled.step):
            self.runner.execute_model(scheduled)

    def take_grammar_bits(self, step: int, num_masks: int) -> np.ndarray:
        """Return the [num_masks, ceil(V / 32)] int32 to fill for `step`; `sample_tokens` must follow with them."""
        return self.runner.grammar_masks.take(step, num_masks)

    def take_drafts(self, req_ids: list[str]) -> np.ndarray:
        """Return the drafts of requests that follow a grammar, before the step that verifies them samples. [n, K]"""
        return self.runner.take_drafts(req_ids)

    def sample_tokens(self, step: int, grammar: GrammarMask | None) -> AsyncOutput:
        """Launch the rest of the step."""
        with stage(stages.SAMPLE_TOKENS, step):
            return self.runner.sample_tokens(grammar)

    def set_knobs(self, knobs: Knobs) -> None:
        """Put `knobs` in force; no step is in flight.

        Another runner, or way to prepare inputs, starts with empty rows.  What has no graph runs without, until
        `graphs` has captured it.
        """
        runner = self._runner(knobs.runner)
        if not knobs.keeps_rows_of(self.knobs):
            self.runner.reset()
        self.knobs, self.resources.knobs, self.runner = knobs, knobs, runner
        self.device.sleeps = knobs.output_wait == "sleep"

    def catch_up(self, method: str, num_computed: dict[str, int]) -> None:
        """Let a draft model read what running requests, id -> tokens, have computed without it."""
        assert isinstance(self.runner, ModelRunnerV2), "only the V2 runner has drafters"
        self.runner.drafting.catch_up(self.device.main, method, num_computed)

    def capture_graphs(self) -> None:
        """Capture what is missing under the knobs; at load, or between two steps, of which the device is drained."""
        with self.clock.part("graphs"):
            self.graphs.all_now(self.knobs)
        self.graph_demand.asked.clear()

    def shutdown(self) -> None:
        """Finish queued work and release the device."""
        self.device.close()

    def _runner(self, name: str) -> Runner:
        if name not in self._runners:
            self._runners[name] = (ModelRunnerV2 if name == "v2" else ModelRunnerV1)(self.resources)
        return self._runners[name]

    def _make_buffers(self) -> ForwardBuffers:
        config = self.config
        return ForwardBuffers(
            self.device,
            max_num_seqs=config.max_num_seqs,
            # a padded verification batch may exceed the budget
            max_num_tokens=max(config.max_num_batched_tokens, config.max_num_seqs * (1 + config.max_num_spec_tokens)),
            blocks_per_row=self.blocks_per_row,
            num_groups=self.num_groups,
            step_words=step_words_capacity(
                max_num_seqs=config.max_num_seqs,
                max_model_len=self.max_model_len,
                blocks_per_row=self.blocks_per_row,
                num_groups=self.num_groups,
                tables=self.processor_tables,
            ),
            hidden_size=self.model.config.hidden_size,
            dtype=self.model.dtype,
            num_taps=len(self.model.aux_layer_ids),
        )

    def _allocate_kv(self, num_blocks: int) -> list[LayerCache]:
        return allocate_kv_caches(self.groups, num_blocks, self.device.empty)

    def _blocks_that_fit(self) -> int:
        """Size the KV pool from free memory, after a forward pass and the sampler have shown their peak."""
        config = self.config
        bytes_per_block = sum(group.bytes_per_block for group in self.groups)
        bytes_per_block += sum(drafter.bytes_per_block for drafter in self.drafters)
        wanted = 1 + config.max_num_seqs * self.blocks_per_row * self.num_groups
        free, total = self.device.memory_info()
        if self.device.type == "host":
            budget = int(free * HOST_KV_SHARE)
        else:
            peak = self._measure_peak()
            free, total = self.device.memory_info()
            budget = int(total * config.gpu_memory_utilization) - (total - free) - peak
        num_blocks = min(wanted, budget // bytes_per_block)
        if num_blocks < 2:
            raise ConfigError(
                f"no memory for the KV cache: {budget / 2**30:.2f} GiB left of {total / 2**30:.2f} GiB, one block of "
                f"{config.block_size} tokens takes {bytes_per_block / 2**20:.2f} MiB; raise gpu_memory_utilization, "
                "or lower max_model_len, max_num_seqs or max_num_batched_tokens"
            )
        return num_blocks

    def _measure_peak(self) -> int:
        """Return the bytes that a full eager step allocates beyond what stays: forward and worst-case sampler."""
        config = self.config
        rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
        forward = ForwardPass(
            self.device,
            self.model,
            self.model_state,
            self._allocate_kv(2),
            self.buffers,
            self.buckets,
            GraphDemand(lazy=False),
        )
        self._make_inert()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        key = forward.buckets.key(tokens, rows, 0)
        batch = forward.make_batch(key, num_reqs=rows, max_query_len=tokens, knobs=self.knobs)
        forward.run(key, batch, self.device.main, self.knobs.with_changes(cuda_graphs="off", attention="triton"))
        # raw logits of every row (drafts have theirs), their float32 copy, and what top-k/top-p, logprobs and
        # processors keep beside it
        num_copies = 3 + 2 * bool(self.processors)
        num_logits = min(rows * (1 + config.max_num_spec_tokens), self.buffers.input_ids.shape[0])
        logits = num_logits * self.vocab_size * (self.model.dtype.itemsize + num_copies * 4)
        # a drafter's logits, beside what the target's left
        logits += max((rows * d.draft_vocab_size * (self.model.dtype.itemsize + 12) for d in self.drafters), default=0)
        if self.model_state.step_graphs:
            # the graphs' pool holds them once more
            logits *= 2
        # the logits of one pass over prompt tokens
        logits += min(MAX_CHUNK_ROWS, tokens) * self.vocab_size * self.model.dtype.itemsize
        self.device.synchronize("memory profile")
        peak = torch.cuda.max_memory_allocated() - before
        if self.buckets.mixed and tokens <= self.buckets.mixed[-1]:
            # the pool of the graphs holds a forward pass of this size once more
            peak *= 2
        torch.cuda.empty_cache()
        return peak + logits + (256 << 20)

    def _make_inert(self) -> None:
        """Fill the persistent buffers with rows that read and write nothing."""
        self.device.main.run(stages.PREPARE_INPUTS, _fill_inert, self.buffers)

    def _poison_blocks(self, block_ids: list[int]) -> None:
        """Tests: whoever reads a fresh block before writing it shall see NaN."""
        ids = torch.tensor(block_ids, dtype=torch.int64)
        caches = [*self.kv_caches, *(cache for drafter in self.drafters for cache in drafter.kv_caches)]
        self.device.main.run(stages.STAGED_WRITES, _fill_blocks, caches, ids)


def _fill_inert(buffers: ForwardBuffers) -> None:
    for tensor in (buffers.input_ids, buffers.positions, buffers.seq_lens, buffers.step_words, *buffers.block_tables):
        tensor.zero_()
    for slots in buffers.slot_mappings:
        slots.fill_(-1)


def _fill_blocks(kv_caches: list[LayerCache], block_ids: torch.Tensor) -> None:
    for caches in kv_caches:
        for cache in caches:
            bytes_of(cache)[block_ids.to(cache.device)] = NAN_BYTE if cache.dtype == FP8 else float("nan")
