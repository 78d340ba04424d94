"""What recordings are kept for: ``traces/index.json`` gives some a role, and here is what each must show."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2.commands.trace_report import headline
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
# what V1 waits for in every step with drafts, by the name of the wait
ACCEPTED = "v1: accepted tokens"
# fields in which a recording of V1 and its twin of V2 agree
_TWINS = ("workload", "model", "async_scheduling", "cuda_graphs", "granularity", "steps", "speculation", "gpu")


def of_role(role: str, **fields: Any) -> Any:
    """Return a parametrisation over the recordings of a role whose entries have these fields."""
    chosen = [e for e in ENTRIES if e.get("role") == role and all(e.get(k) == v for k, v in fields.items())]
    return pytest.mark.parametrize("entry", chosen, ids=[e["file"].removesuffix(".sqlite.gz") for e in chosen])


@cache
def loaded(file: str) -> Trace:
    return load(ROOT / file, cache=False)


def recording(entry: dict[str, Any]) -> Trace:
    return loaded(entry["file"])


def twin_of(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the recording of V2 that was made as `entry` was."""
    (twin,) = [e for e in ENTRIES if e.get("runner") == "v2" and all(e.get(k) == entry[k] for k in _TWINS)]
    return twin


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


def waits_in_steps(analysis: Analysis) -> dict[tuple[str, str], list[int]]:
    """Return (call, reason) -> the steps in which the host made it, ascending, once for each call."""
    found: dict[tuple[str, str], list[int]] = {}
    table = analysis.syncs()
    assert table is not None
    for row in np.flatnonzero(table.counted).tolist():
        found.setdefault((table.name[row], table.reason[row]), []).append(int(table.step[row]))
    return {key: sorted(steps) for key, steps in found.items()}


def check_v1_speculation(trace: Trace) -> None:
    analysis = settled(trace)
    with pytest.raises(TraceAssertionError, match=f"wait: {ACCEPTED}"):
        assert_no_sync(analysis, allow=["output"])
    # whatever V1 waits for has a name
    assert_no_sync(analysis, allow=["output", "v1: *"])
    waits = waits_in_steps(analysis)
    assert waits["cudaEventSynchronize", ACCEPTED] == analysis.windows.step.tolist(), "not once in every step"


def check_steady(trace: Trace) -> None:
    analysis = settled(trace)
    found = analysis.graph_idle()
    assert found is not None and found.num_executions >= len(analysis.windows) - 2
    assert_graph_idle(analysis, at_most=MAX_IDLE_BETWEEN_GRAPHS)
    assert_no_sync(analysis, allow=["output"])


def test_every_recording_is_listed_once_and_every_role_is_known() -> None:
    files = [entry["file"] for entry in ENTRIES]
    assert sorted(files) == sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.sqlite.gz"))
    assert {entry["role"] for entry in ENTRIES if "role" in entry} <= set(ROLES)


def test_every_role_has_its_recordings() -> None:
    # workloads of `mrv2 bench`
    assert {entry["workload"] for entry in ENTRIES if entry.get("role") == "steady"} >= set("abcdef")
    assert {entry["runner"] for entry in ENTRIES if entry.get("role") == "speculation"} == {"v1", "v2"}


@of_role("speculation", runner="v2")
def test_v2_speculates_without_a_wait_and_drafts_at_once(entry: dict[str, Any]) -> None:
    check_v2_speculation(recording(entry))


@of_role("speculation", runner="v1")
def test_v1_waits_for_the_number_of_accepted_tokens(entry: dict[str, Any]) -> None:
    check_v1_speculation(recording(entry))


@of_role("speculation", runner="v1", async_scheduling=True)
def test_v2_waits_once_a_step_where_v1_waits_three_times(entry: dict[str, Any]) -> None:
    v1, v2 = settled(recording(entry)), settled(recording(twin_of(entry)))
    for analysis, reasons in ((v1, {"output", ACCEPTED, "v1: prepare_inputs barrier"}), (v2, {"output"})):
        each_step = analysis.windows.step.tolist()
        assert waits_in_steps(analysis) == {("cudaEventSynchronize", reason): each_step for reason in reasons}


@of_role("speculation", runner="v1")
def test_between_verification_and_drafts_the_gpu_idles_longer_under_v1(entry: dict[str, Any]) -> None:
    v1, v2 = settled(recording(entry)), settled(recording(twin_of(entry)))
    with pytest.raises(TraceAssertionError, match="idle time between 'verify' and 'draft'"):
        assert_stage_gap(v1, stages.VERIFY, stages.DRAFT, p95_ns=MAX_GAP_NS)
    slow, fast = (analysis.stage_gaps(stages.VERIFY, stages.DRAFT) for analysis in (v1, v2))
    assert slow is not None and fast is not None
    # the shortest of one against the longest of the other
    assert slow.idle_ns.min() > fast.idle_ns.max()


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
    with pytest.raises(AssertionError, match="not once in every step"):
        check_v1_speculation(made(count_wait=2))


@of_role("steady", granularity="graph")
def test_the_gpu_hardly_idles_between_steps_and_the_host_waits_for_the_output_alone(entry: dict[str, Any]) -> None:
    check_steady(recording(entry))


def test_the_readme_shows_the_steady_recordings() -> None:
    """What `mrv2 trace stats` says of each, warm-up included in the median step."""
    found = [headline(Analysis(loaded(f"h200/v2_async_step_{name}.graph.sqlite.gz"))) for name in "abcdef"]
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("* `steady`")[1]
    medians, idle = (
        text.split(f"| {line} | ")[1].split("\n")[0] for line in ("median step, us", "GPU idle between graphs")
    )
    assert medians == " | ".join(f"{each['step_median_ns'] / 1e3:,.0f}" for each in found) + " |"
    assert idle == " | ".join(f"{each['idle_between_graphs']:.2%}".replace("%", " %") for each in found) + " |"
    # and the front page
    front = (ROOT.parent / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    for name, each in zip("abcdef", found, strict=True):
        assert f"{each['idle_between_graphs']:.2%} at {name}".replace("%", " %") in front, name


def test_the_statements_about_steady_decode_can_fail(tmp_path: Path) -> None:
    # graphs of the forward pass alone
    with pytest.raises(TraceAssertionError, match="idle between CUDA graphs at most 2.0 %"):
        check_steady(loaded("h200/v2_async.graph.sqlite.gz"))

    def made(**how: Any) -> Trace:
        return load(speculating_steps(**how).write(tmp_path / "t.sqlite"), cache=False)

    # a graph from 30 to 130 us of each step, and the next begins
    check_steady(made(draft_us=60))
    with pytest.raises(TraceAssertionError, match="idle between CUDA graphs at most 2.0 %"):
        check_steady(made(draft_us=57))
    with pytest.raises(TraceAssertionError, match="accepted tokens"):
        check_steady(made(draft_us=60, count_wait=True))


@of_role("steady", granularity="node")
def test_what_idles_inside_graphs_is_measured(entry: dict[str, Any]) -> None:
    found = settled(recording(entry)).graph_idle()
    assert found is not None and found.inside_share is not None
    assert 0 < found.inside_share < 1
