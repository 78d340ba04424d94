"""What the panel's tabs show, and the messages that they take."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2.engine.inspection import Inspection, StepInputs
from mrv2.errors import ConfigError
from mrv2.lab.ab import ABResult
from mrv2.lab.sampling_view import SamplingView, sample_position

if TYPE_CHECKING:
    from mrv2.lab.panel import Panel
    from mrv2.lab.workbench import Workbench

MAX_SHOWN_BLOCKS = 1024
MAX_SHOWN_TOKENS = 96


class Detail(ABC):
    """One tab; `paint` runs on the painter's thread while the tab is open, `take` on the kernel's."""

    def __init__(self, workbench: Workbench) -> None:
        self.workbench = workbench
        self._work: Future[Any] | None = None

    @abstractmethod
    def paint(self, panel: Panel) -> dict[str, Any]:
        """Return what the tab shows; never waits."""

    def take(self, content: dict[str, Any]) -> None:
        """Take a message of the tab."""
        raise ConfigError(f"this tab takes no message of kind {content.get('kind')!r}")

    @property
    def busy(self) -> bool:
        return self._work is not None and not self._work.done()

    def _begin(self, work: Any) -> None:
        """Run `work` on the driver's thread; its error goes to the banner."""
        if self.busy:
            raise ConfigError("wait until the last request of this tab is done")
        self._work = self.workbench.driver.call(self.workbench.errors.guarded(work))


class BatchDetail(Detail):
    """Who holds which KV blocks, and the rows of the inspected steps."""

    def __init__(self, workbench: Workbench) -> None:
        super().__init__(workbench)
        self._found: Inspection | None = None

    def paint(self, panel: Panel) -> dict[str, Any]:
        if not self.busy:
            self._begin(self._look)
        found = self._found
        if found is None:
            return {}
        owners = [-1] * min(found.num_blocks + 1, MAX_SHOWN_BLOCKS)
        for number, request in enumerate(found.requests):
            for block in request.block_ids:
                if block < len(owners):
                    # a block of a shared prefix has several owners
                    owners[block] = number if owners[block] < 0 else -2
        snapshot = self.workbench.view.snapshot
        return {
            "blocks": owners,
            "total": found.num_blocks,
            "blockSize": found.block_size,
            "used": snapshot.kv_blocks_used,
            "cached": snapshot.kv_blocks_cached,
            "requests": [
                {"id": r.req_id, "computed": r.num_computed, "known": r.num_known, "prompt": r.prompt_len}
                for r in found.requests
            ],
            "steps": batch_rows(found.steps[-32:]),
            "left": found.num_left,
        }

    def take(self, content: dict[str, Any]) -> None:
        steps = int(content["steps"])
        self.workbench.driver.call(self.workbench.errors.guarded(lambda: self._look(steps)))

    def _look(self, steps: int = 0) -> None:
        self._found = self.workbench.driver.client.inspect(steps)


def batch_rows(steps: list[StepInputs]) -> dict[str, Any]:
    """Return the rows of some steps as a grid: for each step and row who sits there, and with how many tokens."""
    ids = list(dict.fromkeys(req_id for step in steps for req_id in step.req_ids))
    number = {req_id: i for i, req_id in enumerate(ids)}
    rows = 1 + max((int(step.rows.max()) for step in steps), default=-1)
    return {
        "ids": ids,
        "rows": rows,
        "steps": [
            {
                "step": step.step,
                "runner": step.runner,
                # row, request, tokens of this step, place in the batch
                "cells": [
                    [int(row), number[req_id], int(tokens), place]
                    for place, (row, req_id, tokens) in enumerate(
                        zip(step.rows, step.req_ids, step.num_scheduled, strict=True)
                    )
                ],
            }
            for step in steps
        ],
    }


class InspectorDetail(BatchDetail):
    """The inputs of one inspected step, and what changed since the one before it."""

    def __init__(self, workbench: Workbench) -> None:
        super().__init__(workbench)
        self._chosen: int | None = None

    def paint(self, panel: Panel) -> dict[str, Any]:
        if not self.busy and self._found is not None and self._found.num_left:
            self._begin(self._look)
        steps = self._found.steps if self._found is not None else []
        if not steps:
            return {"steps": [], "left": self._found.num_left if self._found is not None else 0}
        numbers = [step.step for step in steps]
        at = numbers.index(self._chosen) if self._chosen in numbers else len(steps) - 1
        before = steps[at - 1] if at and steps[at - 1].step == steps[at].step - 1 else None
        return {
            "steps": numbers,
            "chosen": numbers[at],
            "left": self._found.num_left if self._found is not None else 0,
            **describe_step(steps[at], before, self.workbench),
        }

    def take(self, content: dict[str, Any]) -> None:
        if content["kind"] == "choose":
            self._chosen = int(content["step"])
        else:
            self._chosen = None
            super().take(content)


def describe_step(step: StepInputs, before: StepInputs | None, workbench: Workbench | None = None) -> dict[str, Any]:
    """Return a step's inputs as tables; `changed` says which cells differ from the step before."""
    tokenizer = workbench.driver.tokenizer if workbench is not None else None
    tokens = min(len(step.input_ids), MAX_SHOWN_TOKENS)
    owner = np.repeat(np.arange(len(step.req_ids)), np.diff(step.query_start_loc))[:tokens]
    earlier = {} if before is None else dict(zip(before.req_ids, range(len(before.req_ids)), strict=True))

    def changed(name: str, i: int) -> bool:
        place = earlier.get(step.req_ids[i])
        return place is None or before is None or int(getattr(step, name)[i]) != int(getattr(before, name)[place])

    return {
        "runner": step.runner,
        "numTokens": len(step.input_ids),
        "requests": [
            {
                "id": req_id,
                "new": before is not None and req_id not in earlier,
                "row": int(step.rows[i]),
                "rowChanged": before is not None and changed("rows", i),
                "scheduled": int(step.num_scheduled[i]),
                "drafts": int(step.num_drafts[i]),
                "start": int(step.query_start_loc[i]),
                "seqLen": int(step.seq_lens[i]),
                "grew": None
                if req_id not in earlier or before is None
                else int(step.seq_lens[i]) - int(before.seq_lens[earlier[req_id]]),
            }
            for i, req_id in enumerate(step.req_ids)
        ],
        "gone": [] if before is None else [req_id for req_id in before.req_ids if req_id not in step.req_ids],
        "tokens": [
            {
                "owner": int(owner[t]),
                "id": int(step.input_ids[t]),
                "text": tokenizer.token_text(int(step.input_ids[t])) if tokenizer is not None else "",
                "position": int(step.positions[t]),
                "slot": int(step.slots[0][t]),
            }
            for t in range(tokens)
        ],
    }


class SpeculationDetail(Detail):
    """How many drafts were accepted, by position and by verification."""

    def paint(self, panel: Panel) -> dict[str, Any]:
        snapshot = self.workbench.view.snapshot
        return {
            "drafted": snapshot.num_drafted,
            "accepted": snapshot.num_accepted,
            "mean": snapshot.mean_accepted_length,
            "lengths": dict(sorted(self.workbench.driver.book.lengths.items())),
            "method": snapshot.knobs["spec_method"],
        }


class SamplerDetail(Detail):
    """Target against empirical distribution of one position."""

    def __init__(self, workbench: Workbench) -> None:
        super().__init__(workbench)
        self._result: SamplingView | None = None

    def paint(self, panel: Panel) -> dict[str, Any]:
        shown = {} if self._result is None else self._result.as_dict()
        return {"busy": self.busy, "sampler": self.workbench.knobs["sampler"], **shown}

    def take(self, content: dict[str, Any]) -> None:
        prompt, draws = str(content["prompt"]), int(content["draws"])

        def work() -> None:
            self._result = sample_position(self.workbench.driver, prompt, draws)

        self._begin(work)


class ABDetail(Detail):
    """Two settings, the same load, a table of differences."""

    def paint(self, panel: Panel) -> dict[str, Any]:
        result: ABResult | None = self.workbench.last_ab
        state = self.workbench.view.state
        return {
            "busy": state if state.startswith("A/B") else "queued" if self.busy else "",
            "result": None if result is None else result.as_dict(),
        }

    def take(self, content: dict[str, Any]) -> None:
        work = self.workbench.ab_work(
            content["a"], content["b"], requests=int(content["requests"]), repetitions=int(content["repetitions"])
        )
        self._begin(work)


class SessionDetail(Detail):
    """Copy-as-code, what was changed, saving, and what the panel costs."""

    def __init__(self, workbench: Workbench) -> None:
        super().__init__(workbench)
        self._saved = ""

    def paint(self, panel: Panel) -> dict[str, Any]:
        from mrv2.lab.code import as_code

        return {
            "code": as_code(self.workbench),
            "knobs": self.workbench.knobs,
            "log": [intent.as_dict() for intent in reversed(self.workbench.intents[-40:])],
            "cost": panel.cost,
            "saved": self._saved,
        }

    def take(self, content: dict[str, Any]) -> None:
        if content["kind"] not in ("save", "report"):
            super().take(content)
        # it may have to wait for an experiment, and whoever brings messages must not
        work = self.workbench.errors.guarded(lambda: self._write(content["kind"]))
        threading.Thread(target=work, name="lab-save", daemon=True).start()

    def _write(self, kind: str) -> None:
        name = time.strftime("mrv2-session-%Y%m%d-%H%M%S")
        if kind == "save":
            self._saved = f"saved {self.workbench.save(name)}"
        else:
            self._saved = f"wrote {self.workbench.report(name + '.html')}"


DETAILS: dict[str, type[Detail]] = {
    "batch": BatchDetail,
    "inspector": InspectorDetail,
    "speculation": SpeculationDetail,
    "sampler": SamplerDetail,
    "ab": ABDetail,
    "session": SessionDetail,
}
