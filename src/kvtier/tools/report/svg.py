"""Figures as SVG with the colours and the font of the page.

Each figure is drawn twice, for wide and for narrow pages, since its text does not reflow. Colours
are drawn as placeholders and replaced by the page's CSS variables, so that a figure fits both a
light and a dark page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure

INK, MUTED, LINE, PAPER = "#101001", "#101002", "#101003", "#101004"
COLD, HOST, DEVICE, DISK = "#101005", "#101006", "#101007", "#101008"
GOOD, BAD = "#101009", "#10100a"
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    LINE: "--line",
    PAPER: "--paper",
    COLD: "--cold",
    HOST: "--host",
    DEVICE: "--device",
    DISK: "--disk",
    GOOD: "--good",
    BAD: "--bad",
}
WIDE_IN, NARROW_IN = 9.4, 4.5
"""Widths, in inches, at which 10-point text is easy to read on a screen and on a phone."""

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "ytick.major.size": 0,
}


@dataclass(frozen=True, slots=True)
class SvgPicture:
    """A figure in two widths, with a caption and a description for screen readers."""

    wide: Markup
    narrow: Markup
    caption: str
    description: str


def picture(draw: Callable[[float], Figure], caption: str, description: str) -> SvgPicture:
    """Return a figure as SVG for wide and for narrow pages. draw: draw it in a width, in inches."""
    wide, narrow = (Markup(_svg(draw, width)) for width in (WIDE_IN, NARROW_IN))
    return SvgPicture(wide, narrow, caption, description)


def _svg(draw: Callable[[float], Figure], width: float) -> str:
    """Return the figure as an ``<svg>`` element that scales and uses the page's colours."""
    salt = f"{draw.__qualname__}-{width}"  # ids must differ between the figures of one page
    with mpl.rc_context({**_STYLE, "svg.hashsalt": salt}):
        buffer = io.StringIO()
        draw(width).savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # A style sheet inside would apply to the whole page, and ids of groups would not be unique.
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r' (width|height)="[^"]*pt"', "", text, count=2)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "inherit", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text.strip()
