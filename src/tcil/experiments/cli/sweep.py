"""`tcil sweep`."""

from __future__ import annotations

import typer

from tcil.experiments.cli import output
from tcil.experiments.cli.options import PlaceOptions, StudyOptions, TrainingOptions


def sweep(
    study: StudyOptions,
    training: TrainingOptions,
    place: PlaceOptions = PlaceOptions(on="processes"),  # noqa: B008 (frozen)
) -> None:
    """Execute all runs of a study, several at once, with a live table. Run it again to resume.

    Exit codes: 0 all done, 1 some run failed, 75 stopped by a signal or Ctrl-C (run it again to resume).
    """
    runs = study.runs()
    resources = place.resources()
    jobs = training.jobs(runs, here=resources.here)
    from tcil.experiments.scheduling.sweep import run_jobs

    raise typer.Exit(run_jobs(jobs, resources, output.console))
