"""What recordings are kept for: ``traces/index.json`` gives some a role, and here is what each must show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrv2.instrument import stages
from mrv2.trace import Trace, load
from mrv2.trace.analysis import Analysis
from mrv2.trace.assertions import TraceAssertionError, assert_graph_idle, assert_no_sync, assert_stage_gap
from nsight_files import NEW, OLD, speculating_steps

ROOT = Path(__file__).parents[2] / "traces"
ENTRIES: list[dict[str, Any]] = json.loads((ROOT / "index.json").read_text(encoding="utf-8"))["recordings"]
# speculation: drafts are verified and made; steady: decode in whole-step graphs, each recorded as one operation (or
# node by node, to see inside)
ROLES = ("speculation", "steady")
# of the draft stage behind the verification, on the GPU
MAX_GAP_NS = 10_000
MAX_IDLE_BETWEEN_GRAPHS = 0.02
# turns that fill the queue behind a drained device
_FILLING = 4


def of_role(role: str, **fields: Any) -> Any:
    """Return a parametrisation over the recordings of a role whose entries have these fields."""
    chosen = [e for e in ENTRIES if e.get("role") == role and all(e.get(k) == v for k, v in fields.items())]
    return pytest.mark.parametrize("entry", chosen, ids=[e["file"].removesuffix(".sqlite.gz") for e in chosen])


def recording(entry: dict[str, Any]) -> Trace:
    return load(ROOT / entry["file"], cache=False)


def settled(trace: Trace) -> Analysis:
    """Return the analysis of the steps behind the last capture of graphs, and behind those that fill the queue."""
    whole = Analysis(trace)
    captures = trace.ranges.end[trace.ranges.name == trace.string_id("wait: graph capture")]
    begins = whole.windows.start[whole.windows.start >= captures.max(initial=0)]
    assert len(begins) > _FILLING + 10, f"{len(begins)} steps behind the last capture"
    return Analysis(trace, window=(int(begins[_FILLING]), whole.window[1]), warmup=0)


def check_v2_speculation(trace: Trace) -> None:
    analysis = settled(trace)
    gaps = analysis.stage_gaps(stages.VERIFY, stages.DRAFT)
    assert gaps is not None and len(gaps) >= len(analysis.windows) - 1, "a step without verification or drafts"
    assert_no_sync(analysis, allow=["output"])
    assert_stage_gap(analysis, stages.VERIFY, stages.DRAFT, p95_ns=MAX_GAP_NS)


def check_v1_speculation(trace: Trace) -> None:
    analysis = settled(trace)
    with pytest.raises(TraceAssertionError, match="wait: v1: accepted tokens"):
        assert_no_sync(analysis, allow=["output"])
    # whatever V1 waits for has a name
    assert_no_sync(analysis, allow=["output", "v1: *"])


def test_every_recording_is_listed_once_and_every_role_is_known() -> None:
    files = [entry["file"] for entry in ENTRIES]
    assert sorted(files) == sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.sqlite.gz"))
    assert {entry["role"] for entry in ENTRIES if "role" in entry} <= set(ROLES)


@of_role("speculation", runner="v2")
def test_v2_speculates_without_a_wait_and_drafts_at_once(entry: dict[str, Any]) -> None:
    check_v2_speculation(recording(entry))


@of_role("speculation", runner="v1")
def test_v1_waits_for_the_number_of_accepted_tokens(entry: dict[str, Any]) -> None:
    check_v1_speculation(recording(entry))


def engine_without_drafts(schema: str, folder: Path) -> Path:
    """Write steps whose last operation is `post_update`."""
    file = speculating_steps(schema, whole_step=False)
    file.rows["NVTX_EVENTS"] = [row for row in file.rows["NVTX_EVENTS"] if row.get("textId") != file.text("draft")]
    return file.write(folder / "plain.sqlite")


@pytest.mark.parametrize("schema", [OLD, NEW])
@pytest.mark.parametrize("whole_step", [True, False])
def test_the_statements_about_speculation_can_fail(tmp_path: Path, schema: str, whole_step: bool) -> None:
    def made(**how: Any) -> Trace:
        return load(speculating_steps(schema, whole_step=whole_step, **how).write(tmp_path / "t.sqlite"), cache=False)

    check_v2_speculation(made())
    check_v1_speculation(made(count_wait=True))
    with pytest.raises(TraceAssertionError, match="accepted tokens"):
        check_v2_speculation(made(count_wait=True))
    with pytest.raises(TraceAssertionError, match="idle time between 'verify' and 'draft'"):
        check_v2_speculation(made(idle_us=9))
    with pytest.raises(AssertionError, match="a step without verification or drafts"):
        check_v2_speculation(load(engine_without_drafts(schema, tmp_path)))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_v1_speculation(made())


@of_role("steady", granularity="graph")
def test_the_gpu_hardly_idles_between_steps(entry: dict[str, Any]) -> None:
    analysis = settled(recording(entry))
    found = analysis.graph_idle()
    assert found is not None and found.num_executions >= len(analysis.windows) - 2
    assert_graph_idle(analysis, at_most=MAX_IDLE_BETWEEN_GRAPHS)


@of_role("steady", granularity="node")
def test_what_idles_inside_graphs_is_measured(entry: dict[str, Any]) -> None:
    found = settled(recording(entry)).graph_idle()
    assert found is not None and found.inside_share is not None
    assert 0 < found.inside_share < 1
