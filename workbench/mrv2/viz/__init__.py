"""Pictures of a `Trace`: the timeline, figures, tables, and one page with all of it."""

from __future__ import annotations

from mrv2.viz.timeline import Timeline

__all__ = ["Timeline"]
