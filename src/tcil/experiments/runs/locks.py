"""One process at a time in a run folder: a lock of the operating system, which ends with the process that holds it.

By hand, not by filelock, which could replace the call of flock alone: refusing links and pipes, telling who holds the
lock and taking it twice would still be ours. Where flock is missing it would leave
files behind that block every later run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tcil.foundation.boundary import open_lock
from tcil.foundation.errors import invalid
from tcil.foundation.files import make_folder

NAME = ".lock"
PAUSE = 0.2  # seconds between two tries


class FolderInUse(RuntimeError):
    """Another process works in the run folder."""


_held: set[tuple[int, Path]] = set()  # by process: a forked one has not what its parent holds


class FolderLock:
    """The lock of a folder. The process that has it may take it again; a killed one leaves nothing stuck."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def held(self, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the lock. Where another process has it: `FolderInUse` with its name, or call `waiting` until it ends."""
        me = (os.getpid(), self._folder.resolve())
        if me in _held:
            yield
            return
        make_folder(self._folder)
        # The file is never deleted: two processes could then hold locks on two files of the same name.
        file = open_lock(self._folder / NAME)
        try:
            while not self._taken(file):
                if waiting is None:
                    raise FolderInUse(f"{self._folder} is in use by {_owner(file)}")
                waiting()
                time.sleep(PAUSE)
            owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            _write(file, json.dumps(owner))
            _held.add(me)
            try:
                yield
            finally:
                _held.remove(me)
                _write(file, "")
        finally:
            os.close(file)

    def _taken(self, file: int) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            given = f"{self._folder}, on storage without file locks ({error.strerror})"
            raise invalid("out", given, "storage with flock", "Mount it with locks (NFS 4, Lustre -o flock).") from None


def _write(file: int, text: str) -> None:
    """Write who holds the lock, as a courtesy: a full disk does not matter here.

    A file with another name elsewhere, in a backup by hard links say, is left as it is; the lock holds all the same.
    """
    with contextlib.suppress(OSError):
        if os.fstat(file).st_nlink == 1:
            os.ftruncate(file, 0)
            os.pwrite(file, text.encode(), 0)


def _owner(file: int) -> str:
    try:
        owner = json.loads(os.pread(file, 1000, 0))
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
