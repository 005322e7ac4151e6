"""The terminal, or the file or pipe that stands for it: one console for all that is printed."""

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

_WIDTH = 160  # in a file or a pipe nothing needs to be cut


class Screen(Console):
    """Prints names and paths as they are: nothing in them is markup, an emoji or a control code.

    When its reader has left (`tcil run | head -1`), or its file can hold no more, work goes on without it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)
        if not self.is_terminal and "width" not in options:
            self.width = _WIDTH

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, unless nothing can be written any more."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            self._leave()
            with contextlib.suppress(OSError):
                print(f"the output cannot be written ({error.strerror}): going on without it", file=sys.stderr)

    def on_broken_pipe(self) -> None:
        """Go on without output."""
        self._leave()

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What is written, with control codes made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def _leave(self) -> None:
        self.quiet = True
        with contextlib.suppress(OSError, ValueError):  # no file of the system stands behind it
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def plain_warnings(console: Screen) -> Iterator[None]:
    """Warnings as one line without the place in the code."""
    with warnings.catch_warnings():

        def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            console.print(f"warning: {message}", soft_wrap=True)

        warnings.showwarning = show  # type: ignore[assignment]
        yield
