"""The lab's logic without widgets and without an engine: loads, metrics, requests, intents, presets, errors."""

from __future__ import annotations

import json
import math
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv2.config import EngineConfig, Knobs, legal_values
from mrv2.engine.messages import EngineOutput, EngineSnapshot, KnobChange, TokenLogprob
from mrv2.errors import ConfigError, EngineDeadError, RequestError
from mrv2.lab.ab import ABResult, Run
from mrv2.lab.code import code_of
from mrv2.lab.errors import ErrorStore
from mrv2.lab.intents import IntentLog
from mrv2.lab.load import MAX_OPEN, Load, LoadGenerator
from mrv2.lab.metrics import METRICS, Metrics, quantile
from mrv2.lab.packs import encode, load_pack, pack_names
from mrv2.lab.presets import changed_only, effect_of, knob_specs, presets, why_not
from mrv2.lab.requests import ACCEPTED, DRAWN, LabRequest, RequestBook
from mrv2.lab.sampling_view import SamplingView
from mrv2.sampling_params import SamplingParams

CONFIG = EngineConfig(model="tiny-llama", max_num_spec_tokens=3)


def snapshot(**changes: object) -> EngineSnapshot:
    base: dict[str, object] = dict(
        step=0,
        num_running=0,
        num_waiting=0,
        steps_in_flight=0,
        kv_blocks_total=100,
        kv_blocks_used=0,
        kv_blocks_cached=0,
        num_preemptions=0,
        waits={},
        knobs=Knobs().as_dict(),
    )
    return EngineSnapshot(**(base | changes))  # type: ignore[arg-type]


# ---- loads


@given(st.integers(1, 20), st.lists(st.integers(0, 25), max_size=20))
def test_a_closed_loop_keeps_as_many_requests_open_as_there_are_users(users: int, opens: list[int]) -> None:
    generator = LoadGenerator(Load(users=users))
    sent = []
    for now, num_open in enumerate(opens):
        due = generator.due(float(now), num_open)
        assert num_open + len(due) == max(users, num_open)
        sent += due
    assert [due.index for due in sent] == list(range(len(sent)))


def test_poisson_arrivals_have_the_rate_and_repeat_with_the_seed() -> None:
    def arrivals(seed: int) -> list[int]:
        generator = LoadGenerator(Load(mode="poisson", rate=20.0, seed=seed))
        return [len(generator.due(i / 10, 0)) for i in range(2000)]

    counts = arrivals(3)
    assert counts == arrivals(3) != arrivals(4)
    mean = sum(counts) / 200
    # 4000 expected, standard deviation 63
    assert abs(mean - 20) < 5 * math.sqrt(4000) / 200
    # of a Poisson variable mean and variance agree; a steady trickle would have none
    variance = sum((n - 2) ** 2 for n in counts) / len(counts)
    assert 1.6 < variance < 2.4


def test_a_poisson_load_does_not_pile_up_without_end() -> None:
    generator = LoadGenerator(Load(mode="poisson", rate=10_000.0))
    generator.due(0.0, 0)
    assert len(generator.due(10.0, MAX_OPEN - 3)) == 3


def test_a_replay_sends_every_prompt_once() -> None:
    load = Load(mode="replay", pack="json", users=3)
    generator = LoadGenerator(load, first_index=7)
    items, num_items = [], len(load_pack("json").items)
    while not generator.exhausted:
        items += [due.item for due in generator.due(0.0, 0)]
    assert len(items) == num_items
    assert {json.dumps(item) for item in items} == {json.dumps(item) for item in load_pack("json").items}
    assert generator.due(0.0, 0) == []


def test_off_sends_nothing() -> None:
    generator = LoadGenerator(Load(mode="off"))
    assert generator.exhausted
    assert generator.due(1e9, 0) == []


@pytest.mark.parametrize(
    "changes", [{"mode": "burst"}, {"pack": "poems"}, {"users": 0}, {"rate": 0}, {"max_tokens": 0}, {"speed": 1}]
)
def test_a_load_that_makes_no_sense_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises((ConfigError, RequestError)):
        Load().with_changes(**changes)


@pytest.mark.parametrize("name", pack_names())
def test_packs_are_complete_and_fit_the_limit(name: str) -> None:
    pack = load_pack(name)
    assert pack.title and pack.about and len(pack.items) >= 4
    for item in pack.items:
        assert ("chat" in item) != ("text" in item)
        prompt = encode(item, None, 512, 100)
        assert 1 <= len(prompt.token_ids) <= 100
        assert all(0 <= token < 512 for token in prompt.token_ids)
        assert len(encode(item, None, 512, 10_000).token_ids) >= item.get("num_tokens", 1)


# ---- metrics


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_lie_between_order_statistics(values: list[float], q: float) -> None:
    found = quantile(values, q)
    below = sorted(values)[math.floor(q * (len(values) - 1))]
    above = sorted(values)[math.ceil(q * (len(values) - 1))]
    assert found is not None and below - 1e-6 <= found <= above + 1e-6


def test_rates_are_differences_between_two_pictures() -> None:
    metrics = Metrics(0.0)
    metrics.sample(1.0, 10, snapshot(step=5, waits={"output": 5}))
    metrics.sample(
        3.0,
        50,
        snapshot(
            step=25,
            num_running=3,
            num_waiting=2,
            kv_blocks_used=25,
            waits={"output": 25, "count": 10, "inspection": 9, "end of recording": 1},
            num_drafted=[8, 8],
            num_accepted=[4, 2],
        ),
    )
    last = {key: series.last for key, series in metrics.series.items()}
    assert last["tok_s"] == pytest.approx(20)
    assert last["step_ms"] == pytest.approx(100)
    # what the lab waits for itself is not the engine's doing
    assert last["syncs_step"] == pytest.approx(1.5)
    assert last["accepted"] == pytest.approx(1 + 6 / 8)
    assert (last["running"], last["queue"], last["kv_pct"]) == (3, 2, 25)
    # nothing was recorded: no evidence, no figure
    assert last["overlap_pct"] is None and last["idle_pct"] is None


def test_an_engine_that_stands_still_gives_no_step_time() -> None:
    metrics = Metrics(0.0)
    for now in (1.0, 2.0):
        metrics.sample(now, 7, snapshot(step=5))
    assert metrics.series["step_ms"].last is None
    assert metrics.series["tok_s"].last == 0


def test_a_view_holds_the_last_seconds_and_the_marks_in_them() -> None:
    metrics = Metrics(0.0)
    for now in range(100):
        metrics.series["queue"].add(float(now), now)
    metrics.mark(10.0, 3, "early")
    metrics.mark(90.0, 9, "late")
    view = metrics.view(100.0, seconds=20.0)
    assert view["series"]["queue"]["t"] == [float(t) for t in range(-20, 0)]
    assert view["series"]["queue"]["v"] == list(range(80, 100))
    assert [(mark["label"], mark["t"]) for mark in view["marks"]] == [("late", -10.0)]
    assert json.dumps(view)


def test_a_long_series_is_drawn_with_few_points_but_counted_in_full() -> None:
    metrics = Metrics(0.0)
    for i in range(1000):
        metrics.series["ttft_ms"].add(i / 20, float(i))
    drawn = metrics.view(50.0, seconds=60.0)["series"]["ttft_ms"]
    assert 100 <= len(drawn["v"]) <= 160
    assert drawn["v"][-1] == 999 and drawn["t"] == sorted(drawn["t"])
    assert drawn["p99"] == pytest.approx(989, abs=1)


def test_every_metric_explains_itself() -> None:
    for metric in METRICS:
        assert metric.label and metric.help and metric.better in ("up", "down", "")
    assert {metric.key for metric in METRICS} == set(Metrics(0.0).series)


# ---- requests


def request(**changes: object) -> LabRequest:
    base: dict[str, object] = dict(
        req_id="a", prompt="p", prompt_token_ids=[1], params=SamplingParams(), submitted=10.0
    )
    return LabRequest(**(base | changes))  # type: ignore[arg-type]


def test_a_request_keeps_when_and_how_each_token_came() -> None:
    book = RequestBook(None)
    book.add(request())
    book.take(EngineOutput(req_id="a", new_token_ids=[5], step=3), 10.5)
    # three drafts, of which two were accepted
    book.take(EngineOutput(req_id="a", new_token_ids=[6, 7, 8], step=4, num_drafted=3), 11.0)
    book.take(EngineOutput(req_id="a", new_token_ids=[9], step=5, num_drafted=3, finish_reason="length"), 12.5)
    (done,) = book.finished
    assert done.token_ids == [5, 6, 7, 8, 9]
    assert done.steps == [3, 4, 4, 4, 5]
    assert done.origins == [DRAWN, ACCEPTED, ACCEPTED, DRAWN, DRAWN]
    assert done.rejected == {3: 1, 4: 3}
    assert dict(book.lengths) == {3: 1, 1: 1}
    assert done.ttft == pytest.approx(0.5)
    assert done.tpot == pytest.approx(0.5)
    assert not book.open and book.num_tokens == 5
    assert book.take(EngineOutput(req_id="stranger", new_token_ids=[1]), 13.0) is None


def test_log_probabilities_stand_beside_their_tokens() -> None:
    one = request()
    one.take(EngineOutput(req_id="a", new_token_ids=[5], logprobs=[TokenLogprob([5, 6], [-0.5, -1.0], 1)]), 11.0)
    one.take(EngineOutput(req_id="a", new_token_ids=[6]), 12.0)
    assert one.logprobs == [-0.5, None]
    assert one.top_logprobs == {5: -0.5, 6: -1.0}


def test_a_failed_request_says_why() -> None:
    one = request()
    one.take(EngineOutput(req_id="a", new_token_ids=[], finish_reason="error", stop_reason="NaN"), 11.0)
    assert (one.finished, one.error, one.ttft, one.tpot) == (True, "NaN", None, None)


# ---- intents and errors


def test_an_intent_is_pending_until_it_is_applied_or_refused() -> None:
    log = IntentLog()
    first = log.add({"queue_depth": 3}, "cell", 0.0)
    second = log.add({"runner": "v1", "queue_depth": 2}, "panel", 1.0)
    assert [intent.state for intent in log.all()] == ["pending", "pending"]
    with pytest.raises(TimeoutError, match="still pending"):
        first.wait(0.0)
    first.apply(KnobChange(step=42), 0.1)
    assert first.wait(0).step == 42
    second.refuse("no")
    with pytest.raises(ConfigError, match="no"):
        second.wait(0)
    assert log.by_knob()["queue_depth"]["state"] == "refused"
    third = log.add({"runner": "v2"}, "cell", 2.0)
    log.refuse_pending("gone")
    assert (third.state, first.state) == ("refused", "applied")


def test_an_intent_is_done_when_its_graphs_are_there() -> None:
    log = IntentLog()
    intent = log.add({"cuda_graphs": "step"}, "cell", 0.0)
    intent.apply(KnobChange(step=7, num_graphs=5, num_recomputed=2), 0.01)
    assert intent.state == "applied" and intent.lacks_graphs
    with pytest.raises(TimeoutError, match="capturing graphs"):
        intent.wait(0.0)
    intent.complete(1.5)
    assert not intent.wait(0).lacks_graphs
    shown = intent.as_dict()
    assert (shown["graphs"], shown["recomputed"], shown["ms"], shown["capture_ms"]) == (5, 2, 10.0, 1500.0)
    # an engine that has stopped keeps nobody waiting
    other = log.add({"cuda_graphs": "step"}, "cell", 0.0)
    other.apply(KnobChange(step=8, num_graphs=1), 0.0)
    log.refuse_pending("gone")
    assert other.wait(0).state == "applied"


def test_a_swallowed_error_is_kept_and_the_end_of_the_engine_cannot_be_dismissed() -> None:
    store = ErrorStore()

    def broken() -> None:
        raise ValueError("first line\nsecond")

    store.guarded(broken)()
    assert store.latest is not None and store.latest.summary == "ValueError: first line"
    assert "broken" in store.latest.detail
    assert isinstance(store.first_exception, ValueError)
    store.add(EngineDeadError("dead"))
    store.dismiss()
    assert store.fatal is not None and store.latest is store.fatal


# ---- presets and knobs


def test_the_panel_knows_every_knob_with_every_value() -> None:
    specs = {spec["name"]: spec for spec in knob_specs()}
    assert list(specs) == [f.name for f in fields(Knobs)]
    for name, spec in specs.items():
        assert tuple(spec["values"]) == legal_values(name), f"{name} cannot be shown without legal values"
        assert spec["default"] in spec["values"]
        assert spec["help"] and spec["lookFor"] and spec["effectText"]
    assert json.dumps(knob_specs())


def test_presets_set_every_knob_or_say_why_not() -> None:
    found = {preset.name: preset for preset in presets(CONFIG, on_cuda=False)}
    assert {"V1 as it was", "V2 sync", "V2 async", "V2 async + n-gram"} <= set(found)
    for preset in found.values():
        assert set(preset.knobs) == {f.name for f in fields(Knobs)}
        if not preset.reason:
            CONFIG.check_knobs(Knobs(**preset.knobs))
    assert found["V2 async"].knobs == Knobs().as_dict()
    assert found["V1 as it was"].knobs["runner"] == "v1"
    assert not found["V1 as it was"].knobs["async_scheduling"]
    assert "CUDA" in found["V2 async, eager"].reason
    without = {p.name: p for p in presets(EngineConfig(model="tiny-llama"), on_cuda=True)}
    assert "max_num_spec_tokens" in without["V2 async + n-gram"].reason
    assert not without["V2 async, eager"].reason


def test_a_value_that_cannot_be_set_now_says_why() -> None:
    v1 = Knobs(runner="v1", sampler="softmax_race").as_dict()
    assert "queue_depth <= 2" in why_not(v1, "queue_depth", 4, CONFIG)
    assert why_not(v1, "queue_depth", 1, CONFIG) == ""


def test_the_effect_of_a_value_depends_on_where_one_comes_from() -> None:
    now = Knobs().as_dict()
    assert effect_of(now, "sampler", "softmax_race") == "same tokens"
    assert effect_of(now, "sampler", "torch_sort") == "same distribution"
    assert effect_of(now, "queue_depth", 4) == "same tokens"


def test_code_of_a_workbench_runs_and_gives_back_what_it_was_made_from() -> None:
    load, knobs = Load(pack="code", users=7, seed=None), Knobs(queue_depth=4, sampler="softmax_race").as_dict()
    given: dict[str, object] = {}

    def workbench(model: str, **arguments: object) -> object:
        given.update(arguments, model=model)
        return None

    text = code_of("tiny-llama", {"max_model_len": 99}, knobs, load)
    exec(text.replace("from mrv2.lab import Load, Workbench", ""), {"Load": Load, "Workbench": workbench})
    assert given == {
        "model": "tiny-llama",
        "max_model_len": 99,
        "knobs": {"queue_depth": 4, "sampler": "softmax_race"},
        "load": load,
    }
    assert changed_only(Knobs().as_dict()) == {}


# ---- comparisons


def run(side: str, repetition: int, seconds: float, tokens: list[list[int]]) -> Run:
    return Run(side, repetition, seconds, 10, [0.1] * len(tokens), [seconds / 10] * len(tokens), tokens)


def result(a: list[float], b: list[float], b_tokens: list[list[int]]) -> ABResult:
    found = ABResult(Knobs(async_scheduling=False).as_dict(), Knobs().as_dict(), Load(), 2)
    tokens = [[1, 2, 3], [4, 5]]
    found.runs = [run("a", i, s, tokens) for i, s in enumerate(a)] + [run("b", i, s, b_tokens) for i, s in enumerate(b)]
    return found


def test_a_clear_difference_is_told_from_noise() -> None:
    same = [[1, 2, 3], [4, 5]]
    clear = result([2.0, 2.1, 2.2, 1.9], [1.0, 1.05, 1.1, 0.95], same).rows()[0]
    assert clear.ratio == pytest.approx(2.0) and clear.is_clear
    assert clear.low is not None and clear.high is not None and clear.low <= 2.0 <= clear.high
    noise = result([2.0, 2.0, 2.0, 2.0], [1.8, 2.2, 1.9, 2.1], same).rows()[0]
    assert not noise.is_clear
    assert "no clear difference" in result([2.0] * 4, [1.8, 2.2, 1.9, 2.1], same).verdict()
    # one pair has no interval
    assert result([2.0], [1.0], same).rows()[0].low is None


def test_token_identity_counts_requests_and_one_difference_shows() -> None:
    assert result([1.0, 1.0], [1.0, 1.0], [[1, 2, 3], [4, 5]]).same_tokens == (2, 2)
    differing = result([1.0, 1.0], [1.0, 1.0], [[1, 2, 3], [4, 6]])
    assert differing.same_tokens == (1, 2)
    assert "1 of 2" in differing.verdict() and differing.promises_tokens
    assert json.dumps(differing.as_dict())


def test_the_test_of_a_sampler_accepts_what_fits_and_rejects_what_does_not() -> None:
    fits = SamplingView("p", ["a", "b", "rest"], [0.5, 0.3, 0.2], [510, 295, 195])
    off = SamplingView("p", ["a", "b", "rest"], [0.5, 0.3, 0.2], [300, 400, 300])
    assert fits.chi2[1] == 2 and fits.p_value > 0.1
    assert off.p_value < 1e-6
    # the median of a chi-square variable with two degrees of freedom is 2 ln 2
    view = SamplingView("p", ["a", "b", "rest"], [0.5, 0.3, 0.2], [500, 300 + 13, 200 - 13])
    assert view.p_value == pytest.approx(math.exp(-view.chi2[0] / 2), abs=0.02)
