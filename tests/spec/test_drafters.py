"""Drafters with weights: their drafts are those of the same head on the whole history, whatever the schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mrv2.engine.core import EngineCore
from mrv2.errors import ConfigError
from mrv2.instrument import sync_guard
from mrv2.options import build_config
from mrv2.runner.forward import Buckets
from mrv2.sampling_params import SamplingParams
from mrv2_models.drafters.loading import load_head, random_head
from mrv2_models.errors import ModelFileError, UnsupportedModelError
from mrv2_models.registry import load_model
from serving import Collector, alone, make_core, random_prompt, serve
from spec.drafter_cores import (
    ENTRY,
    METHODS,
    K,
    check_drafts,
    drafting_core,
    greedy,
    perturb,
    plain_drafter,
    use_small_vocabulary,
    write_head,
)
from spec.plain_models import PlainHead, PlainTarget


@pytest.mark.parametrize(
    ("method", "vocabulary"), [(m, "whole") for m in METHODS] + [(m, "small") for m in ("eagle3", "mtp")]
)
@pytest.mark.parametrize("num_drafts", [1, K])
def test_drafts_are_those_of_the_head_on_the_whole_history(method: str, vocabulary: str, num_drafts: int) -> None:
    """Chunked prompts, prefix hits and preemption on the way."""
    core = drafting_core(method, num_drafts=num_drafts, num_gpu_blocks=12, max_num_batched_tokens=24)
    if vocabulary == "small":
        use_small_vocabulary(core)
    if method == "draft_model":
        perturb(core, 0.03)
    plain = plain_drafter(core)
    shared = random_prompt(9, 40)
    prompts = [shared[:33], shared[:32] + [7, 8], random_prompt(1, 3), random_prompt(2, 61), shared[:17]]
    collector = Collector(core)
    compared = 0
    for i, prompt in enumerate(prompts):
        collector.submit(f"r{i}", prompt, greedy(26))
    while core.has_unfinished:
        collector.step()
        compared += check_drafts(core, plain, num_drafts)
    assert compared > 60 * num_drafts
    assert core.scheduler.stats.num_preemptions > 0
    for i, prompt in enumerate(prompts):
        assert collector.served[f"r{i}"].token_ids == alone(tuple(prompt), 0.0, 0, 26)
    if method == "draft_model":
        accepted, drafted = sum(core.scheduler.stats.num_accepted), sum(core.scheduler.stats.num_drafted)
        assert 0.1 < accepted / drafted < 0.9, "rejections and accepted runs must both occur"
    core.shutdown()


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("squeeze", ["ample", "preempted", "chunked"])
def test_a_drafter_that_is_the_target_is_always_right(depth: int, squeeze: str) -> None:
    """Not one draft is rejected: every key and value it reads is at its place, through preemption and chunks."""
    options = {
        "ample": {},
        "preempted": {"num_gpu_blocks": 11},
        "chunked": {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 7},
    }[squeeze]
    core = drafting_core("draft_model", knobs={"queue_depth": depth}, delay=0.001, seed=depth, **options)
    prompts = [random_prompt(70 + i, 5 + 17 * i) for i in range(5)]
    served = serve(core, {f"r{i}": (p, greedy(31)) for i, p in enumerate(prompts)})
    for i, prompt in enumerate(prompts):
        assert served[f"r{i}"].token_ids == alone(tuple(prompt), 0.0, 0, 31)
    stats = core.scheduler.stats
    assert stats.num_accepted == stats.num_drafted and sum(stats.num_drafted) > 60
    assert (stats.num_preemptions > 0) == (squeeze == "preempted")


@pytest.mark.parametrize("room", [1, 3, 6])
@pytest.mark.parametrize("method", METHODS)
def test_the_edge_of_max_model_len(method: str, room: int) -> None:
    """Drafts may reach behind the last position, where there is neither a block nor a rotary angle."""
    prompts = [random_prompt(4 + i, 40 - room) for i in range(2)]
    core = drafting_core(method, max_model_len=40, num_gpu_blocks=7, knobs={"queue_depth": 4})
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    served = serve(core, {f"r{i}": (p, params) for i, p in enumerate(prompts)})
    for i, prompt in enumerate(prompts):
        assert served[f"r{i}"].token_ids == alone(tuple(prompt), 0.0, 0, room)
    stats = core.scheduler.stats
    assert method != "draft_model" or stats.num_accepted == stats.num_drafted
    assert stats.num_preemptions == 0, "drafts take no block that the request itself will not need"


@pytest.mark.parametrize("method", METHODS)
def test_nothing_but_the_output_is_waited_for(method: str) -> None:
    core = drafting_core(method, max_num_seqs=6, num_gpu_blocks=24, knobs={"queue_depth": 3})
    collector = Collector(core)
    params = (greedy(30), SamplingParams(temperature=1.0, seed=1, top_k=20, max_tokens=20, ignore_eos=True))

    def feed(index: int) -> None:
        collector.submit(f"r{index}", random_prompt(index % 5, 3 + 11 * index % 60), params[index % 2])

    for index in range(8):
        feed(index)
    collector.run()
    first, index = core.scheduler.step, 8
    with sync_guard(core.device, mode="error") as guard:
        while core.scheduler.step - first < 80:
            if len(core.scheduler.waiting) < 3:
                feed(index)
                index += 1
            collector.step()
        core.drain()
    assert not guard.violations and set(guard.waits) == {"output"}
    core.abort(list(core.scheduler.requests))
    collector.run()
    core.shutdown()


class TestGraphs:
    """A captured chain serves every step that is padded to its bucket."""

    @pytest.mark.parametrize("method", METHODS)
    def test_padded_chains_draft_the_same(self, method: str) -> None:
        core = drafting_core(method, max_num_seqs=6)
        # on this backend a graph is the work itself, called again; padding is what a GPU would have
        core.executor.forward.buckets = Buckets(6, max_mixed=64, padded=True, max_uniform=1 + K)
        core.executor.capture_graphs()
        graphs = core.executor.runner.drafting.graphs  # type: ignore[attr-defined]
        assert {key.num_drafts for key in graphs.graphs} == {0, 1, K}
        plain, collector, compared = plain_drafter(core), Collector(core), 0
        prompts = [random_prompt(i, 10 + 37 * i % 90) for i in range(5)]
        for i, prompt in enumerate(prompts):
            collector.submit(f"r{i}", prompt, greedy(26))
        while core.has_unfinished:
            collector.step()
            compared += check_drafts(core, plain, K)
        assert compared > 100
        # all but the steps in which the end of a request left fewer drafts to each
        assert graphs.num_replays >= core.scheduler.step - 3
        for i, prompt in enumerate(prompts):
            assert collector.served[f"r{i}"].token_ids == alone(tuple(prompt), 0.0, 0, 26)
        core.set_knobs(num_spec_tokens=2, draft_sampling="sampled")
        assert {key.num_drafts for key in graphs.graphs if key.choice == "shared"} == {0, 1, 2, K}
        core.set_knobs(cuda_graphs="off")
        serve(core, {"eager": (prompts[0], greedy(4))})
        assert graphs.num_replays < core.scheduler.step

    def test_no_step_graph_leaves_the_drafter_behind(self) -> None:
        """Without drafts a decode step could be one graph, but the drafter must see every token."""
        core = drafting_core("draft_model", num_drafts=0, knobs={"cuda_graphs": "step"})
        core.executor.capture_graphs()
        collector, prompt = Collector(core), random_prompt(3, 9)
        collector.submit("r", prompt, greedy(30))
        for _ in range(12):
            collector.step()
        core.set_knobs(num_spec_tokens=K)
        assert collector.run()["r"].token_ids == alone(tuple(prompt), 0.0, 0, 30)
        assert core.scheduler.stats.num_accepted == core.scheduler.stats.num_drafted
        core.shutdown()


class TestSwitches:
    """Live changes of who drafts: a draft model reads what it has missed, for a head requests start over."""

    ALL = tuple(ENTRY.values())

    def run(self, core: EngineCore, switches: list[dict[str, Any]], check: bool = True) -> None:
        # the longest is more than one pass of catching up
        prompts = [random_prompt(30 + i, 4 + 25 * i) for i in range(4)]
        collector = Collector(core)
        for i, prompt in enumerate(prompts):
            collector.submit(f"r{i}", prompt, greedy(40))
        for changes in switches:
            for _ in range(4):
                collector.step()
            core.set_knobs(**changes)
        served = collector.run()
        for i, prompt in enumerate(prompts):
            assert served[f"r{i}"].token_ids == alone(tuple(prompt), 0.0, 0, 40)

    def test_between_all_methods(self) -> None:
        core = drafting_core("mtp", speculators=self.ALL)
        self.run(
            core,
            [
                {"spec_method": "eagle3"},
                {"spec_method": "ngram"},
                {"spec_method": "draft_model", "num_spec_tokens": 1},
                {"num_spec_tokens": 0},
                {"num_spec_tokens": K, "queue_depth": 4},
                {"spec_method": "off"},
            ],
        )
        core.shutdown()

    def test_a_draft_model_is_right_from_the_first_draft_after_it_was_switched_on(self) -> None:
        core = drafting_core("draft_model", knobs={"spec_method": "off"})
        self.run(core, [{"spec_method": "draft_model"}, {"num_spec_tokens": 0}, {"num_spec_tokens": 2}])
        stats = core.scheduler.stats
        assert stats.num_accepted == stats.num_drafted and sum(stats.num_drafted) > 50
        assert stats.num_preemptions == 0, "the draft model reads what it has missed by itself"
        core.shutdown()

    @pytest.mark.parametrize("method", ["eagle3", "mtp"])
    def test_a_head_drafts_from_whole_histories_after_it_was_switched_on(self, method: str) -> None:
        core = drafting_core(method, knobs={"spec_method": "off"})
        plain, compared = plain_drafter(core), 0
        collector = Collector(core)
        for i in range(3):
            collector.submit(f"r{i}", random_prompt(30 + i, 20 + i), greedy(30))
        for turn in range(40):
            collector.step()
            if turn in (4, 14):
                core.set_knobs(spec_method=method)
            if turn == 9:
                core.set_knobs(spec_method="off")
            if core.knobs.spec_method == method:
                compared += check_drafts(core, plain, K)
        assert compared > 60
        assert core.scheduler.stats.num_preemptions == 3 + 3, "each is recomputed once each time"
        collector.run()
        core.shutdown()

    def test_the_drafter_keeps_step_while_nothing_is_drafted(self) -> None:
        core = drafting_core("draft_model")
        self.run(core, [{"num_spec_tokens": 0}, {"num_spec_tokens": K}])
        assert core.scheduler.stats.num_preemptions == 0
        assert core.scheduler.stats.num_accepted == core.scheduler.stats.num_drafted
        core.shutdown()


class TestPrefixHits:
    """A block is a hit only if the drafter that is on has filled it."""

    def hit(self, core: EngineCore, collector: Collector, name: str, prompt: list[int]) -> int:
        collector.submit(name, prompt, greedy(4))
        collector.run()
        return collector.served[name].outputs[0].num_cached_tokens

    def test_the_set_of_filled_groups(self) -> None:
        core = drafting_core("draft_model", knobs={"spec_method": "off"})
        collector, prompt = Collector(core), random_prompt(3, 50)
        assert self.hit(core, collector, "first", prompt) == 0
        assert self.hit(core, collector, "again", prompt) == 48
        core.set_knobs(spec_method="draft_model")
        assert self.hit(core, collector, "the drafter has not seen it", prompt) == 0
        assert self.hit(core, collector, "now it has", prompt) == 48
        core.set_knobs(spec_method="off")
        assert self.hit(core, collector, "either will do", prompt) == 48
        stats = core.scheduler.stats
        assert stats.num_accepted == stats.num_drafted
        core.shutdown()

    def test_a_head_reads_one_token_ahead_and_leaves_out_the_last_block(self) -> None:
        core = drafting_core("eagle3")
        collector, prompt = Collector(core), random_prompt(3, 50)
        assert self.hit(core, collector, "first", prompt) == 0
        assert self.hit(core, collector, "again", prompt) == 32
        core.shutdown()


class TestLoading:
    """Trained heads: what is in the folder arrives, and what does not fit is refused with both numbers."""

    @pytest.fixture
    def target(self) -> Any:
        return load_model("tiny-llama", dtype="float64", load_format="dummy")

    @pytest.mark.parametrize("method", ["eagle3", "mtp"])
    @pytest.mark.parametrize("size", [None, 100])
    def test_a_saved_head_is_the_same_head(self, target: Any, tmp_path: Path, method: Any, size: int | None) -> None:
        head = random_head(method, target, seed=1, draft_vocab_size=size)
        write_head(head, tmp_path)
        loaded = load_head(tmp_path, target)
        assert loaded.config.aux_layer_ids == head.config.aux_layer_ids
        plain = [PlainHead(h, PlainTarget(target)) for h in (head, loaded)]
        history = random_prompt(1, 12)
        assert plain[0].drafts(history, 4) == plain[1].drafts(history, 4)
        ids = None if size is None else head.to_target
        assert (loaded.to_target is None) if ids is None else torch.equal(loaded.to_target, ids)

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("vocab_size", 600, "vocab_size=600.*has 512"),
            ("hidden_size", 64, "hidden_size=64.*has 96"),
            ("intermediate_size", 7, "shape"),
            ("method", "medusa", "'medusa'.*eagle3, mtp"),
            ("draft_vocab_size", 90, "100 tokens, draft_vocab_size=90"),
            ("rope_theta", None, "rope_theta"),
            ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [9]}, "0..2"),
        ],
    )
    def test_refusals(self, target: Any, tmp_path: Path, key: str, value: Any, message: str) -> None:
        write_head(random_head("eagle3", target, draft_vocab_size=100), tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config[key] = value
        if value is None:
            del config[key]
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises((ModelFileError, UnsupportedModelError), match=message):
            load_head(tmp_path, target)

    def test_other_weights_are_a_warning_or_a_refusal(
        self, target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_head(random_head("mtp", target), tmp_path, sha256="ab" * 32)
        load_head(tmp_path, target)
        assert "ab" * 32 in caplog.text and "unknown" in caplog.text
        with pytest.raises(ModelFileError, match="strict"):
            load_head(tmp_path, target, strict=True)

    def test_an_unknown_head_names_those_that_ship(self, target: Any) -> None:
        with pytest.raises(ModelFileError, match="neither a folder"):
            load_head("no-such-head", target)

    def test_an_engine_loads_a_head_from_its_folder(self, target: Any, tmp_path: Path) -> None:
        write_head(random_head("eagle3", target, seed=4), tmp_path)
        core = drafting_core("eagle3", speculators=(f"eagle3={tmp_path}",))
        prompt = random_prompt(1, 9)
        assert serve(core, {"r": (prompt, greedy(9))})["r"].token_ids == alone(tuple(prompt), 0.0, 0, 9)
        with pytest.raises(ConfigError, match="method 'eagle3', not 'mtp'"):
            drafting_core("mtp", speculators=(f"mtp={tmp_path}",))


class TestRefusals:
    def test_a_method_that_was_not_loaded(self) -> None:
        core = make_core(max_num_spec_tokens=3, speculators=("mtp",))
        with pytest.raises(ConfigError, match="speculators=.*'eagle3'"):
            core.set_knobs(spec_method="eagle3")
        assert core.knobs.spec_method == "off"
        core.shutdown()

    @pytest.mark.parametrize(
        ("entry", "message"),
        [
            ("eagle", "did you mean 'eagle3'"),
            ("ngram", "'ngram' needs no loading"),
            ("draft_model", "draft_model=NAME"),
            ("suffix=x", "takes no model"),
        ],
    )
    def test_entries(self, entry: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            build_config("tiny-llama", speculators=[entry])
        with pytest.raises(ConfigError, match="twice"):
            build_config("tiny-llama", speculators="mtp,mtp=x")

    def test_a_draft_model_of_another_vocabulary(self) -> None:
        with pytest.raises(ConfigError, match="49152.*512"):
            drafting_core("draft_model", speculators=("draft_model=smollm2-135m",))

    def test_vllm_names(self) -> None:
        config = build_config(
            "tiny-llama",
            speculative_config={"method": "draft_model", "model": "tiny-qwen3", "num_speculative_tokens": 2},
        )
        assert config.speculators == ("draft_model=tiny-qwen3",)
        assert (config.knobs.spec_method, config.max_num_spec_tokens) == ("draft_model", 2)
        assert build_config("tiny-llama", spec_method="mtp").speculators == ("mtp",)
        with pytest.raises(ConfigError, match="has no model"):
            build_config(
                "tiny-llama", speculative_config={"method": "ngram", "model": "x", "num_speculative_tokens": 2}
            )
