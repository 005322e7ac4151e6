"""The paper's figures, drawn from our runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes

from tcil.experiments.reporting.charts import Chart
from tcil.experiments.reporting.collect import Study
from tcil.experiments.reporting.figures import Values, drawn, listed, temperature_by_task
from tcil.experiments.reporting.palette import colour
from tcil.experiments.reporting.plots import MARKERS, Picture, drawing, picture
from tcil.experiments.runs.analysed import POLICIES
from tcil.experiments.runs.catalogue import ALL_DATA

POLICY_COLOURS = {"paper": "#d62728", "random": "#7f7f7f", "closest": "#1f77b4", "farthest": "#e0a030"}


def temperature_bias(study: Study) -> Chart | None:
    """Temperatures of the new task's validation set and of the whole test set, by task."""
    return temperature_by_task(study, ("ts", "optimal-ts", "t-cil"))


def task_accuracy(study: Study) -> Picture:
    """Accuracy by task, on test images and on exemplars, after the last task."""
    rows, memories = [run.row(-1, "vanilla") for run in study.runs], [run.tasks[-1].memory for run in study.runs]
    test = np.array([_shares(row.by_task.accuracy) for row in rows if row is not None and row.by_task is not None])
    memory = np.array([_shares(one.accuracy_by_task or ()) for one in memories if one is not None])
    with drawing(height=2.9) as (figure, axes):
        axis: Axes = axes[0, 0]
        positions = np.arange(test.shape[1])
        axis.bar(
            positions - 0.2, 100 * test.mean(0), 0.38, yerr=100 * test.std(0), color="#4c9fd8", label="test images"
        )
        axis.bar(
            positions + 0.2, 100 * memory.mean(0), 0.38, yerr=100 * memory.std(0), color="#f2a154", label="exemplars"
        )
        axis.set(xlabel="task", ylabel="accuracy, %", xticks=positions, ylim=(0, 105))
        axis.grid(axis="x", visible=False)
        figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", frameon=False, ncols=2)
        words = ", ".join(
            f"task {i}: {100 * t:.0f} and {100 * m:.0f}"
            for i, (t, m) in enumerate(zip(test.mean(0), memory.mean(0), strict=True))
        )
        caption = "Accuracy on the images of each task, after the last one"
        caption += "; bars: standard deviation over seeds." if len(study.runs) > 1 else "; one seed."
        table = drawn(
            "Accuracy on each task after the last, %",
            list(positions),
            {"test images": 100 * test.T, "exemplars": 100 * memory.T},
        )
        return picture(figure, caption, f"Accuracy on test images and exemplars, {words}", table)


def epsilon_gap(study: Study) -> Picture | None:
    """|eps*(all classes) - eps*(new classes)| by task for four policies, mean over seeds."""
    analyses = [run.analysis for run in study.runs if run.analysis]
    if not analyses:
        return None
    words, table = [], {}
    with drawing(height=3.0) as (figure, axes):
        axis: Axes = axes[0, 0]
        tasks = [task.task for task in analyses[0].tasks]
        for index, (policy, title) in enumerate(POLICIES.items()):
            gaps = np.array([[_number(task.epsilon[policy].gap) for task in one.tasks] for one in analyses])
            mean = np.ma.masked_invalid(gaps).mean(axis=0).filled(np.nan)
            axis.plot(
                tasks, mean, color=POLICY_COLOURS[policy], marker=MARKERS[index], markersize=4, label=title,
                linewidth=2.4 if policy == "paper" else 1.4,
            )  # fmt: skip
            table[title] = gaps.T
            words.append(f"{title} {listed(mean, 3)}")
        axis.set(xlabel="after task", ylabel="Δε*", xticks=tasks)
        axis.set_ylim(bottom=0)
        figure.legend(*axis.get_legend_handles_labels(), loc="outside right center", frameon=False)
        over = f"mean over {len(analyses)} seeds" if len(analyses) > 1 else "one seed"
        caption = (
            "Δε*: how far the magnitude that gives all perturbed exemplars the temperature of the whole test set is"
            f" from the one that gives the new ones that of the new classes' test images; {over}."
        )
        return picture(figure, caption, "; ".join(words), drawn("Δε* after each task", tasks, table, digits=4))


def feature_space(study: Study) -> Picture | None:
    """Exemplars before and after the perturbation, on the two main axes of their features: two old, two new classes."""
    projections = [(run.seed, run.analysis.projection) for run in study.runs if run.analysis is not None]
    seed, projection = next((pair for pair in projections if pair[1] is not None), (0, None))
    if projection is None:
        return None
    columns, before, after = (np.array(part) for part in (projection.columns, projection.before, projection.after))
    first_new, last = projection.new_from, int(columns.max())
    shown = [0, first_new // 2, first_new, last]
    titles = {column: f"class {column} ({'new' if column >= first_new else 'old'})" for column in shown}
    shades = ("#1f77b4", "#2ca9a0", "#d62728", "#e08a1e")
    with drawing(1, 2, height=3.7) as (figure, axes):
        for axis, points, title in zip(axes[0], (before, after), ("exemplars", "perturbed exemplars"), strict=True):
            axis.scatter(*points.T, s=5, color="#dddddd", linewidths=0)
            for column, shade in zip(shown, shades, strict=True):
                rows = columns == column
                axis.scatter(*points[rows].T, s=14, color=shade, label=titles[column], linewidths=0)
                if title != "exemplars":
                    # Drawn twice: with a wide white arrow below, so that points do not hide it.
                    for tint, width in (("white", 4.5), (shade, 2.0)):
                        axis.annotate(
                            "", xy=after[rows].mean(0), xytext=before[rows].mean(0), zorder=5, arrowprops={
                                "arrowstyle": "-|>,head_width=0.3,head_length=0.6", "color": tint, "lw": width,
                                "shrinkA": 0, "shrinkB": 0,
                            },
                        )  # fmt: skip
            axis.set(title=title, xlabel="first axis", ylabel="second axis")
        low = np.minimum(before.min(0), after.min(0))
        high = np.maximum(before.max(0), after.max(0))
        low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)
        for axis in axes[0]:
            axis.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=4)
        move = np.linalg.norm(after - before, axis=1)
        old, new = move[columns < first_new].mean(), move[columns >= first_new].mean()
        words = f"Mean shift on these axes: old classes {old:.2f}, new classes {new:.2f}."
        ends = {
            title: np.concatenate([points[columns == column].mean(0) for points in (before, after)])
            for column, title in titles.items()
        }
        headings = [f"{when}: {axis} axis" for when in ("before", "perturbed") for axis in ("first", "second")]
        table = drawn("Mean features of a class, before and after the push", headings, ends)
        caption = (
            f"Real features after the last task, seed {seed}, on their two main axes; arrows: how far the mean of a"
            " class moves at T-CIL's magnitude (old classes toward the nearest class, new ones toward the farthest)."
            f" {words}"
        )
        return picture(figure, caption, words, table)


def progression(studies: Sequence[Study]) -> Picture:
    """ECE by task for several learners: as trained, with T-CIL, and with the oracle."""
    names = {**_vanilla(studies), "t-cil": "T-CIL", "optimal-ts": "Optimal TS"}
    words, longest = [], max(study.n_tasks for study in studies)
    table: dict[str, Sequence[Values]] = {}
    with drawing(1, len(studies), width=max(8.0, 2.5 * len(studies) + 0.8), height=2.9) as (figure, axes):
        top = 0.0
        for axis, study in zip(axes[0], studies, strict=True):
            tasks = [task.task for task in study.runs[0].tasks]
            for index, (name, title) in enumerate(names.items()):
                values = 100 * np.array([[_number(v) for v in run.values(name, "ece")] for run in study.runs])
                mean = values.mean(0)
                style = "--" if name == "optimal-ts" else "-"
                axis.plot(tasks, mean, style, color=colour(name), marker=MARKERS[index], markersize=3.5, label=title)
                axis.fill_between(tasks, values.min(0), values.max(0), color=colour(name), alpha=0.15, linewidth=0)
                label = f"{study.learner}: {title}"
                table[label] = [*values.T, *[np.array([np.nan])] * (longest - study.n_tasks)]
                words.append(f"{label} {listed(mean)}")
                top = max(top, float(np.nanmax(values)))
            axis.set(title=study.learner, xlabel="after task", xticks=tasks)
        for axis in axes[0]:
            axis.set_ylim(0, 1.05 * top)
        axes[0, 0].set_ylabel("ECE, %")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=3)
        grid = drawn("ECE after each task, %", range(longest), table)
        return picture(figure, f"ECE by task{_spread(studies, 'bands')}.", "; ".join(words), grid)


def against_size(of: Literal["memory", "validation"], studies: Sequence[Study]) -> Picture:
    """ECE (vanilla, T-CIL, oracle) and accuracy against a size, mean over tasks, range over seeds."""
    words, table, about = [], {}, f"{of} size"
    plain = _vanilla(studies)
    with drawing(1, 2, height=3.0) as (figure, axes):
        sizes = [study.settings.memory if of == "memory" else study.settings.validation for study in studies]
        for axis, metric, names in (
            (axes[0, 0], "ece", {**plain, "t-cil": "T-CIL", "optimal-ts": "Optimal TS"}),
            (axes[0, 1], "accuracy", {"vanilla": "all calibrators"}),
        ):
            for index, (name, title) in enumerate(names.items()):
                values = [np.array([100 * _number(v) for v in study.means(name, metric)]) for study in studies]
                mean = [v.mean() for v in values]
                spread = [
                    [m - v.min() for m, v in zip(mean, values, strict=True)],
                    [v.max() - m for m, v in zip(mean, values, strict=True)],
                ]
                axis.errorbar(
                    sizes, mean, yerr=spread, color=colour(name), marker=MARKERS[index], markersize=4, label=title,
                    capsize=3, linestyle="--" if name == "optimal-ts" else "-",
                )  # fmt: skip
                pairs = ", ".join(f"{m:.1f} at {s}" for s, m in zip(sizes, mean, strict=True))
                label = f"{'ECE' if metric == 'ece' else metric} of {title}"
                words.append(f"{label}: {pairs}")
                table[label] = values
            axis.set(xlabel=about, xticks=sizes, ylabel="ECE, %" if metric == "ece" else "accuracy, %")
        axes[0, 0].set_ylim(bottom=0)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=3)
        caption = f"Against the {about}{_spread(studies, 'bars')}."
        grid = drawn(f"Against the {about}, %", sizes, table)
        return picture(figure, caption, "; ".join(words), grid)


def _vanilla(studies: Sequence[Study]) -> dict[str, str]:
    """Vanilla trained on all the data, as in the paper, if every run has it; else with validation images held out."""
    if all(study.vanilla == ALL_DATA for study in studies):
        return {ALL_DATA: "Vanilla (all data)"}
    return {"vanilla": "Vanilla (validation images held out)"}


def _spread(studies: Sequence[Study], mark: str) -> str:
    """A note on bands or bars, which show the range over seeds, if there are several."""
    counts = sorted({len(study.runs) for study in studies})
    if counts == [1]:
        return "; one seed"
    return f"; {mark}: the range over {' or '.join(map(str, counts))} seeds"


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _shares(values: Sequence[float | None]) -> list[float]:
    return [value or 0.0 for value in values]
