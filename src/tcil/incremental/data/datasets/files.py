"""Shared by the dataset readers: checksums, errors about missing files, and safe unpickling."""

from __future__ import annotations

import hashlib
import io
import pickle  # only for an unpickler that is restricted to arrays  # nosec B403
from pathlib import Path
from typing import Any

from tcil.foundation.errors import invalid
from tcil.foundation.files import open_regular, read_regular


class UnreadableData(ValueError):
    """The files of a dataset are missing or wrong."""


def unreadable(given: str, expected: str, advice: str = "") -> UnreadableData:
    """The error for files that are missing or wrong."""
    return UnreadableData(str(invalid("data", given, expected, advice)))


class _PlainPickle(pickle.Unpickler):
    """An unpickler for arrays, numbers, strings and containers; raises for anything else before it is created."""

    _ALLOWED = frozenset(
        (module, name)
        for module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")
        for name in ("ndarray", "dtype", "_reconstruct")
    ) | {("_codecs", "encode")}  # how Python 3 writes bytes in an old protocol

    def find_class(self, module: str, name: str) -> Any:
        """The class, if CIFAR files need it."""
        if (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a data file")


def read_pickle(path: Path) -> dict[bytes, Any]:
    """Read a dict from a Python 2 pickle (the format of CIFAR) with a restricted unpickler."""
    try:
        record = _PlainPickle(io.BytesIO(read_regular(path)), encoding="bytes").load()
    except Exception as error:
        raise unreadable(f"{path}, which cannot be read ({error})", "the file of the original release") from error
    if not isinstance(record, dict):
        raise unreadable(f"{path}, which holds {type(record).__name__}", "the file of the original release")
    return record


def require(path: Path, where: str) -> Path:
    """The path; if it is missing, raises an error that says where to get the file and where to put it."""
    if not path.exists():
        raise unreadable(f"no {path}", "the files of the dataset", where)
    return path


def check_md5(path: Path, wanted: str, where: str) -> None:
    """Raise if a file does not have the checksum of the release."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "md5").hexdigest()
    if digest != wanted:
        raise unreadable(
            f"{path} with the checksum {digest}",
            f"{wanted}, as in the release",
            f"It is damaged, or a different file. {where}",
        )
