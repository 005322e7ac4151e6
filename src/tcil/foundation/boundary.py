"""No write leaves a run folder: symbolic links inside it are refused.

A run folder may come from someone else, in an archive or on a shared disk. A link in it would let them choose which of
the user's files is overwritten. The run folder itself and its parents may be links: the user chose them. `report`, into
which reports go unless the user says otherwise, may not.
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
    """Refuse a run folder that contains anything but files and folders; call it before any work."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise invalid("run", f"{folder}, which is not a folder", "a run folder, or a name that is free")
    for path in _entries(folder):
        _check(path)


def check_place(folder: Path, argument: str = "out") -> None:
    """Refuse a name under which no folder can be made, before any work; links are followed, the user chose them."""
    for path in (folder, *folder.parents):
        if path.is_dir():
            return
        if path.is_symlink() and not path.exists():
            what = f"a link to {os.readlink(path)}, where nothing is"
        elif path.exists():
            what = "which is a file"
        else:
            continue
        given = f"{folder}" if path == folder else f"{folder}, below {path}"
        raise invalid(argument, f"{given}, {what}", "a folder, or a name that is free")


def check_own_place(folder: Path, argument: str = "out") -> None:
    """The same for a folder in the current one that nobody named: there a link may be someone else's."""
    if folder.is_symlink():
        given, expected = f"{folder}, a link to {os.readlink(folder)}", "a folder, or a name that is free"
        raise invalid(argument, given, expected, f"To write there, pass --{argument} with that folder itself.")
    check_place(folder, argument)


def inside(folder: Path, name: str) -> Path:
    """The path of a file to be written in a run folder, without a link on the way."""
    path = folder
    for part in Path(name).parts:
        if part == os.pardir or os.path.isabs(part):
            raise invalid("run", f"the name {name!r}", f"a name inside {folder}")
        path /= part
        _check(path)
    return path


def plain_file(path: Path) -> bool:
    """Whether there is a file to read. Anything else of that name is refused: reading a pipe would never end."""
    try:
        mode = path.stat().st_mode  # once: a file may come between two looks
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    if not stat.S_ISREG(mode):
        raise invalid("run", f"{path}, which is not a file", "a file there, or nothing", "Move it away.")
    return True


def make_task_folder(path: Path) -> None:
    """Make a folder in a run folder."""
    _check(path)
    if path.exists() and not path.is_dir():
        raise invalid("run", f"{path}, which is not a folder", "a folder there, or nothing", "Move it away.")
    make_folder(path)


def open_lock(path: Path) -> int:
    """The lock file, made where there is none. A link is not followed."""
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
    for at, folders, files in os.walk(folder, followlinks=False):
        for name in (*folders, *files):
            yield Path(at, name)


def _check(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise _refused(path)


def _refused(path: Path) -> ValueError:
    what = f"a link to {os.readlink(path)}" if path.is_symlink() else "which is neither a file nor a folder"
    advice = "Nothing was written. Put the real file or folder in its place, or delete it."
    return invalid("run", f"{path}, {what}", "only files and folders of its own inside a run folder", advice)
