"""The wheel holds what the commands, the notebooks and the drafters open."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from checks.source_tree import REPO

SHARE = "share/mrv2-workbench/"
# what an installed copy says of itself, from a folder that has nothing
LOOK = """
from mrv2.lab.exercise import recorded
from mrv2.lab.starter import copy_notebooks
from mrv2_models.drafters.loading import shipped_head_of
from mrv2_models.shipped import shipped
print(shipped("notebooks"))
print(copy_notebooks(__import__("pathlib").Path.cwd()))
for method in ("eagle3", "mtp"):
    print(shipped_head_of(method, "smollm2-135m-instruct") / "model.safetensors")
print(recorded("h200/v2_sync.graph.sqlite.gz"))
"""


def data_files() -> set[str]:
    """Return the files of the checkout that are installed beside the packages."""
    tool = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found: set[str] = set()
    for place, patterns in tool["data-files"].items():
        for pattern in patterns:
            files = list(REPO.glob(pattern))
            assert files, f"pyproject.toml: nothing matches {pattern}"
            # an installation is laid out as the checkout is
            assert {str(file.relative_to(REPO).parent) for file in files} == {place.removeprefix(SHARE)}
            found |= {str(file.relative_to(REPO)) for file in files}
    return found


def test_what_notebooks_open_is_installed() -> None:
    installed = data_files()
    text = "".join(file.read_text(encoding="utf-8") for file in (REPO / "notebooks").glob("*.py"))
    wanted = re.findall(r'recorded\(f?"([^"]+)"\)', text)
    assert wanted and len(wanted) == text.count("recorded(")
    for name in wanted:
        # what stands in braces differs from call to call
        files = {str(f.relative_to(REPO)) for f in (REPO / "traces").glob(re.sub(r"\{.*?\}", "*", name))}
        assert files and files <= installed, name
    assert {f"notebooks/{file.name}" for file in (REPO / "notebooks").glob("*.ipynb")} <= installed


def test_every_draft_head_is_installed() -> None:
    heads = {str(file.relative_to(REPO)) for file in (REPO / "models" / "checkpoints").glob("*/*")}
    assert heads and heads <= data_files()


@pytest.mark.slow
def test_a_wheel_brings_notebooks_heads_and_recordings(tmp_path: Path) -> None:
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools is older than what pyproject.toml builds with")
    source = tmp_path / "source"
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=REPO, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (REPO / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPO / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    built = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(built, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, capture_output=True)
    env = {**os.environ, "PYTHONPATH": str(site)}
    looked = subprocess.run([sys.executable, "-c", LOOK], cwd=empty, env=env, capture_output=True, text=True)
    assert looked.returncode == 0, looked.stderr
    notebooks, quickstart, *files = map(Path, looked.stdout.split())
    assert notebooks == site / SHARE / "notebooks"
    assert quickstart == empty / "notebooks" / "00_quickstart.ipynb" and quickstart.is_file()
    assert len(files) == 3 and all(file.is_file() and site in file.parents for file in files)
