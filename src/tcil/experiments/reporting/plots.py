"""Static pictures as SVG, drawn by matplotlib: each with the words that say the same."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from tcil.experiments.reporting.grids import Grid

MARKERS = "osD^vP*Xhd<>p"


@dataclass(frozen=True)
class Picture:
    """A figure with its caption, its text alternative, and of curves the values drawn."""

    svg: str
    caption: str
    words: str
    values: Grid | None = None

    def about(self, where: str) -> Picture:
        """The same, saying of what runs it is."""
        values = self.values and replace(self.values, title=f"{self.values.title}; {where}")
        return Picture(self.svg, f"{self.caption} {where}.", f"{where}. {self.words}", values)


@contextmanager
def drawing(rows: int = 1, columns: int = 1, width: float = 8.0, height: float = 3.6) -> Iterator[tuple[Figure, Any]]:
    """A figure in the project's style, for `picture`: no window and no list of figures knows it."""
    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "tcil",
        "text.usetex": False,  # whatever a matplotlibrc says: titles come from files, and LaTeX would run on them
    }
    style |= {"axes.grid": True, "grid.color": "#e6e6e6", "axes.axisbelow": True}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False)


def picture(figure: Figure, caption: str, words: str, values: Grid | None = None) -> Picture:
    """The figure as SVG text without a prologue, to stand inside a page."""
    content = io.StringIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    text = content.getvalue()
    return Picture(text[text.index("<svg") :], caption, words, values)
