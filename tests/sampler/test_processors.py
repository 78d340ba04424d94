"""Logits processors: the shipped examples, plug-ins that fail, and how they are loaded."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from mrv2 import LLM, SamplingParams
from mrv2.config import Knobs
from mrv2.device import make_device
from mrv2.errors import ConfigError, RequestError
from mrv2.logits_processor import LogitsContext, LogitsProcessor, ProcessorSetup, processor_classes
from mrv2.processors import FrequencyCap, GreenList
from mrv2.processors.green_list import green_score
from mrv2.runner.protocol import RowSampling
from sampler.cases import Requests
from schedule_cases import KnowingSpeculator
from serving import Collector, Served, make_core, random_prompt, serve

MODES = {"sync": Knobs(async_scheduling=False), "depth 2": Knobs(queue_depth=2), "depth 4": Knobs(queue_depth=4)}
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)


class Fragile(LogitsProcessor):
    """Raises where it is told to, for the batch that holds the request; spoils every row on the way."""

    argument = "fragile"

    def __init__(self, setup: ProcessorSetup) -> None:
        super().__init__(setup)
        self.bad = setup.table("bad", 1)

    def validate(self, params: SamplingParams) -> None:
        if (params.extra_args or {})[self.argument] == "invalid":
            raise ValueError("the value must be anything but 'invalid'")

    def add_request(self, row: int, params: RowSampling) -> None:
        if params.extra_args[self.argument] == "on add":
            raise RuntimeError("no room")
        self.bad.stage(row, [params.extra_args[self.argument] == "on apply"])

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> None:
        logits.fill_(float("nan"))
        if bool((self.bad.tensor[ctx.slots.long(), 0] * ctx.used).any()):
            raise RuntimeError("cannot do this one")
        logits.zero_()
        logits[:, 7] = 50.0


class Picky(LogitsProcessor):
    """Raises in a row whose last token is 8."""

    argument = "picky"

    def validate(self, params: SamplingParams) -> None:
        pass

    def add_request(self, row: int, params: RowSampling) -> None:
        pass

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> None:
        if bool(((ctx.last_tokens() == 8) & ctx.used).any()):
            raise RuntimeError("eight is too many")


def run(requests: Requests, mode: str = "depth 2", **options: Any) -> dict[str, Served]:
    device = make_device("host", poison=True, random_delay_s=0.0005)
    processors = (GreenList, FrequencyCap, Fragile)
    return serve(make_core(device, knobs=MODES[mode], logits_processors=processors, **options), requests)


def with_args(**args: Any) -> SamplingParams:
    return PARAMS.replace(extra_args=args)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ["on add", "on apply"])
def test_an_error_ends_its_request_and_leaves_the_neighbours_alone(mode: str, place: str) -> None:
    requests = {
        "plain": (random_prompt(1, 9), PARAMS),
        "broken": (random_prompt(2, 9), with_args(fragile=place)),
        "sevens": (random_prompt(3, 9), with_args(fragile="fine")),
        "late": (random_prompt(4, 90), PARAMS.replace(temperature=0.0)),
    }
    served = run(requests, mode)
    assert served["broken"].finish_reason == "error" and served["broken"].token_ids == []
    text = str(served["broken"].stop_reason)
    assert "Fragile" in text and ("no room" in text or "cannot do this one" in text)
    assert served["sevens"].token_ids == [7] * 12
    for name in ("plain", "late"):
        core = make_core(max_num_seqs=1, knobs=MODES["sync"])
        assert served[name].token_ids == serve(core, {name: requests[name]})[name].token_ids


@pytest.mark.parametrize("mode", MODES)
def test_plug_ins_see_the_drafts_before_each_position(mode: str) -> None:
    """A cap that counts, and one that fails once a certain token stands before the row: as without drafts."""
    prompts = {f"r{i}": random_prompt(20 + i, 6) for i in range(3)}
    args: tuple[dict[str, Any], ...] = ({"frequency_cap": 2}, {"picky": 1}, {})
    requests = {
        name: (prompt, with_args(**arg).replace(allowed_token_ids=[3, 4, 5, 6, 8, 9, 10, 11]))
        for (name, prompt), arg in zip(prompts.items(), args, strict=True)
    }
    options: dict[str, Any] = {"logits_processors": (FrequencyCap, Picky)}
    plain = serve(make_core(knobs=MODES["sync"], **options), requests)
    knobs = MODES[mode].with_changes(spec_method="ngram", num_spec_tokens=3)
    core = make_core(knobs=knobs, max_num_spec_tokens=3, **options)
    knowing = KnowingSpeculator(1)
    # what would have come behind the failure as well
    knowing.sequences = [prompt + plain[name].token_ids + [9, 9, 9] for name, prompt in prompts.items()]
    core.executor.runner.drafting.speculators["ngram"] = knowing  # type: ignore[attr-defined]
    fast = serve(core, requests)
    assert sum(core.scheduler.stats.num_accepted) > 0
    for name in requests:
        assert fast[name].token_ids == plain[name].token_ids, name
        ends = [(served[name].finish_reason, served[name].stop_reason) for served in (fast, plain)]
        assert ends[0] == ends[1], name
    assert plain["r1"].finish_reason == "error" and len(plain["r1"].token_ids) > 1


@pytest.mark.parametrize("mode", MODES)
def test_no_token_occurs_more_often_than_the_cap(mode: str) -> None:
    params = with_args(frequency_cap=2).replace(temperature=0.5, logit_bias={5: 90.0, 6: 80.0}, max_tokens=9)
    tokens = run({"r": ([5, 5, 5, 5], params)}, mode)["r"].token_ids
    assert tokens[:4] == [5, 5, 6, 6] and max(map(tokens.count, tokens)) <= 2


def test_a_watermarked_text_is_told_by_its_key() -> None:
    prompt, params = random_prompt(1, 5), PARAMS.replace(max_tokens=100)
    marked = params.replace(extra_args={"green_list": {"key": 77, "delta": 6.0}})
    served = run({"marked": (prompt, marked), "plain": (prompt, params)})
    assert green_score(served["marked"].token_ids, 77) > 6
    assert abs(green_score(served["marked"].token_ids, 78)) < 4
    assert abs(green_score(served["plain"].token_ids, 77)) < 4


@pytest.mark.parametrize("mode", MODES)
def test_tokens_do_not_depend_on_neighbours_or_preemption(mode: str) -> None:
    requests = {
        f"r{i}": (
            random_prompt(i, 5 + 9 * i),
            with_args(**[{"green_list": {"key": i}}, {"frequency_cap": 1, "green_list": {"key": 3}}, {}][i % 3]),
        )
        for i in range(6)
    }
    served = run(requests, mode, num_gpu_blocks=9, max_num_batched_tokens=24)
    for name, request in requests.items():
        core = make_core(max_num_seqs=1, knobs=MODES["sync"], logits_processors=(GreenList, FrequencyCap))
        assert served[name].token_ids == serve(core, {name: request})[name].token_ids


def test_arguments_are_checked_at_admission() -> None:
    core = make_core(logits_processors=(GreenList, FrequencyCap, Fragile))
    collector = Collector(core)
    for args, message in (
        ({"frequency_cap": 0}, "extra_args.'frequency_cap'.*>= 1"),
        ({"green_list": {"delta": 1.0}}, "must be a dict with 'key'"),
        ({"fragile": "invalid"}, "anything but"),
        ({"frequencycap": 1}, "unknown extra_args 'frequencycap'; did you mean 'frequency_cap'"),
    ):
        with pytest.raises(RequestError, match=message):
            collector.submit("r", [1], PARAMS.replace(extra_args=args))
    core.shutdown()
    with pytest.raises(RequestError, match="no logits processor is loaded"):
        Collector(make_core()).submit("r", [1], with_args(anything=1))


def test_loading_by_text_class_and_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("cap", "mrv2.processors:FrequencyCap", "mrv2.logits_processors")
    monkeypatch.setattr("mrv2.logits_processor.entry_points", lambda group: [point])
    assert processor_classes(["mrv2.processors:GreenList", FrequencyCap]) == [FrequencyCap, GreenList]
    with pytest.raises(ConfigError, match="'package.module:Class'"):
        processor_classes(["mrv2.processors:Nothing"])
    with pytest.raises(ConfigError, match="no subclass"):
        processor_classes([print])
    other = type("Other", (FrequencyCap,), {})
    with pytest.raises(ConfigError, match="both have the argument 'frequency_cap'"):
        processor_classes([other])


def test_v1_refuses_them_with_the_reason_and_nothing_changes() -> None:
    core = make_core(logits_processors=(FrequencyCap,))
    with pytest.raises(ConfigError, match="FrequencyCap keep state by row: use runner='v2'"):
        core.set_knobs(runner="v1")
    assert core.knobs.runner == "v2"
    core.shutdown()


def test_through_the_public_api() -> None:
    options: dict[str, Any] = dict(dtype="float32", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64)
    with LLM("tiny-llama", device="host", num_gpu_blocks=16, logits_processors=[FrequencyCap], **options) as llm:
        params = with_args(frequency_cap=1).replace(logit_bias={5: 90.0})
        (output,) = llm.generate([{"prompt_token_ids": [7, 300, 12]}], params, use_tqdm=False)
        assert output.outputs[0].token_ids.count(5) == 1
