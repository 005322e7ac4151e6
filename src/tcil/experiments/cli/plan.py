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
        folder, tasks = RunFolder(out / one.name), StoredSettings.of(one).n_tasks or 1
        done = folder.n_done
        state = "finished" if folder.n_results >= tasks else f"to do after task {done - 1}" if done else "to do"
        output.console.print(f"{number} {one.name} {state}", soft_wrap=True)
