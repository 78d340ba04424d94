"""The teacher's guide names every notebook, fits two half-days, and links to what exists."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
GUIDE = REPO / "workshop" / "README.md"
TEXT = GUIDE.read_text(encoding="utf-8")
# a half-day with its breaks, in minutes
HALF_DAY = 240


def test_each_half_day_fits_and_the_two_cover_the_notebooks_in_order() -> None:
    days = re.split(r"^## .*half-day.*$", TEXT, flags=re.MULTILINE)[1:]
    assert len(days) == 2
    for day in days:
        rows = re.findall(r"^\| (\d+) \|", day.split("\n## ")[0], re.MULTILINE)
        assert rows and sum(map(int, rows)) <= HALF_DAY
    taught = re.findall(r"notebooks/(\d\d_\w+)\.ipynb", "".join(days))
    there = sorted(p.stem for p in (REPO / "notebooks").glob("[01]*.py"))
    assert [name for name in taught if not name.startswith("00")] == [n for n in there if not n.startswith("00")]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        if "00_quickstart" in target and not (REPO / "notebooks" / "00_quickstart.py").exists():
            continue
        assert (GUIDE.parent / target).resolve().exists(), f"no file {target}"
