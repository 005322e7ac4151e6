"""What is looked at from outside: files that a sweep left, processes that are at work; and what must hold of them."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tcil.experiments.scheduling.status import Status, read_status
from tcil.foundation.checksums import Damaged, open_json, open_tensors

PATIENCE = 120.0
# Files that tell of the time, or of who was at work.
PASSING = {"environment.json", "status.json", "report.html", ".lock", "error.txt"}


class Lost(AssertionError):
    """Something was lost, repeated or silently used."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise Lost(what)


def until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> object:
    limit = time.monotonic() + patience
    while not (found := condition()):
        require(time.monotonic() < limit, f"waited in vain for {what}")
        time.sleep(0.02)
    return found


# files ----------------------------------------------------------------------------------------------------------


def contents(out: Path) -> dict[str, bytes]:
    files = [path for path in out.rglob("*") if path.is_file() and path.name not in PASSING and path.suffix != ".part"]
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def finished(out: Path) -> dict[str, tuple[int, int]]:
    """Networks and results of the runs that are finished, with what tells whether they were written again."""
    runs = [path.parent for path in out.glob("*/results.json")]
    files = [path for run in runs for path in [run / "results.json", *run.glob("task-*/model.safetensors")]]
    return {str(path.relative_to(out)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def require_nothing_half_written(out: Path) -> None:
    left = [str(path) for path in out.rglob("*.part")]
    require(not left, f"left half-written: {left}")


def require_whole(out: Path) -> None:
    """Whether every file is what was written: nothing is left to checksums."""
    for name, content in contents(out).items():
        try:
            run, _, own = name.partition("/")
            open_json(content, own) if name.endswith(".json") else open_tensors(content, own)
        except Damaged as reason:
            raise Lost(f"{run}/{own} is damaged: {reason}") from None


# processes ------------------------------------------------------------------------------------------------------


def at_work(out: Path) -> list[int]:
    """The processes that say that they work on a run."""
    found = [read_status(path.parent) for path in out.glob("*/status.json")]
    return sorted({status.pid for status in found if status and status.state == "running" and alive(status.pid)})


def is_early(status: Status | None) -> bool:
    """In the first task: whoever is asked to stop now does so long before the end."""
    return status is not None and status.state == "running" and status.task == 0


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def family(pid: int) -> list[int]:
    """A process and all that it started, and so on."""
    parents = collections.defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                parents[int((entry / "stat").read_text().rpartition(")")[2].split()[1])].append(int(entry.name))
    found, new = [pid], [pid]
    while new:
        new = [child for parent in new for child in parents[parent]]
        found += new
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
