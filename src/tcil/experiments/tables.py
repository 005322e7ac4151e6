"""The tables of one run or of several seeds: means over tasks, figures by task, learners side by side; in percent."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tcil.calibration.errors import invalid
from tcil.calibration.options import Verdict
from tcil.experiments.collect import StoredRun, Study, place, shown, studies
from tcil.experiments.grids import Cell, Grid, Row
from tcil.experiments.statistics import Spread, paired_difference

COLUMNS = {
    "accuracy": "Acc",
    "ece": "ECE",
    "aece": "AECE",
    "ece_predicted_old": "ECE old",
    "ece_predicted_new": "ECE new",
    "noise_floor": "floor",
}
BASELINES = ("ts", "ets", "irm", "perturb-ts")  # the paper's, besides vanilla
ERRORS = ("ece", "aece", "ece_predicted_old", "ece_predicted_new")  # the lower the better
_NUMBER = r"\d+(?:\.\d+)?"
MEANING = {
    "accuracy": "accuracy",
    "ece": "expected calibration error (10 bins)",
    "aece": "adaptive calibration error (10 bins of equal size)",
    "ece_predicted_old": "ECE of images predicted as old classes",
    "ece_predicted_new": "ECE of images predicted as new classes",
    "noise_floor": "the ECE that a perfectly calibrated model would score by chance",
}


def percent_of(study: Study, name: str, key: str, bold: bool = False) -> Cell:
    """A calibrator's mean over tasks, over the seeds that have it; 'n = 1' and so on where some have not."""
    own = study.having(name)
    if own is None:
        return Cell(words="not run")
    cell = percent(own.means(name, key), bold)
    return cell if len(own.runs) == len(study.runs) else replace(cell, note=f"n = {len(own.runs)}")


def percent(values: Sequence[float | None], bold: bool = False) -> Cell:
    """Fractions, one per seed, as a cell in percent; n/a where a seed has none."""
    known = [100 * value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return Cell(words="n/a")
    return Cell(Spread.of(known), bold=bold)


def best(study: Study, names: Sequence[str], key: str) -> str | None:
    """The calibrator with the least mean, if it has every seed, and paired intervals tell it from all that have.

    Those with fewer seeds must be higher on the average over theirs.
    """
    known = {}
    for name in names:
        own = study.having(name)
        values = {run.seed: run.mean(name, key) for run in own.runs} if own is not None else {}
        answers = {seed: value for seed, value in values.items() if value is not None}
        if answers and len(answers) == len(values):  # what is shown as n/a is not ranked
            known[name] = answers
    if len(known) < 2:
        return None
    first = min(known, key=lambda name: sum(known[name].values()) / len(known[name]))
    ours = known.pop(first)
    if len(ours) < len(study.runs):
        return None
    for others in known.values():
        difference = paired_difference([ours[seed] for seed in others], list(others.values()))
        told = difference.excludes_zero if len(others) == len(ours) else difference.mean > 0
        if not told:
            return None
    return first if len(ours) > 1 else None


def summary(study: Study) -> Grid:
    """Means over tasks of every calibrator; the oracles and what needs old-task data stand apart."""
    titles = study.titles()
    ranked = [name for name, (_, block) in titles.items() if block == "ranked"]
    winner = {key: best(study, ranked, key) for key in ERRORS}
    rows = [
        Row(
            title,
            tuple(percent_of(study, name, key, winner.get(key) == name) for key in COLUMNS),
            block,
            block != "ranked",
        )
        for name, (title, block) in titles.items()
    ]
    title = f"{study.title}: mean over {study.n_tasks} tasks, %"
    notes = (_over_seeds([study], bold=any(winner.values())), *remarks(study))
    return Grid(title, ("calibrator", *COLUMNS.values()), tuple(rows), notes)


def _over_seeds(studies: Sequence[Study], bold: bool) -> str:
    """Over how many seeds a table is, and what its marks mean."""
    seeds = sorted({len(study.runs) for study in studies})
    if seeds == [1]:
        return "One seed."
    note = f"{' or '.join(map(str, seeds))} seeds: mean ± standard deviation; n where a row has fewer."
    return note + (
        " Bold: the lowest ranked row, by the paired 95 % intervals to all that have every seed." if bold else ""
    )


def remarks(study: Study) -> list[str]:
    """What was out of the ordinary in a fit, or why there was none, with how often."""
    found: dict[str, list[str]] = {}
    tried: Counter[str] = Counter()
    for run in study.runs:
        for task in run.tasks:
            for row in task["calibrators"].values():
                tried[row["title"]] += 1
                reasons = [f"n/a: {row['not_applicable']}"] if "not_applicable" in row else _verdicts(row)
                for reason in reasons if row["block"] == "ranked" else ():
                    short = re.sub(r"\w+ has no temperature \(n/a\): ", "", reason).partition(";")[0]
                    said = f"{row['title']}: {short}"
                    found.setdefault(re.sub(_NUMBER, "", said), []).append(said)
    return [
        f"{_ranged(reasons)} ({len(reasons)} of {tried[reasons[0].partition(': ')[0]]} tasks)."
        for reasons in found.values()
    ]


def _ranged(alike: Sequence[str]) -> str:
    """Sentences that differ in their numbers only, as one: where numbers differ, their range."""
    columns = zip(*(re.findall(_NUMBER, said) for said in alike), strict=True)
    spans = [sorted(set(column), key=float) for column in columns]
    shown = iter(span[0] if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans)
    return re.sub(_NUMBER, lambda _: next(shown), alike[0])


def _verdicts(row: Mapping[str, Any]) -> list[str]:
    result = row.get("result") or {}
    found = result.get("verdicts") or [result["verdict"]] if "verdict" in result or "verdicts" in result else []
    return [Verdict(name).meaning for name in found if name != "ok"]


def by_task(study: Study, key: str) -> Grid:
    """One figure by task, and its mean, for every calibrator."""
    rows = []
    for name, (title, block) in study.titles().items():
        by_run = [run.values(name, key) for run in (study.having(name) or study).runs]
        cells = [percent(values) for values in zip(*by_run, strict=True)]
        rows.append(Row(title, (*cells, percent_of(study, name, key)), block, block != "ranked"))
    columns = ("after task", *(str(task["task"]) for task in study.runs[0].tasks), "mean")
    if key == "ece_predicted_old":  # after the first task nothing is old
        rows = [replace(row, cells=(Cell(words="-"), *row.cells[1:])) for row in rows]
    return Grid(f"{study.title}: {COLUMNS[key]} by task, %", columns, tuple(rows))


def comparison(a: Sequence[StoredRun], b: Sequence[StoredRun], key: str) -> Grid:
    """Two sets of runs, paired: means, and the paired difference with its interval.

    Runs pair when all their settings agree, but for those in which the whole of A differs from the whole of B.
    """
    changed = _changed(a, b)
    left_runs, right_runs = ({run.without(*changed): run for run in shown(runs)} for runs in (a, b))
    pairs = {same: (left_runs[same], right_runs[same]) for same in left_runs if same in right_runs}
    if not pairs:
        raise invalid("B", "no run with the settings of one in A", "runs to pair with those of A")
    rows = []
    for study in studies(left for left, _ in pairs.values()):
        other = Study(tuple(pairs[run.without(*changed)][1] for run in study.runs))
        for name, (title, block) in sorted({**study.titles(), **other.titles()}.items(), key=place):
            cells = _paired(study, other, name, key)
            rows.append(Row(f"{study.title}: {title}", cells, study.title, block != "ranked"))
    alone = [len(side) - len(pairs) for side in (left_runs, right_runs)]
    notes = [
        "Mean over tasks, %; ± standard deviation over seeds. Bold: the 95 % interval of the paired difference (low to"
        " high, over n pairs) excludes zero.",
        f"What changed: {'; '.join(changed.values()) or 'no setting'}.",
    ]
    notes += [f"Left out, without a run to pair with: {alone[0]} of A, {alone[1]} of B."] if any(alone) else []
    columns = ("", "A", "B", "B - A", "low", "high", "n")
    return Grid(f"{COLUMNS[key]}, A against B", columns, tuple(rows), tuple(notes))


def _paired(left: Study, right: Study, name: str, key: str) -> tuple[Cell, ...]:
    """A calibrator on both sides, and the paired difference over the runs where both have an answer."""
    values = zip(left.means(name, key), right.means(name, key), strict=True)
    known = [(100 * x, 100 * y) for x, y in values if x is not None and y is not None]
    if not known:
        return (percent_of(left, name, key), percent_of(right, name, key), *[Cell(words="")] * 4)
    left_values, right_values = zip(*known, strict=True)
    sides = Cell(Spread.of(left_values)), Cell(Spread.of(right_values))
    difference = paired_difference(left_values, right_values)
    ends = [Cell(words="") if end is None else Cell(Spread.lone(end), signed=True) for end in difference.interval]
    shift = Cell(Spread.lone(difference.mean), signed=True, bold=difference.excludes_zero)
    return (*sides, shift, *ends, Cell(words=str(difference.n)))


def _changed(a: Sequence[StoredRun], b: Sequence[StoredRun]) -> dict[str, str]:
    """Settings that are one value throughout A and another throughout B, as text."""
    found = {}
    for key in sorted({key for run in (*a, *b) for key in run.settings} - {"dataset", "learner"}):
        sides = [{json.dumps(run.settings.get(key), sort_keys=True) for run in shown(runs)} for runs in (a, b)]
        if len(sides[0]) == len(sides[1]) == 1 and sides[0] != sides[1]:
            found[key] = f"{key} {sides[0].pop()} in A, {sides[1].pop()} in B"
    return found


def side_by_side(studies: Sequence[Study], key: str) -> Grid:
    """One figure, mean over tasks, of every calibrator (rows) in every study (columns)."""
    titles: dict[str, tuple[str, str]] = {}
    for study in studies:
        for name, title in study.titles().items():
            titles.setdefault(name, title)
    titles = dict(sorted(titles.items(), key=place))
    ranked = [name for name, (_, block) in titles.items() if block == "ranked"]
    winner = [best(study, ranked, key) if key in ERRORS else None for study in studies]
    rows = [
        Row(
            title,
            tuple(percent_of(study, name, key, won == name) for study, won in zip(studies, winner, strict=True)),
            block,
            block != "ranked",
        )
        for name, (title, block) in titles.items()
    ]
    return Grid(
        f"{COLUMNS[key]}: {MEANING[key]}; mean over tasks, %",
        ("calibrator", *(study.title for study in studies)),
        tuple(rows),
        (_over_seeds(studies, bold=any(winner)),),
    )
