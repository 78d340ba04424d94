"""What stands beside a notebook's code: its pair, its links, its exercises; nothing is executed here."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("jupytext", reason="the notebooks are paired by jupytext: pip install 'mrv2-workbench[test]'")

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "scripts"))
from pair_notebooks import paired, text_of  # noqa: E402  # scripts/ is no package

SOURCES = sorted((REPO / "notebooks").glob("*.py"))
NUMBERED = [path for path in SOURCES if not path.stem.startswith("00")]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_is_in_step_with_its_source_and_holds_no_outputs(source: Path) -> None:
    found = source.with_suffix(".ipynb").read_text(encoding="utf-8")
    notebook = json.loads(found)
    for cell in notebook["cells"]:
        assert not cell.get("outputs") and not cell.get("execution_count"), f"{source.stem}: outputs are committed"
    assert "widgets" not in notebook["metadata"]
    assert found == text_of(paired(source.read_text(encoding="utf-8"))), "run scripts/pair_notebooks.py"


def test_no_notebook_stands_alone() -> None:
    assert {p.stem for p in (REPO / "notebooks").glob("*.ipynb")} == {p.stem for p in SOURCES}


def headings(page: Path) -> set[str]:
    """Return the anchors that a page's headings make."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_links_lead_somewhere(source: Path) -> None:
    for target in re.findall(r"\]\(([^)#]*(?:#[\w-]+)?)\)", source.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        page, _, anchor = target.partition("#")
        path = (source.parent / page).resolve()
        assert path.exists(), f"{source.name}: no file {target}"
        if anchor and path.suffix == ".md":
            assert anchor in headings(path), f"{source.name}: {page} has no heading {anchor}"


@pytest.mark.parametrize("source", NUMBERED, ids=lambda path: path.stem)
def test_a_notebook_has_a_goal_exercises_with_answer_cells_and_glossary_links(source: Path) -> None:
    text = source.read_text(encoding="utf-8")
    assert "**Goal.**" in text, "it begins with what the reader will have learnt"
    assert "docs/glossary.md#" in text, "its terms are explained in the glossary"
    made, checked = (
        set(re.findall(pattern, text, re.MULTILINE)) for pattern in (r"^(\w+) = Exercise\(", r"(\w+)\.check\(")
    )
    assert made and made == checked, f"exercises {made}, of which {checked} are checked"
    assert "progress()" in text


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_one_idea_a_cell(source: Path) -> None:
    for cell in paired(source.read_text(encoding="utf-8"))["cells"]:
        folded = cell["metadata"].get("jupyter", {}).get("source_hidden")
        lines = len(cell["source"])
        assert folded or lines <= 55, f"{source.stem} {cell['id']}: {lines} lines; part it, or fold it (source_hidden)"
