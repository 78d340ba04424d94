"""Numbers that HolisticTraceAnalysis 0.5.0 gives for the same recordings, as far as its definitions are ours."""

from __future__ import annotations

from kineto_files import KinetoFile
from mrv2.trace import load
from mrv2.trace.analysis import Analysis

US = 1000


def queued_kernels() -> KinetoFile:
    """Return five launches 10 us apart, whose kernels of 20 us follow one another from 30 us on."""
    file = KinetoFile()
    for i in range(5):
        file.api("cudaLaunchKernel", 10 * i * US, (10 * i + 8) * US, i + 1)
        file.on_device("kernel", "gemm", (30 + 20 * i) * US, (50 + 20 * i) * US, i + 1)
    return file


def test_launch_delay_of_queued_kernels(tmp_path):
    launches = Analysis(load(queued_kernels().write(tmp_path / "queued.json"))).launches()
    assert launches.queue_delay_ns.tolist() == [us * US for us in (22, 32, 42, 52, 62)]
    # HTA too counts a launch latency only where the stream was empty when the call returned
    assert launches.launch_latency_ns[0] == 30 * US
    assert all(row["launch_latency_ns"] is None for row in launches.rows()[1:])
    # all but 22 us of each delay is time behind earlier kernels
    assert launches.queue_wait_ns.tolist() == [us * US for us in (0, 32, 42, 52, 62)]


def test_idle_time_splits_into_host_wait_and_kernel_wait(tmp_path):
    """HTA: host wait if the launch came after the previous kernel's end, kernel wait if the gap is short."""
    file = KinetoFile()
    times = [(0, 10, 20, 100), (150, 160, 170, 200), (165, 166, 203, 300), (250, 260, 400, 450)]
    for corr, (begin, end, start, stop) in enumerate(times, 1):
        file.api("cudaLaunchKernel", begin * US, end * US, corr)
        file.on_device("kernel", "gemm", start * US, stop * US, corr)
    rollup = Analysis(load(file.write(tmp_path / "idle.json"))).bubbles().rollup()
    # [100, 160) belongs to the host, [160, 170) waits for the kernel's start only; [300, 400) is long: other
    assert rollup == {"host wait": 60 * US, "kernel wait": 3 * US, "other": (10 + 100) * US}
    rollup = Analysis(load(tmp_path / "idle.json"), kernel_wait_ns=11 * US).bubbles().rollup()
    assert rollup == {"host wait": 60 * US, "kernel wait": 13 * US, "other": 100 * US}


def test_the_last_step_counts(tmp_path):
    """HTA leaves it out by default: it reports 300 us of computation here."""
    file = KinetoFile()
    for i in range(3):
        at = 1000 * i
        file.add("user_annotation", f"ProfilerStep#{i}", at * US, (at + 900) * US)
        file.api("cudaLaunchKernel", (at + 100) * US, (at + 110) * US, i + 1)
        file.on_device("kernel", "gemm", (at + 120) * US, (at + 270) * US, i + 1)
    analysis = Analysis(load(file.write(tmp_path / "steps.json")))
    assert analysis.steps().step.tolist() == [0, 1, 2]
    assert analysis.steps().gpu_busy_ns.tolist() == [150 * US] * 3
    assert analysis.overview().devices[0].busy_compute_ns == 450 * US


def test_a_trace_without_gpu_rows_is_no_error(tmp_path):
    """HTA ends in an IndexError."""
    file = KinetoFile()
    file.op("aten::add", 0, 10 * US)
    analysis = Analysis(load(file.write(tmp_path / "cpu.json")))
    assert analysis.overview().devices == []
    assert analysis.bubbles() is analysis.launches() is None
    assert analysis.cpu_work().measure == 10 * US
