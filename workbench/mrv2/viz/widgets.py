"""The notebook widgets, built when first asked for: nothing here is imported without ipywidgets and anywidget."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from mrv2.trace.table import TraceError
from mrv2.viz import payload


@cache
def widget_class() -> type[Any]:
    """Return the class that all widgets here are made from: one that hears every page.

    Raises:
        TraceError: ipywidgets or anywidget is not installed.
    """
    anywidget, _ = modules()

    class Widget(anywidget.AnyWidget):
        def open(self) -> None:
            super().open()
            # ipykernel 7.4 hands what a page says to the subshell that was served when the widget spoke last, and drops
            # it if that one went with an earlier page; without this route it goes to the one that the page names
            self.comm._reply_subshell_for = None

    return Widget


@cache
def timeline_class() -> type[Any]:
    """Return the class of the timeline widget.

    Its traits hold the current tile, so a page that is reloaded shows what is current, and its program is text, so a
    closed widget can be collected.  plotly.js is not part of the state: a page asks for it once.

    Raises:
        TraceError: ipywidgets or anywidget is not installed.
    """
    _, traitlets = modules()

    class TimelineWidget(widget_class()):
        _esm = (
            payload.assets("format.js", "theme.js", "traces.js", "timeline.js", "widget.js")
            + "\nexport default { render: renderTimeline };"
        )
        _css = payload.assets("style.css")
        spec = traitlets.Dict().tag(sync=True)
        tile = traitlets.Dict().tag(sync=True)
        # [start, end] to show, nanoseconds from the start of the trace
        view = traitlets.List().tag(sync=True)
        # [start, end, serial number] to centre on
        centre = traitlets.List().tag(sync=True)
        theme = traitlets.Unicode("").tag(sync=True)
        error = traitlets.Unicode("").tag(sync=True)
        plotly_version = traitlets.Unicode("").tag(sync=True)

    return TimelineWidget


@cache
def table_class() -> type[Any]:
    """Return the class of the table widget.

    Raises:
        TraceError: ipywidgets or anywidget is not installed.
    """
    _, traitlets = modules()

    class TableWidget(widget_class()):
        _esm = payload.assets("format.js", "table.js", "widget.js") + "\nexport default { render: renderTable };"
        _css = payload.assets("style.css")
        spec = traitlets.Dict().tag(sync=True)
        # number of the row that was chosen last, -1 none
        selected = traitlets.Int(-1)

    return TableWidget


def modules() -> tuple[Any, Any]:
    """Return anywidget and traitlets.

    Raises:
        TraceError: one of them is not installed.
    """
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise TraceError("widgets need ipywidgets and anywidget: pip install 'mrv2-workbench[notebook]'") from error
    return anywidget, traitlets


def bundle(widget: Callable[[], Any], static: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a notebook shows: the widget, and `static` for readers that have no kernel."""
    live = widget()._repr_mimebundle_()
    data, metadata = live if isinstance(live, tuple) else (live or {}, {})
    return {**static, **data}, metadata


def has_front_end() -> bool:
    """Return whether this process is a notebook kernel with the widget packages."""
    try:
        from IPython import get_ipython

        modules()
    except (ImportError, TraceError):
        return False
    return hasattr(get_ipython(), "kernel")
