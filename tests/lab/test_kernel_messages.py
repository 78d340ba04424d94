"""What a page says to a widget reaches the kernel, whichever pages and subshells have gone meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from checks.source_tree import REPO

manager = pytest.importorskip("jupyter_client.manager")
pytest.importorskip("ipykernel")
pytest.importorskip("anywidget")
pytestmark = [pytest.mark.serial, pytest.mark.timeout(120)]
# as in the panel: messages are taken on whatever thread brings them, and answered by a thread of its own
WIDGET = """
import threading
from mrv2.lab.panel import panel_class
from mrv2.viz.widgets import table_class, timeline_class

widget, taken = {make}()(), []

def answer():
    thread = threading.Thread(target=widget.send, args=({{"kind": "answer"}},))
    thread.start()
    thread.join()

def take(_widget, content, _buffers):
    taken.append(content["number"])
    answer()

widget.on_msg(take)
"""


class Page:
    """A page of a notebook: what it says goes to a subshell that lives as long as the page."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.subshell = self._control("create_subshell_request")["subshell_id"]

    def say(self, model_id: str, content: dict[str, Any]) -> None:
        """Send a custom message to a widget; returns when the kernel is through with it."""
        data = {"method": "custom", "content": content}
        message = self.client.session.msg("comm_msg", {"comm_id": model_id, "data": data})
        message["header"]["subshell_id"] = self.subshell
        self.client.shell_channel.send(message)
        is_idle = False
        while not is_idle:
            heard = self.client.get_iopub_msg(timeout=30)
            is_ours = heard["parent_header"].get("msg_id") == message["header"]["msg_id"]
            is_idle = is_ours and heard["content"].get("execution_state") == "idle"

    def close(self) -> None:
        """Leave, as a page does whose notebook is closed."""
        self._control("delete_subshell_request", subshell_id=self.subshell)

    def _control(self, kind: str, **content: Any) -> dict[str, Any]:
        self.client.control_channel.send(self.client.session.msg(kind, content))
        return self.client.get_control_msg(timeout=30)["content"]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    roots = [str(REPO / root) for root in ("workbench", "models", "kernels")]
    path = os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")])
    kernel, client = manager.start_new_kernel(kernel_name="python3", env={**os.environ, "PYTHONPATH": path})
    yield client
    client.stop_channels()
    kernel.shutdown_kernel(now=True)


def run(client: Any, code: str, value: str) -> str:
    """Run code and return the `repr` of an expression after it."""
    reply = client.execute_interactive(
        code, user_expressions={"value": value}, timeout=60, output_hook=lambda message: None
    )["content"]
    assert reply["status"] == "ok", reply
    return reply["user_expressions"]["value"]["data"]["text/plain"]


@pytest.mark.parametrize("make", ["panel_class", "timeline_class", "table_class"])
def test_a_widget_hears_each_page_though_the_pages_before_it_have_gone(client: Any, make: str) -> None:
    model_id = run(client, WIDGET.format(make=make), "widget.model_id").strip("'")
    for number in range(3):
        page = Page(client)
        page.say(model_id, {"number": number})
        page.close()
    assert run(client, "", "taken") == "[0, 1, 2]"
