"""Exit codes and error messages of commands. This module does not import packages of extras."""

from __future__ import annotations

import contextlib
import errno
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from tcil.experiments.process import stopping
from tcil.foundation.errors import invalid
from tcil.foundation.files import replace_file


class ExitCode(IntEnum):
    """The exit codes of all commands; docs/scale-out.md has the same table."""

    DONE = 0
    FAILED = 1  # a run failed
    REFUSED = 2  # the command, its settings or its input files are invalid
    STOPPED = 75  # EX_TEMPFAIL: stopped on request; run the same command again to resume
    INTERRUPTED = 130  # by a second Ctrl-C, in the middle of a step


class RunFailed(RuntimeError):
    """A run failed; the error is its cause. Everything stored before is intact."""


_EXTRAS = {
    "bench": ("jinja2", "markupsafe", "matplotlib", "PIL", "pydantic", "rich", "sklearn", "typer", "vl_convert"),
    "ray": ("ray",),
}


# Control characters, which would move the cursor or change the terminal; names may contain them.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def answered(passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Turn errors that users can fix into a message and an exit code; errors of the types in `passing` are raised."""
    try:
        yield
    except passing:
        raise
    except stopping.SecondInterrupt:
        raise _ended(ExitCode.INTERRUPTED, "stopped immediately; everything stored before is intact") from None
    except stopping.Stopped as reason:
        raise _ended(ExitCode.STOPPED, str(reason)) from None
    except KeyboardInterrupt as reason:
        raise _ended(ExitCode.STOPPED, _stopped_by(reason)) from None
    except Exception as error:
        if interrupt := _in_chain(error, KeyboardInterrupt):  # a library converted it to another error
            raise _ended(ExitCode.STOPPED, _stopped_by(interrupt)) from None
        if missing := missing_extra(error):
            raise _ended(ExitCode.REFUSED, missing, "error: ") from None
        if not isinstance(error, (ValueError, RuntimeError, OSError)):
            raise
        if isinstance(error, OSError) and (usage := _usage_code(error)):
            raise SystemExit(usage) from None
        no_room = isinstance(error, OSError) and error.errno in _NO_ROOM
        code = ExitCode.FAILED if no_room or isinstance(error, RunFailed) else ExitCode.REFUSED
        raise _ended(code, str(error) or type(error).__name__, "error: ") from None


def visible(text: str) -> str:
    """The text with control characters made visible.

    >>> print(visible("\\x1b[2Jname"))
    \\x1b[2Jname
    """
    return text.translate(_CONTROLS)


@contextmanager
def visible_warnings() -> Iterator[None]:
    """Print warnings without their location in the code, and with control characters made visible."""
    original = warnings.formatwarning
    warnings.formatwarning = lambda message, *rest, **named: f"warning: {visible(str(message))}\n"
    try:
        yield
    finally:
        warnings.formatwarning = original


def missing_extra(error: BaseException) -> str:
    """What to install, if the error is that a package of an extra is missing; else an empty string."""
    missing = _in_chain(error, ModuleNotFoundError)
    package = (missing.name or "").partition(".")[0] if missing is not None else ""
    for extra, packages in _EXTRAS.items():
        if package in packages:
            advice = f"pip install 'tcil[{extra}]'"
            return str(invalid("tcil", f"an installation without {package}", f"the extra tcil[{extra}]", advice))
    return ""


def _usage_code(error: OSError) -> int:
    """The exit code of a command-line error that could not be printed; 0 if there is none."""
    code = getattr(error.__context__, "exit_code", 0)
    return code if isinstance(code, int) else 0


Kind = TypeVar("Kind", bound=BaseException)


def _in_chain(error: BaseException | None, kind: type[Kind]) -> Kind | None:
    """The error of this type in the chain of causes; None if there is none."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _stopped_by(interrupt: KeyboardInterrupt) -> str:
    return f"stopped by {interrupt.args[0] if interrupt.args else 'SIGINT'}; run the same command again"


def _ended(code: ExitCode, text: str, mark: str = "") -> SystemExit:
    for line in text.splitlines():
        try:
            print(f"{mark}{visible(line)}", file=sys.stderr)
        except OSError:  # the stream is closed; the exit code remains
            break
    return SystemExit(int(code))


def last_line(error: BaseException) -> str:
    """The last line of an error's message, which is usually the most informative, and what was noted of it.

    >>> error = RuntimeError("first line\\nno room")
    >>> error.add_note("memory: the model was run on inputs of shape (2, 3), torch.float32.")
    >>> last_line(error)
    'RuntimeError: no room (memory: the model was run on inputs of shape (2, 3), torch.float32)'
    """
    if missing := missing_extra(error):
        return missing
    if isinstance(error, RunFailed):  # which says it all
        return str(error)
    lines = [line for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if isinstance(error, ValueError) and lines else f"{type(error).__name__}: {(lines or [''])[-1]}"
    notes = "; ".join(note.rstrip(".") for note in getattr(error, "__notes__", ()))
    return f"{last} ({notes})" if notes else last


def note_error(folder: Path) -> None:
    """Write the traceback of the current error to FOLDER/error.txt."""
    with contextlib.suppress(OSError):
        replace_file(folder / "error.txt", traceback.format_exc().encode(errors="backslashreplace"))
