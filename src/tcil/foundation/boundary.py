"""Keep writes inside a run folder: symbolic links in it are rejected.

A run folder may come from someone else, in an archive or on a shared disk. A link in it would let them choose which of
the user's files is overwritten. The run folder itself and its parents may be links, since the user chose them. The
default report folder, `report`, may not.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tcil.foundation.errors import invalid
from tcil.foundation.files import make_folder


def check_entries(folder: Path) -> None:
    """Raise if a run folder contains anything but files and folders; call it before any work."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise invalid("run", f"{folder}, which is not a folder", "a run folder, or a path that does not exist yet")
    for path in _entries(folder):
        _check(path)


def check_place(folder: Path, argument: str = "out") -> None:
    """Raise if no folder can be created at this path, before any work. Links are followed: the user chose them."""
    for path in (folder, *folder.parents):
        try:
            there = path.is_dir()
        except PermissionError:
            continue  # a folder above it may not be entered, which is told of that one
        if there:
            if not os.access(path, os.W_OK | os.X_OK):
                where = "" if path == folder else f", below {path}"
                raise invalid(argument, f"{folder}{where}, which may not be written to", "a folder that may")
            return
        if path.is_symlink() and not path.exists():
            what = f"a link to {os.readlink(path)}, which does not exist"
        elif path.exists():
            what = "which is a file"
        else:
            continue
        given = f"{folder}" if path == folder else f"{folder}, below {path}"
        raise invalid(argument, f"{given}, {what}", "a folder, or a path that does not exist yet")


def check_own_place(folder: Path, argument: str = "out") -> None:
    """`check_place` for a default folder, which the user did not name: a link there may be someone else's."""
    if folder.is_symlink():
        given, expected = f"{folder}, a link to {os.readlink(folder)}", "a folder, or a path that does not exist yet"
        raise invalid(argument, given, expected, f"To write to the link's target, pass it as --{argument}.")
    check_place(folder, argument)


def inside(folder: Path, name: str) -> Path:
    """The path of a file to write in a run folder; raises if a part of it is a link."""
    path = folder
    for part in Path(name).parts:
        if part == os.pardir or os.path.isabs(part):
            raise invalid("run", f"the name {name!r}", f"a name inside {folder}")
        path /= part
        _check(path)
    return path


def plain_file(path: Path) -> bool:
    """Whether there is a regular file to read. Raises for anything else: reading a pipe may never end."""
    try:
        mode = path.stat().st_mode  # one call, since the file may change between two
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    if not stat.S_ISREG(mode):
        raise invalid("run", f"{path}, which is not a file", "a file, or nothing at this path", "Move it away.")
    return True


def make_task_folder(path: Path) -> None:
    """Create a folder in a run folder."""
    _check(path)
    if path.exists() and not path.is_dir():
        raise invalid("run", f"{path}, which is not a folder", "a folder, or nothing at this path", "Move it away.")
    make_folder(path)


def open_lock(path: Path) -> int:
    """Open the lock file, creating it if needed. Links are not followed."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise _refused(path) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _refused(path)
    return file


def _entries(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder, followlinks=False):
        for name in (*folders, *files):
            yield Path(parent, name)


def _check(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise _refused(path)


def _refused(path: Path) -> ValueError:
    what = f"a link to {os.readlink(path)}" if path.is_symlink() else "which is neither a file nor a folder"
    advice = "Nothing was written. Replace it by a real file or folder, or delete it."
    return invalid("run", f"{path}, {what}", "only regular files and folders inside a run folder", advice)
