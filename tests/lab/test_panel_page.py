"""The panel's page in a real browser, with a model that stands in for JupyterLab's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lab.benches import make_bench, until
from lab.jupyter import CHROMIUM_ARGS, needs_lab
from mrv2.lab import Workbench
from mrv2.viz import browser

pytest.importorskip("anywidget")
pytest.importorskip("plotly")
pytestmark = [needs_lab, pytest.mark.serial, pytest.mark.timeout(120)]
TRAITS = ("spec", "status", "knobs", "metrics", "streams", "window", "detail", "tab", "timeline", "beat")
# draws the panel; the first `failures` times its timeline is not to be had
DRAW = """async ([code, values, failures]) => {
  const module = await import(URL.createObjectURL(new Blob([code], { type: "text/javascript" })));
  const handlers = new Map(), asked = [];
  const model = {
    get: (name) => values[name],
    set: (name, value) => { values[name] = value; (handlers.get(`change:${name}`) || []).forEach((act) => act()); },
    on: (name, act) => handlers.set(name, [...(handlers.get(name) || []), act]),
    off: () => {}, send: () => {}, save_changes: () => {},
    widget_manager: {
      get_model: async (id) => {
        asked.push(id);
        if (asked.length <= failures) throw new Error("widget model not found");
        return id;
      },
      create_view: async (id) => ({ el: Object.assign(document.createElement("p"), { id: "drawn", textContent: id }) }),
    },
  };
  const root = document.createElement("div");
  document.body.replaceChildren(root);
  module.default.render({ model, el: root });
  Object.assign(window, { model, asked });
}"""
# comes whether requests run or not, and while a window is held
NEXT_BEAT = "() => window.model.set('beat', window.model.get('beat') + 1)"


@pytest.fixture(scope="module")
def bench() -> Iterator[Workbench]:
    with make_bench(name="page") as made:
        yield made


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=str(browser.find_browser()), args=CHROMIUM_ARGS)
        yield chromium.new_page()
        chromium.close()


@pytest.mark.parametrize("failures", [0, 1, 3])
def test_a_timeline_that_is_late_is_shown_when_it_is_there(bench: Workbench, page: Any, failures: int) -> None:
    bench.start()
    widget = bench.panel.widget
    until(lambda: widget.window.get("number") and widget.timeline)
    page.evaluate(DRAW, [widget._esm, {name: getattr(widget, name) for name in TRAITS}, failures])
    for _ in range(failures):
        assert page.locator(".timeline").first.text_content().endswith("widget model not found")
        page.evaluate(NEXT_BEAT)
    page.wait_for_selector("#drawn")
    # what is shown is not asked for again
    page.evaluate(NEXT_BEAT)
    assert page.evaluate("() => window.asked.length") == failures + 1
    assert page.locator("#drawn").text_content() == widget.timeline
