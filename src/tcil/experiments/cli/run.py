"""`tcil run`."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from tcil.experiments.cli import output
from tcil.experiments.cli.options import Browse, PlaceOptions, StudyOptions, TrainingOptions, Verbose
from tcil.experiments.process import stopping
from tcil.experiments.process.exits import ExitCode, RunFailed, note_error
from tcil.experiments.process.screen import Screen, plain_warnings
from tcil.foundation.errors import invalid

if TYPE_CHECKING:
    from tcil.experiments.config.settings import RunSettings
    from tcil.experiments.reporting.grids import Grid
    from tcil.experiments.scheduling.job import Job


def run(
    study: StudyOptions,
    training: TrainingOptions,
    place: PlaceOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and its cost, train nothing")] = False,
    job: Annotated[int | None, typer.Option(min=1, help="execute only the run with this number in 'tcil plan'")] = None,
    verbose: Verbose = False,
    browse: Browse = False,
) -> None:
    """Train a learner task by task, calibrate its networks with every method, evaluate and report.

    Without arguments: letters, ER, all calibrators, about a minute. Prints three sentences on what was learned, a table
    by calibrator and the path of the report. If a run is interrupted, the same command resumes it.
    """
    runs = study.runs()
    if job is not None:
        if job > len(runs):
            raise invalid("job", f"{job}", f"1 to {len(runs)}, as 'tcil plan' numbers the runs")
        runs = [runs[job - 1]]
    if len(runs) > 1 and (verbose or browse):
        flag = "--open" if browse else "--verbose"
        advice = f"Run them without it, then: tcil report {training.out} {flag}."
        raise invalid(flag, f"{len(runs)} runs", "one run", advice)
    resources = place.resources()
    jobs = training.jobs(runs, here=resources.here)
    if dry_run:
        from tcil.experiments.reporting.grids import terminal

        output.console.print(terminal(_cost(runs, training)))
    elif len(jobs) == 1 and place.on == "serial":
        raise typer.Exit(run_here(jobs[0], output.console, verbose=verbose, browse=browse))
    else:
        from tcil.experiments.scheduling.sweep import run_jobs

        raise typer.Exit(run_jobs(jobs, resources, output.console))


def run_here(job: Job, console: Screen, *, verbose: bool = False, browse: bool = False) -> ExitCode:
    """Execute one run in this process, or on all ranks of torchrun, and show its table and report."""
    from tcil.experiments.process.progress import ProgressDisplay
    from tcil.experiments.process.torchrun import torchrun
    from tcil.experiments.reporting.show import present
    from tcil.experiments.runs.complete import complete_run
    from tcil.foundation import ranks

    with stopping.on_signals(signal.SIGINT), plain_warnings(console), torchrun(job.device) as device:
        if not ranks.current().first:
            console = Screen(quiet=True)
        try:
            stored = complete_run(
                job.settings, job.out, data=job.data, device=device, calibrators=job.calibrators, log=job.log,
                full_data=job.full_data, display=partial(ProgressDisplay, console), until=job.until, backup=job.backup,
                compiled=job.compiled,
            )  # fmt: skip
        except stopping.Stopped as reason:
            console.print(str(reason), soft_wrap=True)
            return ExitCode.STOPPED
        except RunFailed as error:
            note_error(job.folder)
            raise RunFailed(f"{error} (more in {job.folder / 'error.txt'})") from error
        if ranks.current().first:
            (job.folder / "error.txt").unlink(missing_ok=True)
            present(stored, console, verbose=verbose, browse=browse)
    return ExitCode.DONE


def _cost(runs: list[RunSettings], training: TrainingOptions) -> Grid:
    """The cost of the runs, each with its second training on all data."""
    from tcil.experiments.runs.machine import check_device_name
    from tcil.experiments.runs.store import RunFolder
    from tcil.experiments.scheduling.plan import Planned, Standing, plan

    check_device_name(training.device)
    planned = []
    for one in [one for run in runs for one in (run, *([run.on_all_data()] if training.full_data else []))]:
        standing = Standing.FINISHED if training.has_finished(one) else Standing.MISSING
        done = RunFolder(training.out / one.name).n_done
        planned.append(Planned(one, standing, until=training.tasks_until, done=done))
    return plan(planned, training.data)
