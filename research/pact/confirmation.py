"""Round nine, a confirmation without a candidate: `python -m research.pact ninth RUNS`, with RUNS from `train`.

The final worlds F17 to F19 are measured once, with methods that earlier rounds did not compare. With those of round
eight they are six worlds, over which intervals resample; nothing was chosen on F17 to F19.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from research import ROOT
from research.pact import compared, measuring, rounds, small
from research.pact.methods import METHODS
from research.pact.tables import each_learner, harms, learners, mean, of_learner, ratio_errors, rms, world_of
from research.pact.worlds import LEARNERS, NINTH, final_settings
from tcil.experiments.runs.store import RunFolder

FOLDER = "round-nine"
IMAGE = ROOT / "docs/images/pact-runs.svg"
FORMS = ("PACT", "PACT-R")
NO_OLD_DATA = (
    "Vanilla", "TS", "First-task TS", "T-CIL", "T-CIL and imbalance", "whole imbalance", "Prior2Posterior", "PACT",
)  # fmt: skip
RESERVE = (
    "replayed calibration", "balanced TS", "balanced group TS", "distance-aware TS", "BiC layer and T", "BCTS",
    "vector scaling", "T and bias by the reserve alone", "PACT-R",
)  # fmt: skip
CORRECTED = ("BiC layer and T", "PACT, predictions too", "PACT-R, predictions too")
_OURS = tuple(f"{form}, centred" for form in FORMS)  # as `methods` calls the present form
_PARTS = tuple(f"PACT, centred, without {part}" for part in ("new classes", "surrogate", "label shift", "history"))
MEASURED = {
    **{
        name: METHODS[name][1]
        for name in (*NO_OLD_DATA, *RESERVE, *rounds.ORACLES)
        if name in METHODS and name not in FORMS
    },
    **compared.METHODS,
    **{name: METHODS[name][1] for name in (*_OURS, *(f"{name}, predictions too" for name in _OURS), *_PARTS)},
}
COLUMNS = {
    "pooled": "{:.2f}", "debiased": "{:.2f}", "smooth": "{:.2f}", "group": "{:.2f}", "worst task": "{:.2f}",
    "nll": "{:.3f}", "brier": "{:.4f}", "calibration": "{:.4f}", "aurc": "{:.2f}", "accuracy": "{:.2f}",
}  # fmt: skip
TITLES = {
    "pooled": "ECE", "debiased": "debiased ECE", "smooth": "smooth ECE", "group": "ECE by group", "nll": "NLL",
    "brier": "Brier score", "calibration": "its calibration part", "aurc": "AURC",
}  # fmt: skip
DRAWS = 10_000
Records = Sequence[dict[str, Any]]


def run(out: Path) -> None:
    """Measure worlds that every learner is trained on and that have no record yet; print tables, draw the picture."""
    folders = list[Path]()
    for world in NINTH:
        own = [out / final_settings(world, learner).name for learner in LEARNERS]
        done = [folder for folder in own if RunFolder(folder).read_results() is not None]
        print(f"{world}: {len(done)} of {len(own)} runs are trained")
        if len(done) == len(own):
            folders += done
    measuring.store(FOLDER, folders, MEASURED, _OURS)
    print("\n".join(tables()))
    draw()


def fresh() -> list[dict[str, Any]]:
    """Round nine alone."""
    return rounds.stored(rounds.EIGHT, FOLDER)


def letters() -> list[dict[str, Any]]:
    """The worlds of `letters` of rounds eight and nine."""
    both = [*rounds.stored(rounds.EIGHT), *fresh()]
    return [record for record in both if record["about"]["dataset"].startswith("letters")]


def real() -> list[dict[str, Any]]:
    """The runs on real images of round eight."""
    return sorted((r for r in rounds.stored(rounds.EIGHT) if r["about"]["dataset"] in small.TITLES), key=small.place)


def tables() -> list[str]:
    """Round nine by learner and by metric, its goals and harm; then intervals over six worlds."""
    own, both = fresh(), letters()
    if not own:
        return ["(none yet)"]
    worlds = len({world_of(record) for record in both})
    return [
        *by_learner(own), "", *by_metric(own), "", *small.goals(f"{len(own)} runs of round nine", own, FORMS), "",
        *harms(own, FORMS), "",
        *small.goals(f"rounds eight and nine, {len(both)} runs in {worlds} worlds", both, FORMS), "",
        *harms(both, FORMS), "", *differences(both), "", *claimed(both),
    ]  # fmt: skip


def by_learner(records: Records) -> list[str]:
    """Pooled ECE / ECE by group of every method."""
    names = learners(records)
    head = "| method | all | " + " | ".join(name.upper() for name in names) + " |"
    lines = [
        f"**Pooled ECE / ECE by predicted group, % ({len(records)} runs)**",
        "",
        head,
        "|" + "---|" * (len(names) + 2),
    ]
    for title, methods in _blocks(records).items():
        lines.append(f"| *{title}* |" + " |" * (len(names) + 1))
        for method in methods:
            pairs = zip(*(each_learner(records, _mean_of(method, key)) for key in ("pooled", "group")), strict=True)
            lines.append(f"| {method} | " + " | ".join(f"{p:.2f} / {g:.2f}" for p, g in pairs) + " |")
    return lines


def by_metric(records: Records) -> list[str]:
    """Every metric of every method, learners counting equally."""
    titles = [TITLES.get(column, column) for column in COLUMNS]
    lines = ["**All metrics, means over learners**", "", "| method | " + " | ".join(titles) + " |"]
    lines.append("|---|" + "---:|" * len(COLUMNS))
    for title, methods in {**_blocks(records), "predictions corrected as well": CORRECTED}.items():
        lines.append(f"| *{title}* |" + " |" * len(COLUMNS))
        for method in methods:
            cells = [form.format(each_learner(records, _mean_of(method, key))[0]) for key, form in COLUMNS.items()]
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return [*lines, "", "ECE, AURC and accuracy in percent. Worst task: the largest ECE of a run, mean over runs."]


def _blocks(records: Records) -> dict[str, Sequence[str]]:
    known = set.intersection(*(set(record["scores"]) for record in records))
    return {
        "no image of an old class held out": [name for name in NO_OLD_DATA if name in known],
        "two held-out images of each old class": [name for name in RESERVE if name in known],
        "test labels": rounds.ORACLES,
    }


def _mean_of(method: str, key: str) -> Callable[[list[dict[str, Any]]], float]:
    if key == "worst task":
        return lambda own: float(np.mean([max(row["pooled"] for row in r["scores"][method]) for r in own]))
    return lambda own: mean(own, method, key)


PAIRS = (
    ("PACT", "Optimal TS"), ("PACT", "T-CIL"), ("PACT-R", "Optimal TS"), ("PACT-R", "PACT"), ("PACT-R", "balanced TS"),
    ("PACT-R", "BiC layer and T"),
)  # fmt: skip


def differences(records: Records) -> list[str]:
    """Paired differences, with intervals that resample worlds; learners of a world count equally."""
    worlds = sorted({world_of(record) for record in records})
    parts = [[record for record in records if world_of(record) == world] for world in worlds]
    lines = [
        f"**Differences, 95 % intervals over {len(worlds)} worlds**", "",
        "| difference | pooled ECE | ECE by group | NLL |", "|---|---|---|---|",
    ]  # fmt: skip
    for ours, other in PAIRS:
        cells = list[str]()
        for key, form in (("pooled", "{:+.2f}"), ("group", "{:+.2f}"), ("nll", "{:+.4f}")):
            own = [each_learner(part, lambda r, k=key: mean(r, ours, k) - mean(r, other, k))[0] for part in parts]  # type: ignore[misc]  # noqa: B023
            low, high = _interval(np.mean, own)
            cells.append(f"{form.format(np.mean(own))} ({form.format(low)} to {form.format(high)})")
        lines.append(f"| {ours} less {other} | {' | '.join(cells)} |")
    return lines


def claimed(records: Records) -> list[str]:
    """The root mean square of error / claimed error by learner, with intervals that resample its runs."""
    names = learners(records)
    lines = [
        "**RMS of error / claimed error, 95 % intervals over runs; the goal is that each covers 1**", "",
        "| form | of | " + " | ".join(name.upper() for name in names) + " |", "|" + "---|" * (len(names) + 2),
    ]  # fmt: skip
    for form in FORMS:
        for which, what in enumerate(("log T", "b")):
            cells = list[str]()
            for name in names:
                squares = [rms(ratio_errors([record], form, which)) ** 2 for record in of_learner(records, name)]
                low, high = _interval(lambda drawn: float(np.sqrt(np.mean(drawn))), squares)
                cells.append(f"{np.sqrt(np.mean(squares)):.2f} ({low:.2f} to {high:.2f})")
            lines.append(f"| {form} | {what} | {' | '.join(cells)} |")
    return lines


def _interval(statistic: Callable[[Any], Any], values: Sequence[float]) -> tuple[float, float]:
    drawn = np.random.default_rng(0).choice(values, size=(DRAWS, len(values)))
    low, high = np.quantile([statistic(row) for row in drawn], [0.025, 0.975])
    return float(low), float(high)


SHOWN = {"TS": "#b8860b", "T-CIL": "#2a9d8f", "PACT": "#1f4e9c", "PACT-R": "#d1495b"}


@matplotlib.rc_context({"svg.hashsalt": "tcil", "font.size": 9, "svg.fonttype": "none"})
def draw() -> None:
    """Every final run of the present form as a point: pooled ECE less that of the oracle temperature."""
    panels = {"letters, six worlds": letters(), "CIFAR and Tiny-ImageNet": real()}
    names = [name for name in LEARNERS if any(of_learner(records, name) for records in panels.values())]
    figure = Figure(figsize=(9.4, 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (title, records) in zip(axes, panels.items(), strict=True):
        for row, name in enumerate(names):
            for place, (method, colour) in enumerate(SHOWN.items()):
                own = of_learner(records, name)
                x = [mean([record], method, "pooled") - mean([record], "Optimal TS", "pooled") for record in own]
                y = np.full(len(x), len(names) - row + 0.27 - 0.18 * place)
                axis.scatter(x, y, s=26, color=colour, alpha=0.75, linewidths=0, label=method if not row else None)
        axis.axvline(0, color="#444444", linewidth=1)
        axis.set_title(title)
        axis.set_xscale("symlog", linthresh=2, linscale=1.2)
        axis.set_xticks([-4, -2, -1, 0, 1, 2, 4, 10, 20], ["-4", "-2", "-1", "0", "1", "2", "4", "10", "20"])
        axis.minorticks_off()
        axis.set_xlabel("pooled ECE less that of the oracle temperature, points")
        axis.set_yticks(range(1, len(names) + 1), [name.upper() for name in names[::-1]])
        axis.grid(axis="x", color="#dddddd", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    handles, titles = axes[0].get_legend_handles_labels()
    figure.legend(handles, titles, loc="outside lower center", ncols=len(SHOWN), frameon=False)
    figure.savefig(IMAGE, format="svg", metadata={"Date": None})
