"""Every kernel compiles for Hopper, Blackwell and Blackwell Ultra, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mrv2_kernels import aot
from mrv2_kernels.aot import ARCHS, MAX_SHARED_BYTES, all_cases, declared_kernels, kernel_name, why_too_large
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.sampling import gumbel_blocked

CASES = all_cases()
CASED = sorted({kernel_name(case.kernel) for case in CASES})


# half a minute of two idle cores, nothing once it is cached; far more beside a busy neighbour
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def report() -> list[str]:
    """Lines of ``python -m mrv2_kernels.aot --check``; a process of its own, since here kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "mrv2_kernels.aot", "--check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.stdout, f"the compile check printed nothing; it ended with {done.returncode}:\n{done.stderr}"
    return done.stdout.splitlines()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", CASED)
def test_kernel_compiles(report: list[str], kernel: str, arch: int) -> None:
    lines = [line for line in report if line.split(":")[0].split()[1:] == [f"sm_{arch}", kernel]]
    # a case may be for some targets only
    wanted = [case for case in CASES if kernel_name(case.kernel) == kernel and arch in (case.archs or ARCHS)]
    assert len(lines) == len(wanted), f"{len(wanted)} cases of {kernel} for sm_{arch}, the report has {len(lines)}"
    assert all(line.startswith("ok ") for line in lines), "\n".join(lines)


def test_every_kernel_has_a_case() -> None:
    assert sorted(set(declared_kernels()) - set(CASED)) == [], "add these to aot_cases() of their module"


def test_every_kernel_has_a_case_for_every_target() -> None:
    for kernel in CASED:
        archs = {arch for case in CASES if kernel_name(case.kernel) == kernel for arch in case.archs or ARCHS}
        assert archs == set(ARCHS), kernel


def test_a_check_refuses_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too much shared memory never does; registers must only where a case says so."""
    fits, exceeds = (SimpleNamespace(metadata=SimpleNamespace(shared=MAX_SHARED_BYTES + more)) for more in (0, 1))
    lax, strict = AotCase(None, {}, {}), AotCase(None, {}, {}, may_spill=False)
    for spilled in (0, 8):
        monkeypatch.setattr(aot, "stack_bytes", lambda _, spilled=spilled: spilled)
        assert why_too_large(lax, fits) is None
        assert (why_too_large(strict, fits) is None) == (spilled == 0)
        assert "232449 bytes of shared memory" in (why_too_large(lax, exceeds) or "")


def test_a_check_refuses_shared_memory_where_a_case_does() -> None:
    """Sums of the blocked sampler are a warp's own in each of its forms."""
    uses, lacks = (SimpleNamespace(metadata=SimpleNamespace(shared=size)) for size in (64, 0))
    strict = AotCase(None, {}, {}, may_share=False)
    assert "64 bytes of shared memory" in (why_too_large(strict, uses) or "")
    assert why_too_large(strict, lacks) is None and why_too_large(AotCase(None, {}, {}), uses) is None
    sums = [case for case in CASES if case.kernel is gumbel_blocked._sum_kernel]
    forms = {(case.signature["logits_ptr"], case.constexprs["INNER"], case.constexprs["IN_PAIRS"]) for case in sums}
    assert {("*bf16", 4, True), ("*bf16", 8, False), ("*bf16", 1, False), ("*fp32", 4, False)} <= forms
    assert not any(case.may_share for case in sums)


def test_the_tool_that_reads_a_kernels_stack_finds_what_it_spills(tmp_path) -> None:
    """Two kernels of this test: one keeps an array, which it indexes at run time, in memory; one needs none."""
    triton = pytest.importorskip("triton")
    sources = {
        "spills": "local .align 4 .b8 kept[512];",
        "fits": "reg .b32 unused;",
    }
    body = {
        "spills": """
            cvt.u64.u32 %at, %tid.x; shl.b64 %at, %at, 2; mov.u64 %base, kept; add.u64 %at, %at, %base;
            st.local.u32 [%at], %value; ld.local.u32 %value, [kept];""",
        "fits": "",
    }
    found = {}
    for name, declared in sources.items():
        ptx = f""".version 8.0
            .target sm_90
            .address_size 64
            .visible .entry {name}(.param .u64 out) {{
                .reg .b64 %at, %base, %out; .reg .b32 %value;
                .{declared}
                ld.param.u64 %out, [out]; ld.global.u32 %value, [%out];{body[name]}
                st.global.u32 [%out], %value; ret;
            }}"""
        source, cubin = tmp_path / f"{name}.ptx", tmp_path / f"{name}.cubin"
        source.write_text(ptx)
        subprocess.run([triton.knobs.nvidia.ptxas.path, "-arch=sm_90", source, "-o", cubin], check=True)
        found[name] = aot.stack_bytes(SimpleNamespace(asm={"cubin": cubin.read_bytes()}))
    assert found == {"spills": 512, "fits": 0}
