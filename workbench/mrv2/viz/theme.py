"""Colours and text styles: Okabe-Ito hues, a light and a dark theme, text that stays readable on every hue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mrv2.errors import nearest
from mrv2.trace.table import TraceError

ThemeName = Literal["light", "dark"]


@dataclass(frozen=True)
class Hue:
    """One class of events: its key, what the legend says, its colour."""

    key: str
    label: str
    colour: str


# Okabe & Ito, "Color Universal Design": told apart with any colour vision.  The order is the class number in the index.
HUES: tuple[Hue, ...] = (
    Hue("other", "other", "#999999"),
    Hue("schedule", "schedule, bookkeeping", "#E69F00"),
    Hue("prepare", "prepare inputs", "#009E73"),
    Hue("forward", "forward, GEMM", "#0072B2"),
    Hue("attention", "attention", "#56B4E9"),
    Hue("sample", "logits, sampling", "#CC79A7"),
    Hue("copy", "copies", "#F0E442"),
    Hue("wait", "waits, syncs", "#D55E00"),
)
HUE_ID: dict[str, int] = {hue.key: i for i, hue in enumerate(HUES)}

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
# brightness steps of a busy pixel in the far view; the darkest step is still visible
LEVELS = 16
_FAINTEST = 0.4


@dataclass(frozen=True)
class Theme:
    """What surrounds the hues."""

    name: ThemeName
    background: str
    # contrast of at least 4.5 : 1 on the background
    text: str
    muted: str
    grid: str
    band: str
    accent: str


THEMES: dict[str, Theme] = {
    "light": Theme("light", "#ffffff", "#1f2328", "#59636e", "#d8dee4", "rgba(0,0,0,0.05)", "#0550ae"),
    "dark": Theme("dark", "#15191f", "#e6edf3", "#9aa4af", "#30363d", "rgba(255,255,255,0.06)", "#79c0ff"),
}


def theme(name: str) -> Theme:
    """Return a theme by name.

    Raises:
        TraceError: there is no such theme.
    """
    if name not in THEMES:
        raise TraceError(f"unknown theme {name!r}{nearest(name, THEMES)}; themes: {', '.join(THEMES)}")
    return THEMES[name]


def rgb(colour: str) -> tuple[int, int, int]:
    """Return the parts of ``#rrggbb``, 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb``, 0 (black) to 1 (white), as WCAG 2 defines it."""
    linear = [(c / 255 / 12.92) if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """Return the contrast ratio of two ``#rrggbb`` colours, 1 to 21, as WCAG 2 defines it."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def text_on(colour: str) -> str:
    """Return black or white, whichever reads better on `colour`."""
    return max(("#000000", "#ffffff"), key=lambda ink: contrast(ink, colour))


def mix(colour: str, background: str, share: float) -> str:
    """Return `share` of `colour` over `background`, both ``#rrggbb``."""
    parts = [round(b + (c - b) * share) for c, b in zip(rgb(colour), rgb(background))]
    return "#{:02x}{:02x}{:02x}".format(*parts)


def density_colours(of: Theme) -> list[tuple[float, str]]:
    """Return the stepped colour scale of the far view; step ``hue * LEVELS + level`` of ``len(HUES) * LEVELS``."""
    total = len(HUES) * LEVELS
    scale: list[tuple[float, str]] = []
    for code in range(total):
        level = (code % LEVELS + 1) / LEVELS
        colour = mix(HUES[code // LEVELS].colour, of.background, _FAINTEST + (1 - _FAINTEST) * level)
        scale += [(code / total, colour), ((code + 1) / total, colour)]
    return scale


def layout(of: Theme, **changes: Any) -> dict[str, Any]:
    """Return the plotly layout that all our figures share; `changes` override or add keys."""
    axis = {"gridcolor": of.grid, "zerolinecolor": of.grid, "linecolor": of.grid, "automargin": True}
    base: dict[str, Any] = {
        "paper_bgcolor": of.background,
        "plot_bgcolor": of.background,
        "font": {"family": FONT, "size": 12, "color": of.text},
        "hoverlabel": {"font": {"family": FONT, "size": 12}},
        "margin": {"l": 60, "r": 16, "t": 40, "b": 40},
        "xaxis": axis,
        "yaxis": axis,
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.0, "xanchor": "left", "x": 0.0},
        "uirevision": "keep",
    }
    for key, value in changes.items():
        base[key] = {**base[key], **value} if isinstance(base.get(key), dict) and isinstance(value, dict) else value
    return base


def spec() -> dict[str, Any]:
    """Return themes and hues as the browser side takes them."""
    return {
        "font": FONT,
        "levels": LEVELS,
        "hues": [{"key": h.key, "label": h.label, "colour": h.colour, "ink": text_on(h.colour)} for h in HUES],
        "themes": {name: {**vars(of), "density": density_colours(of)} for name, of in THEMES.items()},
    }
