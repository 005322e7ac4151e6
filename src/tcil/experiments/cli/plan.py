"""`tcil plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tcil.experiments.cli import output
from tcil.experiments.cli.options import StudyOptions, TrainingOptions

if TYPE_CHECKING:
    from tcil.experiments.config.settings import RunSettings


def plan(study: StudyOptions, training: TrainingOptions) -> None:
    """List the runs of a study with their numbers: 'tcil run ... --job N' executes the N-th, for a Slurm array.

    Takes the options of 'tcil run' on what is run; no data is read and nothing is written.
    """
    from tcil.experiments.runs.store import RunFolder

    runs = study.runs()
    training.jobs(runs, here=False)  # to refuse what 'tcil run' would refuse
    for number, one in enumerate(runs, start=1):
        done = RunFolder(training.out / one.name).n_done
        state = "finished" if _is_done(one, training) else f"to do, {done} tasks done" if done else "to do"
        output.console.print(f"{number} {one.name} {state}", soft_wrap=True)


def _is_done(run: RunSettings, training: TrainingOptions) -> bool:
    """Whether 'tcil run' with these options would find nothing to do."""
    from tcil.experiments.runs.entries import CALIBRATORS, specs_of
    from tcil.experiments.runs.store import RunFolder

    if not training.has_finished(run):
        return False
    if training.full_data and run.validation and not training.has_finished(run.on_all_data()):
        return False
    folder, wanted = RunFolder(training.out / run.name), set(specs_of(training.calibrators) or CALIBRATORS)
    tasks = folder.n_results
    rows = [folder.read_task_result(task) for task in range(min(training.tasks_until or tasks, tasks))]
    return all(row is not None and wanted <= row.calibrators.keys() for row in rows)
