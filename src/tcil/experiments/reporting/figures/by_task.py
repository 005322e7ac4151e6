"""Errors and temperatures after each task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tcil.experiments.reporting.charts import (
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
from tcil.experiments.reporting.figures.parts import (
    ERROR_OF,
    GROUP_TITLES,
    HEIGHT,
    WIDTH,
    Values,
    drawn,
    labels_of,
    line_of,
    listed,
    percent,
    short,
    shown_at_first,
    stack,
)
from tcil.experiments.reporting.findings import noise_floor
from tcil.experiments.reporting.statistics import Spread
from tcil.experiments.runs.results import RANKED

BANDS = ("vanilla", "ts", "t-cil", "optimal-ts")  # more would hide each other
TEMPERATURES = ("ts", "first-task-ts", "t-cil", "optimal-ts")


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
    labels = labels_of(titles)
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
                row: Spec = {"key": labels[name], "group": group, "task": task, "value": short(mean[place])}
                row |= {"dashed": titles[name].block != RANKED}
                text = percent(Spread.of(list(values[:, place]))) if unit else f"{mean[place]:.3f}"
                if name in BANDS and np.isfinite(ends[:, place]).all():
                    row |= {"low": short(ends[0, place]), "high": short(ends[1, place])}
                if np.isfinite(ends[:, place]).all() and not several:
                    text += f" ({ends[0, place]:.2f} to {ends[1, place]:.2f})"
                if several:
                    row |= {"least": short(values[:, place].min()), "most": short(values[:, place].max())}
                rows.append(row)
                told[place].append((labels[name], group, labels[name], text))
    if not present:
        return None
    first = shown_at_first(present) if unit else set(present)
    legend = [line_of(name, labels[name], titles[name].block, name in first) for name in present]
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
        datasets["floor"] = [{"task": task, "floor": short(value)} for task, value in zip(tasks, floor, strict=True)]
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
