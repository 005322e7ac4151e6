"""One run from its settings to its stored results, and its twin on all data. Nothing is drawn: it starts quickly."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from tcil.experiments.config.settings import RunSettings
from tcil.experiments.process import stopping
from tcil.experiments.process.exits import RunFailed, last_line
from tcil.experiments.process.progress import CsvLog, Listener, Progress, TensorBoardLog
from tcil.experiments.runs.catalogue import ALL_DATA, ALL_DATA_TITLE, AS_TRAINED
from tcil.experiments.runs.entries import check_calibrators
from tcil.experiments.runs.results import RunResult
from tcil.experiments.runs.run import Run
from tcil.experiments.runs.store import StoredRun
from tcil.foundation import ranks
from tcil.foundation.errors import invalid, unknown_name
from tcil.incremental.arithmetic import Precision
from tcil.incremental.data.datasets import DATASETS, dataset_reader
from tcil.incremental.learners.registry import LEARNERS, learner_options
from tcil.incremental.networks import NETWORKS, network_factory
from tcil.incremental.placement import layout_of_environment
from tcil.incremental.pretrained.features import OnFile
from tcil.incremental.pretrained.networks import is_pretrained
from tcil.incremental.training import OptimizerKind

Display = Callable[[str], AbstractContextManager[Listener]]  # of a title; shows where a run stands
LOGS: dict[str, Callable[[Path], Listener]] = {"csv": CsvLog, "tensorboard": TensorBoardLog}


def complete_run(
    settings: RunSettings,
    out: Path,
    *,
    data: Path | None,
    device: str,
    calibrators: Sequence[str] | None,
    log: str | None,
    full_data: bool,
    display: Display,
    until: int | None = None,
    backup: Path | None = None,
    compiled: bool = False,
) -> StoredRun:
    """Do what is missing of a run; with `full_data`, also train it without a validation set, for Vanilla.

    `until` and `backup` as in `Run`.
    """
    check_options(calibrators, log)
    folder = out / settings.name
    run_in = partial(Run, device=device, compiled=compiled, stop=stopping.requested, until=until, backup=backup)
    with _features_shown(settings, display) as on_features:
        run = run_in(settings, folder, data=data, on_features=on_features)
    with run.store.held():
        result = _shown(run, calibrators, log, display, "")
        if full_data and settings.validation:
            everything = settings.on_all_data()
            other = run_in(everything, out / everything.name, dataset=run.images)
            with other.store.held(stopping.check):  # whoever works on it does what is needed here
                beside = _shown(other, [AS_TRAINED], log, display, " all data")
            result = with_all_data(result, beside)
            for task in result.tasks:
                run.store.write_task_result(task)
            run.store.write_results(result)
            run.back_up()
        return StoredRun(folder, run.store.with_parts(result))


@contextmanager
def _features_shown(settings: RunSettings, display: Display) -> Iterator[OnFile]:
    """Show the progress of computing the features of a pre-trained backbone."""
    if not is_pretrained(settings.network):
        yield lambda done, files: None
        return
    with display(f"features of {settings.network}") as shown:
        yield lambda done, files: shown(Progress(0, 1, "features", done, files))


def with_all_data(result: RunResult, beside: RunResult) -> RunResult:
    """The results of a run with one more row: Vanilla of the run that was trained on all data."""
    rows = [full.calibrators[AS_TRAINED].titled(ALL_DATA_TITLE) for full in beside.tasks]
    pairs = zip(result.tasks, rows, strict=False)  # either may have been taken further
    return result.with_tasks([*(task.with_row(ALL_DATA, row) for task, row in pairs), *result.tasks[len(rows) :]])


def check_names(settings: RunSettings) -> None:
    """Refuse unknown names and options of the learner in the settings, before any work."""
    learner_options(settings.learner, settings.learner_options)
    network_factory(settings.network)
    dataset_reader(settings.dataset, **settings.data_options)
    OptimizerKind.parse(settings.optimizer, "optimizer")
    Precision.parse(settings.precision, "precision")


def check_options(calibrators: Sequence[str] | None, log: str | None, *, here: bool = True) -> None:
    """Refuse options that cannot work, before any work; devices and layout too, if the work is done on this machine."""
    check_calibrators(calibrators, here=here)
    if here:
        layout_of_environment()
    if log is not None and log not in LOGS:
        raise unknown_name("log", log, LOGS)
    if log == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise invalid("log", "tensorboard", "the package tensorboard to be installed", "pip install tensorboard")


def _shown(run: Run, calibrators: Sequence[str] | None, log: str | None, display: Display, what: str) -> RunResult:
    """Execute a run with its progress on display and in the log."""
    listeners: list[Listener] = [LOGS[log](run.store.path)] if log and ranks.current().first else []
    with display(f"{run.settings.learner} seed {run.settings.seed}{what}") as shown:
        listeners.append(shown)

        begun = False

        def listener(progress: Progress) -> None:
            nonlocal begun
            begun = True
            for one in listeners:
                one(progress)

        try:
            return run.execute(calibrators, listener)
        except (stopping.Stopped, RunFailed):
            raise
        except Exception as error:
            own = own_parts(run.settings)
            if isinstance(error, ValueError) and not (begun and own):  # a refusal
                raise
            told = f" (in a run with {', '.join(own)})" if own else ""
            raise RunFailed(f"{last_line(error)}{told}") from error


def own_parts(settings: RunSettings) -> list[str]:
    """The parts of a run that are not of tcil, each with its kind."""
    network = "" if is_pretrained(settings.network) else settings.network
    parts = {
        "dataset": (settings.dataset, DATASETS), "network": (network, ("", *NETWORKS)),
        "learner": (settings.learner, LEARNERS),
    }  # fmt: skip
    return [f"the {kind} {name}" for kind, (name, known) in parts.items() if name not in known]
