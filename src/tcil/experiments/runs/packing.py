"""A small copy of a run folder, from which the run resumes on another machine: the last network, and all results."""

from __future__ import annotations

import re
from pathlib import Path

from tcil.experiments.runs import checkpoints
from tcil.experiments.runs.results import Packed
from tcil.experiments.runs.store import ANALYSIS, DATA, ENVIRONMENT, RESULTS, SETTINGS, RunFolder, task_name
from tcil.foundation.boundary import check_entries, check_place
from tcil.foundation.errors import invalid


def pack(run: Path, out: Path) -> Path:
    """Copy what a run needs to resume into `out`, under its own name, and return that folder.

    The copy has the results of all tasks and the network of the last one. Splits and exemplars follow from the seeds.
    The run may be in progress. An earlier copy is updated, and can be resumed at any time meanwhile.
    """
    source, target = RunFolder(run), RunFolder(out / run.resolve().name)
    check_entries(run)
    check_place(out, "to")
    check_entries(target.path)
    if source.read_settings() is None:
        raise invalid("run", f"{run}, without the settings of a training", "a folder that 'tcil run' made")
    if target.path.resolve() == run.resolve():
        raise invalid("to", f"{out}, where the run itself is", "another folder")
    tasks = sorted(int(path.name[5:]) for path in run.glob("task-*") if re.fullmatch(r"task-\d+", path.name))
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
