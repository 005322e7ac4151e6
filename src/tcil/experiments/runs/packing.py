"""A small copy of a run folder, from which the run resumes on another machine: the last network, and all results."""

from __future__ import annotations

import re
from pathlib import Path

from tcil.experiments.runs import checkpoints
from tcil.experiments.runs.evaluate import is_evaluated
from tcil.experiments.runs.results import Packed
from tcil.experiments.runs.store import ANALYSIS, DATA, ENVIRONMENT, RESULTS, SETTINGS, RunFolder, task_name
from tcil.foundation.boundary import check_entries, check_place
from tcil.foundation.errors import invalid


def pack(run: Path, out: Path, argument: str = "to") -> Path:
    """Copy what a run needs to resume into `out`, under its own name, and return that folder.

    The copy has the results of all tasks and the network of the last one. Splits and exemplars follow from the seeds.
    The run may be in progress. An earlier copy is updated, and can be resumed at any time meanwhile. Anything else of
    that name is refused: another run, a whole run folder, and a copy that has gone on since.
    """
    source, target = check_copy(run, out, argument)
    tasks = _tasks(source)
    last = next((task for task in reversed(tasks) if checkpoints.read_network(source, task) is not None), None)
    target.create()
    for name in (SETTINGS, DATA, ENVIRONMENT):
        source.copy(name, target)
    for task in tasks:
        target.task(task)
        for name in (RESULTS, ANALYSIS):
            source.copy(f"{task_name(task)}/{name}", target)
    if last is not None:
        source.copy(checkpoints.network_name(last), target)
        target.write_packed(Packed(without=tuple(range(last))))
    for task in tasks:
        if last is not None and task < last:
            target.remove(checkpoints.network_name(task))
        for name in checkpoints.unfinished(task):  # of the task that is being trained
            if not source.copy(name, target):
                target.remove(name)
    source.copy(RESULTS, target)
    return target.path


def run_folders(path: Path) -> list[Path]:
    """The path itself, or the run folders right below it where it is none; hidden ones are left out."""
    if not path.is_dir() or (path / SETTINGS).exists():
        return [path]
    below = sorted(entry.parent for entry in path.glob(f"*/{SETTINGS}") if not entry.parent.name.startswith("."))
    return below or [path]


def check_copy(run: Path, out: Path, argument: str = "to") -> tuple[RunFolder, RunFolder]:
    """The run folder and that of its copy; raises if there can be no copy, before any work."""
    source, target = RunFolder(run), RunFolder(out / run.resolve().name)
    check_entries(run)
    check_place(out, argument)
    check_entries(target.path)
    if source.read_settings() is None:
        raise invalid("run", f"{run}, without the settings of a training", "a folder that 'tcil run' made")
    if target.path.resolve() == run.resolve():
        raise invalid(argument, f"{out}, where the run itself is", "another folder")
    _check_earlier_copy(source, target, argument)
    return source, target


def _tasks(folder: RunFolder) -> list[int]:
    names = [path.name for path in folder.path.glob("task-*") if re.fullmatch(r"task-\d+", path.name)]
    return sorted(int(name[5:]) for name in names)


def _check_earlier_copy(source: RunFolder, target: RunFolder, argument: str) -> None:
    """Raise if the target holds anything but an earlier copy of the run, since packing replaces and removes files."""
    if not target.path.is_dir() or all(path.name.endswith(".part") for path in target.path.iterdir()):
        return
    settings, packed, ours = target.read_settings(), target.read_packed(), source.read_settings()
    tasks = _tasks(target)
    if settings is None and packed is None:
        what = "which is not a copy of a run"
    elif settings is not None and ours is not None and settings.record() != ours.record():
        what = "which belongs to a run with other settings"
    elif packed is None and any(is_evaluated(target, task) for task in tasks):
        what = "which is a whole run folder and would lose its networks"
    elif any(target.has_task_result(task) and not source.has_task_result(task) for task in tasks):
        what = "which has results of more tasks than the run"
    else:
        return
    expected = "an earlier copy of this run, or nothing of this name"
    raise invalid(argument, f"{target.path}, {what}", expected, "Nothing was written. Take another folder.")
