"""Calibration of finished runs anew, from what is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tcil.experiments.config.settings import stored_settings
from tcil.experiments.runs.calibrate import calibrate
from tcil.experiments.runs.entries import check_calibrators
from tcil.experiments.runs.evaluate import check_finished
from tcil.experiments.runs.records import JsonObject
from tcil.experiments.runs.results import Draws, RunResult, StoredSettings, TaskResult
from tcil.experiments.runs.run import Run
from tcil.experiments.runs.store import RunFolder, StoredRun, check_format
from tcil.foundation.boundary import check_entries
from tcil.foundation.errors import invalid


@dataclass(frozen=True)
class Recalibration:
    """What was computed: the run with these rows alone; with `redraw`, the ECE of each calibrator by draw.

    `whole`: the run was finished, and its results of all tasks have these rows too.
    """

    run: StoredRun
    draws: Mapping[str, Sequence[float]]
    whole: bool


def recalibrate(
    folder: Path,
    *,
    data: Path | None,
    calibrators: Sequence[str] | None,
    redraw: int,
    trust: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Recalibration:
    """Calibrate every finished task anew from what is stored, and store the rows beside the others.

    With `redraw`, also over other draws of the validation set after the last task, stored as redraw.json. Code that the
    folder's settings name is imported only with `trust`.
    """
    check_calibrators(calibrators)
    check_entries(folder)
    store = RunFolder(folder)
    check_format(store.read_environment(), folder)
    stored = store.read_settings()
    if stored is None or stored.imported:
        raise invalid("run", f"{folder}, without the settings of a training", "a folder that 'tcil run' made")
    settings = stored_settings(stored.record(), folder / "settings.json", trust=trust, tell=tell)
    results = store.read_results()
    run = Run(settings, folder, data=data, until=None if results is None else results.until)
    if redraw and run.settings.validation_pool <= run.settings.validation:
        pool = f"a run whose validation_pool ({run.settings.validation_pool}) is larger than its validation set"
        raise invalid("redraw", f"{redraw}", pool)
    run.check_folder()
    check_finished(store, run.stream)
    with store.held():
        return _recalibrated(run, stored, calibrators, redraw)


def _recalibrated(run: Run, settings: StoredSettings, calibrators: Sequence[str] | None, redraw: int) -> Recalibration:
    store = run.store
    results: list[TaskResult] = []
    draws: dict[str, list[float]] = {}
    histories: list[Mapping[str, JsonObject]] = [{} for _ in range(redraw)]
    whole = store.read_results()
    with run.threads():
        for task, memory, learner in run.walk():
            history = results[-1].history if results else {}
            fresh = calibrate(run.finished(task, memory, learner, history), calibrators)
            results.append(fresh)
            before = run.stored_result(task.index, whole)
            store.write_task_result(fresh if before is None else before.renewed(fresh))
            last = task.index == len(run.stream) - 1
            for number, remembered in enumerate(histories):
                valid = run.stream.redrawn(task, torch.Generator().manual_seed(1000 * number + task.index))
                # Before the last task only what later ones remember is needed.
                names = calibrators if last else list(fresh.history)
                if names == []:
                    continue
                outcome = calibrate(run.finished(task, memory, learner, remembered, valid), names)
                histories[number] = outcome.history
                for row in outcome.calibrators.values() if last else ():
                    if row.ece is not None:
                        draws.setdefault(row.title, []).append(row.ece)
    if whole is not None:
        tasks = [old.renewed(new) for old, new in zip(whole.tasks, results, strict=True)]
        store.write_results(whole.with_tasks(tasks))
    if redraw:
        store.write_draws(Draws({title: tuple(values) for title, values in draws.items()}))
    anew = RunResult.of_tasks(settings, results, len(results) < run.n_tasks)
    return Recalibration(StoredRun(store.path, store.with_parts(anew)), draws, whole is not None)
