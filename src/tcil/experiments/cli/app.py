"""The command line. Heavy packages are imported only when a command needs them: `tcil --help` starts without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tcil import __version__
from tcil.experiments.cli import lists, output
from tcil.experiments.cli.calibrate import calibrate
from tcil.experiments.cli.compare import compare
from tcil.experiments.cli.download import download
from tcil.experiments.cli.importing import import_
from tcil.experiments.cli.options import with_options
from tcil.experiments.cli.pack import pack
from tcil.experiments.cli.plan import plan
from tcil.experiments.cli.report import report
from tcil.experiments.cli.reproduce import reproduce
from tcil.experiments.cli.run import run
from tcil.experiments.cli.sweep import sweep
from tcil.experiments.process.exits import answered, visible_warnings

PASSING = (typer.Exit, typer.Abort)
# In the order in which `tcil --help` shows them.
COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "sweep": sweep,
    "plan": plan,
    "pack": pack,
    "calibrate": calibrate,
    "import": import_,
    "report": report,
    "reproduce": reproduce,
    "compare": compare,
    "download": download,
    "datasets": lists.datasets,
    "learners": lists.learners,
    "calibrators": lists.calibrators,
    "settings": lists.settings,
    "networks": lists.networks,
}


class Commands(TyperGroup):
    """All commands. Errors are printed as a single line and determine the exit code."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Parse the command line."""
        with answered(passing=PASSING):
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with answered(passing=PASSING), visible_warnings():
            return super().invoke(ctx)


app = typer.Typer(
    help="Calibrated confidence for classifiers that keep learning new classes.", no_args_is_help=True, cls=Commands,
    pretty_exceptions_enable=False,
)  # fmt: skip
for name, command in COMMANDS.items():
    app.command(name)(with_options(command))


def _version(wanted: bool) -> None:
    if wanted:
        output.console.print(f"tcil {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None: ...
