"""Charts on decisions: how many errors remain among accepted images, and whether claims are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from tcil.experiments.reporting.charts import (
    AXIS,
    Chart,
    Control,
    Legend,
    Panel,
    Rows,
    Spec,
    chosen,
    coloured,
    layered,
    marked,
    tip,
    touched,
)
from tcil.experiments.reporting.collect import Study
from tcil.experiments.reporting.figures.parts import (
    AT_FIRST,
    GROUP_TITLES,
    HEIGHT,
    WIDTH,
    Values,
    drawn,
    listed,
    stack,
)
from tcil.experiments.reporting.palette import colour, shape
from tcil.experiments.runs.results import COVERAGES, RANKED, RISKS

Curves = Mapping[tuple[str, str], Values]  # by calibrator and group: a row for each seed, in percent


def risk_by_coverage(study: Study) -> Chart | None:
    """Errors among accepted images by how many are accepted, after the last task."""
    curves = {}
    for name, group in ((name, group) for name in AT_FIRST for group in GROUP_TITLES):
        found = [run.row(-1, name) for run in study.runs]
        by_seed = [row.decisions.risk_by_coverage for row in found if row is not None and row.decisions is not None]
        if len(by_seed) == len(found) and all(group in curve for curve in by_seed):
            curves[name, group] = 100 * stack([curve[group] for curve in by_seed])
    caption = "Risk by coverage after the last task: errors among the most confident images."
    axes = ("images accepted, %", "errors among accepted, %")
    return _chart(study, curves, [100 * coverage for coverage in COVERAGES], axes, caption, diagonal=False)


def claimed_and_achieved(study: Study) -> Chart | None:
    """The risk that confidences claim for what is accepted, and the one that is found, after the last task."""
    curves = {}
    for name, group in ((name, group) for name in AT_FIRST for group in GROUP_TITLES):
        paths = [f"risks/model_based/{group}/{risk}/achieved" for risk in RISKS]
        found = [row for run in study.runs if (row := run.row(-1, name)) is not None]
        if found:
            curves[name, group] = 100 * stack([[row.metric(path) for path in paths] for row in found])
    caption = (
        "Thresholds where the confidences claim 5, 10 and 20 % errors among accepted images, and the errors that there"
        " are, after the last task. On the dotted line, claims are kept; above it, broken."
    )
    axes = ("claimed risk, %", "achieved risk, %")
    return _chart(study, curves, [100 * risk for risk in RISKS], axes, caption, diagonal=True)


def _chart(
    study: Study, curves: Curves, columns: Sequence[float], axes: tuple[str, str], caption: str, *, diagonal: bool
) -> Chart | None:
    """Curves of calibrators against the same columns, for all images or one predicted group."""
    titles = study.titles()
    means = {
        key: np.ma.masked_invalid(values).mean(axis=0).filled(np.nan)
        for key, values in curves.items()
        if key[0] in titles and not np.isnan(values).all()
    }
    names = list(dict.fromkeys(name for name, _ in means))
    groups = [group for group in GROUP_TITLES if any(own == group for _, own in means)]
    if not names:
        return None
    rows: Rows = []
    told: list[list[tuple[str | None, str | None, str, str]]] = [[] for _ in columns]
    for (name, group), mean in means.items():
        title = titles[name].title
        for place, column in enumerate(columns):
            if np.isfinite(mean[place]):
                dashed = titles[name].block != RANKED
                value = round(float(mean[place]), 5)
                rows.append({"key": title, "group": group, "at": column, "value": value, "dashed": dashed})
                told[place].append((title, group, title, f"{value:.1f} %"))
    legend = [
        Legend(titles[name].title, colour(name), shape(name), titles[name].title, dashed=titles[name].block != RANKED)
        for name in names
    ]
    ends = [columns[0], *((a + b) / 2 for a, b in pairwise(columns)), columns[-1]]
    touch = [
        {"from": ends[place], "to": ends[place + 1], "tip": tip(f"{axes[0].removesuffix(', %')} {column:g} %", lines)}
        for place, (column, lines) in enumerate(zip(columns, told, strict=True))
    ]
    datasets: dict[str, Rows] = {"values": rows, "touch": touch}
    datasets["diagonal"] = [{"at": at, "value": at} for at in (columns[0], columns[-1])]
    main = groups[0]
    table = {titles[name].title: curves[name, main].T for name in names if (name, main) in means}
    words = [f"{titles[name].title}, {GROUP_TITLES[group]}: {listed(mean)}" for (name, group), mean in means.items()]
    return Chart(
        layered(_layers(legend, axes, columns, diagonal=diagonal), WIDTH, HEIGHT),
        (Panel(datasets),),
        caption,
        f"{axes[1]} at {listed(columns, 0)} % ({axes[0]}). " + "; ".join(words),
        tuple(legend),
        (Control("group", "Images", tuple((group, GROUP_TITLES[group]) for group in groups), main),),
        drawn(f"{axes[1][0].upper()}{axes[1][1:]}; {axes[0]}, {GROUP_TITLES[main]}", columns, table),
    )


def _layers(legend: Sequence[Legend], axes: tuple[str, str], columns: Sequence[float], *, diagonal: bool) -> list[Spec]:
    scale = {"domain": [columns[0], columns[-1]], "nice": False}
    x = {"field": "at", "type": "quantitative", "title": axes[0], "scale": scale, "axis": {"values": list(columns)}}
    y = {"field": "value", "type": "quantitative", "title": axes[1], "scale": {"zero": True}}
    base: Spec = {"data": {"name": "values"}, "transform": [chosen("group")]}
    hue = coloured(legend)
    dashes = {"domain": [False, True], "range": [[1, 0], [5, 3]]}
    dash = {"field": "dashed", "type": "nominal", "legend": None, "scale": dashes}
    layers: list[Spec] = []
    if diagonal:
        mark = {"type": "line", "color": AXIS, "strokeDash": [2, 3], "strokeWidth": 1}
        layers.append({"data": {"name": "diagonal"}, "mark": mark, "encoding": {"x": x, "y": y}})
    return [
        *layers,
        {**base, "mark": {"type": "line"}, "encoding": {"x": x, "y": y, "color": hue, "strokeDash": dash}},
        {
            **base,
            "mark": {"type": "point", "filled": True, "size": 55, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": hue, "shape": marked(legend)},
        },
        touched("touch", {"x": {**x, "field": "from"}, "x2": {"field": "to"}}, {"type": "rect"}),
    ]
