"""Stored runs, read back: run folders, folders of them, or the JSON files that `tcil report --keep` leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tcil.calibration.checksums import is_sealed_json, open_json
from tcil.calibration.errors import invalid
from tcil.calibration.storage import replace_file
from tcil.experiments import records
from tcil.experiments.calibration import CALIBRATORS
from tcil.experiments.settings import stored_key
from tcil.experiments.store import RunFolder, check_format

_PLAINEST = ("network", "epochs", "tasks", "memory", "validation", "reserve")  # what readers know runs by


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A finished run: its settings, what each task gave, and with what it was computed.

    `data` tells its images (or imported logits) from others; None in copies that were kept before there was such.
    """

    path: Path
    settings: dict[str, Any]
    tasks: list[dict[str, Any]]
    environment: dict[str, Any]
    analysis: dict[str, Any] | None = None
    data: dict[str, Any] | None = None

    @property
    def settings_key(self) -> str | None:
        """The hash of the settings; None for runs of other tools, which were imported."""
        return stored_key(self.settings)

    @property
    def complete(self) -> bool:
        """Whether every task has a row of every calibrator of this version, in its present form, and its exemplars'."""
        rows = [task["calibrators"].get(name) for task in self.tasks for name in CALIBRATORS]
        exemplars = [task.get("memory") or {"count": 0} for task in self.tasks]
        return all(row is not None and ("not_applicable" in row or "bins" in row) for row in rows) and all(
            memory["count"] for memory in exemplars
        )

    @property
    def seed(self) -> int:
        """The training seed."""
        return int(self.settings.get("seed", 0))

    def without(self, *names: str) -> str:
        """The settings but for these, as text."""
        return json.dumps({k: v for k, v in self.settings.items() if k not in names}, sort_keys=True)

    @property
    def place(self) -> str:
        """Where an imported run lies: such runs are not the same because their settings are."""
        return str(self.path) if self.settings.get("imported") else ""

    def row(self, task: int, calibrator: str) -> dict[str, Any] | None:
        """A calibrator's figures after a task (counted from the end where negative); None where it has none."""
        row: dict[str, Any] | None = self.tasks[task]["calibrators"].get(calibrator)
        return None if row is None or "not_applicable" in row else row

    def values(self, calibrator: str, key: str) -> list[float | None]:
        """A figure by task."""
        rows = [self.row(task, calibrator) for task in range(len(self.tasks))]
        return [None if row is None else row.get(key) for row in rows]

    def mean(self, calibrator: str, key: str) -> float | None:
        """The mean over tasks; None where some task has no answer. (No class is old after the first task.)"""
        rows = [self.row(task, calibrator) for task in range(len(self.tasks))]
        if any(row is None for row in rows):
            return None
        values = [row[key] for row in rows if row is not None and row[key] is not None]
        return sum(values) / len(values) if values else None

    def titles(self) -> dict[str, tuple[str, str]]:
        """Calibrators of the run: name to (title, block), without those apart that never have an answer."""
        found: dict[str, tuple[str, str]] = {}
        for task in self.tasks:
            for name, row in task["calibrators"].items():
                block = "with other options" if "[" in name else row["block"]
                if "not_applicable" not in row or block == "ranked":
                    found.setdefault(name, (row["title"], block))
        return dict(sorted(found.items(), key=place))


@dataclass(frozen=True, eq=False)
class Study:
    """Runs that differ in their seeds only; `difference` tells them from other studies beside them."""

    runs: tuple[StoredRun, ...]
    difference: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings they share (and the first one's seeds)."""
        return self.runs[0].settings

    @property
    def title(self) -> str:
        """Learner and dataset, with the number of classes where not all are used, and what tells it from others."""
        s = self.settings
        classes = f" ({s['classes']} classes)" if s.get("classes") else ""
        return f"{str(s['learner']).upper()} on {s['dataset']}{classes}{self.difference and ', ' + self.difference}"

    @property
    def n_tasks(self) -> int:
        """How many tasks."""
        return len(self.runs[0].tasks)

    @property
    def vanilla(self) -> str:
        """Vanilla as in the paper, trained on all the data, where every seed has it; else on what validation leaves."""
        return "vanilla-all-data" if all("vanilla-all-data" in run.titles() for run in self.runs) else "vanilla"

    def titles(self) -> dict[str, tuple[str, str]]:
        """Calibrators of any of the runs."""
        found: dict[str, tuple[str, str]] = {}
        for run in self.runs:
            for name, title in run.titles().items():
                found.setdefault(name, title)
        return dict(sorted(found.items(), key=place))

    def having(self, calibrator: str) -> Study | None:
        """The runs that have tried this calibrator; None where none has."""
        runs = tuple(run for run in self.runs if any(calibrator in task["calibrators"] for task in run.tasks))
        return replace(self, runs=runs) if runs else None

    def means(self, calibrator: str, key: str) -> list[float | None]:
        """The mean over tasks by run."""
        return [run.mean(calibrator, key) for run in self.runs]


def same_seeds(studies: Sequence[Study]) -> list[Study]:
    """The studies with those seeds only that all of them have; none where they share no seed."""
    shared = set.intersection(*({run.seed for run in study.runs} for study in studies)) if studies else set()
    if not shared:
        return []
    return [replace(study, runs=tuple(run for run in study.runs if run.seed in shared)) for study in studies]


def read_runs(paths: Iterable[Path]) -> list[StoredRun]:
    """All finished runs under these paths, each once, in the order of their names."""
    found: dict[str, StoredRun] = {}
    for path in paths:
        own = sorted(_results_under(path))
        if not own:
            raise invalid("runs", f"{path}, without a finished run", "a run folder, or a folder that holds some")
        for file in own:
            run = _read(file)
            same = run.without() + run.place
            found[same] = _joined(found[same], run) if same in found else run
    return sorted(found.values(), key=lambda run: run.path.name)


def _joined(first: StoredRun, second: StoredRun) -> StoredRun:
    """The same run found twice: rows of either, those of the first where both have them."""
    if not _same_run(first, second):
        given = f"{first.path} and {second.path}, the same settings with other images"
        raise invalid("runs", given, "runs on the same images", "Report them one after the other.")
    tasks = [
        {**b, **a, "calibrators": {**b["calibrators"], **a["calibrators"]}}
        for a, b in zip(first.tasks, second.tasks, strict=True)
    ]
    return replace(first, tasks=tasks, analysis=first.analysis or second.analysis, data=first.data or second.data)


def _same_run(first: StoredRun, second: StoredRun) -> bool:
    """Whether two are the same run, of the same images or imported logits as far as that is known."""
    if first.without() != second.without() or len(first.tasks) != len(second.tasks):
        return False
    if first.data and second.data:
        return first.data == second.data
    # The settings of a training say all of it but the images; those of an import hardly anything.
    return not first.settings.get("imported") or first.tasks == second.tasks


def any_runs(path: Path) -> bool:
    """Whether there is a finished run under this path."""
    return bool(_results_under(path))


def shown(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Runs with something to calibrate; those on all the data stand as a row of Vanilla in the others' tables."""
    calibrated = [run for run in runs if run.settings.get("validation") != 0]
    return calibrated or list(runs)


def studies(runs: Iterable[StoredRun]) -> list[Study]:
    """Runs grouped by everything but the training seed: other classes or validation images make another study."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(run.without("seed") + run.place, []).append(run)
    firsts = [group[0] for group in groups.values()]
    labels = differences([run.settings for run in firsts])
    imported = sum(bool(run.place) for run in firsts)
    return [
        Study(
            tuple(sorted(group, key=lambda run: run.seed)),
            ", ".join(filter(None, [label, first.path.name if first.place and imported > 1 else ""])),
        )
        for group, first, label in zip(groups.values(), firsts, labels, strict=True)
    ]


def differences(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each, in few words, what tells it from the others of its dataset, learner and classes (but for the seed)."""
    known = [(str(s["dataset"]), str(s["learner"]), s.get("classes")) for s in settings]
    found = [""] * len(settings)
    for place in dict.fromkeys(known):
        rows = [row for row, own in enumerate(known) if own == place]
        names = _telling([settings[row] for row in rows])
        for row in rows:
            said = [name for name in names if _is_said(name, settings[row].get(name))]
            found[row] = ", ".join(f"{name} {_brief(settings[row][name])}" for name in said)
    return found


def _telling(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that it takes to tell these apart, each of which tells more than those before it."""
    others = sorted(set().union(*settings) - {"seed", *_PLAINEST})
    names: list[str] = []
    kinds = 1
    for name in (*_PLAINEST, *others):
        told = len({json.dumps([s.get(key) for key in (*names, name)], sort_keys=True) for s in settings})
        if told > kinds:
            names, kinds = [*names, name], told
    return names


def _is_said(name: str, value: Any) -> bool:
    """Whether a title names it: not where there is none, such as no class order but the natural one."""
    return value is not None and (name != "reserve" or value > 0)


def _brief(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def keep(runs: Sequence[StoredRun], folder: Path) -> list[Path]:
    """Small JSON copies of the results, enough for every table and picture but those that need the networks.

    Each has the name of its run's folder. A copy that is there gets the rows that it lacks; what has that name and is
    of another run is refused, before anything is written.
    """
    copies: dict[Path, StoredRun] = {}
    for run in runs:
        path = Path(os.path.abspath(run.path))  # "." has a name as well
        file = folder / f"{path.stem if path.suffix == '.json' else path.name}.json"
        if file in copies:
            raise _other_run(file, f"both {copies[file].path} and {run.path}")
        copies[file] = _joined(run, _copy_of(run, file)) if file.exists() else run
    folder.mkdir(parents=True, exist_ok=True)
    for file, run in copies.items():
        record = {"settings": run.settings, "tasks": run.tasks, "environment": run.environment}
        record |= {name: value for name in ("analysis", "data") if (value := getattr(run, name))}
        replace_file(file, (json.dumps(record, separators=(",", ":"), sort_keys=True) + "\n").encode())
    return list(copies)


def _copy_of(run: StoredRun, file: Path) -> StoredRun:
    """The copy of a run that is in this file; anything else there is refused."""
    try:
        kept = _read(file)
    except (ValueError, OSError):
        raise _other_run(file, f"{run.path} beside a file that cannot be read") from None
    if not _same_run(run, kept):
        raise _other_run(file, f"{run.path} beside that of another run")
    return kept


def _other_run(file: Path, given: str) -> ValueError:
    advice = "Take another --keep, or rename the run's folder. Nothing was written."
    return invalid("keep", f"{given} as {file}", "a file for each run", advice)


def place(item: tuple[str, tuple[str, str]]) -> tuple[int, int, str]:
    """Ranked rows first, then the same with other options, then the rest; each in the order of the registry."""
    name, (_, block) = item
    order = ["vanilla-all-data", *CALIBRATORS]
    base = name.partition("[")[0]
    rank = {"ranked": 0, "with other options": 1}.get(block, 2)
    return rank, order.index(base) if base in order else len(order), name


def _results_under(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / "results.json").is_file():
        return [path / "results.json"]
    if not path.is_dir():
        return []
    return [
        child / "results.json" if child.is_dir() else child
        for child in path.iterdir()
        if (child / "results.json").is_file() or (child.suffix == ".json" and child.is_file())
    ]


def _record(file: Path) -> dict[str, Any]:
    """What a file holds, if it has the shape of results; with a checksum, only if it is whole."""
    try:
        content = file.read_bytes()
        record: dict[str, Any] = open_json(content) if is_sealed_json(content) else json.loads(content)
        records.check("results.json", record)
    except (ValueError, OSError, RecursionError) as error:
        advice = "'tcil run' with the same settings computes it anew."
        raise invalid("runs", f"{file}, which cannot be read ({error})", "the results of a run", advice) from None
    return record


def _read(file: Path) -> StoredRun:
    in_folder = file.name == "results.json"
    if in_folder:
        check_format(RunFolder(file.parent).peek_json("environment.json"), file.parent)
    record = _record(file)
    for name in ("environment", "analysis", "data"):
        if in_folder and name not in record:  # a damaged one is named, and counts as missing
            record[name] = RunFolder(file.parent).read_json(f"{name}.json")
    path = file.parent if in_folder else file
    check_format(record.get("environment"), path)
    return StoredRun(
        path,
        record["settings"],
        record["tasks"],
        record.get("environment") or {},
        record.get("analysis"),
        record.get("data"),
    )
