"""`tcil report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tcil.experiments.cli import output
from tcil.experiments.cli.options import REPORT, Browse, Overwrite, Report, Verbose, check_report_place


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders, or folders of run folders")],
    out: Report = REPORT,
    keep: Annotated[
        Path | None, typer.Option(help="also copy the results, as small JSON files, into this folder")
    ] = None,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
    browse: Browse = False,
) -> None:
    """Report the results of any set of runs: sentences, tables and pictures, as HTML, Markdown, LaTeX and CSV.

    An earlier report of these runs, or of some of them, is replaced; one of other runs only with --overwrite.
    """
    from tcil.experiments.reporting import collect
    from tcil.experiments.reporting.page import check_replaced, marks_of
    from tcil.experiments.reporting.show import show_report
    from tcil.foundation.boundary import check_place

    check_report_place(out, "out")
    if keep is not None:
        check_place(keep, "keep")
    stored = collect.read_runs(runs)
    if not overwrite:
        check_replaced(out, marks_of(stored))
    if keep is not None:
        collect.keep(stored, keep)
    show_report(stored, out, output.console, verbose=verbose, browse=browse)
