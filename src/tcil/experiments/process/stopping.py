"""Signals that ask a run to stop: it finishes its step, saves, and exits with code 75; the same command resumes it."""

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
    """A second Ctrl-C: stop without waiting for the end of the step."""


_received: signal.Signals | None = None
_looks = 0  # how often this process has checked for a request to stop


def request(number: int, frame: FrameType | None = None) -> None:
    """Request that this process stops soon; the signal handler."""
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
    """Raise `Stopped` if this process was asked to stop."""
    if requested():
        assert _received is not None
        raise Stopped(f"stopped by {_received.name}; run the same command again to resume")


def looks() -> int:
    """How often this process has checked for a request to stop, as it does after every step unless it hangs."""
    return _looks


@contextmanager
def on_signals(*more: signal.Signals) -> Iterator[None]:
    """Context in which SIGTERM, SIGUSR1, SIGHUP and `more` are requests to stop; handlers are restored on exit.

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
    """Let these signals and Ctrl-C end the command immediately outside of `on_signals`."""
    for number in (*SIGNALS, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and background shells ignore some
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)
