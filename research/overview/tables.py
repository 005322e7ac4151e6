"""The tables of docs/results.md: all calibrators, the paper's tables beside ours, and what was run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from research.overview.sources import BF16, FP32, Source, has_present_form, main_sources, named, runs_in
from research.regime import RULE, regime
from tcil.experiments.config.settings import RunSettings
from tcil.experiments.reporting.collect import Study
from tcil.experiments.reporting.grids import Cell, Grid, Row, markdown
from tcil.experiments.reporting.statistics import Spread
from tcil.experiments.reporting.tables import side_by_side
from tcil.experiments.reproduction.artifacts import ARTIFACTS, Need, all_needs
from tcil.experiments.reproduction.finished import FinishedRuns
from tcil.experiments.reproduction.reproduce import satisfied
from tcil.experiments.reproduction.schedules import LEARNERS, Edition, editions
from tcil.experiments.runs.store import StoredRun
from tcil.experiments.scheduling.cost import A100, passes_as_released

METRICS = ("ece", "ece_predicted_old", "ece_predicted_new")
IN_COMMON = "The same runs in bf16 and in fp32, mean over the tasks in common, %"
OF_THE_PAPER = ("grid", "policies", "tasks20")  # the grid has the rows of the other two tables


def of_regime(found: Sequence[Source]) -> Iterator[str]:
    """Which runs are of the paper's kind."""
    yield "## Is it the paper's regime?\n"
    yield f"{RULE}\n"
    yield markdown(
        regime((f"{source.name}: {named(learner, study)}", study) for source in found
               for learner, study in source.by_learner.items())
    )  # fmt: skip


def tables(found: Sequence[Source]) -> Iterator[str]:
    """Every calibrator in the main sources, and `compact` and `small` beside the paper."""
    for source in main_sources(found):
        yield f"## {source.name[0].upper()}{source.name[1:]}: all calibrators\n"
        yield f"{source.described}: `{source.command}`\n"
        told = [
            f"{named(learner, study)} {source.percent(learner, 'vanilla', 'accuracy'):.1f} ({100 * share:.1f})"
            for learner, study in source.by_learner.items()
            if (share := study.memorised) is not None
        ]
        told_of = "Accuracy, which no calibrator here changes (exemplars memorised), means over tasks, %"
        yield f"{told_of}: {', '.join(told)}.\n"
        mixed = [learner.upper() for learner, study in source.by_learner.items() if _mixed(study)]
        if mixed:
            yield (
                f"PACT with {', '.join(mixed)}: a mean over two forms of PACT"
                " ([which](results.md#where-these-numbers-come-from)).\n"
            )
        for metric in METRICS:
            yield markdown(side_by_side(list(source.by_learner.values()), metric))
    ours = FinishedRuns([*BF16, *FP32, *editions("small")], [*runs_in("compact"), *runs_in("small")])
    yield "## Beside the paper\n"
    yield (
        "The paper's tables with the schedules `compact` (the paper's ResNet-32) and `small` (a small ResNet), both"
        " with 30 epochs without crops. `n` is the number of seeds. The grid of learners and calibrators has the rows"
        " of two more tables of the paper, T-CIL against its baselines and learners with and without T-CIL.\n"
    )
    said = set[str]()
    for name in OF_THE_PAPER:
        section = ARTIFACTS[name].render(ours)
        yield f"### {section.title}\n"
        lines = [line for line in section.lines if not line.endswith(": not run.") and "'short' only" not in line]
        yield from (f"{line}\n" for line in lines if line not in said)
        said.update(lines)
        yield from (markdown(grid) for grid in section.grids if "not run" not in grid.title)


def _mixed(study: Study) -> bool:
    """Whether seeds of a study have different forms of PACT."""
    return len({has_present_form(run) for run in study.runs}) > 1


# bf16 and fp32 -----------------------------------------------------------------------------------------------------


def precisions() -> Iterator[str]:
    """`compact` in both precisions, over the tasks that both trained."""
    runs = runs_in("compact")
    rows = []
    for learner in LEARNERS:
        both = [FinishedRuns(own, runs).study(own[0], "cifar100", learner) for own in (BF16, FP32)]
        tasks = min((study.n_tasks if study is not None else 0 for study in both), default=0)
        for name, study in zip(("bf16", "fp32"), both, strict=True):
            if study is not None and tasks:
                rows.append(_over_first(f"{learner.upper()}, first {tasks} tasks, {name}", study, tasks))
    if rows:
        yield "## Training in bf16\n"
        yield (
            "`compact` was trained with `--precision bf16` (training steps alone; evaluation and calibration are in"
            " fp32), which is 1.4 to 2 times as fast on a processor with instructions for it. Part of it had been"
            " trained in fp32, on other processors: a check of what the precision changes. One seed.\n"
        )
        columns = ("run", "accuracy", "memorised", "ECE: Vanilla", "TS", "T-CIL", "PACT", "Optimal TS")
        yield markdown(Grid(IN_COMMON, columns, tuple(rows)))


def _over_first(name: str, study: Study, tasks: int) -> Row:
    run = study.runs[0]

    def mean(values: Sequence[float | None]) -> Cell:
        there = [value for value in values if value is not None]
        return Cell(Spread.lone(100 * float(np.mean(there)))) if len(there) == tasks else Cell(words="n/a")

    memorised = [task.memory.accuracy if task.memory is not None else None for task in run.tasks[:tasks]]
    cells = [mean(run.values("vanilla", "accuracy")[:tasks]), mean(memorised)]
    cells += [mean(run.values(c, "ece")[:tasks]) for c in ("vanilla", "ts", "t-cil", "pact", "optimal-ts")]
    return Row(name, tuple(cells))


# what was run ------------------------------------------------------------------------------------------------------


def coverage() -> Iterator[str]:
    """The runs of the two CPU schedules: how far each went and how long it trained, and how to run the others."""
    yield "## What was run, and what is missing\n"
    yield (
        "Trained on one or two shared cores; hours of wall time in training, without calibration. What is kept in the"
        " repository are results, not networks. While a run trains, its folder under `--out` and the copy that"
        " `--backup OTHER_DISK` makes after every task hold the networks; both lay on the machines that trained these"
        " runs, which are gone, so a run that was not finished begins again at its first task. Memory and validation"
        " sizes and reserves are varied by `short` alone, Tiny-ImageNet in 20 tasks by `paper` alone. With `--kept"
        " docs/results/SCHEDULE`, as below, a command trains only what is missing.\n"
    )
    yield from _covered("small", editions("small"), "")
    analysed = ", ".join(str(run.seed) for run in runs_in("small") if run.analysis is not None)
    yield (
        "The analysis that figures need (magnitudes and directions after each task of ER on CIFAR-100) is asked for"
        f" one seed of three; these have it: {analysed}.\n"
    )
    yield from _covered("compact", BF16, " --precision bf16")
    if stopped := cut_short():
        yield (
            f"The schedule asks for the first five tasks of {', '.join(stopped)}. All ten: `tcil reproduce all"
            " --schedule compact --precision bf16 --data DIR --out RUNS --tasks-until 10 --job N` for N ="
            f" {', '.join(map(str, stopped.values()))}.\n"
        )
    kept = [run for run in runs_in("compact") if run.settings.key in _keys(FP32)]
    if kept:
        told = ", ".join(f"{run.learner.upper()} ({len(run.tasks)} tasks)" for run in kept)
        hours = sum(map(_hours, kept))
        yield f"Trained before in fp32, and kept as a check of the precision: {told}, {hours:.1f} hours.\n"
    needs = all_needs(list(ARTIFACTS.values()), editions("paper"))
    trainings = [one for need in needs for one in _both(need)]
    passes = {name: 0.0 for name in A100.images_per_second}
    for one in trainings:
        passes[one.network] += passes_as_released(one).total
    hours = sum(A100.seconds(name, count) for name, count in passes.items()) / 3600
    yield (
        f"**`paper`** was not run: {len(trainings)} trainings, {sum(passes.values()) / 1e9:.1f} billion image"
        f" passes, about {hours:.0f} hours on {A100.where} at {A100.told} images a second"
        f" ({A100.source.partition(':')[0]}; not measured). `tcil reproduce all --schedule paper --dry-run` prints the"
        " plan, with the commands for one GPU, a Ray cluster and Slurm.\n"
    )


def unfinished() -> list[str]:
    """The CPU schedules of which a run is missing, as commands have them."""
    schedules = {"small": ("small", editions("small")), "compact --precision bf16": ("compact", BF16)}
    return [name for name, (folder, own) in schedules.items() if not all(done for *_, done in _progress(folder, own))]


def cut_short() -> dict[str, int]:
    """The learners of which `compact` trained the first tasks alone, and the number of their jobs."""
    return {
        need.settings.learner.upper(): number
        for number, (need, run, _) in enumerate(_progress("compact", BF16), start=1)
        if run is not None and len(run.tasks) < _n_tasks(need.settings)
    }


def _progress(folder: str, own: Sequence[Edition]) -> list[tuple[Need, StoredRun | None, bool]]:
    """Each run of a schedule, as far as it is kept, and whether that is all of it."""
    runs = {run.path.name.partition(".")[0]: run for run in runs_in(folder)}
    needs = [(need, runs.get(need.settings.name)) for need in all_needs(list(ARTIFACTS.values()), own)]
    return [(need, run, satisfied(need, run)) for need, run in needs]


def _keys(own: Sequence[Edition]) -> set[str]:
    return {need.settings.key for need in all_needs(list(ARTIFACTS.values()), own)}


def _both(need: Need) -> Iterator[RunSettings]:
    """The training of a need, and its second one on all the data."""
    yield need.settings
    if need.full_data and need.settings.validation:
        yield need.settings.on_all_data()


def _covered(schedule: str, own: Sequence[Edition], option: str) -> Iterator[str]:
    progress = _progress(schedule, own)
    hours = sum(_hours(run) for _, run, _ in progress if run is not None)
    finished = sum(done for *_, done in progress)
    yield f"**`{schedule}{option}`**: {finished} of {len(progress)} runs, {hours:.1f} hours.\n"
    yield "| job | run | tasks done | hours |\n|---:|---|---|---:|"
    for number, (need, run, done) in enumerate(progress, start=1):
        yield f"| {number} | {_told(need)} | {_done(need, run, done)} | {f'{_hours(run):.1f}' if run else ''} |"
    missing = [str(number) for number, (*_, done) in enumerate(progress, start=1) if not done]
    if missing:
        yield (
            f"\nThe missing ones: `tcil reproduce all --schedule {schedule}{option} --data DIR --out RUNS --kept"
            f" docs/results/{schedule} --job N` for N = {', '.join(missing)}; without `--job`, all of them."
        )
    yield ""


def _done(need: Need, run: StoredRun | None, whole: bool) -> str:
    if run is None:
        return "missing"
    every = _n_tasks(need.settings)
    counted = f"{len(run.tasks)} of {every}"
    if whole:
        return counted if len(run.tasks) == every else f"{counted}, as the schedule asks"
    return counted if len(run.tasks) < _asked(need) else f"{counted}; its analysis for figures is missing"


def _n_tasks(settings: RunSettings) -> int:
    return settings.tasks if isinstance(settings.tasks, int) else len(settings.tasks)


def _asked(need: Need) -> int:
    """How many tasks the schedule asks for."""
    return need.until or _n_tasks(need.settings)


def _told(need: Need) -> str:
    settings = need.settings
    return f"{settings.learner.upper()} on {settings.dataset}, {_n_tasks(settings)} tasks, seed {settings.seed}"


def _hours(run: StoredRun) -> float:
    return sum(task.get("training", 0.0) for task in run.environment.seconds.values()) / 3600
