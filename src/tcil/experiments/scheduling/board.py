"""Where every run of a sweep stands: a live table on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tcil.experiments.scheduling.cost import Outlook
from tcil.experiments.scheduling.job import Job
from tcil.experiments.scheduling.plan import clock
from tcil.experiments.scheduling.status import Status, read_status

SILENCE = 600.0  # seconds, at most, between two lines on the whole plan where there is no terminal
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
    def place(self) -> tuple[str, str]:
        """Task and epoch, where it runs."""
        now = self.status
        if self.state != "running" or now is None or now.updated < self.since or not now.phase:
            return "", ""
        epoch = "" if now.phase.endswith(("calibrate", "done")) else f" {now.done}/{now.total}"
        return f"{now.task + 1}/{now.tasks}", f"{now.phase}{epoch}"


class Board:
    """Shows every run of a sweep: a live table on a terminal, a line for each change elsewhere."""

    def __init__(self, jobs: Sequence[Job], console: Console) -> None:
        self._console, self._lines = console, {job: Line(job) for job in jobs}
        self._told: dict[Job, tuple[str, ...]] = {}
        self._over, self._guard = threading.Event(), threading.Lock()
        self._outlook, self._last_said = Outlook(jobs), time.monotonic()
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

    @property
    def outlook(self) -> str:
        """How much of all the runs together is done, and the time left at the speed so far."""
        share, left = self._outlook.left({line.job: (line.state, line.status) for line in self.lines})
        return f"all runs: {100 * share:.0f} % done" + (f", about {clock(left)} left" if left is not None else "")

    def table(self) -> Table:
        """One row for each run, and all of them together."""
        caption = self.outlook
        table = Table("", "run", "state", "task", "epoch", "left", "", box=None)
        for number, line in enumerate(self.lines, start=1):
            style = COLOURS.get(line.state, "")
            words = [str(number), line.title, line.state, *line.place, self._left(line), line.message]
            table.add_row(*map(Text, words), style=style)
        table.caption = caption
        return table

    def _left(self, line: Line) -> str:
        """The time left of a run, as the outlook last saw it."""
        left = self._outlook.left_of(line.job) if any(line.place) else None
        return "" if left is None else clock(left)

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
            outlook = self.outlook
            for number, line in enumerate(self.lines, start=1):
                (task, epoch), left = line.place, self._left(line)
                news, told = (line.state, line.message, task), self._told.get(line.job, ("queued", "", ""))
                only_tried = told[0] == "in use" and line.state == "running" and not task
                if news != told and not only_tried:
                    self._told[line.job] = news
                    where = f", task {task} {epoch}{left and ', left ' + left}" if task else ""
                    more = f": {line.message}" if line.message else ""
                    text = f"{number}/{len(self._lines)} {line.title}: {line.state}{where}{more}"
                    self._say(f"{text} ({outlook})" if len(self._lines) > 1 else text)
            if time.monotonic() - self._last_said > SILENCE:
                self._say(outlook)

    def _say(self, text: str) -> None:
        self._last_said = time.monotonic()
        self._console.print(text, soft_wrap=True)
