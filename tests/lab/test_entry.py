"""Ways into the lab: magics, the command line, the starter notebook."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mrv2
from checks.source_tree import REPO
from lab.benches import make_bench, until
from mrv2.cli import build_parser
from mrv2.commands import lab as lab_module
from mrv2.commands.lab import lab_command
from mrv2.errors import ConfigError
from mrv2.lab import Workbench
from mrv2.lab.magics import run_line
from mrv2.lab.starter import copy_notebooks, starter_notebook
from mrv2_models import shipped as shipped_files
from mrv2_models.drafters.loading import find_head
from mrv2_models.errors import ModelFileError


@pytest.fixture(scope="module")
def bench() -> Iterator[Workbench]:
    with make_bench(name="magics") as made:
        yield made


@pytest.fixture(scope="module")
def shell(bench: Workbench) -> Iterator[Any]:
    interactive = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    made = interactive.instance()
    mrv2.load_ipython_extension(made)
    mrv2.load_ipython_extension(made)
    yield made
    interactive.clear_instance()


def test_the_line_magic_does_what_the_buttons_do(bench: Workbench, shell: Any) -> None:
    assert shell.run_line_magic("wb", "") is bench
    shell.run_line_magic("wb", "start")
    bench.wait(tokens=3)
    assert shell.run_line_magic("wb", "set async_scheduling=off queue_depth=3").state == "applied"
    assert (bench.knobs["async_scheduling"], bench.knobs["queue_depth"]) == (False, 3)
    shell.run_line_magic("wb", "preset V2 async")
    assert bench.knobs["async_scheduling"] is True
    assert shell.run_line_magic("wb", "load users=2 temperature=0.5 seed=none pack=code").users == 2
    assert (bench.load.seed, bench.load.temperature, bench.load.pack) == (None, 0.5, "code")
    shell.run_line_magic("wb", "stop")
    assert until(lambda: bench.view.state == "paused")


@pytest.mark.parametrize(
    "line, message",
    [
        ("sett x=1", "did you mean 'set'"),
        ("set async_scheduling", "name=value"),
        ("set asynk_scheduling=off", "did you mean"),
        ("set queue_depth=9", "legal values are 1, 2, 3, 4"),
        ("preset V9", "presets are"),
        ("load users=many", "must be a number"),
        ("save", "needs one name"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_would(bench: Workbench, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_line(line)


def test_the_cell_magic_records_what_runs_meanwhile(bench: Workbench, shell: Any) -> None:
    shell.user_ns["bench"] = bench
    shell.run_cell_magic("wb_record", "run1", "bench.generate([[1, 2, 3]])")
    assert len(shell.user_ns["run1"].analyze().windows) >= 10
    shell.run_cell_magic("wb_record", "-n 4", "bench.generate([[1, 2, 3]])")
    assert 3 <= len(shell.user_ns["trace"].analyze().windows) <= 5
    assert bench.driver.windows.enabled
    with pytest.raises(ConfigError, match="one name"):
        shell.run_cell_magic("wb_record", "a b", "1")


def lab_opens(*args: str) -> list[str]:
    return lab_command(build_parser().parse_args(["lab", *args]))


def test_a_folder_without_notebooks_gets_a_working_copy_once(tmp_path: Path) -> None:
    pytest.importorskip("jupyterlab")
    quickstart = tmp_path / "notebooks" / "00_quickstart.ipynb"
    written = lab_opens(str(tmp_path), "--no-browser", "--port", "9")
    assert str(quickstart) in written and {"--no-browser", "--port=9"} <= set(written)
    names = {file.name for file in (REPO / "notebooks").glob("*.ipynb")}
    assert names == {file.name for file in (tmp_path / "notebooks").glob("*.ipynb")}
    # their links lead somewhere
    assert (tmp_path / "docs" / "glossary.md").is_file() and (tmp_path / "notebooks" / "README.md").is_file()
    quickstart.write_text("{}")
    assert str(quickstart) in lab_opens(str(tmp_path))
    copy_notebooks(tmp_path)
    assert quickstart.read_text() == "{}", "a notebook that is there stays"


def test_a_model_of_ones_own_gets_a_notebook_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("jupyterlab")
    mine = tmp_path / "quickstart-tiny-llama.ipynb"
    assert str(mine) in lab_opens(str(tmp_path), "--model", "tiny-llama")
    assert "'tiny-llama'" in mine.read_text() and not (tmp_path / "notebooks").exists()


def test_without_shipped_notebooks_the_starter_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jupyterlab")
    monkeypatch.setattr(shipped_files, "places", lambda: [tmp_path / "nowhere"])
    assert str(tmp_path / "quickstart.ipynb") in lab_opens(str(tmp_path))
    with pytest.raises(ModelFileError, match="this installation has none"):
        find_head("smollm2-135m-instruct-eagle3")


@pytest.mark.parametrize("flags, extra", [([], "notebook"), (["--app"], "app")])
def test_what_is_not_installed_is_named(flags: list[str], extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"mrv2-workbench\[{extra}\]"):
        lab_opens(*flags)


def test_the_starter_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = starter_notebook("tiny-llama")
    json.dumps(notebook)
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(cell["source"], names)
    names["wb"].wait(tokens=5)
    names["wb"].check()
    names["wb"].close()
