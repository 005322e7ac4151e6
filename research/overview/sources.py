"""The runs behind docs/results.md: what was trained, where it is kept, and in what words the page names it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from research import ROOT
from tcil.experiments.reporting.collect import Study, any_runs, read_runs, shown, studies
from tcil.experiments.reporting.tables import percent_of
from tcil.experiments.reproduction import paper
from tcil.experiments.reproduction.finished import FinishedRuns
from tcil.experiments.reproduction.schedules import LEARNERS, MAIN, Edition, Variation, editions
from tcil.experiments.runs.catalogue import ALL_DATA
from tcil.experiments.runs.store import StoredRun

RESULTS, IMAGES = ROOT / "docs/results", ROOT / "docs/images/overview"
PAGE, TABLES = ROOT / "docs/results.md", ROOT / "docs/results-tables.md"
OFFICIAL = {"vanilla": "Vanilla", "ts": "TS", "t-cil": "T-CIL", "pact": "PACT", "optimal-ts": "Optimal TS (oracle)"}
TITLES = {
    "vanilla": "Vanilla", "ts": "TS", "ets": "ETS", "irm": "IRM", "t-cil": "T-CIL", "pact": "PACT (ours)",
    "optimal-ts": "Optimal TS (oracle)",
}  # fmt: skip
MANY_TASKS = "CIFAR-100, 20 tasks"
OF_THE_PAPER = ("vanilla", "ts", "ets", "irm", "perturb-ts")  # what T-CIL is compared with there
# `compact` was trained in bf16, which takes half the time on the machine that had it, and before in fp32 in part.
BF16, FP32 = editions("compact", changes={"precision": "bf16"}), editions("compact")


@dataclass(frozen=True)
class Source:
    """Runs of several learners on the same data."""

    data: str
    schedule: str
    network: str
    what: str
    command: str
    by_learner: Mapping[str, Study]

    @property
    def name(self) -> str:
        """The data, and the network if it is the paper's."""
        return f"{self.data}, {self.network}" if self.schedule == "compact" else self.data

    @property
    def described(self) -> str:
        """The data, the network and the stream in words."""
        what = self.what if self.network in self.name else f"{self.network}, {self.what}"
        return f"{self.name} ({what})"

    def percent(self, learner: str, calibrator: str, metric: str = "ece") -> float | None:
        """A mean over tasks and seeds, in percent."""
        cell = percent_of(self.by_learner[learner], calibrator, metric)
        return None if cell.spread is None else cell.spread.mean

    def mean(self, calibrator: str, metric: str = "ece") -> float | None:
        """The same over all learners, which count equally; None where one has no such number."""
        values = [self.percent(learner, calibrator, metric) for learner in self.by_learner]
        return None if None in values else float(np.mean([value for value in values if value is not None]))


def sources() -> list[Source]:
    """What was run: the schedules `compact` and `small`, and letters."""
    schedules: dict[str, tuple[str, list[Edition]]] = {
        "bf16": ("compact", BF16), "fp32": ("compact", FP32), "small": ("small", editions("small")),
    }  # fmt: skip
    runs = {name: FinishedRuns(own, runs_in(folder)) for name, (folder, own) in schedules.items()}

    def of(schedule: str, edition: int, dataset: str, variation: Variation = MAIN) -> dict[str, Study]:
        known = runs[schedule]
        found = {learner: known.study(known.editions[edition], dataset, learner, variation) for learner in LEARNERS}
        return {learner: study for learner, study in found.items() if study is not None}

    def compact(edition: int, dataset: str) -> dict[str, Study]:
        """In bf16, or in fp32 where more tasks were trained."""
        both = [of(precision, edition, dataset) for precision in ("bf16", "fp32")]
        known = {learner: [own[learner] for own in both if learner in own] for learner in LEARNERS}
        return {learner: max(own, key=lambda study: study.n_tasks) for learner, own in known.items() if own}

    command = "tcil reproduce all --schedule {} --data DIR".format

    def large(data: str, what: str, own: dict[str, Study]) -> Source:
        option = " --precision bf16" if any(study.settings.precision == "bf16" for study in own.values()) else ""
        return Source(data, "compact", "ResNet-32", what, command("compact") + option, own)

    def small(data: str, what: str, own: dict[str, Study]) -> Source:
        return Source(data, "small", "small ResNet", what, command("small"), own)

    by_name = {study.settings.learner: study for study in studies(shown(runs_in("letters")))}
    letters = {learner: by_name[learner] for learner in LEARNERS if learner in by_name}
    drawn = "tcil run --preset letters --learner LEARNER --seeds 2,3,4,5,6 --no-full-data"
    ten, twenty = "10 tasks of 10 classes, memory 2,000", "10 tasks of 20, memory 4,000"
    many, two = "20 tasks of 5, memory 2,000", "5 tasks of 2, memory 200"
    all_of_them = [
        large("CIFAR-100", ten, compact(0, "cifar100")),
        large("CIFAR-10", two, compact(1, "cifar10")),
        small("CIFAR-100", ten, of("small", 0, "cifar100")),
        small(MANY_TASKS, many, of("small", 2, "cifar100", Variation(many_tasks=True))),
        small("Tiny-ImageNet", twenty, of("small", 1, "tiny-imagenet")),
        small("CIFAR-10", two, of("small", 1, "cifar10")),
        Source("letters", "letters", "tiny ResNet", "5 tasks of 4, memory 400", drawn, letters),
    ]
    return [source for source in all_of_them if source.by_learner]


def runs_in(folder: str) -> list[StoredRun]:
    """The runs kept in this folder of docs/results."""
    path: Path = RESULTS / folder
    return read_runs([path]) if any_runs(path) else []


def named(learner: str, study: Study) -> str:
    """The learner, and how far its runs went if they are not complete, and in which precision where it is not fp32."""
    words = [] if study.whole else [tasks_of(study)]
    words += [study.settings.precision] if study.settings.precision != "fp32" else []
    return learner.upper() + (f" ({', '.join(words)})" if words else "")


def tasks_of(study: Study) -> str:
    """How far a study went that did not go through all its tasks."""
    return f"first {study.n_tasks} tasks"


def printed(study: Study, calibrator: str, metric: str = "ece") -> float | None:
    """The paper's number for the same dataset, learner and number of tasks, if it has one."""
    settings = study.settings
    table = {5: "grid", 10: "grid", 20: "tasks20"}.get(settings.n_tasks or 0)
    if table is None or (settings.n_tasks == 5) != (settings.dataset == "cifar10"):
        return None
    named = ALL_DATA if calibrator == "vanilla" else calibrator
    row = paper.find(table, dataset=settings.dataset, learner=settings.learner, calibrator=named)
    value = None if row is None else row.metrics[metric]
    return None if value is None else value[0]


def official() -> dict[str, list[float]]:
    """ECE by task on the authors' checkpoints, in percent."""
    record = json.loads((RESULTS / "official-checkpoints.json").read_text())["results"]
    return {name: [100 * task["ece"] for task in record[title].values()] for name, title in OFFICIAL.items()}


def main_sources(found: Sequence[Source]) -> list[Source]:
    """What is shown task by task and calibrator by calibrator: all of CIFAR-100, and letters."""
    names = ("CIFAR-100", "CIFAR-100, ResNet-32", "letters")
    return sorted((source for source in found if source.name in names), key=lambda source: names.index(source.name))


def has_present_form(run: StoredRun) -> bool:
    """Whether PACT has two temperatures after the second task, as it has in its present form."""
    row = run.result.tasks[1].calibrators.get("pact") if len(run.result.tasks) > 1 else None
    if row is None:
        return False
    old, new = (getattr(row.result, name, None) for name in ("temperature", "new_temperature"))
    return new is not None and new != old
