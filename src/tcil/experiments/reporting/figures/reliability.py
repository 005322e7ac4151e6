"""Reliability diagrams, and the error of each class."""

from __future__ import annotations

from collections.abc import Sequence

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
    ERROR_OF,
    GROUP_TITLES,
    WIDTH,
    Values,
    labels_of,
    line_of,
    short,
    shown_at_first,
    stack,
)
from tcil.experiments.reporting.palette import INK, colour, shape
from tcil.experiments.runs.results import Bins

OVER, UNDER, CORRECT = "#d9363e", "#2f7fd1", "#9fb0c3"


def reliability(study: Study) -> Chart | None:
    """Reliability diagrams after each task, seeds pooled, with the histograms of confidence below."""
    titles = study.titles()
    labels = labels_of(titles)
    panels, names, words, groups = [], [], [], set()
    tasks = [task.task for task in study.runs[0].tasks]
    for name, label in labels.items():
        rows: Rows = []
        told = {}
        for task in tasks:
            for group, metric in ERROR_OF.items():
                found = [run.row(task, name) for run in study.runs]
                diagrams = [bins for row in found if row is not None and (bins := row.diagram(group)) is not None]
                if len(diagrams) < len(found):
                    continue
                errors = [100 * value for row in found if row is not None and (value := row.metric(metric)) is not None]
                told[f"{task} {group}"] = f"ECE {np.mean(errors):.1f} %" if errors else ""
                groups.add(group)
                rows += _bars(diagrams, task, group)
        if rows:
            panels.append(Panel({"bins": rows}, label, label, told))
            names.append(name)
            last = [row for row in rows if row["task"] == tasks[-1] and row["group"] == "all"]
            pairs = ", ".join(f"{row['confidence']:.2f}/{row['accuracy']:.2f}" for row in last)
            words.append(f"{label}, {told.get(f'{tasks[-1]} all', '')}: {pairs}")
    if not panels:
        return None
    first = shown_at_first(names)
    legend = [
        *(line_of(name, labels[name], titles[name].block, name in first) for name in names),
        Legend("accuracy", CORRECT, line=False),
        Legend("over-confident", OVER, line=False),
        Legend("under-confident", UNDER, line=False),
    ]
    controls = [Control("task", "After task", tuple((task, str(task)) for task in tasks), tasks[-1], slider=True)]
    options = tuple((group, title) for group, title in GROUP_TITLES.items() if group in groups)
    controls.append(Control("group", "Images", options, "all"))
    pooled = " Seeds are pooled." if len(study.runs) > 1 else ""
    caption = (
        "Reliability: accuracy by confidence in ten bins, and below it the share of images in each. Red: confidence is"
        f" above accuracy by this much (over-confident); blue: below.{pooled}"
    )
    return Chart(
        _diagram(),
        tuple(panels),
        caption,
        "Confidence/accuracy by bin after the last task. " + "; ".join(words),
        tuple(legend),
        tuple(controls),
        fixed=True,
    )


def _bars(diagrams: Sequence[Bins], task: int, group: str) -> Rows:
    """The bins that have images, over all seeds."""
    count, confidence, accuracy = pooled(diagrams)
    rows: Rows = []
    for place in map(int, np.flatnonzero(count)):
        own, right, share = (float(v) for v in (confidence[place], accuracy[place], 100 * count[place] / count.sum()))
        edges = {"from": place / 10, "to": (place + 1) / 10}
        means = {"confidence": short(own), "accuracy": short(right)}  # the page makes its words of these
        rows.append(
            {"task": task, "group": group, **edges, **means, "count": int(count[place]), "share": round(share, 3)}
        )
    return rows


def pooled(diagrams: Sequence[Bins]) -> tuple[Values, Values, Values]:
    """Counts, mean confidence and accuracy by bin, over all seeds."""
    count, confidence, accuracy = np.zeros(10), np.zeros(10), np.zeros(10)
    for bins in diagrams:
        counts = np.array(bins.count, dtype=float)
        count += counts
        confidence += counts * np.array([value or 0.0 for value in bins.confidence])
        accuracy += counts * np.array([value or 0.0 for value in bins.accuracy])
    with np.errstate(invalid="ignore"):
        return count, confidence / count, accuracy / count


def _diagram() -> Spec:
    where = [{"filter": "datum.task == task && datum.group == group"}]
    base: Spec = {"data": {"name": "bins"}, "transform": where}
    ticks = [0, 0.5, 1]
    bare: Spec = {"values": ticks, "labels": False, "title": None, "ticks": False}
    named: Spec = {"values": ticks, "title": "confidence", "format": ".1f"}
    unit = {"domain": [0, 1]}

    def across(axis: Spec) -> Spec:
        return {"x": {"field": "from", "type": "quantitative", "scale": unit, "axis": axis}, "x2": {"field": "to"}}

    right: Spec = {
        "type": "quantitative",
        "scale": unit,
        "axis": {"values": ticks, "title": "accuracy", "format": ".1f"},
    }
    side: Spec = {"condition": {"test": "datum.confidence >= datum.accuracy", "value": OVER}, "value": UNDER}
    ends = [{"at": 0}, {"at": 1}]
    diagonal = {"x": {"field": "at", "type": "quantitative"}, "y": {"field": "at", "type": "quantitative"}}
    bar: Spec = {"type": "rect", "xOffset": 0.5, "x2Offset": -0.5}
    top: list[Spec] = [
        {
            **base,
            "mark": {**bar, "color": CORRECT},
            "encoding": {**across(bare), "y": {"field": "accuracy", **right}, "y2": {"datum": 0}},
        },
        {
            **base,
            "mark": {**bar, "opacity": 0.7},
            "encoding": {
                **across(bare),
                "y": {"field": "accuracy", **right},
                "y2": {"field": "confidence"},
                "color": side,
            },
        },
        {"data": {"values": ends}, "mark": {"type": "line", "color": INK, "strokeDash": [3, 3]}, "encoding": diagonal},
        touched("bins", {**across(bare), "y": {"value": 0}, "y2": {"value": 150}}, {"type": "rect"}, where),
    ]
    shares = {"values": [0, 50, 100], "title": "images, %"}
    share: Spec = {"field": "share", "type": "quantitative", "scale": {"domain": [0, 100]}, "axis": shares}
    below: Spec = {
        **base,
        "width": 150,
        "height": 42,
        "mark": {**bar, "color": AXIS, "tooltip": {"content": "data"}},
        "encoding": {**across(named), "y": share, "y2": {"datum": 0}},
    }
    return {"vconcat": [{"width": 150, "height": 150, "layer": top}, below], "spacing": 8}


def error_by_class(study: Study) -> Chart | None:
    """Confidence minus accuracy of every class after the last task, seeds averaged, in the order of learning."""
    titles = study.titles()
    labels = labels_of(titles)
    seen = [task.seen for task in study.runs[0].tasks]
    rows: Rows = []
    told: list[list[tuple[str | None, str | None, str, str]]] = [[] for _ in range(seen[-1])]
    words, present = [], []
    for name, label in labels.items():
        last = [run.row(-1, name) for run in study.runs]
        gaps = [row.by_class.gap for row in last if row is not None and row.by_class is not None]
        if len(gaps) < len(last) or any(len(gap) != seen[-1] for gap in gaps):
            continue
        mean = 100 * np.ma.masked_invalid(stack(gaps)).mean(axis=0).filled(np.nan)
        known = mean[~np.isnan(mean)]
        if not len(known):
            continue
        present.append(name)
        words.append(f"{label} from {known.min():.0f} to {known.max():.0f}, mean {known.mean():.1f}")
        for place in map(int, np.flatnonzero(~np.isnan(mean))):
            rows.append({"key": label, "class": place, "value": short(mean[place])})
            told[place].append((label, None, label, f"{mean[place]:+.1f} points"))
    if not present:
        return None
    first = shown_at_first(present) & {"vanilla", "t-cil", "pact"} or shown_at_first(present)
    legend = [
        Legend(labels[name], colour(name), shape(name), labels[name], line=False, on=name in first) for name in present
    ]
    touch = [
        {
            "from": place - 0.5,
            "to": place + 0.5,
            "tip": tip(f"Class {place}, of task {next(t for t, stop in enumerate(seen) if place < stop)}", lines),
        }
        for place, lines in enumerate(told)
        if lines
    ]
    scale = {"domain": [-0.5, seen[-1] - 0.5], "nice": False}
    axis = {"tickMinStep": 1, "format": "d", "grid": False}
    x: Spec = {"field": "class", "type": "quantitative", "title": "class, in the order of learning"}
    x |= {"scale": scale, "axis": axis}
    y: Spec = {"field": "value", "type": "quantitative", "title": "confidence - accuracy, points"}
    zero = {"data": {"values": [{"at": 0}]}, "mark": {"type": "rule", "color": INK}}
    layers: list[Spec] = [
        {
            "data": {"name": "starts"},
            "mark": {"type": "rule", "color": AXIS, "strokeDash": [2, 3], "opacity": 0.8},
            "encoding": {"x": {**x, "field": "at"}},
        },
        {**zero, "encoding": {"y": {**y, "field": "at"}}},
        {
            "data": {"name": "values"},
            "transform": [chosen()],
            "mark": {"type": "point", "filled": True, "size": 50, "opacity": 0.95},
            "encoding": {"x": x, "y": y, "color": coloured(legend), "shape": marked(legend)},
        },
        touched("touch", {"x": {**x, "field": "from"}, "x2": {"field": "to"}}, {"type": "rect"}),
    ]
    starts: Rows = [{"at": stop - 0.5} for stop in seen[:-1]]
    return Chart(
        layered(layers, WIDTH, 260),
        (Panel({"values": rows, "touch": touch, "starts": starts}),),
        "Over-confidence (above 0) and under-confidence by class after the last task. Dotted: where a task begins.",
        "; ".join(words),
        tuple(legend),
    )
