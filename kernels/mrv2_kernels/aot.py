"""Compile every kernel for GPUs that need not be present: ``python -m mrv2_kernels.aot --check``.

Prints one line a kernel and target, ``ok sm_90 _decode_kernel`` or ``FAIL sm_90 _decode_kernel: why``, and exits with 1
if any failed: to compile, or to stay within what a program has (`why_too_large`).  Compiled kernels are cached under
``.cache/aot`` by Triton's own key (source of the kernel and of all it calls, signature, constants, target, Triton
version).
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType
from typing import Any

import mrv2_kernels
from mrv2_kernels._gluon import is_gluon
from mrv2_kernels.aot_case import AotCase

# Hopper, Blackwell (GB200), Blackwell Ultra (GB300)
ARCHS = (90, 100, 103)
# of shared memory that a program may have on each of them
MAX_SHARED_BYTES = 227 << 10


def kernel_name(kernel: Any) -> str:
    """Return the name of a ``@triton.jit`` function, compiled or interpreted."""
    return kernel.fn.__name__


def _modules() -> Iterator[ModuleType]:
    for info in pkgutil.walk_packages(mrv2_kernels.__path__, "mrv2_kernels."):
        yield importlib.import_module(info.name)


def declared_kernels() -> list[str]:
    """Return the names of all launchable kernels, ``_*_kernel``, in order of module."""
    return [
        name
        for module in _modules()
        for name, value in vars(module).items()
        if name.startswith("_")
        and name.endswith("_kernel")
        and hasattr(value, "fn")
        and value.fn.__module__ == module.__name__
    ]


def all_cases() -> list[AotCase]:
    """Return the cases that the kernel modules declare in their ``aot_cases()``."""
    return [case for module in _modules() if hasattr(module, "aot_cases") for case in module.aot_cases()]


def compile_case(case: AotCase, arch: int) -> Any:
    """Compile one case for compute capability `arch` (90 = sm_90) and return Triton's compiled kernel.

    Raises `RuntimeError` under ``TRITON_INTERPRET`` and whatever Triton raises for a kernel that does
    not compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(case.kernel, triton.JITFunction):
        raise RuntimeError("kernels are interpreted, not compiled: unset TRITON_INTERPRET and start anew")
    signature = {name: case.signature.get(name, "constexpr") for name in case.kernel.arg_names}
    unknown = sorted((case.signature.keys() | case.constexprs.keys()) - signature.keys())
    missing = sorted(name for name, kind in signature.items() if kind == "constexpr" and name not in case.constexprs)
    if unknown or missing:
        raise ValueError(f"{kernel_name(case.kernel)}: case names unknown {unknown} and leaves out {missing}")
    stray = sorted(case.aligned - case.signature.keys())
    if stray:
        raise ValueError(f"{kernel_name(case.kernel)}: aligned names {stray}, which are no run-time parameters")
    attrs = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(signature) if name in case.aligned}
    source_type = ASTSource
    if is_gluon(case.kernel):
        from triton.experimental.gluon._runtime import GluonASTSource

        source_type = GluonASTSource
    source = source_type(fn=case.kernel, signature=signature, constexprs=case.constexprs, attrs=attrs)
    options = {"num_warps": case.num_warps, "maxnreg": case.max_registers}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def stack_bytes(compiled: Any) -> int:
    """Return the bytes that a thread of a compiled kernel spills to memory; a tool in Triton's wheel tells."""
    import triton

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", shown)
    if found is None:
        raise ValueError(f"no STACK in {shown[:200]!r}")
    return int(found[1])


def why_too_large(case: AotCase, compiled: Any) -> str | None:
    """Return why a compiled case cannot be launched or is slower than its kernel relies on, or None."""
    if compiled.metadata.shared > MAX_SHARED_BYTES:
        return f"{compiled.metadata.shared} bytes of shared memory, a program has {MAX_SHARED_BYTES}"
    if compiled.metadata.shared and not case.may_share:
        return f"{compiled.metadata.shared} bytes of shared memory, where warps should not wait for each other"
    spilled = 0 if case.may_spill else stack_bytes(compiled)
    return f"a thread spills {spilled} bytes of registers" if spilled else None


def _check(index: int, archs: tuple[int, ...]) -> list[str]:
    case = all_cases()[index]
    lines = []
    for arch in archs if case.archs is None else sorted({*archs} & {*case.archs}):
        subject = f"sm_{arch} {kernel_name(case.kernel)}"
        try:
            reason = why_too_large(case, compile_case(case, arch))
        except Exception as error:  # any failure of any compiler stage is a finding, not a crash
            lines.append(f"FAIL {subject}: {' '.join(str(error).split())[:500]}")
        else:
            lines.append(f"ok {subject}" if reason is None else f"FAIL {subject}: {reason}")
    return lines


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mrv2_kernels.aot", description=__doc__)
    parser.add_argument("--check", action="store_true", required=True, help="compile everything and report")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHS), help="compute capabilities, 90 = sm_90")
    parser.add_argument("--jobs", type=int, default=2, help="compiler processes")
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache/aot"), help="where compiled kernels are kept")
    args = parser.parse_args()
    # the workers inherit it; Triton reads it at its first compilation
    os.environ["TRITON_CACHE_DIR"] = str(args.cache_dir.resolve())
    failed = False
    with ProcessPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(_check, index, tuple(args.arch)) for index in range(len(all_cases()))]
        for future in futures:
            for line in future.result():
                failed |= line.startswith("FAIL")
                print(line, flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
