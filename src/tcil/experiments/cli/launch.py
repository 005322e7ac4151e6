"""The entry point of the `tcil` command: signals, closed output streams, and packages that are not installed."""

from __future__ import annotations

import contextlib
import io
import sys

from tcil.experiments.process import stopping
from tcil.experiments.process.exits import ExitCode, answered


def main() -> None:
    """Run the command given by this process's arguments."""
    with answered():
        stopping.at_once()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # escape names that cannot be encoded
                with contextlib.suppress(ValueError):
                    stream.reconfigure(errors="backslashreplace")
        from tcil.experiments.cli import output
        from tcil.experiments.cli.app import app

        try:
            app(prog_name="tcil")
        except SystemExit as end:
            if output.console.lost and not end.code:
                raise SystemExit(int(ExitCode.FAILED)) from None
            raise
