"""`tcil download`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tcil.experiments.cli import output


def download(
    dataset: Annotated[str, typer.Argument(help="cifar10, cifar100 or tiny-imagenet")],
    data: Annotated[Path, typer.Option(help="folder for the dataset")],
) -> None:
    """Download a dataset and verify it. An interrupted download is resumed."""
    from rich.progress import Progress

    from tcil.incremental.data.datasets.download import download as fetch

    console = output.console
    with Progress(console=console, disable=not console.is_terminal) as bar:
        shown = bar.add_task("downloading", total=None)
        target = fetch(dataset, data, report=lambda done, total: bar.update(shown, completed=done, total=total))
    console.print(f"{dataset} is in {target}", soft_wrap=True)
