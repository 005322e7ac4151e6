"""Finished runs on the terminal, their tables as files, and their pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tcil.experiments.reporting.collect import Study, read_runs, shown, studies
from tcil.experiments.reporting.grids import terminal, write_tables
from tcil.experiments.reporting.page import write_report
from tcil.experiments.reporting.tables import COLUMNS, OVERVIEW, by_task, decisions, redrawn, side_by_side, summary
from tcil.experiments.runs.recalibrate import Recalibration
from tcil.experiments.runs.store import StoredRun


def present(run: StoredRun, console: Console) -> None:
    """The tables of a finished run, its report, and where they are."""
    show_run(run, console)
    report = write_report([run], run.path / "report.html")
    console.print(f"run folder {run.path}\nreport {report}", soft_wrap=True)


def show_run(run: StoredRun, console: Console) -> None:
    """All tables of a run; the means come last, where the eye is."""
    study = Study((run,))
    for key in ("accuracy", "aece", "ece_predicted_old", "ece_predicted_new", "ece"):
        console.print(terminal(by_task(study, key)))
    for grid in decisions(study):
        console.print(terminal(grid))
    console.print(terminal(summary(study)))


def show_summary(runs: Sequence[StoredRun], console: Console) -> None:
    """The means of any set of runs, a table for each study."""
    for study in studies(shown(runs)):
        console.print(terminal(summary(study)))


def show_report(runs: Sequence[StoredRun], out: Path, console: Console) -> None:
    """The tables of any set of runs on the terminal and as files, and their page."""
    groups = studies(shown(runs))
    grids = [summary(study) for study in groups]
    if len(groups) > 1:
        grids = [side_by_side(groups, key) for key in COLUMNS if key in OVERVIEW] + grids
    for grid in grids:
        console.print(terminal(grid))
    write_tables([*grids, *(grid for study in groups for grid in decisions(study))], out)
    page = write_report(runs, out / "report.html")
    console.print(f"report {page}\ntables {out / 'tables.md'}, .tex, .csv", soft_wrap=True)


def show_recalibration(anew: Recalibration, redraw: int, console: Console) -> None:
    """The means of what was calibrated anew and how they depend on the draws; the run's page with its new rows."""
    folder = anew.run.path
    if anew.whole:
        write_report(read_runs([folder]), folder / "report.html")
    console.print(terminal(summary(Study((anew.run,)))))
    if redraw:
        console.print(terminal(redrawn(anew.draws, redraw)))
