"""Files that are whole or not there: written beside their place, synced, and renamed into it; read only if regular."""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
from pathlib import Path

# Storage that has no such thing as a folder that is flushed; nothing is lost there by not asking for it.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM)


def open_regular(path: Path) -> io.BufferedReader:
    """A regular file for reading; anything else, also behind a link, is refused: a pipe or a device may never end."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(file, "rb")
    os.close(file)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "It is a pipe or a device, not a regular file", str(path))


def read_regular(path: Path) -> bytes:
    """The content of a regular file."""
    with open_regular(path) as file:
        return file.read()


def replace_file(path: Path, content: bytes) -> None:
    """Write beside the target, flush to disk, rename, and flush the folder: a reader sees the old file or the new one.

    After a power cut as well: the content is on disk before its name is, and once this returns both are. Where it
    cannot be written (a full disk, say), the error names the file, the old one stays, and no part is left.
    """
    # A name that nobody can foresee, and not too long where that of the file is not.
    partial = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.part")
    try:
        with partial.open("xb") as file:  # of nobody else: what has that name, a link say, is not written
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(
            error.errno, f"could not be written ({error.strerror or error}); what was there before is kept", str(path)
        ) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing, so that a power cut does not take them away again."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk, where its storage can."""
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
