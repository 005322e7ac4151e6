"""What all pictures of a study are made of: values, labels, legends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tcil.experiments.reporting.charts import Control, Legend
from tcil.experiments.reporting.grids import Cell, Grid, Row
from tcil.experiments.reporting.palette import colour, shape
from tcil.experiments.reporting.statistics import Spread
from tcil.experiments.runs.catalogue import ALL_DATA, CATALOGUE, Heading
from tcil.experiments.runs.results import RANKED

Values = np.ndarray[Any, np.dtype[np.float64]]
AT_FIRST = (
    "vanilla",
    "ts",
    "t-cil",
    "pact",
    "pact-r",
    "optimal-ts",
)  # the others of the catalogue are switched on by hand
GROUP_TITLES = {"all": "all images", "old": "predicted old", "new": "predicted new"}
ERROR_OF = {"all": "ece", "old": "ece_predicted_old", "new": "ece_predicted_new"}
WIDTH, HEIGHT = 720, 300


def drawn(title: str, columns: Sequence[object], rows: Mapping[str, Iterable[Values]], digits: int = 2) -> Grid:
    """Curves as a table: for each and at each column the values of all seeds; n/a where some has no answer."""
    lines = [
        Row(
            label,
            tuple(
                Cell(words="n/a") if np.isnan(seeds).any() else Cell(Spread.of(list(seeds)), digits=digits)
                for seeds in map(np.atleast_1d, values)
            ),
        )
        for label, values in rows.items()
    ]
    return Grid(title, ("curve", *map(str, columns)), tuple(lines))


def listed(values: Sequence[float] | Values, digits: int = 1) -> str:
    """Numbers in words."""
    return ", ".join("n/a" if np.isnan(value) else f"{value:.{digits}f}" for value in values)


def stack(rows: Sequence[Sequence[float | None]]) -> Values:
    """Rows as an array; NaN where there is no number."""
    return np.array([[np.nan if value is None else value for value in row] for row in rows], dtype=np.float64)


def short(value: float) -> float | None:
    """A number as the page carries it."""
    return None if not np.isfinite(value) else round(float(value), 5)


def labels_of(titles: Mapping[str, Heading]) -> dict[str, str]:
    """Titles by name, with the name where two have the same title."""
    given = [heading.title for heading in titles.values()]
    return {
        name: heading.title if given.count(heading.title) == 1 else f"{heading.title} ({name})"
        for name, heading in titles.items()
    }


def line_of(name: str, label: str, block: str, on: bool) -> Legend:
    """A calibrator in the legend; those that are not ranked are dashed."""
    return Legend(label, colour(name), shape(name), label, dashed=block != RANKED, on=on)


def shown_at_first(names: Sequence[str]) -> set[str]:
    """Which of these are switched on at first: the usual ones and all that are not of the catalogue."""
    first = {name for name in names if name in AT_FIRST or name.partition("[")[0] not in (*CATALOGUE, ALL_DATA)}
    return first or set(names)


def percent(spread: Spread, note: str = "") -> str:
    """A mean in words, with its deviation over seeds."""
    shown = f"{spread.mean:.2f} %" if spread.n < 2 else f"{spread.mean:.2f} ± {spread.std:.2f} %"
    return f"{shown} ({note})" if note else shown


def group_control() -> Control:
    """The choice between all images and those predicted as old or new classes."""
    return Control("group", "Images", tuple(GROUP_TITLES.items()), "all")
