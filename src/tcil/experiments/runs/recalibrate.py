"""Calibrate finished runs again, from what is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tcil.experiments.runs.calibrate import calibrate
from tcil.experiments.runs.catalogue import ALL_DATA, ALL_DATA_TITLE, AS_TRAINED
from tcil.experiments.runs.complete import with_all_data
from tcil.experiments.runs.entries import check_calibrators
from tcil.experiments.runs.evaluate import check_finished
from tcil.experiments.runs.opening import open_run
from tcil.experiments.runs.records import JsonObject
from tcil.experiments.runs.results import Draws, RunResult, StoredSettings, TaskResult
from tcil.experiments.runs.run import Run
from tcil.experiments.runs.store import RunFolder, StoredRun
from tcil.foundation.boundary import check_entries
from tcil.foundation.errors import invalid


@dataclass(frozen=True)
class Recalibration:
    """What `recalibrate` computed.

    Attributes
    ----------
    run : StoredRun
        The run with these rows only.
    draws : mapping of str to sequence of float
        With `redraw`, the ECE of each calibrator by draw of the validation set.
    whole : bool
        Whether the run was finished, so that its results of all tasks have these rows too.
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
    """Calibrate every finished task again from what is stored, and store the rows beside the others.

    With `redraw`, also over other draws of the validation set after the last task, stored as redraw.json. Code that the
    folder's settings name is imported only with `trust`.

    The row "Vanilla, all data" belongs to a second run. If Vanilla is computed again and that run's folder is beside
    this one, its row is computed again too; otherwise `tell` is called with the reason.
    """
    check_calibrators(calibrators)
    check_entries(folder)
    run = open_run(folder, data=data, trust=trust, tell=tell)
    store, stored = run.store, run.store.read_settings()
    assert stored is not None
    if redraw and run.settings.validation_pool <= run.settings.validation:
        pool = f"a run whose validation_pool ({run.settings.validation_pool}) is larger than its validation set"
        raise invalid("redraw", f"{redraw}", pool)
    run.check_folder()
    check_finished(store, run.stream)
    twin = _twin(run, calibrators, tell)
    with store.held(), nullcontext() if twin is None else twin.store.held():
        anew = _recalibrated(run, stored, calibrators, redraw)
        if twin is None:
            return anew
        rows = _recalibrated(twin, StoredSettings.of(twin.settings), [AS_TRAINED], 0).run.result
        return _with_twin(anew, store, rows)


def _twin(run: Run, calibrators: Sequence[str] | None, tell: Callable[[str], None]) -> Run | None:
    """The run on all data whose Vanilla is a row of this one, if that row is to be computed again and can be."""
    tasks = (run.stored_result(number, None) for number in range(len(run.stream)))
    has_row = any(task is not None and ALL_DATA in task.calibrators for task in tasks)
    if not has_row or (calibrators is not None and AS_TRAINED not in calibrators):
        return None
    settings = run.settings.on_all_data()
    folder = run.store.path.parent / settings.name
    try:
        check_entries(folder)
        twin = Run(settings, folder, dataset=run.images, until=len(run.stream))
        twin.check_folder()
        check_finished(twin.store, twin.stream)
    except (ValueError, OSError) as reason:
        tell(f"The row '{ALL_DATA_TITLE}' stays as it is, because its own run cannot be read: {reason}")
        return None
    return twin


def _with_twin(anew: Recalibration, store: RunFolder, rows: RunResult) -> Recalibration:
    """The same with Vanilla of the run on all data, stored beside the other rows."""
    result = with_all_data(anew.run.result, rows)
    for number, fresh in enumerate(result.tasks):
        before = store.read_task_result(number)
        store.write_task_result(fresh if before is None else before.renewed(fresh))
    whole = store.read_results()
    if whole is not None:
        store.write_results(with_all_data(whole, rows))
    return replace(anew, run=replace(anew.run, result=result))


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
    for fresh in results:  # when all of them are there, so that a failure leaves results as they were
        before = run.stored_result(fresh.task, whole)
        store.write_task_result(fresh if before is None else before.renewed(fresh))
    if whole is not None:
        tasks = [old.renewed(new) for old, new in zip(whole.tasks, results, strict=True)]
        store.write_results(whole.with_tasks(tasks))
    if redraw:
        store.write_draws(Draws({title: tuple(values) for title, values in draws.items()}))
    title = None if whole is None else whole.learner_title
    anew = RunResult.of_tasks(settings, results, len(results) < run.n_tasks, learner_title=title)
    return Recalibration(StoredRun(store.path, store.with_parts(anew)), draws, whole is not None)
