"""The errors of all calibrators in one picture: of one study, or of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tcil.experiments.reporting.charts import (
    AXIS,
    FLOOR,
    Chart,
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
from tcil.experiments.reporting.figures.parts import ERROR_OF, GROUP_TITLES, group_control, labels_of, percent, short
from tcil.experiments.reporting.findings import noise_floor
from tcil.experiments.reporting.palette import GROUPS, INK, SHAPES
from tcil.experiments.reporting.statistics import Spread
from tcil.experiments.runs.catalogue import ORACLE, Heading, in_order

STUDIES = ("#2f7fd1", "#e07b00", "#3a9b3a", "#c2559d", "#7d8590", "#9a6fd0", "#0e9aa7", "#a06a4c")  # more look alike


def errors_by_group(study: Study) -> Chart | None:
    """The ECE of every calibrator on all images and on those predicted as old and new classes, between the limits."""
    titles = study.titles()
    labels = labels_of(titles)
    rows: Rows = []
    words: list[str] = []
    order: list[str] = []
    for name, label in labels.items():
        found, notes = {}, {}
        for group, metric in ERROR_OF.items():
            means = [100 * value for value in study.means(name, metric) if value is not None]
            if len(means) == len(study.runs):
                found[group], notes[group] = Spread.of(means), study.fewer_tasks(name, metric)
        if "all" not in found:
            continue
        order.append(label)
        told = [(None, None, GROUP_TITLES[group], percent(found[group], notes[group])) for group in found]
        for group, spread in found.items():
            place = {"key": GROUP_TITLES[group], "group": group, "label": label}
            rows.append({**place, "value": short(spread.mean), "tip": tip(label, told)})
        words.append(f"{label}: " + ", ".join(f"{GROUP_TITLES[g]} {spread.mean:.1f}" for g, spread in found.items()))
    if not rows:
        return None
    marks = {"all": "circle", "old": "left", "new": "right"}
    groups = {group: title for group, title in GROUP_TITLES.items() if any(row["group"] == group for row in rows)}
    legend = [Legend(title, GROUPS[group], marks[group], title, line=False) for group, title in groups.items()]
    x, y = _errors_by_label(order)
    limits, layers, more = _limits(study)
    span = {"x": {"aggregate": "min", **x}, "x2": {"aggregate": "max", "field": "value"}, "y": y}
    layers += [
        {
            "data": {"name": "errors"},
            "transform": [chosen()],
            "mark": {"type": "rule", "color": AXIS, "strokeWidth": 2, "opacity": 0.55},
            "encoding": span,
        },
        {
            "data": {"name": "errors"},
            "transform": [chosen()],
            "mark": {"type": "point", "filled": True, "size": 75, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": coloured(legend), "shape": marked(legend)},
        },
        touched("errors", {"y": y}, {"type": "bar", "height": {"band": 1}}, [{"filter": "datum.group == 'all'"}]),
    ]
    caption = "ECE of each calibrator, mean over tasks: on all images and on those predicted as old and as new classes."
    return Chart(
        layered(layers, 640, max(120, 27 * len(order) + 45)),
        (Panel({"errors": rows, **limits}),),
        f"{caption}{more[0]}",
        "; ".join([*words, *more[1:]]),
        (*legend, *_limit_legend(limits)),
    )


def _errors_by_label(order: Sequence[str]) -> tuple[Spec, Spec]:
    """The axes of a picture with a row for each calibrator."""
    axis = {"labelLimit": 170, "grid": True, "ticks": False, "domain": False}
    y: Spec = {"field": "label", "type": "nominal", "title": None, "scale": {"domain": list(order)}, "axis": axis}
    x: Spec = {"field": "value", "type": "quantitative", "title": "ECE, % (lower is better)", "scale": {"zero": True}}
    return x, y


def _limits(study: Study) -> tuple[dict[str, Rows], list[Spec], list[str]]:
    """The noise floor as an area and the oracle as a line, across the picture: data, layers, and words."""
    floor = noise_floor(study)
    oracle = [100 * value for value in study.means(ORACLE, "ece") if value is not None] if study.having(ORACLE) else []
    limits: dict[str, Rows] = {}
    layers: list[Spec] = []
    words = [""]
    if floor is not None:
        mean = sum(floor) / len(floor)
        limits["floor"] = [{"low": 0, "high": short(mean)}]
        x = {"field": "low", "type": "quantitative"}
        area = {"type": "rect", "color": FLOOR, "opacity": 0.6}
        layers.append({"data": {"name": "floor"}, "mark": area, "encoding": {"x": x, "x2": {"field": "high"}}})
        words += [f"noise floor {mean:.1f}"]
        words[0] += " Grey: the noise floor."
    if oracle and len(oracle) == len(study.runs):
        mean = sum(oracle) / len(oracle)
        limits["oracle"] = [{"at": short(mean)}]
        line = {"type": "rule", "color": INK, "strokeDash": [5, 3], "strokeWidth": 1.5}
        x = {"field": "at", "type": "quantitative"}
        layers.append({"data": {"name": "oracle"}, "mark": line, "encoding": {"x": x}})
        words[0] += " Dashed: the oracle on all images."
    return limits, layers, words


def _limit_legend(limits: Mapping[str, Rows]) -> list[Legend]:
    lines = [Legend("noise floor", FLOOR, line=False)] if "floor" in limits else []
    return lines + ([Legend("oracle", INK, dashed=True)] if "oracle" in limits else [])


def errors_by_study(studies: Sequence[Study]) -> Chart | None:
    """The ECE of every calibrator (rows) in every study (marks)."""
    titles: dict[str, Heading] = {}
    for study in studies:
        for name, heading in study.titles().items():
            titles.setdefault(name, heading)
    labels = labels_of(in_order(titles))
    few, marks = len(studies) <= len(STUDIES), list(SHAPES)
    given = [study.title for study in studies]
    keys = [title if given.count(title) == 1 else f"{title} ({place})" for place, title in enumerate(given)]
    rows: Rows = []
    found: dict[str, list[float]] = {}
    for place, study in enumerate(studies):
        for name, label in labels.items():
            for group, metric in ERROR_OF.items():
                means = [100 * value for value in study.means(name, metric) if value is not None]
                if len(means) < len(study.runs):
                    continue
                spread = Spread.of(means)
                shown = percent(spread, study.fewer_tasks(name, metric))
                told = tip(study.title, [(None, None, f"{label}, {GROUP_TITLES[group]}", shown)])
                row = {"key": keys[place], "label": label, "group": group, "value": short(spread.mean), "tip": told}
                rows.append(row)
                if group == "all":
                    found.setdefault(label, []).append(spread.mean)
    if not found:
        return None
    legend = [
        Legend(key, STUDIES[place if few else 0], marks[place if few else 0], key, line=False)
        for place, key in enumerate(keys)
    ]
    order = [label for label in labels.values() if label in found]
    x, y = _errors_by_label(order)
    base: Spec = {"data": {"name": "errors"}, "transform": [chosen("group")]}
    layers: list[Spec] = [
        {
            **base,
            "mark": {"type": "point", "filled": True, "size": 60, "opacity": 0.8, "tooltip": {"content": "data"}},
            "encoding": {"x": x, "y": y, "color": coloured(legend), "shape": marked(legend)},
        },
        {
            **base,
            "mark": {"type": "tick", "color": INK, "thickness": 2, "size": 18, "tooltip": None},
            "encoding": {"x": {"aggregate": "mean", **x}, "y": y},
        },
    ]
    words = [f"{label}: mean of {len(values)} studies {np.mean(values):.1f}" for label, values in found.items()]
    return Chart(
        layered(layers, 640, max(120, 27 * len(order) + 45)),
        (Panel({"errors": rows}),),
        "ECE of each calibrator in each study, mean over tasks. Upright strokes: the mean of the studies shown.",
        "; ".join(words),
        tuple(legend),
        (group_control(),),
    )
