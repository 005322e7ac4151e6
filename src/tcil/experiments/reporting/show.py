"""Finished runs on the terminal, their tables as files, and their pages."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tcil.experiments.reporting.collect import Study, read_runs, shown, studies
from tcil.experiments.reporting.findings import sentences
from tcil.experiments.reporting.grids import terminal, write_tables
from tcil.experiments.reporting.page import marks_of, write_report
from tcil.experiments.reporting.tables import (
    COLUMNS,
    OVERVIEW,
    by_task,
    decisions,
    overview,
    overview_of,
    redrawn,
    side_by_side,
    summary,
)
from tcil.experiments.runs.recalibrate import Recalibration
from tcil.experiments.runs.store import StoredRun

BY_TASK = ("accuracy", "aece", "ece_predicted_old", "ece_predicted_new", "ece")  # the main one last, where the eye is


def present(run: StoredRun, console: Console, *, verbose: bool = False, browse: bool = False) -> None:
    """What a finished run has shown, its means, and where its report is.

    `verbose`: its tables by task before; `browse`: its report in the browser.
    """
    study = Study((run,))
    if verbose:
        _show_tasks([study], console)
    _show_studies([study], console)
    report = write_report([run], run.path / "report.html")
    console.print(f"run folder {run.path}\nreport {report}", soft_wrap=True)
    if browse:
        open_page(report, console)


def show_summary(runs: Sequence[StoredRun], console: Console) -> None:
    """What any set of runs has shown, and the means of each study."""
    _show_studies(studies(shown(runs)), console)


def show_report(
    runs: Sequence[StoredRun], out: Path, console: Console, *, verbose: bool = False, browse: bool = False
) -> None:
    """What any set of runs has shown on the terminal, its tables as files, and its page."""
    groups = studies(shown(runs))
    if verbose:
        _show_tasks(groups, console)
    _show_studies(groups, console)
    grids = [summary(study) for study in groups]
    if len(groups) > 1:
        others = [side_by_side(groups, key) for key in COLUMNS if key in OVERVIEW and key != "ece"]
        grids = [overview_of(groups), *others, *grids]
    write_tables([*grids, *(grid for study in groups for grid in decisions(study))], out, marks_of(runs))
    page = write_report(runs, out / "report.html")
    console.print(f"tables {out / 'tables.md'}, .tex, .csv\nreport {page}", soft_wrap=True)
    if browse:
        open_page(page, console)


def open_page(page: Path, console: Console) -> None:
    """Show a page in the browser of this machine, if there is one."""
    if not webbrowser.open(page.resolve().as_uri()):
        console.print("No browser was found. Open the report yourself.", soft_wrap=True)


def _show_tasks(groups: Sequence[Study], console: Console) -> None:
    """The tables by task of each study; of several also their tables by calibrator."""
    for study in groups:
        for key in BY_TASK:
            console.print(terminal(by_task(study, key)))
        for grid in decisions(study):
            console.print(terminal(grid))
        if len(groups) > 1:
            console.print(terminal(summary(study)))


def _show_studies(groups: Sequence[Study], console: Console) -> None:
    """Three sentences, and a table: of one study by calibrator, of several by calibrator and study."""
    if len(groups) == 1:
        console.print(f"\n{groups[0].title}", style="bold", soft_wrap=True)
        grid = overview(groups[0])
    else:
        console.print(f"\n{len(groups)} studies", style="bold", soft_wrap=True)
        grid = overview_of(groups)
    for sentence in sentences(groups):
        console.print(sentence)
    console.print()
    console.print(terminal(grid))


def show_recalibration(anew: Recalibration, redraw: int, console: Console) -> None:
    """The means of the new rows and how they depend on the draws; the run's page is written again with these rows."""
    folder = anew.run.path
    if anew.whole:
        write_report(read_runs([folder]), folder / "report.html")
    console.print(terminal(overview(Study((anew.run,)))))
    if redraw:
        console.print(terminal(redrawn(anew.draws, redraw)))
    if anew.whole:
        console.print(f"report, with all rows: {folder / 'report.html'}", soft_wrap=True)
