"""A sweep: independent runs through an executor, with a live table; what dies is tried again, what fails is listed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tcil.experiments.executors import Executor
from tcil.experiments.plan import clock
from tcil.experiments.status import Status, read_status
from tcil.experiments.worker import Job, Outcome

RETRIES = 2  # how often a run is tried again whose worker died
PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before a run is tried again; twice as long each time
COLOURS = {"done": "green", "failed": "red", "running": "cyan", "stopped": "yellow", "in use": "yellow"}


@dataclass(frozen=True)
class Line:
    """What is known of one run: queued, running, in use (elsewhere), done, failed or stopped; and where it stands."""

    job: Job
    state: str = "queued"
    message: str = ""
    since: float = 0.0
    status: Status | None = None

    @property
    def title(self) -> str:
        """The run in few words."""
        s = self.job.settings
        return f"{s.dataset} {s.learner} seed {s.seed}"

    @property
    def place(self) -> tuple[str, str, str]:
        """Task, epoch and time left, where it runs."""
        now = self.status
        if self.state != "running" or now is None or now.updated < self.since:
            return "", "", ""
        epoch = "" if now.phase.endswith(("calibrate", "done")) else f" {now.done}/{now.total}"
        left = "" if now.left is None else clock(now.left)
        return f"{now.task + 1}/{now.tasks}", f"{now.phase}{epoch}", left


class Board:
    """Shows every run of a sweep: a live table on a terminal, a line for each change elsewhere."""

    def __init__(self, jobs: Sequence[Job], console: Console) -> None:
        self._console, self._lines = console, {job: Line(job) for job in jobs}
        self._told: dict[Job, tuple[str, ...]] = {}
        self._over, self._guard = threading.Event(), threading.Lock()
        self._live = Live(self.table(), console=console, auto_refresh=False)

    @property
    def lines(self) -> list[Line]:
        """All runs in their order."""
        return list(self._lines.values())

    def set(self, job: Job, state: str, message: str = "") -> None:
        """A run's state has changed."""
        self._lines[job] = Line(job, state, message, time.time())
        self._show()

    def remark(self, text: str) -> None:
        """Something that stands by itself, such as a damaged file."""
        self._console.print(f"warning: {text}", soft_wrap=True)

    def table(self) -> Table:
        """One row for each run."""
        table = Table("", "run", "state", "task", "epoch", "left", "", box=None)
        for number, line in enumerate(self.lines, start=1):
            style = COLOURS.get(line.state, "")
            words = [str(number), line.title, line.state, *line.place, line.message]
            table.add_row(*map(Text, words), style=style)
        return table

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._show()
        if self._console.is_terminal:
            self._live.stop()

    def _watch(self) -> None:
        """Look at the runs' status files: in a thread, since a serial sweep does its runs in the main one."""
        while not self._over.wait(0.5):
            for job, line in list(self._lines.items()):
                if line.state == "running":
                    fresh = replace(line, status=read_status(job.folder))
                    if self._lines[job] is line:
                        self._lines[job] = fresh
            self._show()

    def _show(self) -> None:
        with self._guard:
            if self._console.is_terminal:
                self._live.update(self.table(), refresh=True)
                return
            for number, line in enumerate(self.lines, start=1):
                task, epoch, left = line.place
                news, told = (line.state, line.message, task), self._told.get(line.job, ("queued", "", ""))
                only_tried = told[0] == "in use" and line.state == "running" and not task
                if news != told and not only_tried:
                    self._told[line.job] = news
                    where = f", task {task} {epoch}{left and ', left ' + left}" if task else ""
                    more = f": {line.message}" if line.message else ""
                    text = f"{number}/{len(self._lines)} {line.title}: {line.state}{where}{more}"
                    self._console.print(text, soft_wrap=True)


def sweep(
    jobs: Sequence[Job],
    executor: Executor,
    board: Board,
    *,
    stop: Callable[[], bool],
    at_once: int | None = None,
    retries: int = RETRIES,
) -> list[Line]:
    """Do all runs; those that another process works on are tried again until it ends. Returns how each ended."""
    queue, deaths, asked = list(jobs), dict.fromkeys(jobs, 0), False
    running: set[Job] = set()
    not_before, pauses = dict.fromkeys(jobs, 0.0), dict.fromkeys(jobs, PAUSE)
    while running or (queue and not asked):
        if stop() and not asked:
            asked = True
            executor.stop()
        due = [job for job in queue if not_before[job] <= time.monotonic()] if not asked else []
        for job in due[: max(0, min(executor.slots, at_once or len(jobs)) - len(running))]:
            queue.remove(job)
            running.add(job)
            board.set(job, "running")
            executor.start(job)
        for job, outcome in executor.ended(0.2):
            running.remove(job)
            for text in outcome.remarks:
                board.remark(text)
            again = outcome.state == "in use"
            if outcome.state == "died":
                deaths[job] += 1
                again = deaths[job] <= retries
                outcome = Outcome("queued" if again else "failed", _died(outcome.message, deaths[job]))
            board.set(job, outcome.state, outcome.message)
            if again:
                not_before[job] = time.monotonic() + pauses[job]
                pauses[job] = min(2 * pauses[job], LONGEST_PAUSE)
                queue.append(job)
        if not running:
            time.sleep(0.05)
    for line in board.lines:
        if line.state in ("queued", "in use"):
            board.set(line.job, "stopped", line.message)
    return board.lines


def _died(message: str, times: int) -> str:
    return message if times == 1 else f"{message} ({times} times)"
