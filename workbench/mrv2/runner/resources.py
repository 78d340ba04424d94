"""What both runners are built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mrv2.config import Knobs
from mrv2.device import Device
from mrv2.logits_processor import LogitsProcessor, RowTable
from mrv2.runner.forward import ForwardPass
from mrv2.runner.graph_demand import GraphDemand
from mrv2.runner.loaded_drafter import LoadedDrafter
from mrv2_models.causal_lm import CausalLM


@dataclass(slots=True, kw_only=True)
class RunnerResources:
    """Device, model and forward pass, owned by the executor; sizes in rows and tokens."""

    device: Device
    model: CausalLM
    forward: ForwardPass
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    blocks_per_row: int
    num_groups: int
    vocab_size: int
    # most steps in flight that any knob setting allows
    max_queue_depth: int
    # most drafts a request may get in a step; fixes the width of the draft buffers
    max_num_spec_tokens: int
    # shortest and longest suffix that n-gram drafting looks for
    ngram_lengths: tuple[int, int]
    # how often draft 1, 2, ... is accepted by verification="synthetic"
    synthetic_acceptance: tuple[float, ...] = ()
    # which graphs are captured when
    graph_demand: GraphDemand
    # replaced by the executor between two steps
    knobs: Knobs
    # ended requests whose histories spec_method="suffix" keeps; 0 = it was not loaded
    suffix_documents: int = 0
    # drafters with weights that the engine was loaded with
    drafters: Sequence[LoadedDrafter] = ()
    # in order of application, with the tables that they declared
    processors: Sequence[LogitsProcessor] = ()
    processor_tables: Sequence[RowTable] = ()
