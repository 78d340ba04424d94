"""A workbench on a real engine: loads, knobs, recordings, A/B, sessions, life and death."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lab.benches import OPTIONS, make_bench, until
from mrv2.config import Knobs, legal_values
from mrv2.device.host import HostDevice
from mrv2.errors import ConfigError, EngineDeadError, RequestError
from mrv2.lab import Load, Workbench, open_session
from mrv2.lab.metrics import METRICS
from mrv2.lab.presets import EFFECTS, effect_of
from mrv2.lab.report import report_html, thinned
from mrv2.lab.sampling_view import sample_position
from mrv2.lab.session import capture
from mrv2.llm import LLM
from mrv2.sampling_params import SamplingParams

# knobs whose values all promise the same tokens on the host backend
SAME_TOKENS = {
    "runner": ["v1", "v2"],
    "async_scheduling": [True, False],
    "queue_depth": [1, 2, 3, 4],
    "input_prep": ["device", "host"],
    "fetch_ahead": [True, False],
    "output_copy": ["side_stream", "main_stream"],
    "output_wait": ["spin", "sleep"],
    "sampler": ["gumbel_two_pass", "gumbel_fused", "softmax_race"],
    "spec_method": ["off", "ngram", "suffix", "draft_model", "eagle3", "mtp"],
    "num_spec_tokens": [0, 1, 2, 3],
    "adaptive_drafts": [True, False],
    "draft_sampling": ["greedy", "sampled"],
    "cuda_graphs": ["off", "model", "step"],
    "prefill_chunk": [0, 16],
    "grammar_overlap": ["deferred", "blocking"],
    "grammar_drafts": [True, False],
}


def room_for(name: str) -> dict[str, Any]:
    """Return what else to change where a value of `name` is refused: v1 takes neither every drafter nor every depth."""
    if name == "runner":
        return {"spec_method": "off", "queue_depth": 2, "grammar_drafts": False}
    return {"runner": "v2"} | ({"num_spec_tokens": 3} if name == "grammar_drafts" else {"grammar_drafts": False})


@pytest.fixture(scope="module")
def bench() -> Iterator[Workbench]:
    with make_bench(name="module") as made:
        yield made


@pytest.fixture(scope="module")
def drafting() -> Iterator[Workbench]:
    """With every drafter; the heads and the draft model have random weights."""
    speculators = ["suffix", "draft_model=tiny-llama", "eagle3", "mtp"]
    with make_bench(name="drafting", speculators=speculators) as made:
        yield made
        made.check()


@pytest.fixture(autouse=True)
def _quiet(bench: Workbench) -> Iterator[None]:
    yield
    bench.stop()
    bench.set_load(Load(users=3, max_tokens=24, ignore_eos=True))
    bench.preset("V2 async")
    bench.check()


def test_a_load_is_served_and_seen(bench: Workbench) -> None:
    bench.start()
    view = bench.wait(requests=4, tokens=60)
    assert view.state == "running" and 1 <= view.num_open <= 3
    assert any(stream["tokens"] for stream in view.streams)
    found = until(lambda: (found := bench.metrics())["tok_s"]["n"] and found)
    assert found["ttft_ms"]["p50"] > 0
    bench.pause()
    until(lambda: bench.view.state == "paused")
    # what ran was served to its end
    assert all(request.finish_reason == "length" for request in bench.requests[-3:])


def test_stop_ends_running_requests_at_once(bench: Workbench) -> None:
    bench.set_load(max_tokens=120)
    bench.start()
    bench.wait(tokens=5)
    bench.stop()
    assert not bench.driver.book.open
    assert {request.finish_reason for request in bench.requests[-3:]} == {"abort"}
    assert until(lambda: bench.view.state == "paused")


def test_knobs_change_while_requests_run_and_say_at_which_step(bench: Workbench) -> None:
    bench.start()
    bench.wait(tokens=5)
    before = bench.snapshot().step
    intent = bench.set(async_scheduling=False, queue_depth=1)
    assert intent.state == "applied" and intent.step >= before  # type: ignore[operator]
    assert bench.knobs["async_scheduling"] is False
    assert bench.snapshot().knobs_since == intent.step
    with pytest.raises(ConfigError, match="queue_depth <= 2"):
        bench.set(runner="v1", async_scheduling=True, queue_depth=4)
    assert bench.knobs["runner"] == "v2"
    assert bench.intents[-1].state == "refused"
    marks = [mark.label for mark in bench.driver.metrics.marks]
    assert "async_scheduling=off, queue_depth=1" in marks
    assert not any("v1" in label for label in marks)


def test_graphs_are_captured_while_requests_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = HostDevice._capture_graph

    def slow(*args: Any) -> Any:
        threading.Event().wait(0.05)
        return capture(*args)

    monkeypatch.setattr(HostDevice, "_capture_graph", slow)
    monkeypatch.setattr("mrv2.engine.graph_capture.PAUSE_S", 0.0)
    with make_bench(name="capture") as bench:
        bench.start()
        bench.wait(tokens=5)
        intent = bench.set(wait=False, cuda_graphs="step")
        until(lambda: intent.state == "applied")
        assert intent.change is not None and intent.change.num_graphs > 3 and intent.lacks_graphs
        shown = until(lambda: bench.view.snapshot.capture)
        assert 0 <= shown.num_captured < shown.num_graphs == intent.change.num_graphs
        assert "whole step" in shown.upcoming
        tokens = bench.view.num_tokens
        # until the last graph is there
        assert intent.wait(60) is intent and intent.capture_seconds
        assert bench.snapshot().capture is None and bench.view.num_tokens > tokens
        # the graphs are kept: the second time there is nothing to wait for
        bench.set(cuda_graphs="off")
        again = bench.set(cuda_graphs="step")
        assert again.change is not None and again.change.num_graphs == 0 == again.capture_seconds
        bench.check()


def test_presets(bench: Workbench) -> None:
    bench.preset("V1 as it was")
    assert (bench.knobs["runner"], bench.knobs["async_scheduling"]) == ("v1", False)
    with pytest.raises(ConfigError, match="not available here"):
        bench.preset("V2 async, eager")
    with pytest.raises(ConfigError, match="did you mean"):
        bench.preset("V2 asink")


def test_prompts_by_hand_get_what_llm_gives(bench: Workbench) -> None:
    prompts = [[5, 6, 7], [9, 8]]
    params = SamplingParams(max_tokens=10, temperature=0.9, seed=5, logprobs=1, ignore_eos=True)
    bench.start()
    found = bench.generate(prompts, params)  # type: ignore[arg-type]
    with LLM("tiny-llama", **OPTIONS) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    assert [r.token_ids for r in found] == [list(e.outputs[0].token_ids) for e in expected]
    assert all(isinstance(value, float) for value in found[0].logprobs)
    for refused in ({"n": 2}, {"stop": ["x"]}, {"bad_words": ["x"]}):
        with pytest.raises(RequestError):
            bench.generate([[1]], SamplingParams(**refused))  # type: ignore[arg-type]


def test_a_load_that_can_never_be_served_pauses_and_is_reported(bench: Workbench) -> None:
    bench.set_load(max_tokens=159, pack="long", users=1)
    bench.driver.errors.dismiss()
    bench.start()
    bench.wait(tokens=2)
    bench.stop()
    # the prompt was cut to what fits beside the answer
    assert len(bench.requests[-1].prompt_token_ids) == 1
    bench.check()


def test_every_knob_that_promises_the_same_tokens_is_switched() -> None:
    promising = {f.name for f in fields(Knobs) if len(legal_values(f.name)) > 1} - {"verification"}
    # only a GPU has another attention than the reference
    assert set(SAME_TOKENS) == promising - {"attention"}
    for name, values in SAME_TOKENS.items():
        for value in values:
            assert effect_of(Knobs().as_dict(), name, value) == EFFECTS["T"], (name, value)


@pytest.mark.parametrize("seed", range(3))
def test_switching_at_random_moments_leaves_the_tokens_of_seeded_requests(drafting: Workbench, seed: int) -> None:
    bench, rng = drafting, random.Random(seed)
    names = rng.sample(list(SAME_TOKENS), len(SAME_TOKENS))
    # the pack once: the same eight requests with the same seeds
    bench.set_load(mode="replay", users=4, max_tokens=40, temperature=1.0, seed=100, pack="code")
    tokens: dict[str, dict[int | None, list[int]]] = {}
    applied: Counter[str] = Counter()
    for setting in ("quiet", "switching"):
        before = {request.req_id for request in bench.requests}
        goal = bench.view.num_finished + 8
        bench.start()
        while bench.view.num_finished < goal:
            if setting == "quiet":
                bench.wait(seconds=0.05)
                continue
            # each in its turn, so that every one of them is turned
            name = names[sum(applied.values()) % len(names)]
            change = {name: rng.choice(SAME_TOKENS[name])}
            intent = bench.set(wait=False, **change)
            until(lambda intent=intent: intent.state != "pending")
            if intent.state == "refused":
                bench.set(**change, **room_for(name))
            applied[name] += 1
            threading.Event().wait(rng.random() * 0.05)
        done = [request for request in bench.requests if request.req_id not in before]
        tokens[setting] = {request.params.seed: request.token_ids for request in done}
        bench.pause()
    assert sum(applied.values()) >= 5, "hardly anything was switched"
    assert tokens["quiet"].keys() == tokens["switching"].keys() == set(range(100, 108))
    assert tokens["quiet"] == tokens["switching"]


def test_a_recording_has_the_asked_steps_and_windows_go_on_afterwards(bench: Workbench) -> None:
    bench.start()
    trace = bench.record(steps=6)
    assert 5 <= len(trace.analyze().windows) <= 8
    window = until(lambda: bench.driver.window)
    newer = until(lambda: bench.driver.window is not window and bench.driver.window)
    assert newer.num_steps > 3 and 0 <= newer.idle <= 1 and 0 <= newer.overlap <= 1
    assert len(newer.places) == len(newer.syncs["rows"]) > 0
    assert bench.trace is newer.trace or bench.trace is not None
    bench.stop()
    with pytest.raises(ConfigError, match="idle"):
        bench.record(steps=3)
    assert bench.driver.windows.enabled


def test_an_inspection_copies_the_asked_steps(bench: Workbench) -> None:
    bench.start()
    found = bench.inspect(4)
    assert len(found.steps) >= 4 and found.num_left == 0
    numbers = [step.step for step in found.steps[-4:]]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    assert {request.req_id for request in found.requests} <= set(bench.driver.book.open)


def test_both_settings_of_an_ab_get_the_same_requests_and_the_knobs_come_back(bench: Workbench) -> None:
    bench.set(queue_depth=3)
    bench.start()
    result = bench.ab("V1 as it was", "V2 async + n-gram", requests=3, repetitions=2, load=Load(max_tokens=12, users=2))
    assert result.same_tokens == (3, 3) and result.promises_tokens
    assert result.repetitions == 2 and all(len(run.token_ids) == 3 for run in result.runs)
    assert set(result.traces) == {"a", "b"}
    assert bench.knobs["queue_depth"] == 3 and not bench.driver.paused and bench.driver.windows.enabled
    assert until(lambda: bench.view.state == "running")
    assert "3 of 3" in result._repr_html_()
    pytest.importorskip("plotly")
    assert len(result.side_by_side().data) > 2
    with pytest.raises(ConfigError):
        bench.ab("V2 sync", {"runner": "v1", "queue_depth": 4})


def test_draws_of_one_position_fit_the_model(bench: Workbench) -> None:
    view = bench.call(lambda: sample_position(bench.driver, "one two three", 300))
    assert view.draws == 300 and sum(view.target) == pytest.approx(1)
    assert view.p_value > 1e-4


def test_a_session_opens_without_an_engine_and_says_the_same(bench: Workbench, tmp_path: Path) -> None:
    bench.start()
    bench.set(queue_depth=2)
    bench.wait(requests=3)
    until(lambda: bench.trace)
    bench.stop()
    for _ in range(20):
        trace = bench.trace
        saved = open_session(bench.save(tmp_path / "one"))
        # a window that was being recorded may arrive meanwhile
        if bench.trace is trace:
            break
    assert saved.knobs == bench.knobs and saved.load == bench.load
    assert [r["token_ids"] for r in saved.requests] == [r.token_ids for r in bench.requests]
    assert saved.trace is not None and bench.trace is not None
    assert len(saved.trace.analyze().windows) == len(bench.trace.analyze().windows)
    assert any(change["changes"] == {"queue_depth": 2} for change in saved.about["changes"])
    assert saved.code() == bench.code()
    assert "svg" in saved._repr_html_()
    # over itself, but over nothing else
    bench.save(tmp_path / "one")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is no session"):
        bench.save(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"no session\.json"):
        open_session(tmp_path / "other")
    about = json.loads((tmp_path / "one" / "session.json").read_text())
    (tmp_path / "one" / "session.json").write_text(json.dumps({**about, "schema": 99}))
    with pytest.raises(ConfigError, match="schema 99"):
        open_session(tmp_path / "one")


def test_a_report_needs_nothing_else(bench: Workbench, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    bench.start()
    bench.wait(requests=2)
    until(lambda: bench.trace)
    text = bench.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "tiny-llama" in text and "mrv2-timeline" in text
    assert 'src="http' not in text and "src='http" not in text
    with pytest.raises(ConfigError, match=r"\.html"):
        bench.report(tmp_path / "report.pdf")


def test_a_report_of_a_long_session_fits_into_two_megabytes(bench: Workbench) -> None:
    pytest.importorskip("plotly")
    bench.start()
    bench.record(steps=3)
    bench.wait(requests=2)
    session = capture(bench)
    session.trace = bench.record(steps=32)
    rng = random.Random(0)
    # as many points, requests and changes as a workbench keeps
    points = [[i / 2 + rng.random(), 1e3 * rng.random()] for i in range(1200)]
    session.metrics["series"] = {metric.key: points for metric in METRICS}
    session.metrics["marks"] = [{"t": 3.0 * i, "step": i, "label": "queue_depth=2"} for i in range(200)]
    session.about["changes"] = session.about["changes"][:1] * 200
    session.requests = [{**session.requests[0], "text": "word " * 400}] * 200
    assert len(report_html(session).encode()) <= 2_000_000


def test_a_thinned_line_keeps_what_stands_out() -> None:
    points = [[float(i), 1.0] for i in range(1000)]
    points[123][1], points[777][1] = 9.0, -9.0
    kept = thinned(points, 100)
    assert len(kept) <= 100 and kept == sorted(kept)
    assert [123.0, 9.0] in kept and [777.0, -9.0] in kept
    assert thinned(points[:100], 100) == points[:100]


def test_the_card_stands_in_where_there_is_no_front_end(bench: Workbench) -> None:
    bench.start()
    bench.wait(tokens=20, seconds=1.2)
    shown = bench._repr_mimebundle_()
    assert set(shown) == {"text/plain", "text/html"}
    assert "tiny-llama" in shown["text/plain"] and "<svg" in shown["text/html"]
    assert "<script" not in shown["text/html"]


def test_a_second_workbench_of_the_same_name_closes_the_first() -> None:
    first = make_bench(name="twice")
    second = make_bench(name="twice")
    assert first.closed and not second.closed
    with pytest.raises(EngineDeadError, match="closed"):
        first.set(queue_depth=1)
    second.close()
    second.close()


def test_a_dead_engine_is_reported_everywhere_and_closes_cleanly() -> None:
    bench = make_bench(name="doomed")
    bench.start()
    bench.wait(tokens=3)

    def explode() -> None:
        raise EngineDeadError("the engine has stopped: on purpose")

    bench.driver.call(explode)
    until(lambda: bench.view.state == "failed")
    with pytest.raises(EngineDeadError, match="on purpose"):
        bench.set(queue_depth=1)
    with pytest.raises(EngineDeadError, match="on purpose"):
        bench.check()
    bench.close()


def test_closing_ends_an_experiment_and_is_no_failure() -> None:
    bench = make_bench(name="interrupted")
    work = bench.ab_work("V2 sync", "V2 async", requests=200, repetitions=10)
    experiment = bench.driver.call(work)
    until(lambda: bench.view.state.startswith("A/B"))
    bench.close()
    with pytest.raises(EngineDeadError, match="closed"):
        experiment.result(10)
    assert bench.errors.fatal is None
    assert not bench.driver.is_alive


def test_the_engine_may_run_in_a_child_process() -> None:
    with make_bench(name="child", engine="process") as bench:
        bench.start()
        bench.wait(requests=2)
        assert bench.set(runner="v1").state == "applied"
        assert len(bench.inspect(2).steps) == 2
        assert until(lambda: bench.trace) is not None
        until(lambda: bench.metrics()["tok_s"]["p50"])
        bench.check()


def test_places_and_names_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="legal values"):
        make_bench(engine="cloud")
    with pytest.raises(ConfigError, match="pack="):
        make_bench(load="poems")
