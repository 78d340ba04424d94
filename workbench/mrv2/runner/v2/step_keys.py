"""What tells one graph of a whole step from another, and which of them are captured ahead.

Steady drafting verifies up to K drafts a request and proposes K more: those steps have graphs, of every K that is
captured.  Steps between two numbers of drafts have none.
"""

from __future__ import annotations

from typing import NamedTuple

from mrv2.config import Knobs
from mrv2.runner.forward import Buckets, GraphKey
from mrv2.runner.v2.drafters.chain import DraftChoice
from mrv2.runner.v2.drafters.graphs import draft_choice
from mrv2.runner.v2.variants import DrawPlan, graph_plans
from mrv2.speculators import MODEL_METHODS


class StepDrafting(NamedTuple):
    """What drafting adds to a step."""

    method: str
    # a value of the knob; "" = the step has no drafts to verify
    verification: str
    # drafts for the next step; 0 = a drafter with weights only keeps step
    num_next: int
    choice: DraftChoice

    @property
    def by_probability(self) -> bool:
        """Whether acceptance goes by probabilities: then the step draws no token of every logits row."""
        return self.verification not in ("", "token_exact")


class StepKey(NamedTuple):
    """Padded shape, kind of draw, and drafting; ``shape.query_len`` is 1 + the drafts that are verified."""

    shape: GraphKey
    draw: DrawPlan
    drafted: StepDrafting | None = None


def step_drafting(knobs: Knobs, num_drafts: int, num_next: int) -> StepDrafting | None:
    """Return the drafting of a step that verifies `num_drafts` and proposes `num_next`; None = a plain decode step."""
    method = knobs.spec_method
    if method == "off" or not (num_drafts or num_next or method in MODEL_METHODS):
        return None
    return StepDrafting(method, knobs.verification if num_drafts else "", num_next, draft_choice(knobs))


def step_key(shape: GraphKey, draw: DrawPlan, drafted: StepDrafting | None) -> StepKey:
    """Return the key that serves a batch whose sampling is planned as `draw`."""
    if drafted is not None and drafted.by_probability:
        # no variant is asked; truncated logits are scaled, too
        return StepKey(shape, DrawPlan("", is_scaled=draw.is_truncated, is_truncated=draw.is_truncated), drafted)
    return StepKey(shape, draw.for_graph(), drafted)


def wanted_keys(knobs: Knobs, buckets: Buckets, max_num_spec_tokens: int) -> list[StepKey]:
    """Return the keys to capture for `knobs`: plain steps, and steady drafting of 1 and the most drafts, and theirs.

    Under `adaptive_drafts` of every number up to theirs.  Largest first, so that the shared memory pool is reused.
    """
    counts = {0}
    if knobs.drafting:
        counts |= {1, max_num_spec_tokens, knobs.num_spec_tokens}
        if knobs.adaptive_drafts:
            counts |= set(range(knobs.num_spec_tokens))
    keys: dict[StepKey, None] = {}
    for count in counts:
        drafted = step_drafting(knobs, count, count)
        for shape in buckets.capturable((1 + count,)):
            keys |= dict.fromkeys(step_key(shape, plan, drafted) for plan in graph_plans(knobs.sampler))
    return sorted(keys, key=lambda key: -key.shape.num_tokens)


def first_keys(keys: list[StepKey], knobs: Knobs) -> set[StepKey]:
    """Return those of `wanted_keys` that are captured before anybody asks for them, where the others wait for that.

    Of plain steps and of steps with as many drafts as the knobs say: the largest shape of every kind, and the smallest.
    """
    first: set[StepKey] = set()
    for query_len in {1, 1 + knobs.num_spec_tokens}:
        mine = [key for key in keys if key.shape.query_len == query_len]
        first |= {key for key in mine if key.shape == mine[0].shape}
        first |= set(mine[-1:])
    return first
