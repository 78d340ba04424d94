"""The hook for nsight-python, and the comparison of samplers, with a stand-in for NVIDIA's package."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrv2 import nsight as wrapper
from mrv2.config import legal_values
from mrv2.device import make_device
from mrv2.errors import ConfigError, RequestError
from mrv2.instrument import context, nsight_python_ranges, stage
from mrv2.instrument.nsight_python import started_too_early
from mrv2.instrument.ranges import wait_range
from mrv2.nsight import NsightError, SamplerInput, compare_samplers, load_nsight


class FakeNvtx:
    """Writes down start/end ranges and refuses what nsight-python cannot use."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.open: set[str] = set()

    def start_range(self, message: str, *, domain: str) -> str:
        assert domain == "nsight-python"
        assert not self.open, f"{message} inside {self.open}"
        self.open.add(message)
        self.log.append(message)
        return message

    def end_range(self, range_id: str) -> None:
        self.open.remove(range_id)
        self.log.append(f"/{range_id}")


@pytest.fixture
def api() -> Iterator[FakeNvtx]:
    before = context.load_nvtx()
    api = FakeNvtx()
    yield api
    assert context.nvtx is before and not api.open


def test_only_the_outermost_stage_opens_a_range_and_names_may_repeat(api: FakeNvtx) -> None:
    with nsight_python_ranges(api=api):
        for _ in range(2):
            with stage("execute_model"), stage("inner"):
                pass
            with wait_range("output"):
                pass
            with stage("sample_tokens"):
                pass
    step = ["mrv2/execute_model", "/mrv2/execute_model", "mrv2/sample_tokens", "/mrv2/sample_tokens"]
    assert api.log == step * 2


def test_chosen_stages_only(api: FakeNvtx) -> None:
    with nsight_python_ranges(("inner",), api=api), stage("outer"), stage("inner"), stage("inner"):
        pass
    assert api.log == ["mrv2/inner", "/mrv2/inner"]


def test_one_range_at_a_time_in_the_process(api: FakeNvtx) -> None:
    device = make_device("host")
    inside, go_on = threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        go_on.wait(10.0)

    with nsight_python_ranges(api=api):
        device.main.run("forward", work)
        assert inside.wait(10.0)
        # the stream's thread is inside a stage: this one gets no range of its own
        with stage("schedule"):
            pass
        go_on.set()
        device.main.record_event().synchronize("drain")
        with stage("later"):
            pass
    device.close()
    assert api.log == ["mrv2/forward", "/mrv2/forward", "mrv2/later", "/mrv2/later"]


def test_ranges_of_nvtx_go_on_below(api: FakeNvtx) -> None:
    log: list[Any] = []
    inner: Any = SimpleNamespace(push=lambda *given: log.append(given), pop=lambda: log.append("pop"))
    before = context.nvtx
    context.set_nvtx(inner)
    context.set_step(None)
    try:
        opened = stage("open before")
        opened.__enter__()
        with nsight_python_ranges(api=api):
            opened.__exit__(None, None, None)
            with stage("schedule", 4):
                pass
    finally:
        context.set_nvtx(before)
    assert log == [("open before", "host", None), "pop", ("schedule", "host", 4), "pop"]
    assert api.log == ["mrv2/schedule", "/mrv2/schedule"]


@contextmanager
def annotate(name: str, used: set[str]) -> Iterator[None]:
    assert name not in used, "nsight-python refuses a name the second time"
    used.add(name)
    yield


def fake_nsight(calls: list[dict[str, Any]], error: Exception | None = None) -> SimpleNamespace:
    """Return a module that runs what it is given and reports one row a config."""
    used: set[str] = set()

    def kernel(**options: Any) -> Callable[[Callable[..., None]], Callable[[], Any]]:
        calls.append(options)

        def decorate(func: Callable[..., None]) -> Callable[[], Any]:
            def profile() -> Any:
                if error is not None:
                    raise error
                for config in options["configs"]:
                    used.clear()
                    func(*config)
                return SimpleNamespace(to_dataframe=lambda: [config[0] for config in options["configs"]])

            return profile

        return decorate

    return SimpleNamespace(analyze=SimpleNamespace(kernel=kernel), annotate=lambda name: annotate(name, used))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "nsight", fake_nsight(calls))
    monkeypatch.setattr(wrapper.shutil, "which", lambda name: f"/usr/bin/{name}")
    return calls


def test_every_variant_is_profiled_once_a_run(calls: list[dict[str, Any]]) -> None:
    seen: list[torch.Size] = []
    frame = compare_samplers(
        {"mine": lambda given: seen.append(given.logits.shape)}, 3, 50, device="cpu", dtype="float32", runs=2
    )
    assert frame == ["mine"] and seen == [torch.Size((3, 50))] * 2  # once to compile, once in the range
    (options,) = calls
    assert options["replay_mode"] == "range" and options["runs"] == 2
    assert options["combine_kernel_metrics"](2.0, 3.0) == 5.0


@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_shipped_variants_run(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, filters: dict[str, float]
) -> None:
    sampled: dict[str, list[int]] = {}
    kept = wrapper._draw

    def keep(name: str, given: SamplerInput) -> None:
        kept(name, given)
        sampled[name] = given.sampled.tolist()

    monkeypatch.setattr(wrapper, "_draw", keep)
    names = legal_values("sampler")
    found = compare_samplers(names, 4, 97, device="cpu", dtype="float32", **filters)  # type: ignore[arg-type]
    assert found == list(names) == list(sampled)
    assert all(0 <= token < 97 for tokens in sampled.values() for token in tokens)
    # these are the same function of the logits and the noise
    assert sampled["gumbel_fused"] == sampled["gumbel_two_pass"] == sampled["softmax_race"]


def test_plain_torch_is_a_variant(calls: list[dict[str, Any]]) -> None:
    assert compare_samplers(["torch"], 4, 97, device="cpu", dtype="float32") == ["torch"]


def test_bad_comparisons(calls: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match="unknown sampler 'gumbel_fusd'; did you mean 'gumbel_fused'"):
        compare_samplers(["gumbel_fusd"])
    with pytest.raises(ConfigError, match="variants is empty"):
        compare_samplers([])
    with pytest.raises(ConfigError, match="vocab=0"):
        compare_samplers(vocab=0)
    with pytest.raises(ConfigError, match="dtype='float8'"):
        compare_samplers(dtype="float8")
    with pytest.raises(ConfigError, match="'torch' only draws from the softmax"):
        compare_samplers(["torch"], top_k=3)
    with pytest.raises(RequestError, match="top_p"):
        compare_samplers(top_p=2.0)
    assert not calls


def test_ncu_absent_or_too_old(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    class ProfilerException(Exception):  # as nsight-python names it
        pass

    old = ProfilerException("NVIDIA Nsight Compute 2026.2.1.0 or later is required,\nbut found 2025.3.1.0.")
    monkeypatch.setitem(sys.modules, "nsight", fake_nsight(calls, old))
    with pytest.raises(NsightError, match="is required, but found 2025.3.1.0"):
        compare_samplers(["torch"], 2, 16, device="cpu", dtype="float32")
    monkeypatch.setitem(sys.modules, "nsight", fake_nsight(calls, KeyError("other")))
    with pytest.raises(KeyError, match="other"):
        compare_samplers(["torch"], 2, 16, device="cpu", dtype="float32")
    monkeypatch.setattr(wrapper.shutil, "which", lambda name: None)
    with pytest.raises(NsightError, match="ncu is not on PATH: install Nsight Compute 2026.2.1"):
        compare_samplers(["torch"], 2, 16, device="cpu", dtype="float32")


def test_nsight_python_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapper, "started_too_early", lambda: None)
    monkeypatch.setitem(sys.modules, "nsight", None)
    with pytest.raises(NsightError, match="pip install nsight-python"):
        load_nsight()


@pytest.mark.parametrize("what", ["CUDA", "NVTX"])
def test_import_order_is_guarded(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.delitem(sys.modules, "nsight", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: what == "CUDA")
    monkeypatch.setattr(context, "nvtx_loaded", what == "NVTX")
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace())
    assert started_too_early() == what
    with pytest.raises(NsightError, match=f"before {what} is initialised, .* restart the process"):
        load_nsight()
    # imported in time
    monkeypatch.setitem(sys.modules, "nsight", SimpleNamespace())
    assert load_nsight() is sys.modules["nsight"]
