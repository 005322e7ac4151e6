"""Where a run stands, as a small file in its folder: the same for local processes, Ray and Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import TypeAdapter, ValidationError

from tcil.experiments.process import stopping
from tcil.experiments.process.progress import Progress
from tcil.experiments.runs.store import RunFolder

NAME = "status.json"
PAUSE = 0.5  # seconds between two writes, but for a change of phase
BEAT = 5.0  # seconds between two signs of life, at most, of a process that gets on
BUSY = 0.05  # share of a processor that a process uses at least, if it computes


@dataclass(frozen=True)
class Status:
    """What the file says: of the run, and of the process that does it."""

    state: str
    task: int = 0
    tasks: int = 0
    phase: str = ""
    done: int = 0
    total: int = 0
    error: str = ""
    host: str = ""
    pid: int = 0
    updated: float = 0.0


_STATUS = TypeAdapter(Status)


def read_status(folder: Path) -> Status | None:
    """What the file in this folder says; None where there is none that can be read."""
    record = RunFolder(folder).peek_json(NAME)  # by threads too, in which no warning may be caught
    try:
        return None if record is None else _STATUS.validate_json(json.dumps(record), strict=True)
    except ValidationError:
        return None


class StatusWriter:
    """A listener that keeps the file up to date."""

    def __init__(self, folder: Path) -> None:
        self._store = RunFolder(folder)
        self._last: Status | None = None
        self._what = ""
        self._writing = threading.RLock()

    @property
    def begun(self) -> bool:
        """Whether a step of the run was told."""
        return self._last is not None and self._last.tasks > 0

    def titled(self, title: str) -> Self:
        """The display of one training; a run may have a second one, on all data, which starts from the beginning."""
        self._what = "all data, " if title.endswith("all data") else ""
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __call__(self, progress: Progress) -> None:
        """Write where the run stands, unless that was just done."""
        shown = self._what + progress.phase
        status = self._status("running", progress.task, progress.n_tasks, shown, progress.done, progress.total)
        last = self._last
        same = last is not None and (last.task, last.phase) == (status.task, status.phase)
        if last is None or not same or status.updated - last.updated > PAUSE:
            self._write(status)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Inside, `updated` moves on every few seconds, as long as this process takes steps or computes."""
        over = threading.Event()
        heart = threading.Thread(target=self._beat, args=(over,), daemon=True)
        heart.start()
        try:
            yield
        finally:
            over.set()
            heart.join()

    def _beat(self, over: threading.Event) -> None:
        self._refresh()
        looks, used, since = stopping.looks(), _used_by_others(), time.monotonic()
        while not over.wait(BEAT):
            before = looks, used, since
            looks, used, since = stopping.looks(), _used_by_others(), time.monotonic()
            if looks != before[0] or used - before[1] > BUSY * (since - before[2]):
                self._refresh()

    def _refresh(self) -> None:
        with self._writing:
            self._write(replace(self._last or self._status("running"), updated=time.time()))

    def end(self, state: str, error: str = "") -> None:
        """Write how it ended."""
        last = self._last or Status(state)
        self._write(self._status(state, last.task, last.tasks, last.phase, last.done, last.total, error))

    def _status(self, state: str, *values: object) -> Status:
        who = {"host": socket.gethostname(), "pid": os.getpid(), "updated": time.time()}
        return Status(state, *values, **who)  # type: ignore[arg-type]

    def _write(self, status: Status) -> None:
        with self._writing, contextlib.suppress(OSError):  # a full disk is told where it does harm
            self._last = status
            self._store.write_json(NAME, asdict(status))


def _used_by_others() -> float:
    """Processor time of all threads but this one."""
    return time.process_time() - time.thread_time()
