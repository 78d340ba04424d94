"""Recorded windows: a few steps every now and then, analysed on a thread of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mrv2.engine.client import EngineClient
from mrv2.errors import MRV2Error
from mrv2.record import Recording, record
from mrv2.trace import Trace
from mrv2.trace.analysis.model import Analysis
from mrv2.viz.latest import LatestWins
from mrv2.viz.tables import sync_table

MAX_SYNC_ROWS = 40


@dataclass(frozen=True)
class Window:
    """Some recorded steps and what they say; shares from 0 to 1, None = not collected."""

    number: int
    analysis: Analysis
    first_step: int | None
    num_steps: int
    overlap: float | None
    idle: float | None
    # rows of the sync table, dearest first, as the panel shows them
    syncs: dict[str, Any]
    # for each of its rows (start, end), nanoseconds of the trace's clock
    places: list[tuple[int, int]]

    @property
    def trace(self) -> Trace:
        """The recording."""
        return self.analysis.trace

    @classmethod
    def of(cls, trace: Trace, number: int = 0) -> Window:
        """Analyse a recording."""
        analysis = Analysis(trace)
        overview, steps = analysis.overview(), analysis.windows
        table = sync_table(analysis, counted_only=True)
        busy = overview.utilization
        return cls(
            number=number,
            analysis=analysis,
            first_step=int(steps.step[0]) if len(steps) else None,
            num_steps=len(steps),
            overlap=overview.overlap_cpu,
            idle=None if busy is None else 1 - busy,
            syncs={
                "title": table.title,
                "columns": [vars(column) for column in table.columns if column.key != "stack"],
                "rows": [dict(row, stack=None) for row in table.rows[:MAX_SYNC_ROWS]],
            },
            places=table.places[:MAX_SYNC_ROWS],
        )


class WindowRecorder:
    """Records `steps` steps, then rests until `period_s` seconds after the last start; `tick` never waits for steps.

    Args:
        on_window: called on the analysing thread with each finished window.
        on_error: called on the analysing thread with what went wrong.
    """

    def __init__(
        self,
        client: EngineClient,
        on_window: Callable[[Window], None],
        on_error: Callable[[BaseException], None],
        *,
        steps: int = 16,
        period_s: float = 2.0,
        limit_s: float = 6.0,
    ) -> None:
        self._client = client
        self._on_window = on_window
        self._on_error = on_error
        self.steps, self.period_s, self.limit_s = steps, period_s, limit_s
        self.enabled = True
        self._recording: Recording | None = None
        self._started = float("-inf")
        self._first_step = 0
        self._number = 0
        self.analyst: LatestWins[Recording] = LatestWins(self._analyse, on_error)

    @property
    def is_recording(self) -> bool:
        return self._recording is not None

    def tick(self, now: float, step: int, busy: bool) -> None:
        """Start a recording or collect one; `step` is the engine's next step, `busy` says whether it has work."""
        if self._recording is not None:
            if step - self._first_step > self.steps or now - self._started > self.limit_s or not busy:
                self.collect()
        elif self.enabled and busy and now - self._started >= self.period_s:
            self._recording = record(self.steps, "stages", engine=self._client)
            self._started, self._first_step = now, step
            self._recording.start()

    def collect(self) -> None:
        """End the recording that runs, if there is one, and hand it to the analyst."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        try:
            recording.stop()
        except MRV2Error:
            return  # nothing ran meanwhile: there is no window to show
        self.analyst.submit(recording)

    def _analyse(self, recording: Recording) -> None:
        self._number += 1
        window = Window.of(recording.trace(), self._number)
        if window.num_steps:
            self._on_window(window)
