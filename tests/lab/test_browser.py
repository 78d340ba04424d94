"""The quickstart in JupyterLab, driven through its page by a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from checks.source_tree import REPO
from lab.jupyter import LabPage, lab_page, lab_server, needs_lab

pytestmark = [needs_lab, pytest.mark.serial, pytest.mark.timeout(240)]
PANEL = ".mrv2-lab"
CHIP = """([name, text]) => document.querySelector(`[data-knob=${name}]`)?.closest('.knob')?.querySelector('.chip')
  ?.textContent.includes(text)"""
WINDOW = "() => Number(document.querySelector('.mrv2-lab')?.dataset.window || 0)"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root, home = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("home")
    shutil.copy(REPO / "notebooks" / "00_quickstart.ipynb", root / "quickstart.ipynb")
    with lab_server(root, home) as address:
        yield address


@pytest.fixture(scope="module")
def lab(base: str) -> Iterator[LabPage]:
    """The first three cells run, and the panel's first recorded steps are there."""
    with lab_page(base) as page:
        page.open("quickstart.ipynb")
        assert page.run_cells(3).startswith("1,2,3")
        page.wait(WINDOW, timeout=60_000)
        yield page


@pytest.fixture(autouse=True)
def _clean(lab: LabPage) -> Iterator[None]:
    yield
    assert lab.problems == []
    assert lab.foreign == []


def choose(lab: LabPage, knob: str, label: str) -> None:
    lab.page.locator(f"[data-knob={knob}]").select_option(label=label)


def test_knobs_turned_while_requests_run_are_applied_and_seen(lab: LabPage) -> None:
    marks = int(lab.page.locator(PANEL).get_attribute("data-marks") or 0)
    changes = [
        ("async_scheduling", "off"),
        ("spec_method", "ngram"),
        ("sampler", "softmax_race"),
        ("spec_method", "off"),
        ("runner", "v1"),
        ("async_scheduling", "on"),
    ]
    for knob, value in changes:
        choose(lab, knob, value)
        lab.wait(CHIP, [knob, "applied at step"])
    number = lab.page.evaluate(WINDOW)
    lab.wait(f"() => ({WINDOW})() > {number} + 1")
    lab.wait(f"() => Number(document.querySelector('{PANEL}').dataset.marks) >= {marks + len(changes)}")
    values = lab.page.locator(".tile b").all_text_contents()
    assert sum(text != "\u2013" for text in values) >= 8, values
    assert lab.page.locator(".streams .token").count() > 20
    # graphs that were missing are captured while requests go on, and the page says how many
    choose(lab, "runner", "v2")
    choose(lab, "cuda_graphs", "step")
    lab.wait(CHIP, ["cuda_graphs", "graphs captured"])
    assert lab.page.locator(f"{PANEL} .capture progress").get_attribute("aria-label") == "graphs captured"
    lab.wait(f"() => document.querySelector('{PANEL} .capture').hidden")
    choose(lab, "runner", "v1")
    lab.wait(CHIP, ["runner", "applied at step"])
    # V1 four steps ahead: the page says why not, before anybody asks
    refused = lab.page.locator("[data-knob=queue_depth] option").nth(3)
    assert refused.is_disabled()
    assert "queue_depth <= 2" in (refused.get_attribute("title") or "")


def test_the_timeline_zooms_to_single_intervals_and_a_sync_row_centres_it(lab: LabPage) -> None:
    plot = lab.page.locator(".timeline .mrv2-plot")
    plot.scroll_into_view_if_needed()
    status = lab.page.locator(".timeline .mrv2-status")
    whole = status.text_content()
    box = plot.bounding_box()
    assert box is not None
    lab.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 40)
    for _ in range(6):
        lab.page.mouse.wheel(0, -300)
        lab.frame()
    lab.wait("(whole) => document.querySelector('.timeline .mrv2-status').textContent !== whole", whole)
    lab.wait("() => !document.querySelector('.mrv2-lab [data-act=follow]').closest('[hidden]')")
    number = lab.page.evaluate(WINDOW)
    zoomed = status.text_content()
    row = lab.page.locator(".syncs tbody tr").nth(2)
    row.click()
    assert row.get_attribute("aria-selected") == "true"
    lab.wait("(before) => document.querySelector('.timeline .mrv2-status').textContent !== before", zoomed)
    assert lab.page.evaluate(WINDOW) == number
    lab.page.locator("[data-act=follow]").click()
    lab.wait(f"() => ({WINDOW})() > {number}")


def test_every_control_is_reached_by_keyboard_and_has_a_name(lab: LabPage) -> None:
    controls = f"{PANEL} :is(button, select, input, summary, tr[tabindex]):not(:disabled)"
    named = """(selector) => [...document.querySelectorAll(selector)].filter((n) => n.checkVisibility() &&
      !(n.getAttribute('aria-label') || n.closest('label')?.textContent.trim() || n.textContent.trim()))
      .map((n) => n.outerHTML)"""
    assert lab.page.evaluate(named, controls) == []
    lab.page.locator("[data-act=pause]").focus()
    reached: list[Any] = []
    script = "() => Object.values(document.activeElement.dataset)[0] || ''"
    for _ in range(60):
        lab.page.keyboard.press("Tab")
        reached.append(lab.page.evaluate(script))
    knobs = lab.page.locator("[data-knob]").evaluate_all("(nodes) => nodes.map((n) => n.dataset.knob)")
    assert set(knobs) <= set(reached)
    assert {"preset", "stop", "users", "timeline"} <= set(reached)
    # the tab list moves by arrows, and the help follows the focus
    lab.page.locator("[data-tab=timeline]").focus()
    lab.page.keyboard.press("ArrowRight")
    lab.wait("() => document.activeElement.dataset.tab === 'batch' && document.querySelector('.blocks')")
    lab.page.locator("[data-tab=timeline]").click()
    lab.page.locator("[data-knob=queue_depth]").focus()
    assert "queue depth" in (lab.page.locator(".help").text_content() or "")


def test_a_reloaded_page_shows_what_is_current_and_stop_stops(lab: LabPage, base: str) -> None:
    choose(lab, "queue_depth", "1")
    lab.wait(CHIP, ["queue_depth", "applied at step"])
    lab.save()
    lab.open("quickstart.ipynb")
    # the output of the saved notebook finds its widget again in the kernel that lives on
    lab.wait("() => document.querySelector('[data-knob=queue_depth]')?.selectedOptions[0]?.textContent === '1'")
    lab.wait("() => document.querySelector('.streams .token')")
    lab.wait("() => document.querySelector('.timeline .main-svg')")
    number = lab.page.evaluate(WINDOW)
    lab.wait(f"() => ({WINDOW})() > {number}")
    lab.page.locator("[data-act=stop]").click()
    lab.wait("() => document.querySelector('.mrv2-lab .state').textContent === 'paused'")
    lab.page.locator("[data-act=start]").click()
    lab.wait("() => document.querySelector('.mrv2-lab .state').textContent === 'running'")


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_the_panel_follows_the_theme(lab: LabPage, theme: str) -> None:
    lab.command("apputils:change-theme", theme=theme)
    name = theme.split()[1].lower()
    lab.wait(f"() => document.querySelector('{PANEL}').dataset.theme === '{name}'")
    colours = lab.page.locator(PANEL).evaluate(
        "(n) => [getComputedStyle(n).color, getComputedStyle(n).backgroundColor]"
    )
    text, background = (sum(map(float, c[c.index("(") + 1 : -1].split(",")[:3])) / 3 for c in colours)
    assert (text > background) == (name == "dark")
    assert abs(text - background) > 150


def test_a_restarted_kernel_greys_the_panel(lab: LabPage) -> None:
    script = "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
    lab.page.evaluate(script)
    lab.wait(f"() => document.querySelector('{PANEL}.stale .banner.lost:not([hidden])')", timeout=20_000)
    lab.idle()
    assert lab.page.locator(f"{PANEL} .main").evaluate("(n) => n.inert")
    # whatever the page says to a widget that is gone is no fault of the panel's
    lab.problems.clear()
