"""Colours that everybody can tell apart, text that everybody can read, names that fit."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2.trace.table import OpKind, Trace, TraceError
from mrv2.viz import names, theme

OKABE_ITO = {"#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999"}


def test_hues_are_okabe_ito_and_grey() -> None:
    assert {hue.colour for hue in theme.HUES} == OKABE_ITO


@pytest.mark.parametrize("name", list(theme.THEMES))
def test_text_is_readable_in_every_theme(name: str) -> None:
    of = theme.theme(name)
    for colour in (of.text, of.muted, of.accent):
        assert theme.contrast(colour, of.background) >= 4.5


def test_text_on_bars_is_readable() -> None:
    for hue in theme.HUES:
        assert theme.contrast(theme.text_on(hue.colour), hue.colour) >= 4.5


@pytest.mark.parametrize("name", list(theme.THEMES))
def test_the_faintest_cell_differs_from_the_background_and_more_work_is_stronger(name: str) -> None:
    of = theme.theme(name)
    scale = theme.density_colours(of)
    assert len(scale) == 2 * len(theme.HUES) * theme.LEVELS
    assert [at for at, _ in scale] == sorted(at for at, _ in scale)
    for number, hue in enumerate(theme.HUES):
        steps = [scale[2 * (number * theme.LEVELS + level)][1] for level in range(theme.LEVELS)]
        assert steps[-1].lower() == hue.colour.lower()
        distance = [sum(abs(x - y) for x, y in zip(theme.rgb(step), theme.rgb(of.background))) for step in steps]
        assert distance == sorted(distance)
        assert distance[0] >= 30


def test_an_unknown_theme_is_refused_with_the_names() -> None:
    with pytest.raises(TraceError, match="did you mean 'dark'.*light, dark"):
        theme.theme("drak")


@pytest.mark.parametrize(
    "name, short",
    [
        ("_decode_kernel", "_decode_kernel"),
        ("void at::native::vectorized_gather_kernel<(int)16, int>(char *, char *)", "vectorized_gather_kernel"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int)",
         "vectorized_elementwise_kernel<FillFunctor>"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<x>>>(y)",
         "device_kernel<FlashAttnFwdSm90>"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
        ("(weird)", "(weird)"),
    ],
)  # fmt: skip
def test_short_names_keep_what_tells_kernels_apart(name: str, short: str) -> None:
    assert names.short_name(name) == short


@pytest.mark.parametrize(
    "name, hue",
    [
        ("schedule", "schedule"), ("v1: preprocess", "prepare"), ("prepare_inputs", "prepare"), ("forward", "forward"),
        ("sample_tokens", "sample"), ("wait: output", "wait"), ("cudaEventSynchronize", "wait"),
        ("cudaMemcpyAsync", "copy"), ("cudaGraphLaunch", "forward"), ("update_from_output", "schedule"),
        ("cudaEventRecord", "other"), ("gpu_model_runner: preprocess", "prepare"),
        ("schedule: allocate_slots", "schedule"), ("llm_engine step: get_output", "schedule"),
        ("wait: v1: prepare_inputs barrier", "wait"), ("step_graph", "forward"),
    ],
)  # fmt: skip
def test_stages_have_their_hue(name: str, hue: str) -> None:
    assert theme.HUES[names.host_hue(name)].key == hue


@pytest.mark.parametrize(
    "name, kind, hue",
    [
        ("_decode_kernel", OpKind.KERNEL, "attention"), ("nvjet_sm90_tst_64x8", OpKind.KERNEL, "forward"),
        ("_gumbel_sample_kernel", OpKind.KERNEL, "sample"), ("_gather_block_tables_kernel", OpKind.KERNEL, "prepare"),
        ("Memset (Device)", OpKind.MEMSET, "copy"), ("CUDA graph 3", OpKind.GRAPH, "forward"),
        ("output_copy", OpKind.STAGE, "copy"), ("mystery", OpKind.KERNEL, "other"),
        ("_decode_inputs_kernel", OpKind.KERNEL, "prepare"), ("_packed_write_kernel", OpKind.KERNEL, "prepare"),
        ("_commit_kernel", OpKind.KERNEL, "prepare"), ("_longest_first_kernel", OpKind.KERNEL, "prepare"),
        ("_fetch_step_kernel", OpKind.KERNEL, "prepare"), ("_embed_norm_kernel", OpKind.KERNEL, "forward"),
        ("_ring_linear_kernel", OpKind.KERNEL, "forward"),
    ],
)  # fmt: skip
def test_operations_have_their_hue(name: str, kind: int, hue: str) -> None:
    assert theme.HUES[names.op_hue(name, kind)].key == hue


@pytest.mark.parametrize(
    "ns, text", [(0, "0 ns"), (999, "999 ns"), (1500, "1.5 us"), (999_499, "999 us"), (999_500, "1 ms"),
                 (2_340_000, "2.34 ms"), (1.5e9, "1.5 s"), (-1500, "-1.5 us")]
)  # fmt: skip
def test_durations_have_a_unit(ns: float, text: str) -> None:
    assert names.format_ns(ns) == text


def test_sizes_have_a_unit() -> None:
    assert [names.format_bytes(n) for n in (0, 512, 4096, 2.5e6, 7e10)] == ["0 B", "512 B", "4.1 kB", "2.5 MB", "70 GB"]


def test_events_without_a_name_have_the_neutral_hue() -> None:
    trace = Trace(strings=["schedule"])
    assert names.host_hues(trace, np.array([-1, 0, -1])).tolist() == [0, theme.HUE_ID["schedule"], 0]
    assert names.host_hues(trace, np.array([-1])).tolist() == [0]
