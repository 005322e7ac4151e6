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
from scipy.stats import t as student

from research import ROOT
from research.pact import compared, measuring, rounds, sizes, small
from research.pact.methods import METHODS
from research.pact.tables import (
    HARM_FROM,
    each_learner,
    harmful_large,
    harms,
    learners,
    mean,
    of_learner,
    ratio_errors,
    rms,
    world_of,
)
from research.pact.worlds import LEARNERS, NINTH

FOLDER = "round-nine"
ROUND_TEN = "round-ten"  # of `real_images`
IMAGE = ROOT / "docs/images/pact-runs.svg"
FORMS = ("PACT", "PACT-R")
BENNETT = "PACT-R, Bennett"
NO_OLD_DATA = (
    "Vanilla", "TS", "First-task TS", "T-CIL", "T-CIL and imbalance", "whole imbalance", "Prior2Posterior", "PACT",
)  # fmt: skip
RESERVE = (
    "replayed calibration", "balanced TS", "balanced group TS", "distance-aware TS", "BiC layer and T", "BCTS",
    "vector scaling", "T and bias by the reserve alone", BENNETT, "PACT-R",
)  # fmt: skip
CORRECTED = ("BiC layer and T", "PACT, predictions too", "PACT-R, predictions too")
OURS = tuple(f"{form}, centred" for form in FORMS)  # as `methods` calls the present form
_PARTS = tuple(f"PACT, centred, without {part}" for part in ("new classes", "surrogate", "label shift", "history"))
MEASURED = {
    **{
        name: METHODS[name][1]
        for name in (*NO_OLD_DATA, *RESERVE, *rounds.ORACLES)
        if name in METHODS and name not in (*FORMS, BENNETT)  # which have an earlier form under these names
    },
    **compared.METHODS,
    **{name: METHODS[name][1] for name in (*OURS, *(f"{name}, predictions too" for name in OURS), *_PARTS)},
}
COLUMNS = {
    "pooled": "{:.2f}", "debiased": "{:.2f}", "smooth": "{:.2f}", "group": "{:.2f}", "worst task": "{:.2f}",
    "nll": "{:.3f}", "brier": "{:.4f}", "calibration": "{:.4f}", "refinement": "{:.4f}", "aurc": "{:.2f}",
    "accuracy": "{:.2f}",
}  # fmt: skip
TITLES = {
    "pooled": "ECE", "debiased": "debiased ECE", "smooth": "smooth ECE", "group": "ECE by group", "nll": "NLL",
    "brier": "Brier score", "calibration": "its calibration part", "refinement": "the rest of it", "aurc": "AURC",
}  # fmt: skip
DRAWS, FEWEST = 10_000, 3  # of an interval: draws, and runs
Records = Sequence[dict[str, Any]]


def run(out: Path) -> None:
    """Measure worlds that every learner is trained on and that have no record yet; print tables, draw the picture."""
    measuring.store_worlds(FOLDER, NINTH, out, MEASURED, OURS)
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
    """The runs on real images of round eight, without what was measured there in an earlier form."""
    records = [record for record in rounds.stored(rounds.EIGHT) if record["about"]["dataset"] in small.TITLES]
    kept = [{**r, "scores": {name: own for name, own in r["scores"].items() if name != BENNETT}} for r in records]
    return sorted(kept, key=small.place)


def real_tables() -> list[str]:
    """Every metric on real images with five new classes per task or more, accuracies, and whether errors are right."""
    own = [record for record in real() if small.is_large(record)]
    return [*by_metric(own), "", *rounds.accuracies(own), "", *claimed(own)]


def parts_of_cifar100() -> list[dict[str, Any]]:
    """Round ten: 20 or 28 classes of CIFAR-100, six learners."""
    return rounds.stored(rounds.EIGHT, ROUND_TEN)


def tables() -> list[str]:
    """Round nine by learner and by metric, its goals and harm; then intervals over six worlds."""
    own, both = fresh(), letters()
    if not own:
        return ["(none yet)"]
    worlds = len({world_of(record) for record in both})
    return [
        *by_learner(own), "", *by_metric(own), "", *rounds.accuracies(own), "",
        *small.goals(f"{len(own)} runs of round nine", own, FORMS), "",
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
    """Every metric that was measured of every method, learners counting equally."""
    parts = all("calibration" in record["scores"]["Vanilla"][0] for record in records)
    columns = {key: form for key, form in COLUMNS.items() if parts or key not in ("calibration", "refinement")}
    lines = [f"**All metrics, means over learners ({len(records)} runs)**", ""]
    lines.append("| method | " + " | ".join(TITLES.get(key, key) for key in columns) + " |")
    lines.append("|---|" + "---:|" * len(columns))
    known = set.intersection(*(set(record["scores"]) for record in records))
    corrected = [name for name in CORRECTED if name in known]
    for title, methods in {**_blocks(records), "predictions corrected as well": corrected}.items():
        lines.append(f"| *{title}* |" + " |" * len(columns))
        for method in methods:
            cells = [form.format(each_learner(records, _mean_of(method, key))[0]) for key, form in columns.items()]
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return [*lines, "", "ECE, AURC and accuracy in percent. Worst task: the largest ECE of a run, mean over runs."]


def _blocks(records: Records) -> dict[str, Sequence[str]]:
    known = set.intersection(*(set(record["scores"]) for record in records))
    return {
        "no image of an old class held out": [name for name in NO_OLD_DATA if name in known],
        "two held-out images of each old class": [name for name in RESERVE if name in known],
        "test labels": rounds.ORACLES,
        "PACT without a part": [name for part in rounds.EIGHT.parts if (name := f"PACT {part}") in known],
    }


def _mean_of(method: str, key: str) -> Callable[[list[dict[str, Any]]], float]:
    if key == "worst task":
        return lambda own: float(np.mean([max(row["pooled"] for row in r["scores"][method]) for r in own]))
    if key == "refinement":
        return lambda own: mean(own, method, "brier") - mean(own, method, "calibration")
    return lambda own: mean(own, method, key)


PAIRS = (
    ("PACT", "Optimal TS"), ("PACT", "T-CIL"), ("PACT-R", "Optimal TS"), ("PACT-R", "PACT"), ("PACT-R", "balanced TS"),
    ("PACT-R", "BiC layer and T"),
)  # fmt: skip


def differences(records: Records) -> list[str]:
    """Paired differences, with Student's intervals over worlds, of which a bootstrap of so few would be too narrow.

    Learners of a world count equally.
    """
    worlds = sorted({world_of(record) for record in records})
    parts = [[record for record in records if world_of(record) == world] for world in worlds]
    lines = [
        f"**Differences, 95 % intervals (Student) over {len(worlds)} worlds**", "",
        "| difference | pooled ECE | ECE by group | NLL |", "|---|---|---|---|",
    ]  # fmt: skip
    for ours, other in PAIRS:
        cells = list[str]()
        for key, form in (("pooled", "{:+.2f}"), ("group", "{:+.2f}"), ("nll", "{:+.4f}")):
            own = [each_learner(part, lambda r, k=key: mean(r, ours, k) - mean(r, other, k))[0] for part in parts]  # type: ignore[misc]  # noqa: B023
            low, high = student.interval(0.95, len(own) - 1, np.mean(own), np.std(own, ddof=1) / np.sqrt(len(own)))
            cells.append(f"{form.format(np.mean(own))} ({form.format(low)} to {form.format(high)})")
        lines.append(f"| {ours} less {other} | {' | '.join(cells)} |")
    return lines


def claimed(records: Records) -> list[str]:
    """The root mean square of error / claimed error by learner, and intervals that resample its runs."""
    names = learners(records)
    lines = [
        f"**RMS of error / claimed error; of {FEWEST} runs or more with 95 % intervals that resample them (runs count"
        " equally); the goal is that each covers 1**", "",
        "| form | of | " + " | ".join(name.upper() for name in names) + " |", "|" + "---|" * (len(names) + 2),
    ]  # fmt: skip
    for form in FORMS:
        for which, what in enumerate(("log T", "b")):
            cells = list[str]()
            for name in names:
                squares = [rms(ratio_errors([record], form, which)) ** 2 for record in of_learner(records, name)]
                if len(squares) < FEWEST:
                    cells.append(f"{np.sqrt(np.mean(squares)):.2f}")
                    continue
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
    panels = {
        "letters": letters(),
        "a part of CIFAR-100": parts_of_cifar100(),
        "CIFAR and Tiny-ImageNet, all classes": real(),
    }
    panels = {title: records for title, records in panels.items() if records}
    names = [name for name in LEARNERS if any(of_learner(records, name) for records in panels.values())]
    figure = Figure(figsize=(0.4 + 4.3 * len(panels), 4.2), layout="constrained")
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
        axis.set_xticks([-2, -1, 0, 1, 2, 4, 10, 20], ["-2", "-1", "0", "1", "2", "4", "10", "20"])
        axis.minorticks_off()
        axis.set_xlim(-2, 30)
        axis.set_xlabel("pooled ECE less that of the oracle temperature, points")
        axis.set_yticks(range(1, len(names) + 1), [name.upper() for name in names[::-1]])
        axis.grid(axis="x", color="#dddddd", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    handles, titles = axes[0].get_legend_handles_labels()
    figure.legend(handles, titles, loc="outside lower center", ncols=len(SHOWN), frameon=False)
    figure.savefig(IMAGE, format="svg", metadata={"Date": None})


def overview() -> list[str]:
    """The final runs of the present form, one row for each kind of data."""
    large, few = list[dict[str, Any]](), list[dict[str, Any]]()
    for record in real():
        (large if small.is_large(record) else few).append(record)
    rows = {
        "letters": fresh(),
        "a part of CIFAR-100": parts_of_cifar100(),
        "CIFAR-100, Tiny-ImageNet": large,
        "CIFAR-10": few,
        "other settings": sizes.stored(sizes.FOLDER),
    }
    shown = ("Vanilla", "TS", "T-CIL", "PACT", "PACT-R", "Optimal TS")
    lines = [
        "| ECE, % | runs | none | TS | T-CIL | PACT | PACT-R | oracle T | by group: PACT | PACT-R | two oracle T "
        "| harmed |",
        "|---|" + "---:|" * 11,
    ]
    for title, records in rows.items():
        if records:
            cells = [f"{_over_learners(records, name, 'pooled'):.1f}" for name in shown]
            groups = [f"{_over_learners(records, name, 'group'):.1f}" for name in (*FORMS, "Optimal group TS")]
            large_ones = len(_large(records))
            harm = f"{harmful_large(records, FORMS[0])} of {large_ones}" if large_ones else ""
            lines.append(f"| {title} | {len(records)} | {' | '.join([*cells, *groups])} | {harm} |")
    return lines


def harm_by_learner() -> list[str]:
    """Large tasks in which PACT is worse than no calibration, and than the best of three, by learner."""
    rows: dict[str, list[tuple[float, float, list[float]]]] = {}
    for record in (*letters(), *real()):
        states = [state for state in record["states"] if "harm" in state]
        own = zip(states, record["scores"]["Vanilla"], record["scores"]["PACT"], strict=True)
        rows.setdefault(record["about"]["learner"], []).extend(
            (none["pooled"], ours["pooled"], state["harm"]["PACT"])
            for state, none, ours in own
            if state["n_test"] >= HARM_FROM
        )
    lines = [
        "| learner | tasks | ECE without calibration, % | with PACT, % | PACT raises it by more than 1 point |"
        " largest change, points | harm above 1 point | largest harm |",
        "|---|" + "---:|" * 7,
    ]
    found = {name.upper(): rows[name] for name in LEARNERS if name in rows}
    for name, tasks in {**found, "all": [task for own in found.values() for task in own]}.items():
        rises = [ours - none for none, ours, _ in tasks]
        sure = [value for _, _, (value, low, _) in tasks if low > 0]
        none, ours = (np.mean([task[place] for task in tasks]) for place in (0, 1))
        lines.append(
            f"| {name} | {len(tasks)} | {none:.1f} | {ours:.1f} | {sum(rise > 1 for rise in rises)} |"
            f" {max(rises):+.1f} | {sum(value > 1 for value in sure)} | {max(sure, default=0):+.1f} |"
        )
    return lines


def goals() -> list[str]:
    """The goals of round one on round nine's worlds and on real images with five new classes per task or more."""
    real_runs = [record for record in real() if small.is_large(record)]
    many = [part for record in real_runs if (part := small.with_many(record))]
    columns = [
        ("PACT", fresh(), (0.5, 1.0), (1.0, 1.2)), ("PACT-R", fresh(), (1.0, None), (0.8, 1.0)),
        ("PACT", real_runs, (0.5, 1.0), (1.0, 1.2)), ("PACT-R", many, (0.0, 0.3), (0.8, 1.0)),
    ]  # fmt: skip
    if not all(records for _, records, *_ in columns):
        return ["(none yet)"]
    rows: dict[str, list[str]] = {}
    for form, records, pooled, group in columns:
        names = learners(records)
        found = small.measures(records, form)
        harmed, large = harmful_large(records, form), _large(records)
        far = sum(value > 3 and low > 0 for value, low, _ in (state["harm"][form] for state in large))
        allowed = 0.05 if form == "PACT" else 0.01
        nll = found[2][0] if form == "PACT" else max(found[2][1:])
        cells = {
            "ECE less that of Optimal TS": _told(found[0][0], pooled[0], "{:+.3f}"),
            "the same, worst learner": _worst(found[0], names, pooled[1], "{:+.2f}"),
            "ECE by group / two oracle temperatures": _told(found[1][0], group[0], "{:.2f}"),
            "the same, worst learner ": _worst(found[1], names, group[1], "{:.2f}"),
            "harm above 1 point": f"{harmed} of {len(large)} tasks: "
            + _reached(harmed <= allowed * len(large), f"{100 * allowed:.0f} %"),
            "harm above 3 points": f"{far} tasks: " + _reached(far == 0, "none") if form == "PACT" else f"{far} tasks",
            "NLL less that of Optimal TS (PACT-R: worst learner)": _told(nll, 0.0, "{:+.3f}"),
            "RMS of error / claimed, log T": _between(found[3][0]),
            "RMS of error / claimed, b": _between(found[4][0]),
        }
        for title, cell in cells.items():
            rows.setdefault(title, []).append(cell)
    lines = [
        "| goal (in brackets) | letters, PACT | letters, PACT-R | real images, PACT | real images, PACT-R |",
        "|---|---|---|---|---|",
    ]
    return lines + [f"| {title.strip()} | {' | '.join(cells)} |" for title, cells in rows.items()]


def _over_learners(records: Records, method: str, key: str) -> float:
    return each_learner(records, lambda own: mean(own, method, key))[0]


def _large(records: Records) -> list[dict[str, Any]]:
    return [s for record in records for s in record["states"] if "harm" in s and s["n_test"] >= HARM_FROM]


def _reached(holds: bool, limit: str) -> str:
    return f"{'reached' if holds else '**missed**'} ({limit})"


def _told(value: float, limit: float, form: str) -> str:
    return f"{form.format(value)}: {_reached(value <= limit, f'at most {form.format(limit)}')}"


def _worst(values: Sequence[float], names: Sequence[str], limit: float | None, form: str) -> str:
    worst, name = max(zip(values[1:], names, strict=True))
    told = f"{name.upper()} {form.format(worst)}"
    return told if limit is None else f"{told}: {_reached(worst <= limit, f'at most {form.format(limit)}')}"


def _between(value: float) -> str:
    return f"{value:.2f}: {_reached(0.8 <= value <= 1.25, '0.8 to 1.25')}"
