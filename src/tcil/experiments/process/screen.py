"""The console for all output, to a terminal, a file or a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tcil.experiments.process.exits import visible

_WIDTH = 160  # of files and pipes


class Screen(Console):
    """Prints names and paths literally, without markup, emoji or control characters.

    If the reader of a pipe exits (`tcil run | head -1`) or the disk is full, work continues without output. `lost` says
    that output could not be written although someone may wait for it.
    """

    lost = False

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)
        if not self.is_terminal and "width" not in options:
            self.width = _WIDTH

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, unless the output can no longer be written."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            self._leave()
            self.lost = True
            with contextlib.suppress(OSError):
                print(f"cannot write the output ({error.strerror}): continuing without it", file=sys.stderr)

    def on_broken_pipe(self) -> None:
        """Continue without output."""
        self._leave()

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments to write, with control characters made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def _leave(self) -> None:
        self.quiet = True
        with contextlib.suppress(OSError, ValueError):  # there is no file descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def plain_warnings(console: Screen) -> Iterator[None]:
    """Print warnings as one line, without their location in the code."""
    with warnings.catch_warnings():

        def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            console.print(f"warning: {message}", soft_wrap=True)

        warnings.showwarning = show  # type: ignore[assignment]
        yield
