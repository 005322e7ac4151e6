"""Signals that ask a run to stop: it finishes its step, saves, and exits with a code that says: start me again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Stopped(Exception):
    """A run stopped because it was asked to; the same command resumes it."""


class SecondInterrupt(KeyboardInterrupt):
    """Ctrl-C once more: the user does not want to wait for the end of the step."""


_received: signal.Signals | None = None
_looks = 0  # how often this process has looked whether it was asked to stop


def request(number: int, frame: FrameType | None = None) -> None:
    """Note that this process shall stop soon; what signal handlers call."""
    global _received
    if _received is signal.SIGINT and number == signal.SIGINT:
        raise SecondInterrupt
    _received = signal.Signals(number)


def requested() -> bool:
    """Whether this process was asked to stop."""
    global _looks
    _looks += 1
    return _received is not None


def check() -> None:
    """Stop here, if this process was asked to."""
    if requested():
        assert _received is not None
        raise Stopped(f"stopped by {_received.name}; run the same command again to resume")


def looks() -> int:
    """How often this process has looked whether it shall stop, as it does after every step: a hung one does not."""
    return _looks


@contextmanager
def on_signals(*more: signal.Signals) -> Iterator[None]:
    """Inside, SIGTERM, SIGUSR1 and SIGHUP (and `more`) are requests to stop; handlers are put back afterwards.

    Under nohup, SIGHUP stays ignored.
    """
    global _received
    _received = None
    kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set[signal.Signals]()
    before = {number: signal.signal(number, request) for number in (*SIGNALS, *more) if number not in kept}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received = None


def at_once() -> None:
    """Outside of `on_signals`, these signals and Ctrl-C end the command where it is: there is no step to finish."""
    for number in (*SIGNALS, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and background shells leave them
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)
