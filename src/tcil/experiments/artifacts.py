"""The paper's tables, figures and claims: what runs each needs, and how it is drawn from them beside the printed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tcil.calibration.errors import unknown_name
from tcil.experiments import paper, paper_figures
from tcil.experiments.claims import claims_grid, numbered
from tcil.experiments.collect import Study
from tcil.experiments.evidence import Evidence
from tcil.experiments.figures import Picture
from tcil.experiments.grids import Cell, Grid, Row
from tcil.experiments.report import Section
from tcil.experiments.schedules import LEARNERS, Edition
from tcil.experiments.settings import RunSettings
from tcil.experiments.statistics import Spread
from tcil.experiments.tables import COLUMNS, best, percent

OTHER_POLICIES = {f"t-cil-{policy}": policy for policy in paper.POLICIES if policy != "paper"}


@dataclass(frozen=True)
class Need:
    """A training that an artifact needs, with what must be computed on it."""

    settings: RunSettings
    calibrators: tuple[str, ...] = ()
    full_data: bool = False
    analysis: bool = False


@dataclass(frozen=True)
class Wanted:
    """An experiment that an artifact draws, in the paper's own terms, and what it takes from it besides the tables."""

    dataset: str
    learner: str
    variation: Mapping[str, Any] = field(default_factory=dict)
    calibrators: tuple[str, ...] = ()
    full_data: bool = False
    analysis: bool = False


@dataclass(frozen=True)
class Artifact:
    """A table, figure or set of claims of the paper."""

    name: str
    title: str
    wanted: Sequence[Wanted]
    render: Callable[[Evidence], Section]
    notes: Sequence[str] = field(default=())

    def needs(self, editions: Sequence[Edition]) -> list[Need]:
        """The trainings it needs in these editions."""
        found = []
        for edition, one in itertools.product(editions, self.wanted):
            for seed in edition.seeds:
                settings = edition.settings(one.dataset, one.learner, seed, **one.variation)
                if settings is not None:
                    found.append(Need(settings, one.calibrators, one.full_data, one.analysis))
        return found


def all_needs(artifacts: Sequence[Artifact], editions: Sequence[Edition]) -> list[Need]:
    """The trainings of several artifacts, each once, with everything that any of them wants of it."""
    merged: dict[str, Need] = {}
    for need in (need for artifact in artifacts for need in artifact.needs(editions)):
        known = merged.get(need.settings.key)
        if known is not None:
            need = Need(
                need.settings,
                tuple(dict.fromkeys((*known.calibrators, *need.calibrators))),
                known.full_data or need.full_data,
                known.analysis or need.analysis,
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


def _label(row: paper.PaperRow, study: Study | None) -> str:
    titles = {
        "vanilla-all-data": "Vanilla (all data)", "ts": "TS", "ets": "ETS", "irm": "IRM", "perturb-ts": "PerturbTS",
        "t-cil": "T-CIL", **{name: paper.POLICIES[policy] for name, policy in OTHER_POLICIES.items()},
    }  # fmt: skip
    if row.table == "validation":
        ours = study.settings["validation"] if study is not None else row.validation
        return f"validation {row.validation}" + (f" (ours {ours})" if ours != row.validation else "")
    if row.table in ("grid", "compatibility", "tasks20"):
        return f"{row.learner.upper()}: {titles[row.calibrator]}"
    return titles[row.calibrator]


def _variation(row: paper.PaperRow) -> dict[str, Any]:
    if row.table == "validation":
        return {"validation": row.validation}
    return {"many_tasks": True} if row.tasks == 20 else {}


def _paper_table(table: str) -> Callable[[Evidence], Section]:
    """Ours, the paper's, and the difference, for each dataset and edition."""

    def render(evidence: Evidence) -> Section:
        grids, missing, unrun = [], [], []
        for dataset in dict.fromkeys(row.dataset for row in paper.rows(table)):
            rows = [row for row in paper.rows(table) if row.dataset == dataset]
            run = [e for e in evidence.editions if any(_our_study(evidence, e, row) for row in rows)]
            grids += [_against_paper(evidence, edition, dataset, rows) for edition in run]
            if not run:
                unrun.append(dataset)
                missing.append(_against_paper(evidence, None, dataset, rows))
        more: dict[str, Sequence[Grid]] = {"Not run: the paper's numbers alone": missing} if missing else {}
        named = [paper.DATASETS[name] for name in unrun]
        lines = [*ARTIFACTS[table].notes, *([f"{' and '.join(named)}: not run."] if named else [])]
        return Section(ARTIFACTS[table].title, lines, grids, more=more)

    return render


def _our_study(evidence: Evidence, edition: Edition, row: paper.PaperRow) -> Study | None:
    return evidence.study(edition, row.dataset, row.learner, **_variation(row))


def _against_paper(evidence: Evidence, edition: Edition | None, dataset: str, rows: Sequence[paper.PaperRow]) -> Grid:
    keys = [key for key in paper.FIGURES if key in rows[0].figures]
    columns = ["method", *(f"{COLUMNS[key]} {part}" for key in keys for part in ("ours", "paper", "diff"))]
    winners = _winners(evidence, edition, rows) if edition else {}
    studies = [_told(evidence, edition, row) if edition else None for row in rows]
    most = max((len(study.runs) for study in studies if study), default=0)
    lines = []
    for row, study in zip(rows, studies, strict=True):
        name = _our_name(row.calibrator)
        fewer = f"n = {len(study.runs)}" if study is not None and len(study.runs) < most else ""
        cells: list[Cell] = []
        for key in keys:
            printed = row.figures[key]
            theirs = Cell(words="n/a") if printed is None else Cell(Spread(printed[0], printed[1], 5))
            ours = Cell(words="not run")
            if study is not None:
                bold = key == "ece" and winners.get(row.learner) == name
                ours = replace(percent(study.means(name, key), bold), note=fewer)
            difference = Cell(words="")
            if ours.spread is not None and printed is not None:
                difference = Cell(Spread.lone(ours.spread.mean - printed[0]), signed=True)
            cells += [ours, theirs, difference]
        lines.append(Row(_label(row, study), tuple(cells), row.learner if len({r.learner for r in rows}) > 1 else ""))
    tasks = " or ".join(sorted({str(study.n_tasks) for study in studies if study}))
    title = f"ours: {edition.title}, {tasks} tasks, n = {most}" if edition else "not run"
    notes = ["Mean over tasks, %, ± standard deviation over seeds.", _protocols(rows, studies)]
    if any(winners.values()):
        notes.append("Bold: the lowest ECE of a learner's rows, by the paired 95 % intervals to all with every seed.")
    notes += numbered(paper.footnotes(f"{rows[0].table}:{dataset}"))
    return Grid(
        f"{_SHORT[rows[0].table]}, {paper.DATASETS[dataset]}; {title}", tuple(columns), tuple(lines), tuple(notes)
    )


def _protocols(rows: Sequence[paper.PaperRow], studies: Sequence[Study | None]) -> str:
    """How many tasks and validation images the paper has, and ours."""
    sizes = sorted({row.validation for row in rows if row.validation is not None})
    tasks = " or ".join(sorted({str(row.tasks) for row in rows}))
    told = f"The paper's: five seeds, 200 epochs a task, {tasks} tasks, {_either(sizes)} images a task for validation."
    own = [study.settings for study in studies if study is not None]
    if own:
        held = {s["validation_pool"] for s in own if s["validation_pool"] > s["validation"]}
        told += f" Ours: {_either(sorted({s['validation'] for s in own}))}"
        told += f", of {_either(sorted(held))} held out." if held else "."
    return told


def _either(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes))


def _told(evidence: Evidence, edition: Edition, row: paper.PaperRow) -> Study | None:
    """The seeds of a row's experiment that have its calibrator."""
    study = _our_study(evidence, edition, row)
    return study.having(_our_name(row.calibrator)) if study is not None else None


def _winners(evidence: Evidence, edition: Edition, rows: Sequence[paper.PaperRow]) -> dict[str, str | None]:
    """By learner, the calibrator whose ECE is told from all others by paired intervals."""
    found: dict[str, str | None] = {}
    for learner in dict.fromkeys(row.learner for row in rows if row.table != "validation"):
        names = [_our_name(row.calibrator) for row in rows if row.learner == learner]
        study = _our_study(evidence, edition, next(row for row in rows if row.learner == learner))
        if study is not None:
            found[learner] = best(study, names, "ece")
    return found


# figures -----------------------------------------------------------------------------------------------------

Draw = Callable[[Study], Picture | None]


def _by_study(name: str, draw: Draw) -> Callable[[Evidence], Section]:
    """One picture for each dataset and learner that the figure wants, in each edition that has it."""

    def render(evidence: Evidence) -> Section:
        pictures, missing = [], []
        for dataset, learner in ((one.dataset, one.learner) for one in ARTIFACTS[name].wanted):
            drawn = [
                _titled(draw(study), edition, dataset, learner) for edition, study in evidence.on(dataset, learner)
            ]
            pictures += [picture for picture in drawn if picture is not None]
            if not any(drawn):
                missing.append(f"{learner.upper()} on {paper.DATASETS[dataset]} was not run.")
        return Section(ARTIFACTS[name].title, [*ARTIFACTS[name].notes, *missing], pictures=pictures)

    return render


def _titled(picture: Picture | None, edition: Edition, dataset: str, learner: str) -> Picture | None:
    where = f"{learner.upper()} on {paper.DATASETS[dataset]}, ours: {edition.title}"
    return picture and picture.about(where)


def _ece_progression(evidence: Evidence) -> Section:
    pictures, missing = [], []
    for dataset in ("cifar100", "tiny-imagenet"):
        for edition in evidence.editions:
            found = {learner: evidence.study(edition, dataset, learner) for learner in LEARNERS}
            studies = [study for study in found.values() if study is not None]
            if studies:
                where = f"{paper.DATASETS[dataset]}, ours: {edition.title}"
                pictures.append(paper_figures.progression(studies).about(where))
                missing += [
                    f"{k.upper()}: not run ({where})." for k, s in found.items() if s is None and k in edition.learners
                ]
        if not any(evidence.study(e, dataset, learner) for e in evidence.editions for learner in LEARNERS):
            missing.append(f"{paper.DATASETS[dataset]} was not run.")
    return Section(ARTIFACTS["ece-progression"].title, missing, pictures=pictures)


def _memory_sizes(evidence: Evidence) -> Section:
    pictures, missing = [], []
    for dataset, sizes in paper.MEMORY_SIZES.items():
        drawn = False
        for edition in evidence.editions:
            found = [(size, evidence.study(edition, dataset, "er", memory=size, validation=100)) for size in sizes]
            known = [(study.settings["memory"], study) for _, study in found if study is not None]
            if known:
                drawn = True
                picture = paper_figures.against_size(known, "memory size")
                images = known[0][1].settings["validation"]
                told = replace(picture, caption=f"{picture.caption} {images} images a task for validation.")
                pictures.append(_titled(told, edition, dataset, "er"))
            if known and len(known) < len(sizes):
                absent = [str(size) for size, study in found if study is None]
                missing.append(f"The paper's sizes {', '.join(absent)} were not run ({edition.title}).")
        if not drawn:
            missing.append(f"{paper.DATASETS[dataset]} was not run.")
    return Section(ARTIFACTS["memory-size"].title, missing, pictures=[p for p in pictures if p is not None])


def _validation_table(evidence: Evidence) -> Section:
    section = _paper_table("validation")(evidence)
    pictures = []
    for edition in evidence.editions:
        found = [evidence.study(edition, "cifar100", "er", validation=size) for size in paper.VALIDATION_SIZES]
        known = [(study.settings["validation"], study) for study in found if study is not None]
        if len(known) > 1:
            picture = _titled(paper_figures.against_size(known, "validation size"), edition, "cifar100", "er")
            pictures += [picture] if picture else []
    return replace(section, pictures=pictures)


def _claims(evidence: Evidence) -> Section:
    return Section(ARTIFACTS["claims"].title, ARTIFACTS["claims"].notes, [claims_grid(evidence)])


def _table(name: str, title: str, full_data: bool = False, notes: Sequence[str] = ()) -> Artifact:
    rows = paper.rows(name)
    calibrators = tuple(dict.fromkeys(_our_name(row.calibrator) for row in rows if row.calibrator in OTHER_POLICIES))
    wanted = {
        repr((row.dataset, row.learner, _variation(row))): Wanted(
            row.dataset, row.learner, _variation(row), calibrators, full_data
        )
        for row in rows
    }
    render = _validation_table if name == "validation" else _paper_table(name)
    return Artifact(name, title, list(wanted.values()), render, notes)


_ALL_DATA = "Vanilla is trained on all the data, as in the paper; the others on what the validation set leaves."
_ER, _ER_ON_TINY, _DER = (Wanted("cifar100", "er"), Wanted("tiny-imagenet", "er"), Wanted("cifar100", "der"))
_ER_ANALYSED = replace(_ER, analysis=True)
_MEMORY = [
    Wanted(dataset, "er", {"memory": size, "validation": 100})
    for dataset, sizes in paper.MEMORY_SIZES.items()
    for size in sizes
]
_LEARNERS = [Wanted(dataset, learner) for dataset in ("cifar100", "tiny-imagenet") for learner in LEARNERS]
_CLAIMED = [
    replace(_ER_ANALYSED, calibrators=tuple(map(_our_name, OTHER_POLICIES))),
    *(Wanted("cifar10", learner) for learner in LEARNERS),
    *(replace(one, full_data=one.dataset == "cifar100" or one.learner == "der") for one in _LEARNERS),
    *(replace(one, variation={"many_tasks": True}) for one in _LEARNERS),
    *(Wanted("cifar100", "er", {"validation": size}) for size in paper.VALIDATION_SIZES),
    *_MEMORY,
    replace(_ER, variation={"reserve": 0.25}),
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
