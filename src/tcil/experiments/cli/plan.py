"""`tcil plan`."""

from __future__ import annotations

from pathlib import Path

from tcil.experiments.cli import output
from tcil.experiments.cli.options import Out, StudyOptions


def plan(study: StudyOptions, out: Out = Path("runs")) -> None:
    """List the runs of a study with their numbers: 'tcil run ... --job N' executes the N-th, for a Slurm array."""
    from tcil.experiments.runs.results import StoredSettings
    from tcil.experiments.runs.store import RunFolder

    for number, one in enumerate(study.runs(), start=1):
        done = RunFolder(out / one.name).n_results
        tasks = StoredSettings.of(one).n_tasks or 1
        state = "finished" if done >= tasks else f"to do after task {done - 1}" if done else "to do"
        output.console.print(f"{number} {one.name} {state}", soft_wrap=True)
