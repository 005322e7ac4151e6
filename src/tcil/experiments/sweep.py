"""A sweep: independent runs through an executor, with a live table; what dies is tried again, what fails is listed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tcil.experiments.executors import HUNG_AFTER, Executor, ExecutorLost
from tcil.experiments.plan import clock
from tcil.experiments.status import Status, read_status
from tcil.experiments.worker import Job, Outcome

RETRIES = 2  # how often a run is tried again whose worker died
PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before a run is tried again; twice as long each time
STARTING = 300.0  # seconds that a worker may take to its first sign of life: it imports, and reads its data
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
        if self.state != "running" or now is None or now.updated < self.since or not now.phase:
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


class Watch:
    """How long running jobs have given no sign of life: their status files have not changed meanwhile.

    Time is this process's own, and counts only while it looks: clocks of other nodes do not matter, and whoever was
    halted together with the sweep is not taken for hung.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._pause, self._looked = limit, min(limit / 20, 5.0), time.monotonic()
        self._silent: dict[Job, tuple[object, float, bool]] = {}  # last sign, seconds since, whether it was this one's

    def hung(self, running: Iterable[Job]) -> list[Job]:
        """Of these jobs, those that have been silent for too long; of a limit of 0, none."""
        passed = time.monotonic() - self._looked
        if not self._limit or passed < self._pause:
            return []
        self._looked += passed
        return [job for job in running if self._look(job, min(passed, 2 * self._pause + 1))]

    def forget(self, job: Job) -> None:
        """The job has ended."""
        self._silent.pop(job, None)

    def _look(self, job: Job, passed: float) -> bool:
        status = read_status(job.folder)
        sign = status and (status.host, status.pid, status.updated)
        last, silent, own = self._silent.get(job, (sign, 0.0, False))
        silent, own = (silent + passed, own) if sign == last else (0.0, True)
        self._silent[job] = sign, silent, own
        return silent >= (self._limit if own else max(self._limit, STARTING))


def sweep(
    jobs: Sequence[Job],
    executor: Executor,
    board: Board,
    *,
    stop: Callable[[], bool],
    at_once: int | None = None,
    retries: int = RETRIES,
    hung_after: float = HUNG_AFTER,
) -> list[Line]:
    """Do all runs; those that another process works on are tried again until it ends. Returns how each ended.

    One without a sign of life for `hung_after` seconds (0: never) is ended, and tried again as if it had died.
    """
    watch = Watch(hung_after)
    queue, deaths, asked = list(jobs), dict.fromkeys(jobs, 0), False
    running: set[Job] = set()
    not_before, pauses = dict.fromkeys(jobs, 0.0), dict.fromkeys(jobs, PAUSE)
    while running or (queue and not asked):
        if stop() and not asked:
            asked = True
            executor.stop()
        due = [job for job in queue if not_before[job] <= time.monotonic()] if not asked else []
        free = min(executor.slots, at_once or len(jobs)) - len(running) if due else 0
        for job in due[: max(0, free)]:
            queue.remove(job)
            running.add(job)
            board.set(job, "running")
            executor.start(job)
        for job in watch.hung(running):
            watch.forget(job)
            executor.kill(job, f"the worker hung: no sign of life for {hung_after:g} s")
        try:
            ended = executor.ended(0.2)
        except ExecutorLost as reason:
            board.remark(str(reason))
            break
        for job, outcome in ended:
            running.remove(job)
            watch.forget(job)
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
        if line.state in ("queued", "in use", "running"):
            board.set(line.job, "stopped", line.message)
    return board.lines


def _died(message: str, times: int) -> str:
    return message if times == 1 else f"{message} ({times} times)"
