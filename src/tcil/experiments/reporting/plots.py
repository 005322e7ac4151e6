"""The pictures of a study as SVG: each with the words that say the same."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tcil.experiments.reporting.collect import Study
from tcil.experiments.reporting.grids import Cell, Grid, Row
from tcil.experiments.reporting.statistics import Spread
from tcil.experiments.runs.catalogue import ALL_DATA
from tcil.experiments.runs.results import RANKED, Bins, CalibratorRow

COLOURS = {
    "vanilla": "#7f7f7f", ALL_DATA: "#8f8f8f", "ts": "#1f77b4", "ets": "#17a2b8", "irm": "#2ca02c",
    "perturb-ts": "#8c564b", "t-cil": "#d62728", "pact": "#ff7f0e", "first-task-ts": "#9467bd",
    "exemplar-ts": "#e0a030", "optimal-ts": "#111111", "optimal-group-ts": "#555555", "reserve-ts": "#006d5b",
    "reserve-group-ts": "#7fb800", "pact-r": "#b35806",
}  # fmt: skip
BANDS = ("vanilla", "ts", "t-cil", "optimal-ts")  # more would hide each other
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


Values = np.ndarray[Any, np.dtype[np.float64]]


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
    return Grid(title, ("", *map(str, columns)), tuple(lines))


def colour(name: str) -> str:
    """The colour of a calibrator, the same in every picture."""
    return COLOURS.get(name, "#e377c2")


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


def by_task_curves(
    study: Study, metric: str, label: str, names: Sequence[str], *, scale: float = 100
) -> Picture | None:
    """A metric by task, mean over seeds; bands are bootstrap intervals, bars the range over seeds."""
    titles = study.titles()
    words, banded, table = [], [], {}
    with drawing() as (figure, axes):
        axis: Axes = axes[0, 0]
        tasks = np.array([task.task for task in study.runs[0].tasks])
        floor = _stack([run.values("vanilla", "noise_floor") for run in study.runs])
        if metric == "ece":
            axis.fill_between(
                tasks, 0, scale * floor.mean(0), facecolor="#e3e3e3", edgecolor="#9a9a9a", hatch="....", linewidth=0,
                label="noise floor",
            )  # fmt: skip
        for index, name in enumerate(name for name in names if name in titles):
            values = scale * _stack([run.values(name, metric) for run in study.runs])
            mean = values.mean(0)
            if np.isnan(mean).all():
                continue
            oracle = titles[name].block != RANKED
            axis.plot(
                tasks, mean, color=colour(name), label=titles[name].title, linestyle="--" if oracle else "-",
                marker=MARKERS[index % len(MARKERS)], markersize=4, linewidth=2.4 if name in ("t-cil", "pact") else 1.4,
            )  # fmt: skip
            if name in BANDS:
                low, high = scale * _interval(study, name, metric)
                axis.fill_between(tasks, low, high, color=colour(name), alpha=0.2, linewidth=0)
                banded += [] if np.isnan(low).all() else [titles[name].title]
                if len(study.runs) > 1:
                    axis.vlines(tasks, values.min(0), values.max(0), color=colour(name), linewidth=1)
            table[titles[name].title] = values.T
            words.append(f"{titles[name].title} {listed(mean, 1 if scale > 1 else 2)}")
        if not words:
            return None
        axis.set(xlabel="after task", ylabel=label, xticks=tasks)
        axis.set_ylim(bottom=0)
        figure.legend(*axis.get_legend_handles_labels(), loc="outside right center", frameon=False)
        caption = f"{label[0].upper()}{label[1:]}, by task."
        several = len(study.runs) > 1
        if banded:
            ends = ", the mean of the seeds' where all have one" if several else ""
            caption += f" Bands: 95 % bootstrap intervals over images{ends} ({', '.join(banded)})."
        caption += " Bars: the range over seeds." if several else ""
        grid = drawn(f"{label[0].upper()}{label[1:]}, after each task", list(tasks), table)
        return picture(figure, caption, f"{label} after each task: " + "; ".join(words), grid)


def listed(values: Sequence[float] | Values, digits: int = 1) -> str:
    """Numbers in words."""
    return ", ".join("n/a" if np.isnan(value) else f"{value:.{digits}f}" for value in values)


def reliability(study: Study, names: Sequence[str]) -> Picture:
    """Reliability diagrams after the last task, seeds pooled, with histograms of confidence below."""
    titles = study.titles()
    shown = {name: rows for name in names if name in titles and (rows := _after_last(study, name))}
    words = []
    edges = np.arange(10) / 10
    with drawing(2, max(1, len(shown)), width=max(4.0, 1.9 * len(shown)), height=3.9) as (figure, axes):
        for column, (name, rows) in enumerate(shown.items()):
            count, confidence, accuracy = _pooled([bins for _, bins in rows])
            top, below = axes[0, column], axes[1, column]
            top.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle=":")
            top.bar(edges, accuracy, width=0.1, align="edge", color=colour(name), alpha=0.75, edgecolor="white")
            gap = np.nan_to_num(confidence - accuracy)
            top.bar(
                edges, gap, bottom=np.nan_to_num(accuracy), width=0.1, align="edge", color="none",
                edgecolor="#444444", hatch="////", linewidth=0.4,
            )  # fmt: skip
            ece = np.mean([100 * row.ece for row, _ in rows if row.ece is not None])
            top.set(xlim=(0, 1), ylim=(0, 1), title=f"{titles[name].title}\nECE {ece:.1f} %")
            top.set_xticklabels([])
            below.bar(edges, 100 * count / count.sum(), width=0.1, align="edge", color=colour(name), edgecolor="white")
            below.set(xlim=(0, 1), xlabel="confidence")
            if column == 0:
                top.set_ylabel("accuracy")
                below.set_ylabel("share of images, %")
            pairs = [f"{c:.2f}/{a:.2f}" for c, a in zip(confidence, accuracy, strict=True) if not np.isnan(c)]
            words.append(f"{titles[name].title}, ECE {ece:.1f} %: {', '.join(pairs)}")
        caption = "Reliability after the last task: accuracy (bars) by confidence; hatched: the gap to the confidence."
        return picture(figure, caption, "Confidence/accuracy by bin. " + "; ".join(words))


def predicted_groups(study: Study, names: Sequence[str]) -> Picture:
    """Pooled ECE beside those of images predicted as old and new classes, mean over tasks."""
    titles = study.titles()
    shown = [name for name in names if name in titles and None not in study.means(name, "ece_predicted_new")]
    parts = {"ece": ("all images", "#444444"), "ece_predicted_old": ("predicted old", "#4c9fd8")}
    parts["ece_predicted_new"] = ("predicted new", "#f2a154")
    words = []
    with drawing(height=3.0) as (figure, axes):
        axis: Axes = axes[0, 0]
        positions = np.arange(len(shown))
        for offset, (metric, (label, fill)) in zip((-0.27, 0.0, 0.27), parts.items(), strict=True):
            heights = [100 * float(np.mean([v for v in study.means(n, metric) if v is not None] or [0])) for n in shown]
            axis.bar(positions + offset, heights, width=0.25, color=fill, label=label)
            words.append(
                f"{label}: " + ", ".join(f"{titles[n].title} {h:.1f}" for n, h in zip(shown, heights, strict=True))
            )
        axis.set_xticks(positions, [titles[name].title.replace(" ", "\n") for name in shown])
        axis.set_ylabel("ECE, %")
        axis.grid(axis="x", visible=False)
        figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", frameon=False, ncols=3)
        return picture(
            figure,
            "ECE of all images, and of those predicted as old and as new classes; mean over tasks.",
            "; ".join(words),
        )


def per_class(study: Study, names: Sequence[str]) -> Picture:
    """Confidence minus accuracy of every class after the last task, seeds averaged, in the order of learning."""
    titles = study.titles()
    shown = {name: rows for name in names if name in titles and (rows := _after_last(study, name))}
    words = []
    with drawing(height=2.8) as (figure, axes):
        axis: Axes = axes[0, 0]
        axis.axhline(0, color="#444444", linewidth=0.8)
        for index, (name, rows) in enumerate(shown.items()):
            gaps = _stack([row.by_class.gap for row, _ in rows if row.by_class is not None])
            mean = 100 * np.nanmean(gaps, axis=0)
            axis.plot(mean, MARKERS[index], color=colour(name), markersize=4, label=titles[name].title)
            words.append(f"{titles[name].title} from {mean.min():.0f} to {mean.max():.0f}, mean {mean.mean():.1f}")
        axis.set(xlabel="class, in the order of learning", ylabel="confidence - accuracy, points")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(*axis.get_legend_handles_labels(), loc="outside right center", frameon=False)
        return picture(
            figure, "Over-confidence (above 0) and under-confidence by class after the last task.", "; ".join(words)
        )


def search_trace(study: Study, calibrator: str = "t-cil") -> Picture | None:
    """Temperature of the perturbed new exemplars against the magnitude, with the target and what was chosen."""
    run = study.runs[0]
    rows = [(task.task, task.answer(calibrator)) for task in run.tasks]
    searches = [(task, row.result) for task, row in rows if row is not None and row.result is not None]
    traces = [
        (task, search, search.magnitude, search.target_temperature)
        for task, search in searches
        if search.reachable and search.magnitude is not None and search.target_temperature is not None
    ]
    if not traces:
        return None
    words = []
    with drawing(height=3.4) as (figure, axes):
        axis: Axes = axes[0, 0]
        shades = matplotlib.colormaps["viridis"](np.linspace(0.05, 0.85, len(traces)))
        for (task, search, magnitude, target), shade in zip(traces, shades, strict=True):
            steps = sorted((step.magnitude, step.temperature) for step in search.trace)
            steps = [step for step in steps if np.isfinite(step[1])]
            magnitudes, temperatures = zip(*steps, strict=True)
            axis.plot(
                magnitudes, temperatures, color=shade, linewidth=1, marker=".", markersize=4, label=f"task {task}"
            )
            axis.plot(
                magnitude, target, marker="*", markersize=12, color=shade,
                markeredgecolor="#222222", markeredgewidth=0.6, linestyle="none",
            )  # fmt: skip
            words.append(f"task {task}: magnitude {magnitude:.3f} for target {target:.2f}")
        most = max(magnitude for _, _, magnitude, _ in traces)
        axis.set(xlabel="magnitude of the perturbation", ylabel="temperature of the perturbed new exemplars")
        axis.set_xlim(-0.02 * most, 2 * most)
        axis.set_ylim(0, 2 * max(target for *_, target in traces))
        figure.legend(*axis.get_legend_handles_labels(), loc="outside right center", frameon=False)
        seed = f", seed {run.seed}" if len(study.runs) > 1 else ""
        caption = (
            f"T-CIL's search{seed}: steps of the search, and the chosen magnitude at the target (stars). Steps beyond"
            " twice the largest magnitude chosen, or twice the highest target, are not in the picture."
        )
        return picture(figure, caption, "; ".join(words))


def _stack(rows: Sequence[Sequence[float | None]]) -> Values:
    return np.array([[np.nan if value is None else value for value in row] for row in rows], dtype=np.float64)


def _interval(study: Study, name: str, metric: str) -> Values:
    """Both ends by task, mean over seeds: test images are the same for all, so that their share of chance is too."""
    rows = [[task.answer(name) for task in run.tasks] for run in study.runs]
    ends = [[(row.interval(metric) if row else None) or (np.nan, np.nan) for row in by_task] for by_task in rows]
    both: Values = np.array(ends, dtype=np.float64).mean(0).T
    return both


def _after_last(study: Study, name: str) -> list[tuple[CalibratorRow, Bins]]:
    """A calibrator's rows after the last task with their bins, by seed; none where a seed has no such row."""
    rows = [run.row(-1, name) for run in study.runs]
    binned = [(row, row.bins) for row in rows if row is not None and row.bins is not None]
    return binned if len(binned) == len(rows) else []


def _pooled(diagrams: Sequence[Bins]) -> tuple[Values, Values, Values]:
    """Counts, mean confidence and accuracy by bin, over all seeds."""
    count, confidence, accuracy = np.zeros(10), np.zeros(10), np.zeros(10)
    for bins in diagrams:
        counts = np.array(bins.count, dtype=float)
        count += counts
        confidence += counts * np.array([value or 0.0 for value in bins.confidence])
        accuracy += counts * np.array([value or 0.0 for value in bins.accuracy])
    with np.errstate(invalid="ignore"):
        return count, confidence / count, accuracy / count
