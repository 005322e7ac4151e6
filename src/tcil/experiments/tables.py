"""The tables of one run or of several seeds: means over tasks, figures by task, learners side by side; in percent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tcil.experiments.collect import Study, place
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
ERRORS = ("ece", "aece", "ece_predicted_old", "ece_predicted_new")  # the lower the better
MEANING = {
    "accuracy": "accuracy",
    "ece": "expected calibration error (10 bins)",
    "aece": "adaptive calibration error (10 bins of equal size)",
    "ece_predicted_old": "ECE of images predicted as old classes",
    "ece_predicted_new": "ECE of images predicted as new classes",
    "noise_floor": "the ECE that a perfectly calibrated model would score by chance",
}


def percent(values: Sequence[float | None], bold: bool = False) -> Cell:
    """Fractions, one per seed, as a cell in percent; n/a where a seed has none."""
    known = [100 * value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return Cell(words="n/a")
    return Cell(Spread.of(known), bold=bold)


def best(scores: Mapping[str, Sequence[float | None]]) -> str | None:
    """The name with the least mean, if paired intervals tell it from every other; else None."""
    known = {name: [v for v in values if v is not None] for name, values in scores.items() if None not in values}
    known = {name: values for name, values in known.items() if len(values) > 1}
    if len(known) < 2:
        return None
    first = min(known, key=lambda name: sum(known[name]) / len(known[name]))
    others = (paired_difference(known[first], values) for name, values in known.items() if name != first)
    return first if all(difference.excludes_zero for difference in others) else None


def summary(study: Study) -> Grid:
    """Means over tasks of every calibrator; the oracles and what needs old-task data stand apart."""
    titles = study.titles()
    ranked = [name for name, (_, block) in titles.items() if block == "ranked"]
    winner = {key: best({name: study.means(name, key) for name in ranked}) for key in ERRORS}
    rows = [
        Row(title, tuple(percent(study.means(name, key), winner.get(key) == name) for key in COLUMNS), block)
        for name, (title, block) in titles.items()
    ]
    return Grid(f"{study.title}: mean over {study.n_tasks} tasks, %", ("calibrator", *COLUMNS.values()), tuple(rows))


def by_task(study: Study, key: str) -> Grid:
    """One figure by task, and its mean, for every calibrator."""
    rows = []
    for name, (title, block) in study.titles().items():
        by_run = [run.values(name, key) for run in study.runs]
        cells = [percent(values) for values in zip(*by_run, strict=True)]
        rows.append(Row(title, (*cells, percent(study.means(name, key))), block))
    columns = ("after task", *(str(task["task"]) for task in study.runs[0].tasks), "mean")
    if key == "ece_predicted_old":  # after the first task nothing is old
        rows = [Row(row.label, (Cell(words="-"), *row.cells[1:]), row.block) for row in rows]
    return Grid(f"{study.title}: {COLUMNS[key]} by task, %", columns, tuple(rows))


def side_by_side(studies: Sequence[Study], key: str) -> Grid:
    """One figure, mean over tasks, of every calibrator (rows) in every study (columns)."""
    titles: dict[str, tuple[str, str]] = {}
    for study in studies:
        for name, title in study.titles().items():
            titles.setdefault(name, title)
    titles = dict(sorted(titles.items(), key=place))
    ranked = [name for name, (_, block) in titles.items() if block == "ranked"]
    winner = [best({name: study.means(name, key) for name in ranked}) if key in ERRORS else None for study in studies]
    rows = [
        Row(
            title,
            tuple(percent(study.means(name, key), won == name) for study, won in zip(studies, winner, strict=True)),
            block,
        )
        for name, (title, block) in titles.items()
    ]
    seeds = sorted({len(study.runs) for study in studies})
    counts = " or ".join(map(str, seeds)) + (" seed" if seeds == [1] else " seeds")
    note = f"{counts}; mean ± standard deviation. Bold: better than every other ranked row by the paired 95 % interval."
    return Grid(
        f"{COLUMNS[key]}: {MEANING[key]}; mean over tasks, %",
        ("calibrator", *(study.title for study in studies)),
        tuple(rows),
        (note,),
    )
