"""The distribution installs on 64-bit Arm Linux (GH200, GB200): every package has a wheel for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from checks.source_tree import REPO

PYTHON = "3.12"
TARGET = {
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "aarch64",
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
}
# pip matches each tag by name: glibc 2.17 up to 2.39, which the current server distributions have
PLATFORMS = ["manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 40))]
UNREACHABLE = (
    "NewConnectionError",
    "ConnectTimeout",
    "ReadTimeout",
    "ProxyError",
    "Failed to establish",
    "Max retries",
)


def _requirements() -> list[str]:
    """Return what a GPU machine installs: the required packages and those of the optional parts."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    optional = [text for extra in ("nvtx", "trace", "structured", "notebook") for text in extras[extra]]
    wanted = [Requirement(text) for text in project["dependencies"] + optional]
    kept = [r for r in wanted if r.name != project["name"] and (r.marker is None or r.marker.evaluate(TARGET))]
    return [f"{r.name}{'[' + ','.join(sorted(r.extras)) + ']' if r.extras else ''}{r.specifier}" for r in kept]


@pytest.mark.timeout(280)
def test_every_dependency_has_an_aarch64_wheel(tmp_path: Path) -> None:
    """pip resolves the whole tree for the other platform from the wheels' metadata, fetching none of them."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "1", "--use-feature", "fast-deps"]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", PYTHON]
    command += [flag for tag in PLATFORMS for flag in ("--platform", tag)]
    command += ["--target", str(tmp_path / "unused"), "--report", str(report), *_requirements()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270)
    if done.returncode and any(sign in done.stderr for sign in UNREACHABLE) and os.environ.get("CI") != "true":
        pytest.skip("the package registry cannot be reached from here")
    assert done.returncode == 0, f"pip finds no set of aarch64 wheels for pyproject.toml:\n{done.stderr[-3000:]}"
    wheels = [item["download_info"]["url"].rsplit("/", 1)[-1] for item in json.loads(report.read_text())["install"]]
    foreign = [wheel for wheel in wheels if "x86_64" in wheel or not wheel.endswith(".whl")]
    assert not foreign, f"not wheels for aarch64: {foreign}"
    installed = {wheel.split("-")[0].lower() for wheel in wheels}
    for needed in ("torch", "triton"):
        assert needed in installed, f"{needed} is not among the resolved packages {sorted(installed)}"
