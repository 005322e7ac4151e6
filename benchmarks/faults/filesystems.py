"""Disks to play with: one that forgets what was not flushed, one that is small, one of a process's own."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults import seams
from benchmarks.faults.checks import PASSING, Lost
from tcil.experiments.runs.store import RunFolder


class Disk:
    """Knows what a process has flushed to disk under a folder, and takes the rest away when the power fails.

    Content is safe once its file was flushed, a name once its folder was. Of what is not, each piece is drawn: a name
    as it is or as it was, content cut short, as zeros or as it is.
    """

    def __init__(self, out: Path, at: int, note: Path, draw: random.Random) -> None:
        self._out, self._at, self._note, self._draw = out, at, note, draw
        self._content: dict[int, bytes] = {}  # by inode
        self._names: dict[str, dict[str, int]] = {}  # by folder
        self._held: list[int] = []  # open files, whose inodes are given to no other
        self._stored: dict[str, bytes] = {}
        self._pending: tuple[str, bytes] | None = None
        self._calls = 0

    def install(self) -> None:
        """From here on, in this process."""
        seams.wrap(os, "fsync", self._flushing)
        seams.wrap(os, "replace", self._renaming)
        seams.around_writes(self._storing)
        seams.around_removals(self._removing)

    def _flushing(self, fsync: Callable[[int], None]) -> Callable[[int], None]:
        def flushed(file: int) -> None:
            self._step()
            fsync(file)
            place = os.readlink(f"/proc/self/fd/{file}")
            if os.path.isdir(place):
                self._names[place] = {entry.name: entry.inode() for entry in os.scandir(place)}
            else:
                self._held.append(os.dup(file))
                self._content[os.fstat(file).st_ino] = Path(place).read_bytes()

        return flushed

    def _renaming(self, rename: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        def renamed(source: Path, target: Path) -> None:
            self._step()
            rename(source, target)

        return renamed

    def _storing(self, write: Callable[[Path, bytes], None]) -> Callable[[Path, bytes], None]:
        def stored(path: Path, content: bytes) -> None:
            if path.name in PASSING:  # also written by other threads
                write(path, content)
                return
            self._pending = str(path), content
            write(path, content)
            self._pending = None
            self._stored[str(path)] = content

        return stored

    def _removing(self, remove: Callable[[RunFolder, str], None]) -> Callable[[RunFolder, str], None]:
        def removed(folder: RunFolder, name: str) -> None:
            self._stored.pop(str(folder.path / name), None)
            remove(folder, name)

        return removed

    def _step(self) -> None:
        self._calls += 1
        if self._calls == self._at:
            self._fail()

    def _fail(self) -> None:
        """The power fails for all threads at once: this process stops, another one takes away, and kills it."""
        failing = os.getpid()
        if os.fork() == 0:
            code = 1
            try:
                while not _stopped(failing):
                    time.sleep(0.001)
                self._take_away()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os.closerange(3, 4096)  # locks of the run, which the test takes next
                with contextlib.suppress(ProcessLookupError):
                    os.kill(failing, signal.SIGKILL)
                os._exit(code)
        os.kill(failing, signal.SIGSTOP)  # at once, and holding the interpreter's lock: no other thread goes on
        raise AssertionError("a stopped process went on")

    def _take_away(self) -> None:
        files: dict[int, bytes] = {}
        for path in self._out.rglob("*"):
            if path.is_file():
                files[path.stat().st_ino] = path.read_bytes()
        self._settle(self._out.parent, self._out.name, files)
        acceptable = {path: [content.hex()] for path, content in self._stored.items()}
        if self._pending and self._pending[0] in acceptable:
            acceptable[self._pending[0]].append(self._pending[1].hex())
        self._note.write_text(json.dumps(acceptable))

    def _settle(self, folder: Path, name: str, files: dict[int, bytes]) -> None:
        """What is left of one name in a folder, and of all under it."""
        path, safe = folder / name, self._names.get(str(folder), {}).get(name)
        now = path.stat().st_ino if path.exists() else None
        if path.is_dir():
            if now != safe and self._draw.random() < 0.5:
                shutil.rmtree(path)
                return
            for inner in sorted({*os.listdir(path), *self._names.get(str(path), {})}):
                self._settle(path, inner, files)
            return
        if name in PASSING or (safe is not None and safe not in {*files, *self._content}):
            return
        kept = now if now == safe else self._draw.choice([now, safe])
        if kept is None:
            path.unlink()
            return
        content = self._content.get(kept)
        if content is None or files.get(kept, content) != content:
            whole = files[kept]
            cut = self._draw.randrange(len(whole) + 1)
            content = self._draw.choice([whole, whole[:cut], whole[:cut] + bytes(len(whole) - cut)])
        path.unlink(missing_ok=True)
        path.write_bytes(content)


def _stopped(pid: int) -> bool:
    """Whether every thread of a process has stopped; also where there is none any more."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        states = [(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads]
    except (FileNotFoundError, ProcessLookupError):
        return not Path(f"/proc/{pid}").exists()
    return all(state in "TZX" for state in states)


def budget(size: int) -> None:
    """Writes beyond so many bytes in all get the error of a full disk."""
    left = size

    def limited(open_file: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
            file = open_file(path, mode, *args, **more)
            if mode not in ("wb", "xb"):
                return file
            write = file.write

            def counted(content: bytes) -> int:
                nonlocal left
                left -= len(content)
                if left < 0:
                    write(content[: max(0, left + len(content))])
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return int(write(content))

            return _Written(file, counted)

        return opened

    seams.wrap(Path, "open", limited)


class _Written:
    """A file with another `write`."""

    def __init__(self, file: Any, write: Callable[[bytes], int]) -> None:
        self._file, self.write = file, write

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


_libc = ctypes.CDLL(None, use_errno=True)
_NEW_NAMESPACE, _NEW_USER, _PRIVATE, _REMOUNT = 0x20000, 0x10000000, 0x44000, 0x20  # of <sched.h> and <sys/mount.h>


def can_mount() -> bool:
    """Whether a process may have file systems of its own here."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            in_own_namespace(lambda: mount(Path(folder), 2**20))
    except OSError:
        return False
    return True


def mount(folder: Path, size: int) -> None:
    """A file system in memory of that size, or another size for the one that is there."""
    flags = _REMOUNT if folder.is_mount() else 0
    if _libc.mount(b"tmpfs", bytes(folder), b"tmpfs", flags, f"size={size}".encode()):
        raise OSError(ctypes.get_errno(), "mount")


def in_own_namespace(work: Callable[[], None]) -> None:
    """Do this in a process that sees mounts of its own, which end with it; its `Lost` and OSError are raised here."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = ["", ""]
        try:
            own = _NEW_NAMESPACE | (0 if os.geteuid() == 0 else _NEW_USER)
            if _libc.unshare(own) or _libc.mount(None, b"/", None, _PRIVATE, None):
                raise OSError(ctypes.get_errno(), "unshare")
            work()
        except BaseException as error:
            said = [type(error).__name__, str(error)]
        finally:
            os.write(writer, json.dumps(said).encode()[:60000])
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        kind, what = json.loads(file.read())
    os.waitpid(pid, 0)
    if kind:
        raise Lost(what) if kind == "Lost" else OSError(f"{kind}: {what}")
