"""`tcil compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tcil.experiments.cli import output
from tcil.experiments.cli.options import Overwrite


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="a run folder, or a folder of run folders")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another one with the same datasets, learners and seeds")],
    out: Annotated[Path | None, typer.Option(help="folder for the tables as files")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Compare two sets of runs, with paired differences and their intervals.

    Earlier tables of this comparison are replaced; those of other runs only with --overwrite.
    """
    from tcil.experiments.reporting import collect, tables
    from tcil.experiments.reporting.grids import terminal, write_tables
    from tcil.experiments.reporting.page import check_replaced, check_report, marks_of_comparison
    from tcil.foundation.boundary import check_place

    if out is not None:
        check_place(out)
        check_report(out)
    left, right = collect.read_runs([a]), collect.read_runs([b])
    marks = marks_of_comparison(left, right)
    if out is not None and not overwrite:
        check_replaced(out, marks)
    grids = [tables.comparison(left, right, key) for key in tables.COLUMNS if key != "noise_floor"]
    for grid in grids:
        output.console.print(terminal(grid))
    if out is not None:
        write_tables(grids, out, marks)
        output.console.print(f"tables {out / 'tables.md'}, .tex, .csv", soft_wrap=True)
