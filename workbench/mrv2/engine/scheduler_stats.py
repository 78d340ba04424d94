"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from mrv2.engine.messages import DraftCounts


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the engine was loaded."""

    num_preemptions: int = 0
    num_discarded_tokens: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    # of these, the ones that a grammar forced
    forced: DraftCounts = field(default_factory=DraftCounts)
    num_stale_delivered: int = 0
    # steps launched for a request after the one that ended it, by finish reason
    num_wasted_steps: dict[str, int] = field(default_factory=dict)

    @property
    def num_drafted(self) -> list[int]:
        return self.drafts.num_drafted

    @property
    def num_accepted(self) -> list[int]:
        return self.drafts.num_accepted
