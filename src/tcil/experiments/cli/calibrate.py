"""`tcil calibrate`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tcil.experiments.cli import output
from tcil.experiments.cli.options import SomeCalibrators, Trust
from tcil.experiments.process.exits import RunFailed, note_error


def calibrate(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")],
    data: Annotated[Path | None, typer.Option(help="folder that holds the dataset")] = None,
    calibrators: SomeCalibrators = None,
    redraw: Annotated[
        int, typer.Option(min=0, max=10_000, help="also refit on this many other draws of the validation set")
    ] = 0,
    trust: Trust = False,
) -> None:
    """Recompute calibrators on a finished run, without training."""
    from tcil.experiments.reporting.show import show_recalibration
    from tcil.experiments.runs.entries import specs_of
    from tcil.experiments.runs.recalibrate import recalibrate

    names, tell = specs_of(calibrators), partial(output.console.print, soft_wrap=True)
    try:
        anew = recalibrate(folder, data=data, calibrators=names, redraw=redraw, trust=trust, tell=tell)
    except RunFailed as error:
        note_error(folder)
        raise RunFailed(f"{error} (more in {folder / 'error.txt'})") from error
    (folder / "error.txt").unlink(missing_ok=True)
    show_recalibration(anew, redraw, output.console)
