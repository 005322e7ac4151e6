"""What the readers share: checksums, clear errors about missing files, and pickles without code."""

from __future__ import annotations

import hashlib
import io
import pickle  # only for an unpickler that knows arrays alone  # nosec B403
from pathlib import Path
from typing import Any

from tcil.foundation.errors import invalid
from tcil.foundation.files import open_regular, read_regular


class UnreadableData(ValueError):
    """The files of a dataset are not there, or not what they should be."""


def unreadable(given: str, expected: str, advice: str = "") -> UnreadableData:
    """The error for files that are missing or wrong."""
    return UnreadableData(str(invalid("data", given, expected, advice)))


class _PlainPickle(pickle.Unpickler):
    """Arrays, numbers, text and containers only; anything else in the file is refused before it is made."""

    _ALLOWED = frozenset(
        (module, name)
        for module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")
        for name in ("ndarray", "dtype", "_reconstruct")
    ) | {("_codecs", "encode")}  # how Python 3 writes bytes in an old protocol

    def find_class(self, module: str, name: str) -> Any:
        """Only what a CIFAR file needs."""
        if (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a data file")


def read_pickle(path: Path) -> dict[bytes, Any]:
    """A dict out of a Python 2 pickle (as CIFAR comes), by a restricted unpickler."""
    try:
        record = _PlainPickle(io.BytesIO(read_regular(path)), encoding="bytes").load()
    except Exception as error:
        raise unreadable(f"{path}, which cannot be read ({error})", "the file of the original release") from error
    if not isinstance(record, dict):
        raise unreadable(f"{path}, which holds {type(record).__name__}", "the file of the original release")
    return record


def require(path: Path, where: str) -> Path:
    """The path, or an error that says where to get the file and where to put it."""
    if not path.exists():
        raise unreadable(f"no {path}", "the files of the dataset there", where)
    return path


def check_md5(path: Path, wanted: str, where: str) -> None:
    """Refuse a file that is not the one of the release."""
    with open_regular(path) as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found != wanted:
        raise unreadable(
            f"{path} with the checksum {found}",
            f"{wanted}, as in the release",
            f"It is damaged, or another. {where}",
        )
