"""Draw the paper's artifacts from finished runs: on the terminal, as tables, and as one page. Does not need torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tcil.experiments.process.screen import Screen
from tcil.experiments.reporting.collect import studies
from tcil.experiments.reporting.grids import terminal, write_tables
from tcil.experiments.reporting.page import PAPER, READING, Section, study_sections, write_sections
from tcil.experiments.reproduction.artifacts import Artifact
from tcil.experiments.reproduction.claims import numbered
from tcil.experiments.reproduction.finished import FinishedRuns
from tcil.experiments.reproduction.paper import contradictions
from tcil.experiments.reproduction.schedules import MAIN

REPRODUCED = (
    "Every table, figure and claim of the paper beside our runs of it, in percent, means over tasks. Each table says on"
    " what schedule ours was run; cells that were not run say so, and nothing is filled in."
)


def draw(artifacts: Sequence[Artifact], finished: FinishedRuns, report: Path, console: Screen) -> list[Section]:
    """Draw every artifact next to our runs, and the runs in full."""
    sections = [artifact.render(finished) for artifact in artifacts]
    grids = [grid for section in sections for grid in section.tables]
    for grid in grids:
        console.print(terminal(grid))
    notes = Section(
        "Where the paper disagrees with itself or with its code",
        ["Lines are those of the paper's LaTeX source.", *numbered(dict(enumerate(contradictions(), start=1)))],
    )
    write_tables(grids, report, {PAPER})
    content = [*sections, notes, *_own_runs(artifacts, finished)]
    left_out = " ".join(edition.left_out for edition in finished.editions if edition.left_out)
    front = Section("T-CIL reproduced", [line for line in (REPRODUCED, left_out) if line])
    page = write_sections(report / "report.html", front, [*content, READING], {PAPER})
    console.print(f"tables {report / 'tables.md'}, .tex, .csv\nreport {page}", soft_wrap=True)
    return sections


def _own_runs(artifacts: Sequence[Artifact], finished: FinishedRuns) -> list[Section]:
    """Our runs of the main experiments in full or, if there are none, of those that vary a size."""
    wanted = [one for artifact in artifacts for one in artifact.wanted]
    runs = {
        run.settings.key: run
        for one in [one for one in wanted if one.variation == MAIN] or wanted
        for _, study in finished.on(one.dataset, one.learner, one.variation)
        for run in study.runs
    }
    sections = study_sections(studies(runs.values()))
    return [replace(section, title=f"Our runs: {section.title}") for section in sections]
