"""Atomic file writes (write to a temporary file, sync, rename), and reads of regular files only."""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Errors of file systems on which folders cannot be synced; skipping the sync loses nothing there.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM)


class NotRegularError(OSError):
    """Raised for a pipe or a device, which may never end."""


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading; links are followed. Raises for a pipe or a device, which may never end."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(file, "rb")
    os.close(file)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise NotRegularError(errno.EINVAL, "It is a pipe or a device, not a regular file", str(path))


def read_regular(path: Path) -> bytes:
    """The content of a regular file."""
    with open_regular(path) as file:
        return file.read()


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see either the old or the new content.

    The content is written to a temporary file and synced before the rename, and the folder is synced after it, so the
    file also survives a power cut. If writing fails (on a full disk, for instance), the error names the file, the old
    content is kept and no temporary file is left.
    """
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name of an empty temporary file to be filled, which then replaces a file as `replace_file` does."""
    # The name cannot be predicted, and is not too long if the file's own name is not.
    partial = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.part")
    try:
        partial.open("xb").close()  # exclusive: an existing file or link of that name is never written to
        mode = stat.S_IMODE(partial.stat().st_mode)
        yield partial
        partial.chmod(mode)  # who fills it may have put a file of their own in its place
        with partial.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(
            error.errno, f"could not be written ({error.strerror or error}); the old content is kept", str(path)
        ) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and sync them to disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Sync the entries of a folder to disk, if its file system supports that."""
    try:
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            reason = f"could not be flushed to disk ({error.strerror or error}); a power cut may undo the last write"
            raise OSError(error.errno, reason, str(path)) from error
