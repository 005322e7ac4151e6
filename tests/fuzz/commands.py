"""Commands in this process: in a folder of their own, with nothing drawn, and a module that must not be imported."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest
from typer.testing import CliRunner, Result

from fuzz.files import CANARY, content_of
from tcil.experiments.cli.app import app
from tcil.experiments.reporting import page

TELLS = "the canary sang"
PATIENT = pytest.mark.xdist_group("fuzz-folders")  # one worker makes the folders that these tests share


def run(arguments: Sequence[str]) -> Result:
    """A command, as `tcil` would take it."""
    return CliRunner().invoke(app, list(arguments))


@contextlib.contextmanager
def workshop(folder: Path) -> Iterator[Path]:
    """A folder to work in: commands start here, `outside` must stay as it is, and the canary lies ready.

    Pictures are not drawn, which would take ten times as long as all the rest.
    """
    (folder / "outside").mkdir(parents=True)
    (folder / "outside" / "precious.txt").write_text("nobody may touch this\n")
    (folder / "outside" / "task").mkdir()
    tells = folder / "outside" / TELLS
    (folder / f"{CANARY}.py").write_text(
        f"from pathlib import Path\ndef touch(*args, **kwargs):\n    raise SystemExit(3)\n"
        f"Path({str(tells)!r}).write_text('imported')\n"
    )
    here, path, draw = os.getcwd(), list(sys.path), matplotlib.figure.Figure.savefig
    static, scripts = page.static_svg, page.scripts
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    matplotlib.figure.Figure.savefig = _undrawn  # type: ignore[method-assign]
    page.static_svg, page.scripts = (lambda chart, panel: "<svg></svg>"), (lambda: "")  # type: ignore[assignment]
    try:
        yield folder
    finally:
        os.chdir(here)
        sys.path[:] = path
        sys.modules.pop(CANARY, None)
        matplotlib.figure.Figure.savefig = draw  # type: ignore[method-assign]
        page.static_svg, page.scripts = static, scripts


def _undrawn(self: Any, file: Any, **options: Any) -> None:
    file.write("<svg></svg>")


@contextlib.contextmanager
def nothing_outside(folder: Path) -> Iterator[None]:
    """Inside, no file outside of the run folders is written, and nothing is imported that only a file names."""
    sys.modules.pop(CANARY, None)
    (folder / "outside" / TELLS).unlink(missing_ok=True)
    before = content_of(folder / "outside")
    yield
    assert content_of(folder / "outside") == before, "something outside of the run folder was written"
    assert CANARY not in sys.modules, "a module that only a file names was imported"
