"""`tcil import`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tcil.experiments.cli import output
from tcil.experiments.cli.options import Out, SomeCalibrators, Trust


def import_(
    source: Annotated[Path, typer.Argument(help="folder with tasks.json and task-00.npz, ...")],
    out: Out = Path("runs"),
    data: Annotated[Path | None, typer.Option(help="folder that holds the dataset, for checkpoints")] = None,
    calibrators: SomeCalibrators = None,
    trust: Trust = False,
) -> None:
    """Calibrate models that were trained elsewhere, from their logits, labels and class lists."""
    from tcil.experiments.reporting.collect import read_runs
    from tcil.experiments.reporting.show import present
    from tcil.experiments.runs.entries import specs_of
    from tcil.experiments.runs.importing import import_run
    from tcil.foundation.boundary import check_place

    check_place(out)
    folder = out / f"imported-{source.resolve().name}"
    names, tell = specs_of(calibrators), partial(output.console.print, soft_wrap=True)
    import_run(source, folder, data=data, calibrators=names, trust=trust, tell=tell)
    present(read_runs([folder])[0], output.console)
