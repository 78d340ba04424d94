"""What a measurement depends on: versions, GPU, driver, revision. No host name, user or path."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "jinja2", "nvtx", "transformers", "jupyterlab")
_SMI_FIELDS = (
    "driver_version",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "power.limit",
    "clocks.max.sm",
)


@dataclass(frozen=True)
class GPUInfo:
    """One CUDA device; fields that only nvidia-smi knows are None where it is missing."""

    name: str
    # e.g. "9.0"
    compute_capability: str
    num_sms: int
    memory_gib: float
    driver: str | None = None
    # e.g. "gen 5 of 5, x16 of x16"; the current generation drops while the GPU idles
    pcie_link: str | None = None
    power_limit_w: float | None = None
    max_sm_clock_mhz: float | None = None


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Return the processor's model name, or the architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def gpu_info(index: int = 0) -> GPUInfo | None:
    """Describe CUDA device `index` (as torch counts them), or return None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(index)
    smi = _nvidia_smi(str(getattr(found, "uuid", "")))
    link = None
    if "pcie.link.gen.current" in smi:
        link = (
            f"gen {smi['pcie.link.gen.current']} of {smi.get('pcie.link.gen.max', '?')}, "
            f"x{smi.get('pcie.link.width.current', '?')} of x{smi.get('pcie.link.width.max', '?')}"
        )
    return GPUInfo(
        name=found.name,
        compute_capability=f"{found.major}.{found.minor}",
        num_sms=found.multi_processor_count,
        memory_gib=round(found.total_memory / 2**30, 1),
        driver=smi.get("driver_version"),
        pcie_link=link,
        power_limit_w=_number(smi.get("power.limit")),
        max_sm_clock_mhz=_number(smi.get("clocks.max.sm")),
    )


def git_revision() -> str | None:
    """Return the commit of this source tree, with "+" for uncommitted changes; None outside a checkout."""
    root = source_root()
    if root is None or not (root / ".git").exists():
        return None
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    changes = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return None if commit is None else commit.strip() + ("+" if changes else "")


def source_root() -> Path | None:
    """Return the checkout that this package runs from, or None for an installed copy."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "pyproject.toml").is_file() else None


def environment() -> dict[str, Any]:
    """Return everything above as plain values for a record."""
    import torch

    gpu = gpu_info()
    return {
        "mrv2": package_version("mrv2-workbench"),
        "revision": git_revision(),
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "num_cpus": os.cpu_count(),
        "packages": {name: found for name in PACKAGES if (found := package_version(name)) is not None},
        "torch_build": torch.__version__,
        "cuda_runtime": torch.version.cuda,
        "gpu": None if gpu is None else asdict(gpu),
    }


def _nvidia_smi(uuid: str) -> dict[str, str]:
    """Return the fields that nvidia-smi reports for one GPU; empty where it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return {}
    chosen = [f"--id=GPU-{uuid.removeprefix('GPU-')}"] if uuid else []
    fields = ",".join(_SMI_FIELDS)
    text = _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", *chosen])
    if not text or not text.strip():
        return {}
    values = [value.strip() for value in text.strip().splitlines()[0].split(",")]
    return {
        name: value for name, value in zip(_SMI_FIELDS, values, strict=False) if value and not value.startswith("[")
    }


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
