"""``mrv2 doctor``: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mrv2.commands.loading import is_fetched

Status = Literal["OK", "missing", "note"]
MIN_PYTHON = (3, 11)


@dataclass(frozen=True)
class Finding:
    """One line: "missing" stops something from working, "note" does not."""

    status: Status
    what: str
    detail: str
    remedy: str = ""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what this machine has, what is missing and what to do",
        description="Look at Python, torch, the GPU, Triton, NVTX and the benchmark records. Never fails.",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print every finding; always 0."""
    findings = [finding for check in CHECKS for finding in _safely(check)]
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{finding.status:<7}  {finding.what:<{width}}  {finding.detail}")
        if finding.remedy:
            print(f"{'':<7}  {'':<{width}}  -> {finding.remedy}")
    missing = sum(finding.status == "missing" for finding in findings)
    print(f"\n{'everything needed is here' if not missing else f'{missing} thing(s) missing'}")
    return 0


def _safely(check: Callable[[], list[Finding]]) -> list[Finding]:
    """A check that breaks is a finding too."""
    try:
        return check()
    except Exception as error:  # whatever a broken installation raises
        name = check.__name__.strip("_").replace("_", " ")
        return [Finding("missing", name, f"the check failed: {type(error).__name__}: {error}")]


def _python() -> list[Finding]:
    from mrv2.bench.environment import cpu_name, package_version

    version = platform.python_version()
    enough = sys.version_info >= MIN_PYTHON
    remedy = "" if enough else f"install Python {'.'.join(map(str, MIN_PYTHON))} or newer"
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    return [
        Finding("OK" if enough else "missing", "python", version, remedy),
        Finding("OK", "mrv2", package_version("mrv2-workbench") or "not installed, running from its sources"),
        Finding("OK", "platform", f"{platform.system()} {platform.machine()}, {cpu_name()}"),
        Finding("OK", "cpus", f"{os.cpu_count()} (OMP_NUM_THREADS {threads})"),
    ]


def _packages() -> list[Finding]:
    from mrv2.bench.environment import package_version

    required = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "tqdm")
    found = [_package(name, package_version(name)) for name in required]
    if platform.system() == "Linux":
        triton = package_version("triton")
        found.append(
            Finding("OK", "triton", triton)
            if triton
            else Finding("missing", "triton", "not installed: no CUDA kernels", "pip install triton, as pinned by mrv2")
        )
    else:
        found.append(Finding("note", "triton", f"not available on {platform.system()}: the host backend works"))
    return found


def _package(name: str, version: str | None) -> Finding:
    if version is None:
        return Finding("missing", name, "not installed", f"pip install {name}")
    return Finding("OK", name, version)


def _torch_build() -> list[Finding]:
    import torch

    if torch.version.cuda is None:
        return [
            Finding(
                "note",
                "torch build",
                f"{torch.__version__}, without CUDA: only the host backend runs",
                "on a machine with an NVIDIA GPU install a CUDA build of torch",
            )
        ]
    return [Finding("OK", "torch build", f"{torch.__version__}, CUDA {torch.version.cuda}")]


def _gpu() -> list[Finding]:
    import torch

    from mrv2.bench.environment import gpu_info

    if not torch.cuda.is_available():
        remedy = "check `nvidia-smi` and the driver" if torch.version.cuda else ""
        return [Finding("note", "gpu", "none that torch can use; device auto means host", remedy)]
    found = []
    for index in range(torch.cuda.device_count()):
        gpu = gpu_info(index)
        assert gpu is not None, f"torch counts device {index} but does not describe it"
        what = f"gpu {index}"
        found.append(
            Finding(
                "OK",
                what,
                f"{gpu.name}, compute capability {gpu.compute_capability}, {gpu.num_sms} SMs, {gpu.memory_gib} GiB",
            )
        )
        if gpu.driver is None:
            found.append(Finding("note", f"{what} driver", "unknown: nvidia-smi is missing or failed"))
            continue
        limits = [
            f"{value:g} {unit}"
            for value, unit in ((gpu.power_limit_w, "W"), (gpu.max_sm_clock_mhz, "MHz"))
            if value is not None
        ]
        found.append(Finding("OK", f"{what} driver", f"{gpu.driver}" + (f" ({', '.join(limits)})" if limits else "")))
        found.append(Finding("OK", f"{what} link", gpu.pcie_link or "not reported"))
    return found


def _instruments() -> list[Finding]:
    from mrv2.bench.environment import package_version
    from mrv2.instrument import nvtx_status

    status = nvtx_status()
    nvtx = package_version("nvtx")
    found = [Finding("OK" if nvtx else "note", "nvtx", f"{nvtx or 'not installed'}; ranges are {status}")]
    found.append(_nsys())
    transformers = package_version("transformers")
    text = transformers or "not installed: needed by the model tests only"
    found.append(Finding("OK" if transformers else "note", "transformers", text))
    lab = package_version("jupyterlab")
    remedy = "" if lab else "pip install 'mrv2-workbench[notebook]'"
    found.append(Finding("OK" if lab else "note", "jupyterlab", lab or "not installed: no notebooks", remedy))
    return found


def _nsys() -> Finding:
    from mrv2.trace.readers.nsys_rep import find_nsys
    from mrv2.trace.table import TraceError

    try:
        program = find_nsys()
    except TraceError as error:
        return Finding("note", "nsys", str(error))
    missing = "not found: `mrv2 record --level nsight` needs it (set MRV2_NSYS)"
    return Finding("OK" if program else "note", "nsys", program or missing)


def _models() -> list[Finding]:
    from mrv2_models.smollm2 import MODEL_NAME

    here = is_fetched()
    text = "in the cache" if here else "not fetched yet: the first use downloads about 93 MB"
    return [Finding("OK" if here else "note", MODEL_NAME, text)]


def _records() -> list[Finding]:
    """Say which figures of this repository were measured on this machine's GPU."""
    from mrv2.bench.environment import gpu_info, source_root

    root = source_root()
    folder = root / "traces" / "bench" if root is not None else None
    measured = _measured_gpus(folder) if folder is not None else {}
    gpu = gpu_info()
    on_record = ", ".join(sorted(measured)) or "no GPU"
    found = [Finding("note", "bench records", f"in this repository: {on_record}")]
    if gpu is None:
        return found
    workloads = measured.get(gpu.name)
    if workloads:
        return [*found, Finding("OK", "figures", f"measured on {gpu.name}: workloads {', '.join(sorted(workloads))}")]
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    return [
        *found,
        Finding(
            "note",
            "figures",
            f"unmeasured on {gpu.name}: tok/s, share of the memory floor, host and device time per step, overlap, idle",
            f"mrv2 bench --workload a,b,c,d,e,f --record traces/bench/{slug}.json",
        ),
    ]


def _measured_gpus(folder: Path) -> dict[str, set[str]]:
    """Return GPU name -> workloads that have a record; files that are no record are skipped."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            name = record["environment"]["gpu"]["name"]
            found.setdefault(name, set()).update(each["name"] for each in record["workloads"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    _python,
    _packages,
    _torch_build,
    _gpu,
    _instruments,
    _models,
    _records,
)
