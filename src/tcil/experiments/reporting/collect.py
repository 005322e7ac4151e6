"""Stored runs, read back without torch: run folders, folders of them, or the copies of `tcil report --keep`.

Those copies may be compressed (`NAME.json.gz`).
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import JsonValue

from tcil.experiments.runs.catalogue import ALL_DATA, AS_TRAINED, Heading, in_order
from tcil.experiments.runs.records import JsonObject, parse
from tcil.experiments.runs.results import RunResult, StoredSettings
from tcil.experiments.runs.store import RunFolder, StoredRun, check_format
from tcil.foundation.checksums import is_sealed_json, open_json
from tcil.foundation.errors import invalid
from tcil.foundation.files import replace_file

_COPIES = (".json.gz", ".json")  # how the names of kept copies end
_MOST_BYTES = 64 * 2**20  # of a copy once decompressed: the largest of ours has half a megabyte
_EXPECTED = "a run folder, or a folder that holds run folders or copies of 'tcil report --keep'"
_MADE_BY = "Other JSON files, such as tables of your own scripts, are not results of a run."
_PLAINEST = ("network", "epochs", "tasks", "memory", "validation", "reserve")  # what readers know runs by


@dataclass(frozen=True, eq=False)
class Study:
    """Runs that differ in their seeds only.

    Attributes
    ----------
    runs : tuple of StoredRun
        In the order of their seeds.
    difference : str
        What tells them from other studies of the same learner and dataset, for the title.
    """

    runs: tuple[StoredRun, ...]
    difference: str = ""

    @property
    def settings(self) -> StoredSettings:
        """The settings they share (and the first one's seeds)."""
        return self.runs[0].settings

    @property
    def title(self) -> str:
        """Learner and dataset, with the number of classes where not all are used, and what tells it from others."""
        s = self.settings
        classes = f" ({s.classes} classes)" if s.classes else ""
        return f"{self.learner} on {s.dataset}{classes}{self.difference and ', ' + self.difference}"

    @property
    def learner(self) -> str:
        """What tables call their learner."""
        return self.runs[0].learner

    @property
    def n_tasks(self) -> int:
        """How many tasks."""
        return len(self.runs[0].tasks)

    @property
    def tasks_told(self) -> str:
        """How many tasks, or which of them where the runs have not been taken to their end."""
        return self.runs[0].result.tasks_told

    @property
    def whole(self) -> bool:
        """Whether the runs have been taken to their last task."""
        return self.runs[0].result.until is None

    @property
    def memorised(self) -> float | None:
        """The share of exemplars that are predicted correctly, mean over tasks and seeds; None where none is known."""
        memories = [task.memory for run in self.runs for task in run.tasks]
        shares = [memory.accuracy for memory in memories if memory is not None and memory.accuracy is not None]
        return sum(shares) / len(shares) if shares else None

    @property
    def vanilla(self) -> str:
        """Vanilla as in the paper, trained on all the data, where every seed has it; else on what validation leaves."""
        return ALL_DATA if all(ALL_DATA in run.titles() for run in self.runs) else AS_TRAINED

    def titles(self) -> dict[str, Heading]:
        """Calibrators of any of the runs."""
        found: dict[str, Heading] = {}
        for run in self.runs:
            for name, title in run.titles().items():
                found.setdefault(name, title)
        return in_order(found)

    def having(self, calibrator: str) -> Study | None:
        """The runs that have tried this calibrator; None where none has."""
        runs = tuple(run for run in self.runs if any(calibrator in task.calibrators for task in run.tasks))
        return replace(self, runs=runs) if runs else None

    def means(self, calibrator: str, metric: str) -> list[float | None]:
        """The mean over tasks by run."""
        return [run.mean(calibrator, metric) for run in self.runs]

    def fewer_tasks(self, calibrator: str, metric: str) -> str:
        """Over how many tasks of the runs the means are, such as "8 of 9 tasks"; empty where no task lacks a value."""
        counts = [run.result.tasks_with(calibrator, metric) for run in self.runs]
        there, possible = (sum(column) for column in zip(*counts, strict=True))
        return f"{there} of {possible} tasks" if there < possible else ""


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
            others = _others_under(path)
            raise invalid("runs", f"{path}, without a finished run{others}", _EXPECTED, _MADE_BY if others else "")
        for file in own:
            run = _read(file)
            same = run.settings.without() + run.origin
            found[same] = _joined(found[same], run) if same in found else run
    return sorted(found.values(), key=lambda run: run.path.name)


def _joined(first: StoredRun, second: StoredRun) -> StoredRun:
    """The same run found twice: rows of either, those of the first where both have them."""
    if not _same_run(first, second):
        given = f"{first.path} and {second.path}, the same settings with other images"
        raise invalid("runs", given, "runs on the same images", "Report them one after the other.")
    if len(first.tasks) != len(second.tasks):  # one has not been taken as far as the other
        return max(first, second, key=lambda run: len(run.tasks))
    tasks = tuple(a.filled_from(b) for a, b in zip(first.tasks, second.tasks, strict=True))
    parts = {name: getattr(first.result, name) or getattr(second.result, name) for name in ("analysis", "data")}
    return replace(first, result=first.result.model_copy(update={"tasks": tasks, **parts}))


def _same_run(first: StoredRun, second: StoredRun) -> bool:
    """Whether two are the same run, of the same images or imported logits as far as that is known."""
    partial = first.result.until is not None or second.result.until is not None
    if first.settings.without() != second.settings.without() or (len(first.tasks) != len(second.tasks) and not partial):
        return False
    if first.data and second.data:
        return first.data == second.data
    # The settings of a training say all of it but the images; those of an import hardly anything.
    return not first.settings.imported or first.tasks == second.tasks


def any_runs(path: Path) -> bool:
    """Whether there is a finished run under this path."""
    return next(_results_under(path), None) is not None


def shown(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Runs with something to calibrate; those on all the data stand as a row of Vanilla in the others' tables."""
    calibrated = [run for run in runs if run.settings.validation != 0]
    return calibrated or list(runs)


def studies(runs: Iterable[StoredRun]) -> list[Study]:
    """Runs grouped by everything but the training seed: other classes or validation images make another study.

    Where the split, or split and class order, follow the seed, as in some presets, runs are not told apart by them.
    Runs that were taken to different tasks are.
    """
    groups: dict[str, list[StoredRun]] = {}
    runs = list(runs)
    fixed = {run.settings.without("seed") + run.origin for run in runs if not _validation_follows(run.settings)}
    for run in runs:
        own = run.settings.without("seed") + run.origin
        kind = own if own in fixed else f"{run.settings.but_for_seeds()} {run.origin}"
        groups.setdefault(f"{kind} {len(run.tasks)}", []).append(run)
    firsts = [group[0] for group in groups.values()]
    labels = differences([run.settings for run in firsts])
    imported = sum(bool(run.origin) for run in firsts)
    return [
        Study(
            tuple(sorted(group, key=lambda run: run.seed)),
            ", ".join(filter(None, [label, first.path.name if first.origin and imported > 1 else ""])),
        )
        for group, first, label in zip(groups.values(), firsts, labels, strict=True)
    ]


def _validation_follows(settings: StoredSettings) -> bool:
    """Whether the validation images were drawn by the run's own seed."""
    return settings.record().get("validation_seed") == settings.seed


def differences(settings: Sequence[StoredSettings]) -> list[str]:
    """Of each, in few words, what tells it from the others of its dataset, learner and classes (but for the seed)."""
    groups: dict[tuple[str, str, int | None], list[int]] = {}
    for row, own in enumerate(settings):
        groups.setdefault((own.dataset, own.learner, own.classes), []).append(row)
    found = [""] * len(settings)
    for rows in groups.values():
        follow = all(_validation_follows(settings[row]) for row in rows)
        records = [settings[row].but_for_seeds() if follow else settings[row].record() for row in rows]
        names = _telling(records)
        for row, record in zip(rows, records, strict=True):
            said = [name for name in names if _is_said(name, record.get(name))]
            found[row] = ", ".join(f"{name} {brief(record[name])}" for name in said)
    return found


def _telling(settings: Sequence[JsonObject]) -> list[str]:
    """The settings that it takes to tell these apart, each of which tells more than those before it."""
    others = sorted(set[str]().union(*settings) - {"seed", *_PLAINEST})
    names: list[str] = []
    kinds = 1
    for name in (*_PLAINEST, *others):
        told = len({json.dumps([s.get(key) for key in (*names, name)], sort_keys=True) for s in settings})
        if told > kinds:
            names, kinds = [*names, name], told
    return names


def _is_said(name: str, value: JsonValue) -> bool:
    """Whether a title names it: not where there is none, such as no class order but the natural one."""
    return value is not None and (name != "reserve" or value != 0)


def brief(value: JsonValue) -> str:
    """A value of the settings in a few words."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def keep(runs: Sequence[StoredRun], folder: Path) -> list[Path]:
    """Write small JSON copies of the results: enough for every table and picture that needs no network.

    Each has the name of its run's folder, and is compressed where the folder has compressed copies. A copy that is
    there gets the rows that it lacks; what has that name and is of another run is refused, before anything is written.
    """
    copies: dict[Path, StoredRun] = {}
    form = _COPIES[0] if any(folder.glob(f"*{_COPIES[0]}")) else _COPIES[1]
    for run in runs:
        name = os.path.basename(os.path.abspath(run.path))  # "." has a name as well
        name = name.removesuffix(_COPIES[0]).removesuffix(_COPIES[1])
        file = folder / f"{name}{form}"
        if file in copies:
            raise _other_run(file, f"both {copies[file].path} and {run.path}")
        copies[file] = _joined(run, _copy_of(run, file)) if file.exists() else run
    folder.mkdir(parents=True, exist_ok=True)
    for file, run in copies.items():
        parts = ("version", "settings", "learner_title", "until", "tasks", "analysis", "data")
        given = {name: value for name in parts if (value := getattr(run.result, name)) is not None}
        record = RunResult(**given, environment=run.environment).record()
        content = (json.dumps(record, separators=(",", ":"), sort_keys=True) + "\n").encode()
        replace_file(file, gzip.compress(content, mtime=0) if form == _COPIES[0] else content)
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


def _results_under(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif (path / "results.json").is_file():
        yield path / "results.json"
    elif path.is_dir():
        for child in path.iterdir():
            if (child / "results.json").is_file():
                yield child / "results.json"
            elif child.name.endswith(_COPIES) and child.is_file() and not _foreign(child):
                yield child


def _others_under(path: Path) -> str:
    """How many files of a folder have the names of copies and another format, for an error; they are not named."""
    count = sum(child.name.endswith(_COPIES) and child.is_file() for child in path.iterdir()) if path.is_dir() else 0
    if not count:
        return ""
    return f" ({count} JSON {'file there has' if count == 1 else 'files there have'} another format)"


def _foreign(file: Path) -> bool:
    """Whether a JSON file beside results is valid and not a result: it is skipped."""
    try:
        record = json.loads(_content(file))
    except (ValueError, OSError, RecursionError):
        return False
    return not _is_result(record)


def _is_result(record: object) -> bool:
    """Whether this is the record of a run, or a damaged one; files of other programs may have the same keys."""
    if not isinstance(record, dict):
        return False
    if "tasks" not in record:
        return "settings" in record
    tasks = record["tasks"]
    parts = [task for task in tasks if isinstance(task, dict)] if isinstance(tasks, list) else []
    return tasks == [] or any({"seen", "version"} & task.keys() for task in parts)


def _content(file: Path) -> bytes:
    """The bytes of a file, decompressed where it is a compressed copy."""
    if not file.name.endswith(_COPIES[0]):
        return file.read_bytes()
    try:
        with gzip.open(file) as stream:
            content = stream.read(_MOST_BYTES + 1)
    except (EOFError, zlib.error) as error:
        raise ValueError(f"it is damaged: {error}") from None
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes once decompressed")
    return content


def _read(file: Path) -> StoredRun:
    """What a file holds, if it has the shape of results; with a checksum, only if it is whole."""
    store = RunFolder(file.parent) if file.name == "results.json" else None
    if store is not None:
        check_format(store.read_format(), store.path)
    try:
        content = _content(file)
        record = open_json(content) if is_sealed_json(content) else json.loads(content)
        result = parse(RunResult, record) if store is not None or _is_result(record) else None
    except (ValueError, OSError, RecursionError) as error:
        advice = "'tcil run' with the same settings computes it anew."
        raise invalid("runs", f"{file}, which cannot be read ({error})", "the results of a run", advice) from None
    if result is None:
        what = f"the keys {', '.join(sorted(record)[:5])!r:.80}" if isinstance(record, dict) else "no keys"
        raise invalid("runs", f"{file}, a JSON file of another format, with {what}", _EXPECTED, _MADE_BY)
    path = file
    if store is not None:
        path, result = store.path, store.with_parts(result)
    check_format(result.environment, path)
    return StoredRun(path, result)
