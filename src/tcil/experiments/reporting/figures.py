"""The pictures of studies as charts: each with the words that say the same, and the values drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tcil.experiments.reporting.charts import (
    AXIS,
    FLOOR,
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
from tcil.experiments.reporting.findings import ORACLE, noise_floor
from tcil.experiments.reporting.grids import Cell, Grid, Row
from tcil.experiments.reporting.palette import GROUPS, INK, SHAPES, colour, shape
from tcil.experiments.reporting.statistics import Spread
from tcil.experiments.runs.catalogue import ALL_DATA, CATALOGUE, Heading, in_order
from tcil.experiments.runs.results import RANKED, Bins

Values = np.ndarray[Any, np.dtype[np.float64]]
AT_FIRST = (
    "vanilla",
    "ts",
    "t-cil",
    "pact",
    "pact-r",
    "optimal-ts",
)  # the others of the catalogue are switched on by hand
BANDS = ("vanilla", "ts", "t-cil", "optimal-ts")  # more would hide each other
TEMPERATURES = ("ts", "first-task-ts", "t-cil", "optimal-ts")
GROUP_TITLES = {"all": "all images", "old": "predicted old", "new": "predicted new"}
ERROR_OF = {"all": "ece", "old": "ece_predicted_old", "new": "ece_predicted_new"}
WIDTH, HEIGHT = 720, 300
SHAPE_FOUND = SHAPES["star"]
SEQUENCE = ((59, 111, 212), (14, 154, 167), (58, 155, 58), (184, 144, 26), (217, 54, 62))  # of tasks, first to last
STUDIES = ("#2f7fd1", "#e07b00", "#3a9b3a", "#c2559d", "#7d8590", "#9a6fd0", "#0e9aa7", "#a06a4c")  # more look alike


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


def _short(value: float) -> float | None:
    """A number as the page carries it."""
    return None if not np.isfinite(value) else round(float(value), 5)


def _labels(titles: Mapping[str, Heading]) -> dict[str, str]:
    """Titles by name, with the name where two have the same title."""
    given = [heading.title for heading in titles.values()]
    return {
        name: heading.title if given.count(heading.title) == 1 else f"{heading.title} ({name})"
        for name, heading in titles.items()
    }


def _line(name: str, label: str, block: str, on: bool) -> Legend:
    return Legend(label, colour(name), shape(name), label, dashed=block != RANKED, on=on)


def _at_first(names: Sequence[str]) -> set[str]:
    """Which of these are switched on at first: the usual ones and all that are not of the catalogue."""
    first = {name for name in names if name in AT_FIRST or name.partition("[")[0] not in (*CATALOGUE, ALL_DATA)}
    return first or set(names)


# All calibrators ---------------------------------------------------------------------------------------------


def errors_by_group(study: Study) -> Chart | None:
    """The ECE of every calibrator on all images and on those predicted as old and new classes, between the limits."""
    titles = study.titles()
    labels = _labels(titles)
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
        told = [(None, None, GROUP_TITLES[group], _percent(found[group], notes[group])) for group in found]
        for group, spread in found.items():
            place = {"key": GROUP_TITLES[group], "group": group, "label": label}
            rows.append({**place, "value": _short(spread.mean), "tip": tip(label, told)})
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
        touched(
            "errors",
            {"y": y},
            {"type": "bar", "height": {"band": 1}},
            [{"filter": "datum.group == 'all'"}],
        ),
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


def _percent(spread: Spread, note: str = "") -> str:
    shown = f"{spread.mean:.2f} %" if spread.n < 2 else f"{spread.mean:.2f} ± {spread.std:.2f} %"
    return f"{shown} ({note})" if note else shown


def _limits(study: Study) -> tuple[dict[str, Rows], list[Spec], list[str]]:
    """The noise floor as an area and the oracle as a line, across the picture: data, layers, and words."""
    floor = noise_floor(study)
    oracle = [100 * value for value in study.means(ORACLE, "ece") if value is not None] if study.having(ORACLE) else []
    limits: dict[str, Rows] = {}
    layers: list[Spec] = []
    words = [""]
    if floor is not None:
        mean = sum(floor) / len(floor)
        limits["floor"] = [{"low": 0, "high": _short(mean)}]
        x = {"field": "low", "type": "quantitative"}
        area = {"type": "rect", "color": FLOOR, "opacity": 0.6}
        layers.append({"data": {"name": "floor"}, "mark": area, "encoding": {"x": x, "x2": {"field": "high"}}})
        words += [f"noise floor {mean:.1f}"]
        words[0] += " Grey: the noise floor."
    if oracle and len(oracle) == len(study.runs):
        mean = sum(oracle) / len(oracle)
        limits["oracle"] = [{"at": _short(mean)}]
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
    labels = _labels(in_order(titles))
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
                shown = _percent(spread, study.fewer_tasks(name, metric))
                told = tip(study.title, [(None, None, f"{label}, {GROUP_TITLES[group]}", shown)])
                row = {"key": keys[place], "label": label, "group": group, "value": _short(spread.mean), "tip": told}
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
        (_group_control(),),
    )


def _group_control() -> Control:
    return Control("group", "Images", tuple(GROUP_TITLES.items()), "all")


# By task -----------------------------------------------------------------------------------------------------


def error_by_task(study: Study) -> Chart | None:
    """The ECE after each task with its intervals and the noise floor; of all images, or of one predicted group."""
    return _by_task(study, ERROR_OF, "ECE", "%", list(study.titles()), scale=100)


def temperature_by_task(study: Study, names: Sequence[str] = TEMPERATURES) -> Chart | None:
    """The temperatures after each task."""
    return _by_task(study, {"all": "temperature"}, "temperature", "", names, scale=1)


def _by_task(
    study: Study, metrics: Mapping[str, str], what: str, unit: str, names: Sequence[str], *, scale: float
) -> Chart | None:
    titles = study.titles()
    labels = _labels(titles)
    tasks = [task.task for task in study.runs[0].tasks]
    several, digits = len(study.runs) > 1, 1 if unit else 2
    rows: Rows = []
    told: list[list[tuple[str | None, str | None, str, str]]] = [[] for _ in tasks]
    table, words, banded, present = {}, [], [], []
    for name in (name for name in names if name in titles):
        for group, metric in metrics.items():
            values = scale * stack([run.values(name, metric) for run in study.runs])
            if np.isnan(values).all():
                continue
            mean, ends = values.mean(0), scale * _interval(study, name, metric)
            if group == "all":
                present.append(name)
                table[labels[name]] = values.T
                words.append(f"{labels[name]} {listed(mean, digits)}")
                banded += [labels[name]] if name in BANDS and not np.isnan(ends).all() else []
            for place, task in enumerate(tasks):
                if not np.isfinite(mean[place]):
                    continue
                row: Spec = {"key": labels[name], "group": group, "task": task, "value": _short(mean[place])}
                row |= {"dashed": titles[name].block != RANKED}
                text = _percent(Spread.of(list(values[:, place]))) if unit else f"{mean[place]:.3f}"
                if name in BANDS and np.isfinite(ends[:, place]).all():
                    row |= {"low": _short(ends[0, place]), "high": _short(ends[1, place])}
                if np.isfinite(ends[:, place]).all() and not several:
                    text += f" ({ends[0, place]:.2f} to {ends[1, place]:.2f})"
                if several:
                    row |= {"least": _short(values[:, place].min()), "most": _short(values[:, place].max())}
                rows.append(row)
                told[place].append((labels[name], group, labels[name], text))
    if not present:
        return None
    first = _at_first(present) if unit else set(present)
    legend = [_line(name, labels[name], titles[name].block, name in first) for name in present]
    groups = [group for group in metrics if any(row["group"] == group for row in rows)]
    controls = (Control("group", "Images", tuple((g, GROUP_TITLES[g]) for g in groups), "all"),)
    floor = noise_floor(study) if unit else None
    title = f"{what}, {unit}" if unit else what
    datasets: dict[str, Rows] = {"values": rows}
    datasets["touch"] = [
        {"from": task - 0.5, "to": task + 0.5, "tip": tip(f"After task {task}", lines)}
        for task, lines in zip(tasks, told, strict=True)
    ]
    if floor is not None:
        datasets["floor"] = [{"task": task, "floor": _short(value)} for task, value in zip(tasks, floor, strict=True)]
        for line, value in zip(datasets["touch"], floor, strict=True):
            line["tip"]["rows"].append([None, "all", "noise floor", f"{value:.2f} %"])
    layers = _task_layers(legend, title, tasks, several, floor is not None)
    caption = f"{what[0].upper()}{what[1:]} after each task{f', in {unit}' if unit else ''}."
    if banded:
        ends_of = ", the mean of the seeds' where all have one" if several else ""
        caption += f" Bands: 95 % bootstrap intervals over images{ends_of} ({', '.join(banded)})."
    caption += " Upright strokes: the range over seeds." if several else ""
    shown = [*legend, *([Legend("noise floor", FLOOR, line=False)] if floor is not None else [])]
    return Chart(
        layered(layers, WIDTH, HEIGHT),
        (Panel(datasets),),
        caption,
        f"{title} after each task: " + "; ".join(words),
        tuple(shown),
        controls,
        drawn(f"{title[0].upper()}{title[1:]}, after each task", tasks, table),
    )


def _task_layers(legend: Sequence[Legend], title: str, tasks: Sequence[int], several: bool, floor: bool) -> list[Spec]:
    axis = {"values": list(tasks), "format": "d", "grid": False}
    scale = {"domain": [tasks[0] - 0.5, tasks[-1] + 0.5], "nice": False}
    x = {"field": "task", "type": "quantitative", "title": "after task", "axis": axis, "scale": scale}
    y = {"field": "value", "type": "quantitative", "title": title, "scale": {"zero": True}}
    base: Spec = {"data": {"name": "values"}, "transform": [chosen("group")]}
    hue = coloured(legend)
    layers: list[Spec] = []
    if floor:
        area = {"type": "area", "color": FLOOR, "opacity": 0.6}
        under = {"x": x, "y": {**y, "field": "floor"}}
        where = [{"filter": "group == 'all'"}]
        layers.append({"data": {"name": "floor"}, "transform": where, "mark": area, "encoding": under})
    with_ends = [*base["transform"], {"filter": "isValid(datum.low)"}]
    layers.append(
        {
            "data": {"name": "values"},
            "transform": with_ends,
            "mark": {"type": "area", "opacity": 0.16},
            "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": hue},
        }
    )
    if several:
        ends = {"x": x, "y": {**y, "field": "least"}, "y2": {"field": "most"}, "color": hue}
        layers.append({**base, "mark": {"type": "rule", "strokeWidth": 1.2, "opacity": 0.7}, "encoding": ends})
    solid_or_dashed = {"domain": [False, True], "range": [[1, 0], [5, 3]]}
    dash: Spec = {"field": "dashed", "type": "nominal", "legend": None, "scale": solid_or_dashed}
    layers += [
        {**base, "mark": {"type": "line"}, "encoding": {"x": x, "y": y, "color": hue, "strokeDash": dash}},
        {
            **base,
            "mark": {"type": "point", "filled": True, "size": 55, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": hue, "shape": marked(legend)},
        },
        touched("touch", {"x": {**x, "field": "from"}, "x2": {"field": "to"}}, {"type": "rect"}),
    ]
    return layers


def _interval(study: Study, name: str, metric: str) -> Values:
    """Both ends by task, mean over seeds: test images are the same for all, so that their share of chance is too."""
    rows = [[task.answer(name) for task in run.tasks] for run in study.runs]
    ends = [[(row.interval(metric) if row else None) or (np.nan, np.nan) for row in by_task] for by_task in rows]
    both: Values = np.array(ends, dtype=np.float64).mean(0).T
    return both


# Reliability -------------------------------------------------------------------------------------------------

OVER, UNDER, CORRECT = "#d9363e", "#2f7fd1", "#9fb0c3"


def reliability(study: Study) -> Chart | None:
    """Reliability diagrams after each task, seeds pooled, with the histograms of confidence below."""
    titles = study.titles()
    labels = _labels(titles)
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
    first = _at_first(names)
    legend = [
        *(_line(name, labels[name], titles[name].block, name in first) for name in names),
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
        means = {"confidence": _short(own), "accuracy": _short(right)}  # the page makes its words of these
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


# Classes and the search --------------------------------------------------------------------------------------


def error_by_class(study: Study) -> Chart | None:
    """Confidence minus accuracy of every class after the last task, seeds averaged, in the order of learning."""
    titles = study.titles()
    labels = _labels(titles)
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
            rows.append({"key": label, "class": place, "value": _short(mean[place])})
            told[place].append((label, None, label, f"{mean[place]:+.1f} points"))
    if not present:
        return None
    first = _at_first(present) & {"vanilla", "t-cil", "pact"} or _at_first(present)
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


def search_trace(study: Study, calibrator: str = "t-cil") -> Chart | None:
    """Temperature of the perturbed new exemplars against the magnitude, with the target and what was chosen."""
    run = study.runs[0]
    answers = [(task.task, task.answer(calibrator)) for task in run.tasks]
    searches = [(task, row.result) for task, row in answers if row is not None and row.result is not None]
    traces = [
        (task, search, search.magnitude, search.target_temperature)
        for task, search in searches
        if search.reachable and search.magnitude is not None and search.target_temperature is not None
    ]
    if not traces:
        return None
    rows: Rows = []
    found: Rows = []
    words, legend = [], []
    for place, (task, search, magnitude, target) in enumerate(traces):
        key = f"task {task}"
        legend.append(Legend(key, _shade(place, len(traces)), "circle", key))
        steps = sorted((step.magnitude, step.temperature) for step in search.trace)
        for at, temperature in (step for step in steps if np.isfinite(step[1])):
            lines = [("magnitude", f"{at:.4f}"), ("temperature", f"{temperature:.3f}")]
            told = tip(f"Task {task}, a step of the search", [(None, None, *line) for line in lines])
            rows.append({"key": key, "magnitude": at, "temperature": temperature, "tip": told})
        lines = [("magnitude", f"{magnitude:.4f}"), ("target temperature", f"{target:.3f}")]
        told = tip(f"Task {task}, chosen", [(None, None, *line) for line in lines])
        found.append({"key": key, "magnitude": magnitude, "temperature": target, "tip": told})
        words.append(f"task {task}: magnitude {magnitude:.3f} for target {target:.2f}")
    most, highest = max(t[2] for t in traces), max(t[3] for t in traces)
    x: Spec = {"field": "magnitude", "type": "quantitative", "title": "magnitude of the perturbation"}
    x["scale"] = {"domain": [0, 2 * most or 1], "nice": False}
    y: Spec = {"field": "temperature", "type": "quantitative", "title": "temperature of perturbed new exemplars"}
    y["scale"] = {"domain": [0, 2 * highest or 1], "nice": False}
    base: Spec = {"data": {"name": "steps"}, "transform": [chosen()]}
    hue = coloured(legend)
    encoding = {"x": x, "y": y, "color": hue}
    said = {"content": "data"}
    layers: list[Spec] = [
        {**base, "mark": {"type": "line", "strokeWidth": 1.3, "clip": True}, "encoding": encoding},
        {
            **base,
            "mark": {"type": "circle", "size": 26, "opacity": 1, "clip": True, "tooltip": said},
            "encoding": encoding,
        },
        {
            "data": {"name": "found"},
            "transform": [chosen()],
            "mark": {"type": "point", "shape": SHAPE_FOUND, "filled": True, "size": 190, "opacity": 1, "tooltip": said,
                     "stroke": INK, "strokeWidth": 0.7},
            "encoding": encoding,
        },
    ]  # fmt: skip
    seed = f", seed {run.seed}" if len(study.runs) > 1 else ""
    caption = (
        f"T-CIL's search{seed}: each step, and the magnitude that was chosen for the target temperature (stars). Steps"
        " beyond twice the largest magnitude or target are not in the picture."
    )
    return Chart(
        layered(layers, WIDTH, HEIGHT),
        (Panel({"steps": rows, "found": found}),),
        caption,
        "; ".join(words),
        tuple(legend),
    )


def _shade(place: int, count: int) -> str:
    """The colour of a task, from first to last."""
    at = place / max(1, count - 1) * (len(SEQUENCE) - 1)
    low = min(int(at), len(SEQUENCE) - 2)
    mixed = [round(a + (at - low) * (b - a)) for a, b in zip(SEQUENCE[low], SEQUENCE[low + 1], strict=True)]
    return "#" + "".join(f"{part:02x}" for part in mixed)
