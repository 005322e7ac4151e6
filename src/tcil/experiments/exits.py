"""How a command ends: its exit code, and what is said instead of a traceback. Nothing of an extra is imported here."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TypeVar

from tcil.calibration.errors import invalid
from tcil.experiments import stopping


class ExitCode(IntEnum):
    """The exit codes of every command; the table in docs/scale-out.md says the same."""

    DONE = 0
    FAILED = 1  # a run went wrong while it was done
    REFUSED = 2  # something is wrong with the command, its settings or the files it reads
    STOPPED = 75  # EX_TEMPFAIL: nothing is wrong, start it again
    INTERRUPTED = 130  # by a second Ctrl-C, without waiting for the step


class RunFailed(RuntimeError):
    """A run went wrong while it was done; its cause is the error. What was stored before is whole."""


_EXTRAS = {
    "bench": ("jinja2", "markupsafe", "matplotlib", "PIL", "pydantic", "rich", "sklearn", "typer"),
    "ray": ("ray",),
}


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def answered(passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Errors that a user can do something about as one message and an exit code; what is `passing` goes by."""
    try:
        yield
    except passing:
        raise
    except stopping.SecondInterrupt:
        raise _ended(ExitCode.INTERRUPTED, "ended at once; what was stored before is whole") from None
    except stopping.Stopped as reason:
        raise _ended(ExitCode.STOPPED, str(reason)) from None
    except KeyboardInterrupt as reason:
        raise _ended(ExitCode.STOPPED, _stopped_by(reason)) from None
    except Exception as error:
        if interrupt := _in_chain(error, KeyboardInterrupt):  # a library made another error of it
            raise _ended(ExitCode.STOPPED, _stopped_by(interrupt)) from None
        if missing := missing_extra(error):
            raise _ended(ExitCode.REFUSED, missing, "error: ") from None
        if not isinstance(error, (ValueError, RuntimeError, OSError)):
            raise
        no_room = isinstance(error, OSError) and error.errno in _NO_ROOM
        code = ExitCode.FAILED if no_room or isinstance(error, RunFailed) else ExitCode.REFUSED
        raise _ended(code, str(error) or type(error).__name__, "error: ") from None


def missing_extra(error: BaseException) -> str:
    """What to install, where the error is that a package of an extra is not there; else nothing."""
    found = _in_chain(error, ModuleNotFoundError)
    package = (found.name or "").partition(".")[0] if found is not None else ""
    for extra, packages in _EXTRAS.items():
        if package in packages:
            advice = f"pip install 'tcil[{extra}]'"
            return str(invalid("tcil", f"an installation without {package}", f"the extra tcil[{extra}]", advice))
    return ""


Kind = TypeVar("Kind", bound=BaseException)


def _in_chain(error: BaseException | None, kind: type[Kind]) -> Kind | None:
    """The error, or the one that led to it, of this kind."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _stopped_by(interrupt: KeyboardInterrupt) -> str:
    return f"stopped by {interrupt.args[0] if interrupt.args else 'SIGINT'}; start the same command again"


def _ended(code: ExitCode, text: str, mark: str = "") -> SystemExit:
    for line in text.splitlines():
        try:
            print(f"{mark}{line}", file=sys.stderr)
        except OSError:  # nobody reads it; the code tells
            break
    return SystemExit(int(code))
