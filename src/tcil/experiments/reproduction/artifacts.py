"""The paper's tables, figures and claims: the runs that each needs, and how it is drawn next to the printed one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tcil.experiments.config.settings import RunSettings
from tcil.experiments.reporting.charts import Chart
from tcil.experiments.reporting.collect import Study
from tcil.experiments.reporting.grids import Cell, Grid, Row
from tcil.experiments.reporting.page import Section
from tcil.experiments.reporting.plots import Picture
from tcil.experiments.reporting.statistics import Spread
from tcil.experiments.reporting.tables import COLUMNS, best, percent
from tcil.experiments.reproduction import paper, paper_figures
from tcil.experiments.reproduction.claims import claims_grid, numbered
from tcil.experiments.reproduction.finished import FinishedRuns
from tcil.experiments.reproduction.schedules import LEARNERS, MAIN, Edition, Variation
from tcil.experiments.runs.analysed import POLICIES
from tcil.experiments.runs.catalogue import ALL_DATA, learner_title
from tcil.foundation.errors import unknown_name

OTHER_POLICIES = {f"t-cil-{policy}": policy for policy in POLICIES if policy != "paper"}


@dataclass(frozen=True)
class Need:
    """A training that an artifact needs, and what must be computed on it."""

    settings: RunSettings
    calibrators: tuple[str, ...] = ()
    full_data: bool = False
    analysis: bool = False
    until: int | None = None


@dataclass(frozen=True)
class Wanted:
    """An experiment that an artifact draws, in the paper's terms, and what it needs besides the tables."""

    dataset: str
    learner: str
    variation: Variation = MAIN
    calibrators: tuple[str, ...] = ()
    full_data: bool = False
    analysis: bool = False


@dataclass(frozen=True)
class Artifact:
    """A table, figure or set of claims of the paper."""

    name: str
    title: str
    wanted: Sequence[Wanted]
    render: Callable[[FinishedRuns], Section]
    notes: Sequence[str] = field(default=())

    def needs(self, editions: Sequence[Edition]) -> list[Need]:
        """The trainings that it needs in these editions."""
        needs = []
        for edition, one in itertools.product(editions, self.wanted):
            for seed in edition.seeds:
                settings = edition.settings(one.dataset, one.learner, seed, one.variation)
                if settings is not None:
                    second, until = one.full_data and edition.full_data, edition.first_tasks.get(one.learner)
                    analysis = one.analysis and seed in edition.seeds[: edition.n_analysed]
                    needs.append(Need(settings, one.calibrators, second, analysis, until))
        return needs


def all_needs(artifacts: Sequence[Artifact], editions: Sequence[Edition]) -> list[Need]:
    """The trainings of several artifacts, each once, with everything that any of them needs."""
    merged: dict[str, Need] = {}
    for need in (need for artifact in artifacts for need in artifact.needs(editions)):
        earlier = merged.get(need.settings.key)
        if earlier is not None:
            need = Need(
                need.settings,
                tuple(dict.fromkeys((*earlier.calibrators, *need.calibrators))),
                earlier.full_data or need.full_data,
                earlier.analysis or need.analysis,
                None if None in (earlier.until, need.until) else max(earlier.until or 0, need.until or 0),
            )
        merged[need.settings.key] = need
    return list(merged.values())


# tables ------------------------------------------------------------------------------------------------------


_SHORT = {
    "baselines": "Baselines, ER", "compatibility": "Learners with and without T-CIL", "policies": "Direction policies",
    "grid": "Learners x calibrators", "tasks20": "Twice as many tasks", "validation": "Size of the validation set",
}  # fmt: skip


def _our_name(calibrator: str) -> str:
    return f"t-cil[policy={OTHER_POLICIES[calibrator]}]" if calibrator in OTHER_POLICIES else calibrator


def _with_pact(rows: Sequence[paper.PaperRow]) -> list[paper.PaperRow]:
    """The rows, with one for PACT (without numbers of the paper) below each row of T-CIL."""
    more = []
    for row in rows:
        more.append(row)
        if row.calibrator == "t-cil":
            more.append(row.model_copy(update={"calibrator": "pact", "metrics": dict.fromkeys(row.metrics)}))
    return more


def _label(row: paper.PaperRow, study: Study | None) -> str:
    titles = {
        ALL_DATA: "Vanilla (all data)", "vanilla": "Vanilla (validation images held out)", "ts": "TS", "ets": "ETS",
        "irm": "IRM", "perturb-ts": "PerturbTS", "t-cil": "T-CIL", "pact": "PACT (ours)",
        **{name: POLICIES[policy] for name, policy in OTHER_POLICIES.items()},
    }  # fmt: skip
    label = titles[row.calibrator]
    if row.table == "validation":
        ours = study.settings.validation if study is not None else row.validation
        label = f"validation {row.validation}" + (f" (ours {ours})" if ours != row.validation else "")
        label = f"PACT (ours), {label}" if row.calibrator == "pact" else label
    elif row.table in ("grid", "compatibility", "tasks20"):
        label = f"{learner_title(row.learner)}: {label}"
    return label if study is None or study.whole else f"{label}; {study.tasks_told}"


def _variation(row: paper.PaperRow) -> Variation:
    if row.table == "validation":
        return Variation(validation=row.validation)
    return Variation(many_tasks=row.tasks == 20)


def _paper_table(table: str) -> Callable[[FinishedRuns], Section]:
    """A table of our results, the paper's and the difference, for each dataset and edition."""

    def render(finished: FinishedRuns) -> Section:
        grids, missing, unrun = [], [], []
        for dataset in dict.fromkeys(row.dataset for row in paper.rows(table)):
            rows = _with_pact([row for row in paper.rows(table) if row.dataset == dataset])
            having = [e for e in finished.editions if any(_our_study(finished, e, row) for row in rows)]
            grids += [_against_paper(finished, edition, dataset, rows) for edition in having]
            if not having:
                unrun.append(dataset)
                missing.append(_against_paper(finished, None, dataset, rows))
        more: dict[str, Sequence[Grid]] = {"Not run: the paper's numbers alone": missing} if missing else {}
        named = [paper.DATASETS[name] for name in unrun]
        lines = [*ARTIFACTS[table].notes, *([f"{' and '.join(named)}: not run."] if named else [])]
        lines += [edition.left_out for edition in finished.editions if edition.left_out]
        return Section(ARTIFACTS[table].title, lines, grids, more=more)

    return render


def _our_study(finished: FinishedRuns, edition: Edition, row: paper.PaperRow) -> Study | None:
    return finished.study(edition, row.dataset, row.learner, _variation(row))


def _against_paper(
    finished: FinishedRuns, edition: Edition | None, dataset: str, rows: Sequence[paper.PaperRow]
) -> Grid:
    if edition is not None:
        rows = [_as_trained(finished, edition, row) for row in rows]
    metrics = [metric for metric in paper.METRICS if metric in rows[0].metrics]
    columns = ["method", *(f"{COLUMNS[metric]} {part}" for metric in metrics for part in ("ours", "paper", "diff"))]
    winners = _winners(finished, edition, rows) if edition else {}
    studies = [_told(finished, edition, row) if edition else None for row in rows]
    most = max((len(study.runs) for study in studies if study), default=0)
    lines = []
    for row, study in zip(rows, studies, strict=True):
        name = _our_name(row.calibrator)
        fewer = f"n = {len(study.runs)}" if study is not None and len(study.runs) < most else ""
        cells: list[Cell] = []
        for metric in metrics:
            printed = row.metrics[metric]
            theirs = Cell(words="n/a") if printed is None else Cell(Spread(printed[0], printed[1], 5))
            ours = Cell(words="not run")
            if study is not None:
                bold = metric == "ece" and winners.get(row.learner) == name
                ours = replace(percent(study.means(name, metric), bold), note=fewer)
            difference = Cell(words="")
            if ours.spread is not None and printed is not None and study is not None and study.whole:
                difference = Cell(Spread.lone(ours.spread.mean - printed[0]), signed=True)
            cells += [ours, theirs, difference]
        lines.append(Row(_label(row, study), tuple(cells), row.learner if len({r.learner for r in rows}) > 1 else ""))
    tasks = " or ".join(dict.fromkeys(study.tasks_told for study in studies if study))
    title = f"ours: {edition.title}, {tasks}, n = {most}" if edition else "not run"
    notes = [
        "Mean over tasks, %, ± population standard deviation over seeds.",
        _protocols(rows, studies),
        *_memorised(studies),
    ]
    if any(study is not None and not study.whole for study in studies):
        notes.append("Where ours are the first tasks only, the paper's are of all, and no difference is given.")
    if any(row.calibrator == "vanilla" for row in rows):
        notes.append("Ours for Vanilla: the networks that all calibrators share, with the validation images held out.")
    if any(winners.values()):
        notes.append("Bold: the lowest ECE of a learner's rows, by the paired 95 % intervals to all with every seed.")
    notes += numbered(paper.footnotes(f"{rows[0].table}:{dataset}"))
    return Grid(
        f"{_SHORT[rows[0].table]}, {paper.DATASETS[dataset]}; {title}", tuple(columns), tuple(lines), tuple(notes)
    )


def _as_trained(finished: FinishedRuns, edition: Edition, row: paper.PaperRow) -> paper.PaperRow:
    """The row, for the networks with held-out validation images if the edition has none trained on all the data."""
    study = _our_study(finished, edition, row) if row.calibrator == ALL_DATA and not edition.full_data else None
    instead = study is not None and study.having(ALL_DATA) is None
    return row.model_copy(update={"calibrator": "vanilla"}) if instead else row


def _memorised(studies: Sequence[Study | None]) -> list[str]:
    """A note on the accuracy on exemplars and test images; results are comparable only if exemplars are memorised."""
    by_learner: dict[str, str] = {}
    for study in studies:
        if study is not None and study.memorised is not None and study.having("vanilla") is not None:
            accuracy = percent(study.means("vanilla", "accuracy")).text()
            name = study.learner
            if study.settings.validation is not None and len({s.settings.validation for s in studies if s}) > 1:
                name += f" ({study.settings.validation} for validation)"
            by_learner.setdefault(name, f"{name} {100 * study.memorised:.1f} % (accuracy {accuracy} %)")
    shown = ", ".join(by_learner.values())
    return [f"Memorised exemplars, predicted correctly, mean over tasks: {shown}."] if shown else []


def _protocols(rows: Sequence[paper.PaperRow], studies: Sequence[Study | None]) -> str:
    """A note on the numbers of tasks and validation images, in the paper and in our runs."""
    sizes = sorted({row.validation for row in rows if row.validation is not None})
    tasks = " or ".join(sorted({str(row.tasks) for row in rows}))
    validated = f"{_either(sizes)} images per task for validation"
    told = f"The paper's: five seeds, 200 epochs per task, {tasks} tasks, {validated}."
    ours = [
        (settings.validation, settings.validation_pool)
        for settings in (study.settings for study in studies if study is not None)
        if settings.validation is not None and settings.validation_pool is not None
    ]
    if ours:
        held_out = {pool for validation, pool in ours if pool > validation}
        told += f" Ours: {_either(sorted({validation for validation, _ in ours}))}"
        told += f", of {_either(sorted(held_out))} held out." if held_out else "."
    return told


def _either(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes))


def _told(finished: FinishedRuns, edition: Edition, row: paper.PaperRow) -> Study | None:
    """The study of a row's experiment, with the seeds that have its calibrator."""
    study = _our_study(finished, edition, row)
    return study.having(_our_name(row.calibrator)) if study is not None else None


def _winners(finished: FinishedRuns, edition: Edition, rows: Sequence[paper.PaperRow]) -> dict[str, str | None]:
    """By learner, the calibrator whose ECE is significantly lower than all others by paired intervals."""
    winners: dict[str, str | None] = {}
    for learner in dict.fromkeys(row.learner for row in rows if row.table != "validation"):
        names = [_our_name(row.calibrator) for row in rows if row.learner == learner]
        study = _our_study(finished, edition, next(row for row in rows if row.learner == learner))
        if study is not None:
            winners[learner] = best(study, names, "ece")
    return winners


# figures -----------------------------------------------------------------------------------------------------

Draw = Callable[[Study], Picture | Chart | None]


def _by_study(name: str, draw: Draw) -> Callable[[FinishedRuns], Section]:
    """One picture for each dataset and learner of the figure, in each edition that includes it."""

    def render(finished: FinishedRuns) -> Section:
        pictures, missing = [], []
        for dataset, learner in ((one.dataset, one.learner) for one in ARTIFACTS[name].wanted):
            drawn = [
                _titled(draw(study), edition, dataset, learner, "" if study.whole else f", {study.tasks_told}")
                for edition, study in finished.on(dataset, learner)
            ]
            pictures += [picture for picture in drawn if picture is not None]
            if not any(drawn):
                missing.append(f"{learner_title(learner)} on {paper.DATASETS[dataset]} was not run.")
        return Section(ARTIFACTS[name].title, [*ARTIFACTS[name].notes, *missing], pictures=pictures)

    return render


def _titled(
    picture: Picture | Chart | None, edition: Edition, dataset: str, learner: str, told: str = ""
) -> Picture | Chart | None:
    where = f"{learner_title(learner)} on {paper.DATASETS[dataset]}, ours: {edition.title}{told}"
    return picture and picture.about(where)


def _ece_progression(finished: FinishedRuns) -> Section:
    pictures, missing = [], []
    for dataset in ("cifar100", "tiny-imagenet"):
        for edition in finished.editions:
            by_learner = {learner: finished.study(edition, dataset, learner) for learner in LEARNERS}
            studies = [study for study in by_learner.values() if study is not None]
            if studies:
                where = f"{paper.DATASETS[dataset]}, ours: {edition.title}"
                pictures.append(paper_figures.progression(studies).about(where))
                missing += [
                    f"{learner_title(learner)}: not run ({where})."
                    for learner, study in by_learner.items()
                    if study is None and learner in edition.learners
                ]
        if not any(finished.study(e, dataset, learner) for e in finished.editions for learner in LEARNERS):
            missing.append(f"{paper.DATASETS[dataset]} was not run.")
    return Section(ARTIFACTS["ece-progression"].title, missing, pictures=pictures)


def _memory_sizes(finished: FinishedRuns) -> Section:
    pictures, missing = [], []
    for dataset, sizes in paper.MEMORY_SIZES.items():
        drawn = False
        for edition in finished.editions:
            by_size = {
                size: finished.study(edition, dataset, "er", Variation(memory=size, validation=100)) for size in sizes
            }
            studies = [study for study in by_size.values() if study is not None]
            if studies:
                drawn = True
                picture = paper_figures.against_size("memory", studies)
                images = studies[0].settings.validation
                told = replace(picture, caption=f"{picture.caption} {images} images per task for validation.")
                pictures.append(_titled(told, edition, dataset, "er"))
            if studies and len(studies) < len(sizes):
                absent = [str(size) for size, study in by_size.items() if study is None]
                missing.append(f"The paper's sizes {', '.join(absent)} were not run ({edition.title}).")
        if not drawn:
            missing.append(f"{paper.DATASETS[dataset]} was not run.")
    return Section(ARTIFACTS["memory-size"].title, missing, pictures=[p for p in pictures if p is not None])


def _validation_table(finished: FinishedRuns) -> Section:
    section = _paper_table("validation")(finished)
    pictures = []
    for edition in finished.editions:
        by_size = [
            finished.study(edition, "cifar100", "er", Variation(validation=size)) for size in paper.VALIDATION_SIZES
        ]
        studies = [study for study in by_size if study is not None]
        if len(studies) > 1:
            picture = _titled(paper_figures.against_size("validation", studies), edition, "cifar100", "er")
            pictures += [picture] if picture else []
    return replace(section, pictures=pictures)


def _claims(finished: FinishedRuns) -> Section:
    return Section(ARTIFACTS["claims"].title, ARTIFACTS["claims"].notes, [claims_grid(finished)])


def _table(name: str, title: str, full_data: bool = False, notes: Sequence[str] = ()) -> Artifact:
    rows = paper.rows(name)
    calibrators = tuple(dict.fromkeys(_our_name(row.calibrator) for row in rows if row.calibrator in OTHER_POLICIES))
    wanted = dict.fromkeys(Wanted(row.dataset, row.learner, _variation(row), calibrators, full_data) for row in rows)
    render = _validation_table if name == "validation" else _paper_table(name)
    return Artifact(name, title, list(wanted), render, notes)


_ALL_DATA = (
    "The paper trains Vanilla on all the data and the others on what the validation set leaves; so do rows"
    " 'Vanilla (all data)' here, where a schedule has this second training."
)
_ER, _ER_ON_TINY, _DER = (Wanted("cifar100", "er"), Wanted("tiny-imagenet", "er"), Wanted("cifar100", "der"))
_ER_ANALYSED = replace(_ER, analysis=True)
_MEMORY = [
    Wanted(dataset, "er", Variation(memory=size, validation=100))
    for dataset, sizes in paper.MEMORY_SIZES.items()
    for size in sizes
]
_LEARNERS = [Wanted(dataset, learner) for dataset in ("cifar100", "tiny-imagenet") for learner in LEARNERS]
_CLAIMED = [
    replace(_ER_ANALYSED, calibrators=tuple(map(_our_name, OTHER_POLICIES))),
    *(Wanted("cifar10", learner) for learner in LEARNERS),
    *(replace(one, full_data=one.dataset == "cifar100" or one.learner == "der") for one in _LEARNERS),
    *(replace(one, variation=Variation(many_tasks=True)) for one in _LEARNERS),
    *(Wanted("cifar100", "er", Variation(validation=size)) for size in paper.VALIDATION_SIZES),
    *_MEMORY,
    replace(_ER, variation=Variation(reserve=0.25)),
]

ARTIFACTS: dict[str, Artifact] = {
    artifact.name: artifact
    for artifact in (
        _table("baselines", "Table: T-CIL against five baselines, ER", full_data=True, notes=[_ALL_DATA]),
        _table("compatibility", "Table: four learners with and without T-CIL", full_data=True, notes=[_ALL_DATA]),
        _table("policies", "Table: direction policies, ER on CIFAR-100"),
        _table("grid", "Table: learners x calibrators x datasets", full_data=True, notes=[_ALL_DATA]),
        _table("tasks20", "Table: twice as many tasks", full_data=True, notes=[_ALL_DATA]),
        _table("validation", "Table and figure: size of the validation set, ER on CIFAR-100"),
        Artifact(
            "temperature-bias",
            "Figure: temperature of new-task TS against the optimal one",
            [_ER, _ER_ON_TINY],
            _by_study("temperature-bias", paper_figures.temperature_bias),
        ),
        Artifact(
            "task-accuracy",
            "Figure: accuracy by task on test images and on exemplars after the last task",
            [_ER, _DER],
            _by_study("task-accuracy", paper_figures.task_accuracy),
        ),
        Artifact(
            "feature-space",
            "Figure: the perturbation policy in feature space",
            [_ER_ANALYSED],
            _by_study("feature-space", paper_figures.feature_space),
        ),
        Artifact(
            "epsilon-gap",
            "Figure: difference of optimal magnitudes by task for four policies",
            [_ER_ANALYSED],
            _by_study("epsilon-gap", paper_figures.epsilon_gap),
        ),
        Artifact("memory-size", "Figure: size of the memory, ER", _MEMORY, _memory_sizes),
        Artifact("ece-progression", "Figure: ECE by task for four learners", _LEARNERS, _ece_progression),
        Artifact(
            "claims",
            "Claims in the text",
            _CLAIMED,
            _claims,
            notes=["Each claim with what the paper prints and what our runs give; 'not run' where none tells."],
        ),
    )
}


def artifacts_named(name: str) -> list[Artifact]:
    """One artifact, or all."""
    if name == "all":
        return list(ARTIFACTS.values())
    if name not in ARTIFACTS:
        raise unknown_name("name", name, [*ARTIFACTS, "all"])
    return [ARTIFACTS[name]]
