"""One run from its settings to its stored results. Workers import this: it draws nothing, and so starts quickly."""

from __future__ import annotations

import contextlib
import importlib.util
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tcil.calibration import ranks
from tcil.calibration.errors import invalid, unknown_name
from tcil.calibration.storage import replace_file
from tcil.experiments import stopping
from tcil.experiments.calibration import entry_of
from tcil.experiments.collect import StoredRun, read_runs
from tcil.experiments.exits import RunFailed, missing_extra
from tcil.experiments.progress import CsvLog, TensorBoardLog
from tcil.experiments.run import Listener, Progress, Run
from tcil.experiments.settings import RunSettings
from tcil.incremental.datasets import dataset_reader
from tcil.incremental.learners.registry import learner_type
from tcil.incremental.networks import network_factory
from tcil.incremental.training import OptimizerKind

Display = Callable[[str], AbstractContextManager[Listener]]  # of a title; shows where a run stands
LOGS: dict[str, Callable[[Path], Listener]] = {"csv": CsvLog, "tensorboard": TensorBoardLog}


def train(
    settings: RunSettings,
    out: Path,
    *,
    data: Path | None,
    device: str,
    calibrators: Sequence[str] | None,
    log: str | None,
    full_data: bool,
    display: Display,
) -> StoredRun:
    """Run (or resume, or find finished) one run; with `full_data`, once more without a validation set, for Vanilla."""
    check_options(calibrators, log)
    folder = out / settings.name
    run = Run(settings, folder, data=data, device=device, stop=stopping.requested)
    with run.store.held():
        results = _shown(run, calibrators, log, display, "")
        if full_data and settings.validation:
            everything = settings.on_all_data()
            other = Run(everything, out / everything.name, dataset=run.dataset, device=device, stop=stopping.requested)
            with other.store.held(stopping.check):  # whoever works on it does what is needed here
                beside = _shown(other, ["vanilla"], log, display, " all data")
            for task, full in zip(results["tasks"], beside["tasks"], strict=True):
                row = {**full["calibrators"]["vanilla"], "title": "Vanilla, all data"}
                task["calibrators"] = {"vanilla-all-data": row, **task["calibrators"]}
                run.store.write_json(f"{run.store.task(task['task']).name}/results.json", task)
            run.store.write_json("results.json", results)
    return read_runs([folder])[0]


def check_names(settings: RunSettings) -> None:
    """Names in the settings that nothing is known by are told before any work."""
    learner_type(settings.learner)
    network_factory(settings.network)
    dataset_reader(settings.dataset)
    OptimizerKind.parse(settings.optimizer, "optimizer")


def check_options(calibrators: Sequence[str] | None, log: str | None) -> None:
    """What is wrong with these is told before any work."""
    for name in calibrators or ():
        entry_of(name)
    if log is not None and log not in LOGS:
        raise unknown_name("log", log, LOGS)
    if log == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise invalid("log", "tensorboard", "the package tensorboard to be installed", "pip install tensorboard")


def _shown(run: Run, calibrators: Sequence[str] | None, log: str | None, display: Display, what: str) -> dict[str, Any]:
    """Execute a run with its progress on display and in the log."""
    listeners: list[Listener] = [LOGS[log](run.store.path)] if log and ranks.current().first else []
    with display(f"{run.settings.learner} seed {run.settings.seed}{what}") as shown:
        listeners.append(shown)

        def listener(progress: Progress) -> None:
            for one in listeners:
                one(progress)

        try:
            return run.execute(calibrators, listener)
        except (stopping.Stopped, ValueError):
            raise
        except Exception as error:
            raise RunFailed(last_line(error)) from error


def last_line(error: BaseException) -> str:
    """The end of what an error says, which tells most."""
    if missing := missing_extra(error):
        return missing
    if isinstance(error, RunFailed) and error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if isinstance(error, ValueError) and lines else f"{type(error).__name__}: {(lines or [''])[-1]}"


def note_error(folder: Path) -> None:
    """The error that is being handled, in full, as FOLDER/error.txt."""
    with contextlib.suppress(OSError):
        replace_file(folder / "error.txt", traceback.format_exc().encode(errors="backslashreplace"))
