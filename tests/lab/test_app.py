"""The panel alone as a page: ``mrv2 lab --app``, opened by a real browser."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from lab.jupyter import app_server, lab_page, needs_lab
from lab.test_browser import CHIP

pytestmark = [
    needs_lab,
    pytest.mark.skipif(find_spec("voila") is None, reason="no voila here: pip install 'mrv2-workbench[app]'"),
    pytest.mark.serial,
    pytest.mark.timeout(240),
]
# icons of the page's own template, which it does without where there is no network
ICONS = "https://cdn.jsdelivr.net/npm/@fortawesome/"


def test_the_panel_is_a_page_of_its_own_and_takes_orders(tmp_path: Path) -> None:
    with app_server(tmp_path, "tiny-llama") as base, lab_page(base) as page:
        page.page.goto(base, wait_until="domcontentloaded")
        page.wait("() => document.querySelector('.mrv2-lab .streams .token')", timeout=120_000)
        page.wait("() => document.querySelector('.mrv2-lab .timeline .main-svg')")
        page.page.locator("[data-knob=async_scheduling]").select_option(label="off")
        page.wait(CHIP, ["async_scheduling", "applied at step"])
        # no code, no prompt: the panel alone
        assert page.page.locator(".jp-CodeMirrorEditor, .jp-InputArea-editor:visible").count() == 0
        assert [url for url in page.foreign if not url.startswith(ICONS)] == []
        assert [problem for problem in page.problems if ICONS not in problem] == []
