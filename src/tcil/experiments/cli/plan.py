"""`tcil plan`."""

from __future__ import annotations

from tcil.experiments.cli import output
from tcil.experiments.cli.options import StudyOptions, TrainingOptions


def plan(study: StudyOptions, training: TrainingOptions) -> None:
    """List the runs of a study with their numbers: 'tcil run ... --job N' executes the N-th, for a Slurm array.

    Takes the options of 'tcil run' on what is run; no data is read and nothing is written.
    """
    from tcil.experiments.runs.store import RunFolder

    runs = study.runs()
    training.jobs(runs, here=False)  # to refuse what 'tcil run' would refuse
    for number, one in enumerate(runs, start=1):
        done = RunFolder(training.out / one.name).n_done
        state = "finished" if training.has_finished(one) else f"to do, {done} tasks done" if done else "to do"
        output.console.print(f"{number} {one.name} {state}", soft_wrap=True)
