"""One picture for each question of docs/results.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from research.overview.sources import IMAGES, TITLES, Source, main_sources, official
from tcil.experiments.reporting.palette import colour
from tcil.experiments.reporting.plots import MARKERS, Picture, drawing, picture
from tcil.experiments.reproduction.schedules import LEARNERS
from tcil.foundation.files import replace_file

COLUMNS = 4  # panels of a row, where sources and the authors' checkpoints stand side by side


def questions(found: Sequence[Source]) -> Iterator[str]:
    """The pictures, each under the question that it answers."""
    yield "## Which calibrator is nearest to the oracle?\n"
    yield _saved(nearness(found), "nearness")
    yield "## Does it last from task to task?\n"
    first, *others = main_sources(found)
    yield _saved(over_tasks(first), "tasks-0")
    yield f"The same for {' and for '.join(source.name for source in others)}: [all tables](results-tables.md).\n"
    yield "## What does one temperature hide?\n"
    yield _saved(hidden(found), "hidden")
    yield "## Is T-CIL's temperature the right one?\n"
    yield _saved(temperatures(found), "temperatures")


def task_by_task(found: Sequence[Source]) -> Iterator[str]:
    """The pictures by task of the other sources."""
    yield "## ECE after each task\n"
    for number, source in enumerate(main_sources(found)[1:], start=1):
        yield _saved(over_tasks(source), f"tasks-{number}")


def _panels(axes: Any, count: int) -> list[Axes]:
    """The first axes of a grid, row by row; the others are taken away."""
    every = list(axes.flat)
    for spare in every[count:]:
        spare.remove()
    return every[:count]


def _rows(panels: int) -> int:
    return -(-panels // COLUMNS)


def nearness(found: Sequence[Source]) -> Picture:
    """ECE by calibrator, a panel for each source, a mark for each learner."""
    names, words = list(reversed(TITLES)), []
    rows_of = _rows(len(found) + 1)
    with drawing(rows_of, COLUMNS, width=10, height=2.8 * rows_of) as (figure, axes):
        panels = _panels(axes, len(found) + 1)
        for number, (axis, source) in enumerate(zip(panels, found, strict=False)):
            for learner in source.by_learner:
                values = [source.percent(learner, name) for name in names]
                rows = [row for row, value in enumerate(values) if value is not None]
                marks = [value for value in values if value is not None]
                mark = MARKERS[LEARNERS.index(learner)]  # the same in every panel
                _marks(axis, marks, rows, [names[row] for row in rows], mark, learner.upper())
                told = ", ".join(f"{names[row]} {values[row]:.1f}" for row in rows)
                words.append(f"{source.name}, {learner.upper()}: {told}")
            _panel(axis, source.name, names, first=number % COLUMNS == 0)
        last, record = panels[-1], official()
        own = [name for name in names if name in record]
        marks = [float(np.mean(record[name])) for name in own]
        _marks(last, marks, [names.index(name) for name in own], own, MARKERS[0], "ER")
        _panel(last, "authors' checkpoints", names, first=False)
        for axis in panels:  # one scale, so that panels can be compared
            axis.set_xlim(0, max(panel.get_xlim()[1] for panel in panels))
        words.append("authors' checkpoints, ER: " + ", ".join(f"{n} {v:.1f}" for n, v in zip(own, marks, strict=True)))
        _legend(figure, panels)
        caption = (
            "ECE by calibrator, mean over tasks and seeds; a mark for each learner. Calibrators of the paper and PACT"
            " see no unseen images of old classes, the oracle sees the test labels."
        )
        return picture(figure, caption, "ECE, %. " + "; ".join(words))


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend for all panels, below them; what several panels have counts once."""
    handles = [axis.get_legend_handles_labels() for axis in panels]
    by_label = {label: handle for pair in handles for handle, label in zip(*pair, strict=True)}
    order = [name.upper() for name in LEARNERS]
    labels = sorted(by_label, key=lambda label: order.index(label) if label in order else len(order))
    figure.legend([by_label[label] for label in labels], labels, loc="outside lower center", ncols=4, frameon=False)


def _marks(axis: Axes, x: Sequence[float], y: Sequence[int], names: Sequence[str], mark: str, label: str) -> None:
    axis.scatter(x, y, c=[colour(name) for name in names], marker=mark, s=34, alpha=0.85, linewidths=0)
    axis.scatter([], [], c="#444444", marker=mark, label=label)


def _panel(axis: Axes, title: str, names: Sequence[str], first: bool) -> None:
    axis.set(title=title, xlabel="ECE, %")
    axis.set_yticks(range(len(names)), [TITLES[name] for name in names] if first else [""] * len(names))
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.set_xlim(left=0)


def over_tasks(source: Source) -> Picture:
    """ECE after each task, a panel for each learner."""
    names, words = [name for name in TITLES if name not in ("ets", "irm")], []
    with drawing(1, len(source.by_learner), width=10, height=2.9) as (figure, axes):
        for axis, (learner, study) in zip(axes[0], source.by_learner.items(), strict=True):
            for index, name in enumerate(names):
                rows = [[value or np.nan for value in run.values(name, "ece")] for run in study.runs]
                mean = 100 * np.array(rows, dtype=float).mean(axis=0)
                axis.plot(
                    mean, color=colour(name), marker=MARKERS[index], markersize=3.5, label=TITLES[name],
                    linestyle="--" if name == "optimal-ts" else "-",
                )  # fmt: skip
                told = ", ".join(f"{value:.1f}" for value in mean)
                words.append(f"{learner.upper()}, {TITLES[name]}: {told}")
            axis.set(title=f"{learner.upper()}", xlabel="after task", xticks=range(study.n_tasks))
            axis.set_ylim(bottom=0)
        axes[0][0].set_ylabel("ECE, %")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
        caption = f"ECE after each task, mean over seeds: {source.described}."
        return picture(figure, caption, "ECE after each task, %. " + "; ".join(words))


def hidden(found: Sequence[Source]) -> Picture:
    """ECE of images predicted as old and as new classes: a line between them for each learner and calibrator."""
    names, words = ("pact", "optimal-ts", "t-cil"), []
    with drawing(_rows(len(found)), COLUMNS, width=11, height=3.2 * _rows(len(found))) as (figure, axes):
        panels = _panels(axes, len(found))
        for axis, source in zip(panels, found, strict=True):
            labels = []
            for place, (name, learner) in enumerate(product(names, reversed(list(source.by_learner)))):
                old, new = (source.percent(learner, name, f"ece_predicted_{group}") for group in ("old", "new"))
                labels.append(f"{TITLES[name].split(' (')[0]}, {learner.upper()}")
                if old is None or new is None:
                    continue
                axis.plot([old, new], [place, place], color="#bbbbbb", linewidth=1.5, zorder=1)
                axis.scatter([old], [place], color="#4c9fd8", s=30, zorder=2, label="" if place else "predicted old")
                axis.scatter(
                    [new], [place], color="#f2a154", s=30, zorder=2, marker="D", label="" if place else "predicted new"
                )
                words.append(f"{source.name}, {labels[-1]}: {old:.1f} and {new:.1f}")
            axis.set_yticks(range(len(labels)), labels, fontsize=7)
            axis.set(title=source.name, xlabel="ECE, %")
            axis.set_xlim(left=0)
        _legend(figure, panels)
        caption = (
            "ECE of images predicted as old classes and as new classes, mean over tasks and seeds. One temperature,"
            " even the oracle's, leaves one of the two far from 0 with most learners; PACT has a bias between them."
        )
        return picture(figure, caption, "ECE predicted old and predicted new, %. " + "; ".join(words))


def temperatures(found: Sequence[Source]) -> Picture:
    """T-CIL's temperature over the optimal one, by task."""
    words = []
    with drawing(_rows(len(found)), COLUMNS, width=10, height=2.5 * _rows(len(found))) as (figure, axes):
        panels = _panels(axes, len(found))
        for axis, source in zip(panels, found, strict=True):
            axis.axhline(1, color="#444444", linewidth=0.8)
            for learner, study in source.by_learner.items():
                place = LEARNERS.index(learner)  # the same mark and colour in every panel
                ours, optimal = (
                    np.array([run.values(name, "temperature") for run in study.runs], dtype=float).mean(axis=0)
                    for name in ("t-cil", "optimal-ts")
                )
                axis.plot(ours / optimal, color=f"C{place}", marker=MARKERS[place], markersize=4, label=learner.upper())
                told = ", ".join(f"{ratio:.2f}" for ratio in ours / optimal)
                words.append(f"{source.name}, {learner.upper()}: {told}")
            axis.set(title=source.name, xlabel="after task")
            axis.set_xticks(range(max(study.n_tasks for study in source.by_learner.values())))
        for first in panels[::COLUMNS]:
            first.set_ylabel("T of T-CIL / optimal T")
        _legend(figure, panels)
        caption = "T-CIL's temperature over the optimal one, after each task, mean over seeds. Above 1: too high."
        return picture(figure, caption, "T-CIL's temperature over the optimal one. " + "; ".join(words))


def _saved(drawn: Picture, name: str) -> str:
    replace_file(IMAGES / f"{name}.svg", drawn.svg.encode())
    return f"![{drawn.words}](images/overview/{name}.svg)\n\n*{drawn.caption}*\n"
