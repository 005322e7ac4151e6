"""The tables of one run or of several seeds: means over tasks, metrics by task, learners side by side; in percent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from tcil.experiments.reporting.collect import Study, shown, studies
from tcil.experiments.reporting.findings import noise_floor
from tcil.experiments.reporting.grids import Cell, Grid, Row
from tcil.experiments.reporting.guessing import guessing
from tcil.experiments.reporting.statistics import Spread, paired_difference
from tcil.experiments.runs.catalogue import ALL_DATA, OLD_DATA, ORACLE, ORACLE_BLOCK, Heading, in_order
from tcil.experiments.runs.reasons import NoAnswer, in_common
from tcil.experiments.runs.results import RANKED, RISKS, WITH_OPTIONS, first_task
from tcil.experiments.runs.store import StoredRun
from tcil.foundation.errors import invalid
from tcil.foundation.options import Verdict

COLUMNS = {
    "accuracy": "Acc",
    "ece": "ECE",
    "aece": "AECE",
    "ece_predicted_old": "ECE old",
    "ece_predicted_new": "ECE new",
    "noise_floor": "floor",
}
OVERVIEW = ("ece", "accuracy", "ece_predicted_old", "ece_predicted_new")  # in what several studies are compared
ERRORS = ("ece", "aece", "ece_predicted_old", "ece_predicted_new")  # the lower the better
MEANING = {
    "accuracy": "accuracy",
    "ece": "expected calibration error (10 bins)",
    "aece": "adaptive calibration error (10 bins of equal size)",
    "ece_predicted_old": "ECE of images predicted as old classes",
    "ece_predicted_new": "ECE of images predicted as new classes",
    "noise_floor": "the ECE that a perfectly calibrated model would score by chance",
}
HEADINGS = {
    RANKED: "Calibrators",
    WITH_OPTIONS: "With other options",
    ORACLE_BLOCK: "Limits",
    OLD_DATA: "With validation data of old tasks",
}


def percent_of(study: Study, name: str, metric: str, bold: bool = False) -> Cell:
    """A calibrator's mean over tasks, over the seeds that have it.

    Noted beside it: 'n = 1' and so on where some seeds have not, '8 of 9 tasks' where some tasks have no value.
    """
    trying = study.having(name)
    if trying is None:
        return Cell(words="not run")
    fewer = f"n = {len(trying.runs)}" if len(trying.runs) < len(study.runs) else ""
    return _noted(percent(trying.means(name, metric), bold), fewer, trying.fewer_tasks(name, metric))


def _noted(cell: Cell, *notes: str) -> Cell:
    """The cell with what is to be said of its number; words need no note."""
    return cell if cell.spread is None else replace(cell, note=", ".join(filter(None, notes)))


def percent(values: Sequence[float | None], bold: bool = False) -> Cell:
    """Fractions, one per seed, as a cell in percent; n/a where a seed has none."""
    percents = [100 * value for value in values if value is not None]
    if len(percents) < len(values) or not percents:
        return Cell(words="n/a")
    return Cell(Spread.of(percents), bold=bold)


def best(study: Study, names: Sequence[str], metric: str) -> str | None:
    """The calibrator with the least mean, if it has every seed, and paired intervals tell it from all that have.

    Those with fewer seeds must be higher on the average over theirs. What has no value after some task is not ranked,
    and nothing is where networks are no better than guessing.
    """
    candidates = {}
    if guessing(study) is not None:
        return None
    for name in names:
        trying = study.having(name)
        if trying is not None and trying.fewer_tasks(name, metric):
            continue
        values = {run.seed: run.mean(name, metric) for run in trying.runs} if trying is not None else {}
        answers = {seed: value for seed, value in values.items() if value is not None}
        if answers and len(answers) == len(values):  # what is shown as n/a is not ranked
            candidates[name] = answers
    if len(candidates) < 2:
        return None
    first = min(candidates, key=lambda name: sum(candidates[name].values()) / len(candidates[name]))
    ours = candidates.pop(first)
    if len(ours) < len(study.runs):
        return None
    for others in candidates.values():
        difference = paired_difference([ours[seed] for seed in others], list(others.values()))
        told = difference.excludes_zero if len(others) == len(ours) else difference.mean > 0
        if not told:
            return None
    return first if len(ours) > 1 else None


def summary(study: Study) -> Grid:
    """Means over tasks of every calibrator; the oracles and what needs old-task data stand apart."""
    titles = study.titles()
    ranked = [name for name, (_, block) in titles.items() if block == RANKED]
    winner = {metric: best(study, ranked, metric) for metric in ERRORS}
    rows = [
        Row(
            title,
            tuple(percent_of(study, name, metric, winner.get(metric) == name) for metric in COLUMNS),
            block,
            block != RANKED,
        )
        for name, (title, block) in titles.items()
    ]
    title = f"{study.title}: mean over {study.tasks_told}, %"
    notes = (_over_seeds([study], bold=any(winner.values())), *remarks(study))
    return Grid(title, ("calibrator", *COLUMNS.values()), tuple(rows), notes)


def overview(study: Study) -> Grid:
    """The means of every calibrator with their distance to the oracle; oracle and noise floor are below, as limits."""
    whole, titles = summary(study), study.titles()
    columns = ("ece", "ece_predicted_old", "ece_predicted_new", "aece", "accuracy")
    places = [list(COLUMNS).index(name) for name in columns]
    rows = []
    for name, row in zip(titles, whole.rows, strict=True):
        cells = [row.cells[place] for place in places]
        rows.append(replace(row, cells=(cells[0], _to_oracle(study, name), *cells[1:])))
    floor = noise_floor(study)
    by_chance = Cell(words="n/a") if floor is None else Cell(Spread.lone(sum(floor) / len(floor)))
    chance = (by_chance, _beside(titles, study, by_chance), *[Cell(words="-")] * (len(columns) - 1))
    names = ("calibrator", COLUMNS["ece"], "to oracle", *(COLUMNS[name] for name in columns[1:]))
    title = f"Mean over {study.tasks_told}, %"
    limited, headings = _with_floor(rows, chance)
    return Grid(title, names, limited, whole.notes, headings=headings)


def _to_oracle(study: Study, name: str) -> Cell:
    """How much higher a calibrator's ECE is than the oracle's, over the runs that have both; of the same networks."""
    if name in (ORACLE, ALL_DATA):
        return Cell(words="-")
    pairs = zip(study.means(name, "ece"), study.means(ORACLE, "ece"), strict=True)
    differences = [100 * (own - best) for own, best in pairs if own is not None and best is not None]
    trying = study.having(name)
    if not differences or trying is None or len(differences) < len(trying.runs):
        return Cell(words="-")
    return Cell(Spread.of(differences), signed=True)


def _beside(titles: Mapping[str, Heading], study: Study, level: Cell) -> Cell:
    """How far a level is from the oracle."""
    best = percent_of(study, ORACLE, "ece") if ORACLE in titles else Cell(words="-")
    if best.spread is None or level.spread is None:
        return Cell(words="-")
    return Cell(Spread.lone(level.spread.mean - best.spread.mean), signed=True)


def _over_seeds(studies: Sequence[Study], bold: bool) -> str:
    """Over how many seeds a table is, and what its marks mean."""
    seeds = sorted({len(study.runs) for study in studies})
    if seeds == [1]:
        return "One seed."
    count = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    note = f"{count} seeds: mean ± population standard deviation; n where a row has fewer seeds."
    rule = " Bold: the lowest ranked row, if paired 95 % intervals tell it from all others with every seed."
    return note + (rule if bold else "")


def remarks(study: Study) -> list[str]:
    """What was out of the ordinary: networks that guess, and fits with a verdict or without an answer, with how often.

    Fits are in the order of the table.
    """
    tried: Counter[str] = Counter()
    alike: dict[tuple[str, *tuple[str | None, ...]], list[NoAnswer | Verdict]] = {}  # but for their numbers
    tasks = [task for run in study.runs for task in run.tasks]
    for row in (task.calibrators[name] for name in study.titles() for task in tasks if name in task.calibrators):
        tried[row.title] += 1
        if row.block != RANKED:
            continue
        if (silent := row.not_applicable) is not None:
            alike.setdefault((row.title, silent.reason, silent.words), []).append(silent)
            continue
        for verdict in row.verdicts:
            if verdict is not Verdict.OK:
                alike.setdefault((row.title, verdict), []).append(verdict)
    guesses = guessing(study)
    first = [f"{guesses.told}: nothing is ranked."] if guesses is not None else []
    return first + [
        f"{title}: {_in_words(group)} ({len(group)} of {tried[title]} tasks)." for (title, *_), group in alike.items()
    ]


def _in_words(alike: Sequence[NoAnswer | Verdict]) -> str:
    """What they say in common, but for what is done about it, which stands behind a semicolon."""
    first = alike[0]
    if isinstance(first, Verdict):
        return first.meaning.partition(";")[0]
    return f"n/a: {in_common([answer for answer in alike if isinstance(answer, NoAnswer)])}"


def by_task(study: Study, metric: str) -> Grid:
    """One metric by task, and its mean, for every calibrator."""
    rows = []
    for name, (title, block) in study.titles().items():
        by_run = [run.values(name, metric) for run in (study.having(name) or study).runs]
        cells = [percent(values) for values in zip(*by_run, strict=True)]
        rows.append(Row(title, (*cells, percent_of(study, name, metric)), block, block != RANKED))
    columns = ("after task", *(str(task.task) for task in study.runs[0].tasks), "mean")
    if start := first_task(metric):
        rows = [replace(row, cells=(*[Cell(words="-")] * start, *row.cells[start:])) for row in rows]
    return Grid(f"{study.title}: {COLUMNS[metric]} by task, %", columns, tuple(rows))


def decisions(study: Study) -> list[Grid]:
    """What calibrators are worth for decisions: thresholds and prediction sets, promised beside achieved.

    Means over the tasks after the first, where old and new classes differ; noted where some of them have no value, such
    as the errors among accepted images after a task in which none was accepted. None where no row has such figures.
    """
    names = [name for name in study.titles() if _decided(study, name, "risks/model_based/all/0.1/coverage")]
    if not names:
        return []
    where = f"{study.title}: "
    by_group = [(risk, group) for risk in RISKS for group in ("old", "new")]
    heads = tuple(f"{100 * risk:g} % {group}" for risk, group in by_group)
    grids = [
        _decision_grid(
            study,
            names,
            f"{where}{title}, %",
            heads,
            [f"risks/model_based/{group}/{risk}/{figure}" for risk, group in by_group],
            note,
        )
        for figure, title, note in (
            (
                "achieved",
                "errors among accepted images, by the errors that the confidences claim and by predicted group",
                "Means over tasks after the first. Model-based thresholds: no theorem backs them. A calibrated model"
                " achieves what it claims.",
            ),
            ("coverage", "accepted images, by the errors that the confidences claim and by predicted group", ""),
        )
    ]
    backed = [name for name in names if _decided(study, name, "risks/finite_sample/all/0.1/coverage")]
    if backed:
        figures = [f"risks/finite_sample/all/{risk}/{key}" for risk in RISKS for key in ("achieved", "coverage")]
        heads = tuple(f"{100 * risk:g} %: {key}" for risk in RISKS for key in ("errors", "accepted"))
        note = (
            "Finite-sample promises at confidence 90 %, for any mixture of old and new images, backed by the reserve."
            " Where it is too small none is accepted: promises begin at"
            f" {_begins_at(study, backed[0])} images of each group."
        )
        title = f"{where}thresholds that promise a risk by the reserve, %"
        grids.append(_decision_grid(study, backed, title, heads, figures, note))
    kinds = ("model_based", "finite_sample") if backed else ("model_based",)
    parts = [(kind, group) for kind in kinds for group in ("old", "new")]
    words = {"model_based": "by the confidences", "finite_sample": "by the reserve"}
    for figure, title, scale in (
        ("achieved", "prediction sets of 90 %: achieved coverage by true group, %", 100.0),
        ("size", "prediction sets of 90 %: mean number of classes by true group", 1.0),
    ):
        heads = tuple(f"{words[kind]}, {group}" for kind, group in parts)
        figures = [f"sets/{kind}/{group}/{figure}" for kind, group in parts]
        note = (
            "By the confidences, sets claim that they hold the true class in 90 % of images: no theorem backs it."
            + (" By the reserve, they promise it for either group." if backed else "")
        )
        grids.append(_decision_grid(study, names, f"{where}{title}", heads, figures, note, scale))
    return grids


def _decision_grid(
    study: Study,
    names: Sequence[str],
    title: str,
    heads: Sequence[str],
    figures: Sequence[str],
    note: str,
    scale: float = 100.0,
) -> Grid:
    titles, rows = study.titles(), []
    for name in names:
        cells = tuple(_decision_cell(study, name, figure, scale) for figure in figures)
        rows.append(Row(titles[name].title, cells, titles[name].block, titles[name].block != RANKED))
    return Grid(title, ("calibrator", *heads), tuple(rows), (note,) if note else ())


def _decision_cell(study: Study, name: str, figure: str, scale: float) -> Cell:
    """The mean of a figure, and over how many tasks it is if not over all after the first."""
    values = _decided(study, name, figure)
    if not values:
        return Cell(words="-")
    by_task = [value for run in study.runs for value in run.values(name, figure)[1:]]
    there = sum(value is not None for value in by_task)
    note = f"{there} of {len(by_task)} tasks" if there < len(by_task) else ""
    return Cell(Spread.of([scale * value for value in values]), note=note)


def _decided(study: Study, name: str, figure: str) -> list[float]:
    """A figure of decisions by run: its mean over the tasks after the first that have it; runs without are left out."""
    found = []
    for run in study.runs:
        values = [value for value in run.values(name, figure)[1:] if value is not None]
        if values:
            found.append(sum(values) / len(values))
    return found


def _begins_at(study: Study, name: str) -> str:
    """From how many images on promises at the three risks exist."""
    counts = [_decided(study, name, f"risks/finite_sample/all/{risk}/begins_at") for risk in RISKS]
    return ", ".join(f"{max(values):.0f}" if values else "-" for values in counts)


def comparison(a: Sequence[StoredRun], b: Sequence[StoredRun], metric: str) -> Grid:
    """Two sets of runs, paired: means, and the paired difference with its interval.

    Runs pair when all their settings agree, but for those in which the whole of A differs from the whole of B.
    """
    changed = _changed(a, b)
    left_runs, right_runs = ({run.settings.without(*changed): run for run in shown(runs)} for runs in (a, b))
    pairs = {same: (left_runs[same], right_runs[same]) for same in left_runs if same in right_runs}
    if not pairs:
        kinds = [
            sorted({f"{run.settings.learner} on {run.settings.dataset}" for run in shown(runs)}) for runs in (a, b)
        ]
        differ = f" (A has {', '.join(kinds[0])}; B has {', '.join(kinds[1])})" if kinds[0] != kinds[1] else ""
        expected = (
            "runs that pair with those of A: of the same learner and dataset, with one value of each other setting"
        )
        advice = "tcil report shows several learners side by side." if differ else ""
        raise invalid("B", f"no run with the settings of one in A{differ}", expected, advice)
    rows = []
    for study in studies(left for left, _ in pairs.values()):
        other = Study(tuple(pairs[run.settings.without(*changed)][1] for run in study.runs))
        for name, (title, block) in in_order({**study.titles(), **other.titles()}).items():
            cells = _paired(study, other, name, metric)
            rows.append(Row(f"{study.title}: {title}", cells, study.title, block != RANKED))
    alone = [len(side) - len(pairs) for side in (left_runs, right_runs)]
    notes = [
        "Mean over tasks (those that both sides have), %; ± population standard deviation over seeds. Bold: the 95 %"
        " interval of the paired difference (low to high, over n pairs) excludes zero.",
        f"What changed: {'; '.join(changed.values()) or 'no setting'}.",
    ]
    notes += [f"Left out, without a run to pair with: {alone[0]} of A, {alone[1]} of B."] if any(alone) else []
    columns = ("", "A", "B", "B - A", "low", "high", "n")
    return Grid(f"{COLUMNS[metric]}, A against B", columns, tuple(rows), tuple(notes))


def _paired(left: Study, right: Study, name: str, metric: str) -> tuple[Cell, ...]:
    """A calibrator on both sides, and their paired difference.

    It is over the runs where both have an answer after every task, and over the tasks where both have a value. Runs in
    other numbers of tasks are compared by the means over their own.
    """
    both = [
        pair
        for pair in zip(left.runs, right.runs, strict=True)
        if all(run.mean(name, metric) is not None for run in pair)
    ]
    if not both:
        return (percent_of(left, name, metric), percent_of(right, name, metric), *[Cell(words="")] * 4)
    means, there, possible = list[tuple[float, float]](), 0, 0
    for runs in both:
        if runs[0].settings.n_tasks != runs[1].settings.n_tasks:  # then task i of one is not that of the other
            own = [run.mean(name, metric) for run in runs]
            means.append((own[0] or 0.0, own[1] or 0.0))
            continue
        by_task = list(zip_longest(*(run.values(name, metric)[first_task(metric) :] for run in runs)))
        common = [(a, b) for a, b in by_task if a is not None and b is not None]
        there, possible = there + len(common), possible + len(by_task)
        if common:
            means.append((sum(a for a, _ in common) / len(common), sum(b for _, b in common) / len(common)))
    if not means:
        return (percent_of(left, name, metric), percent_of(right, name, metric), *[Cell(words="")] * 4)
    fewer = f"{there} of {possible} tasks" if there < possible else ""
    sides = [_noted(percent(side), fewer) for side in zip(*means, strict=True)]
    difference = paired_difference(*([100 * value for value in side] for side in zip(*means, strict=True)))
    ends = [Cell(words="") if end is None else Cell(Spread.lone(end), signed=True) for end in difference.interval]
    shift = Cell(Spread.lone(difference.mean), signed=True, bold=difference.excludes_zero)
    return (*sides, shift, *ends, Cell(words=str(difference.n)))


def _changed(a: Sequence[StoredRun], b: Sequence[StoredRun]) -> dict[str, str]:
    """Settings that are one value throughout A and another throughout B, as text."""
    changed = {}
    names = {name for run in (*a, *b) for name in run.settings.record()} - {"dataset", "learner"}
    records = [[run.settings.record() for run in shown(runs)] for runs in (a, b)]
    for name in sorted(names):
        sides = [{json.dumps(record.get(name), sort_keys=True) for record in side} for side in records]
        if len(sides[0]) == len(sides[1]) == 1 and sides[0] != sides[1]:
            changed[name] = f"{name} {sides[0].pop()} in A, {sides[1].pop()} in B"
    return changed


def side_by_side(studies: Sequence[Study], metric: str) -> Grid:
    """One metric, mean over tasks, of every calibrator (rows) in every study (columns)."""
    titles: dict[str, Heading] = {}
    for study in studies:
        for name, title in study.titles().items():
            titles.setdefault(name, title)
    titles = in_order(titles)
    ranked = [name for name, (_, block) in titles.items() if block == RANKED]
    winner = [best(study, ranked, metric) if metric in ERRORS else None for study in studies]
    rows = [
        Row(
            title,
            tuple(percent_of(study, name, metric, won == name) for study, won in zip(studies, winner, strict=True)),
            block,
            block != RANKED,
        )
        for name, (title, block) in titles.items()
    ]
    return Grid(
        f"{COLUMNS[metric]}: {MEANING[metric]}; mean over tasks, %",
        ("calibrator", *(study.title for study in studies)),
        tuple(rows),
        (_over_seeds(studies, bold=any(winner)), *_guessing_studies(studies)),
    )


def _guessing_studies(studies: Sequence[Study]) -> list[str]:
    """Which studies have networks that are no better than guessing."""
    found = [(study.title, guesses) for study in studies if (guesses := guessing(study)) is not None]
    return [f"{title}: {guesses.told}: nothing is ranked." for title, guesses in found]


def overview_of(studies: Sequence[Study]) -> Grid:
    """The ECE of every calibrator in every study; oracle and noise floor are below, as limits."""
    whole = side_by_side(studies, "ece")
    floors = [noise_floor(study) for study in studies]
    cells = [Cell(words="n/a") if floor is None else Cell(Spread.lone(sum(floor) / len(floor))) for floor in floors]
    rows, headings = _with_floor(whole.rows, tuple(cells))
    return replace(whole, rows=rows, headings=headings)


def _with_floor(rows: Sequence[Row], cells: tuple[Cell, ...]) -> tuple[tuple[Row, ...], dict[str, str]]:
    """The rows with the noise floor below the oracles, and headings for their blocks."""
    limits = [place for place, row in enumerate(rows) if row.block == ORACLE_BLOCK]
    place = limits[-1] + 1 if limits else len(rows)
    floor = Row("Noise floor", cells, ORACLE_BLOCK, apart=True)
    rows = (*rows[:place], floor, *rows[place:]) if any(cell.spread for cell in cells) else tuple(rows)
    blocks = dict.fromkeys(row.block for row in rows)
    return rows, {block: HEADINGS.get(block, block.capitalize()) for block in blocks}


def redrawn(draws: Mapping[str, Sequence[float]], count: int) -> Grid:
    """How much each calibrator's ECE depends on which validation images it was given."""
    rows = []
    for title, values in draws.items():
        percents = [100 * value for value in values]
        ends = (Cell(Spread.lone(end(percents))) for end in (min, max))
        rows.append(Row(title, (Cell(Spread.of(percents)), *ends)))
    title = f"ECE after the last task over {count} draws of the validation set, %"
    return Grid(title, ("calibrator", "mean", "least", "most"), tuple(rows))
