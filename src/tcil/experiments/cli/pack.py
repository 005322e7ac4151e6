"""`tcil pack`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tcil.experiments.cli import output


def pack(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="run folders, finished or not, or folders of them")
    ],
    to: Annotated[Path, typer.Option(help="folder for the copies, on another disk")],
) -> None:
    """Copy what a run needs to resume on another machine: its results, and the network of its last task.

    The copy is a run folder. 'tcil run' with the same settings and '--out' of the copies resumes after the last
    finished task. Run the command again to update the copies.
    """
    from tcil.experiments.runs.packing import pack as copy
    from tcil.experiments.runs.packing import run_folders

    for run in (folder for path in runs for folder in run_folders(path)):
        folder = copy(run, to)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        output.console.print(f"{folder} {size / 1e6:.1f} MB", soft_wrap=True)
