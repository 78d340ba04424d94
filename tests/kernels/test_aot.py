"""Every kernel compiles for Hopper, Blackwell and Blackwell Ultra, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mrv2_kernels.aot import ARCHS, all_cases, declared_kernels, kernel_name

CASED = sorted({kernel_name(case.kernel) for case in all_cases()})


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
    assert lines, f"the report has no line about {kernel} for sm_{arch}"
    assert all(line.startswith("ok ") for line in lines), "\n".join(lines)


def test_every_kernel_has_a_case() -> None:
    assert sorted(set(declared_kernels()) - set(CASED)) == [], "add these to aot_cases() of their module"
