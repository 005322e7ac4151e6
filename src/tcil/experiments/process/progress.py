"""Progress of long work: a bar with the remaining time on a terminal, plain lines elsewhere, and logs."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from tcil.experiments.process.screen import Screen
from tcil.foundation.boundary import inside
from tcil.foundation.files import replace_file


@dataclass(frozen=True)
class Progress:
    """The progress of a run."""

    task: int
    n_tasks: int
    phase: str
    done: int
    total: int
    loss: float | None = None


Listener = Callable[[Progress], None]


class ProgressDisplay:
    """A bar for each task on a terminal; a line for each stage and task elsewhere."""

    def __init__(self, console: Screen, title: str) -> None:
        self._console, self._title = console, title
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._shown: dict[tuple[int, str], Any] = {}
        self._last_line = 0.0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        """Show the progress of the run."""
        name = f"{self._title} task {progress.task + 1}/{progress.n_tasks} {progress.phase}"
        if self._console.is_terminal:
            key = (progress.task, progress.phase)
            if progress.phase not in ("done", "calibrate") and key not in self._shown:
                self._shown[key] = self._bars.add_task(name, total=progress.total)
            if key in self._shown:
                self._bars.update(self._shown[key], completed=progress.done)
            return
        now = time.monotonic()
        if progress.phase == "calibrate" or progress.done == progress.total or now - self._last_line > 30:
            self._last_line = now
            loss = "" if progress.loss is None else f", loss {progress.loss:.4f}"
            count = "" if progress.phase in ("done", "calibrate") else f" {progress.done}/{progress.total}{loss}"
            self._console.print(f"{name}{count}")


class CsvLog:
    """One line per epoch in RUN/progress.csv."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = inside(folder, "progress.csv")
        if self._path.exists() and self._path.stat().st_nlink > 1:  # never append to a file outside of this folder
            replace_file(self._path, self._path.read_bytes())

    def __call__(self, progress: Progress) -> None:
        """Write an epoch's line."""
        if progress.loss is None:
            return
        fresh = not self._path.exists()
        with self._path.open("a", newline="") as file:
            writer = csv.writer(file)
            if fresh:
                writer.writerow(["task", "stage", "epoch", "loss"])
            writer.writerow([progress.task, progress.phase, progress.done, progress.loss])


class TensorBoardLog:
    """The loss by epoch for TensorBoard (requires the package `tensorboard`)."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(inside(folder, "tensorboard")))

    def __call__(self, progress: Progress) -> None:
        """Write an epoch's loss."""
        if progress.loss is not None:
            tag = f"task-{progress.task:02d}/{progress.phase}/loss"
            self._writer.add_scalar(tag, progress.loss, progress.done)
            self._writer.flush()
