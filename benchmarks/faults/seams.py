"""The places where faults reach into the library: each is named here, and nothing else of it is replaced.

The process that is to be disturbed calls these in itself, before it begins. A name that the library no longer has is an
error: a fault that reaches nothing would look like one that does no harm.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

import tcil.experiments.runs.store as store
import tcil.experiments.scheduling.executors as executors
import tcil.experiments.scheduling.status as status
import tcil.experiments.scheduling.worker as worker

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def put(owner: object, name: str, value: object) -> None:
    """Something else in place of what the library has there."""
    if not hasattr(owner, name):
        raise AttributeError(f"{owner} has no {name!r}: a fault would reach nothing; see {__name__}")
    setattr(owner, name, value)


def wrap(owner: object, name: str, wrapper: Wrapper) -> None:
    """The same, made from what was there."""
    put(owner, name, wrapper(getattr(owner, name)))


def command(words: list[str]) -> None:
    """The `tcil` command in this process, on wide lines; ends with SystemExit."""
    from tcil.experiments.cli import output  # here: workers, which also come here, start without it
    from tcil.experiments.cli.app import app
    from tcil.experiments.process.screen import Screen

    with os.fdopen(os.dup(1), "w") as file:
        put(output, "console", Screen(width=300, file=file))
        app(words)


def import_all() -> None:
    """What the command imports on its way."""
    for name in ("cli.app", "scheduling.sweep"):
        importlib.import_module(f"tcil.experiments.{name}")


def without_pages() -> None:
    """No page at the end of a run: pictures cost more than all the rest here."""
    put(worker, "write_page", lambda *given: None)


def start_workers_by(*words: str) -> None:
    """The command by which a sweep on processes starts its workers."""
    put(executors.Worker, "command", (sys.executable, *words))


def work() -> None:
    """The worker's own main function."""
    worker.main()


def beat_every(seconds: float) -> None:
    """How often a process that works gives a sign of life."""
    put(status, "BEAT", seconds)


def before_each_step(act: Callable[[], None]) -> None:
    """Before every step of an optimizer in this process; torch's own hook."""
    register_optimizer_step_pre_hook(lambda *given: act())


def around_writes(wrapper: Wrapper) -> None:
    """Around the writing of a file in a run folder: (path, content)."""
    wrap(store, "replace_file", wrapper)


def around_removals(wrapper: Wrapper) -> None:
    """Around the removal of a file in a run folder: (folder, name)."""
    wrap(store.RunFolder, "remove", wrapper)
