"""Fitted calibrators on disk: JSON, safetensors for very large arrays, atomic renames, no pickle.

The JSON contains a checksum of all its other bytes and that of the array file, so that any change is detected. Files of
format version 1 have no checksum; their content is checked in the same way.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from tcil.foundation.checksums import Damaged, is_sealed_json, open_json, seal_json
from tcil.foundation.errors import invalid
from tcil.foundation.files import NotRegularError, open_regular, replace_file

FORMAT, RULE_FORMAT = "tcil-calibrator", "tcil-decision-rule"
_NAMES = {FORMAT: "calibrator", RULE_FORMAT: "decision rule"}
FORMAT_VERSION = 2  # with checksum; version 1 has the same fields without one
_WANTED = (
    "calibrator",
    "options",
    "classes",
    "head_width",
    "columns",
    "features",
    "model_hash",
    "result",
    "history",
    "arrays",
    "array_file",
)
# Arrays up to this size are written into the JSON itself: one file is replaced in one step, copied and linked as one.
_INLINE_ELEMENTS = 1 << 16
_ATTEMPTS = 5  # to read two files that belong together while another process replaces them
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "int64": torch.int64, "bool": torch.bool}
_LARGEST_JSON, _LARGEST_ARRAYS = 1 << 26, 1 << 32  # bytes; a typical calibrator has a few thousand
_LONGEST_NAME = 255  # bytes
_OF_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, SafetensorError)
_AS_WRITTEN = "a file as save() wrote it"
_INT64 = range(-(2**63), 2**63)
_UNBOUNDED = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}  # JSON has no such numbers


def as_path(value: object) -> Path:
    """A validated file name; the file may be missing."""
    if not isinstance(value, (str, os.PathLike)) or "\0" in os.fsdecode(value):
        raise invalid("path", f"{value!r:.80}", "the name of a file that ends in .json")
    return Path(os.fsdecode(value))


def tilde_advice(path: Path) -> str:
    """Advice for a path that begins with ~, which is not expanded, as in numpy and torch; else empty."""
    if not str(path).startswith("~"):
        return ""
    return "'~' is not expanded: pass Path(path).expanduser()."


def write(path: Path, record: dict[str, Any], arrays: dict[str, Tensor], form: str = FORMAT) -> Path:
    """Write the record with its small arrays, and larger arrays to a safetensors file next to it."""
    from tcil import __version__

    if path.suffix != ".json":
        raise invalid("path", str(path), "a file name that ends in .json", "For instance calibrator.json.")
    if not path.parent.is_dir():
        advice = tilde_advice(path) or f"Create {path.parent} first."
        raise invalid("path", str(path), "a file in an existing folder", advice)
    inline = {name: value for name, value in arrays.items() if _fits_inline(value)}
    large = {name: value.contiguous() for name, value in arrays.items() if name not in inline}
    beside = None
    if large:
        content = save_tensors(large)
        digest = hashlib.sha256(content).hexdigest()
        # The array file is named after its content, so that an older JSON file never refers to newer arrays.
        beside = {"file": f"{path.stem}.{digest[:12]}.safetensors", "sha256": digest}
    whole = {
        "format": form,
        "format_version": FORMAT_VERSION,
        "tcil_version": __version__,
        **record,
        "arrays": {name: _inline(value) for name, value in inline.items()},
        "array_file": beside,
    }
    sealed = seal_json(whole)
    before = _array_file(path)
    if beside is not None:
        replace_file(path.with_name(beside["file"]), content)
    replace_file(path, sealed)
    if before is not None and not _needed(before):
        before.unlink(missing_ok=True)  # the arrays of the file that was replaced
    return path


def _array_file(path: Path) -> Path | None:
    """The array file of an earlier save to this path, if its name has the expected form."""
    try:
        record = open_json(_content(path, _LARGEST_JSON))
        name = record["array_file"]["file"] if record["format"] in _NAMES else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not re.fullmatch(re.escape(path.stem) + r"\.[0-9a-f]{12}\.safetensors", name):
        return None
    return path.with_name(name)


def _needed(arrays: Path) -> bool:
    """Whether a JSON file in the folder refers to these arrays (such as a copy, or one written since), or may do so."""
    for other in arrays.parent.glob("*.json"):
        try:
            if arrays.name.encode() in _content(other, _LARGEST_JSON):
                return True
        except Damaged:  # too large for a calibrator, or a pipe
            continue
        except ValueError:  # it cannot be read
            return True
    return False


def _content(path: Path, largest: int) -> bytes:
    """The bytes of a regular file of a plausible size; pipes and devices may never end."""
    try:
        return _bytes(path, largest)
    except Damaged:
        raise
    except OSError as error:
        expected = "an existing file written by save()"
        raise invalid("path", f"{path} ({error.strerror})", expected, tilde_advice(path)) from None
    except ValueError as error:  # a zero byte in the name
        raise invalid("path", f"{str(path)!r} ({error})", "an existing file written by save()") from None


def _bytes(path: Path, largest: int) -> bytes:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= largest:
                return file.read()
    except NotRegularError:
        raise Damaged("it is a pipe or a device, not a regular file") from None
    raise Damaged(f"it has {size} bytes, more than {largest}")


def read(path: Path, form: str = FORMAT, wanted: Sequence[str] = _WANTED) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the record and its arrays; raises for damaged files and other formats.

    If the array file is missing, both are read again: another process may have replaced them in the meantime.
    """
    name = ""
    for _ in range(_ATTEMPTS):
        record, arrays, name, digest = _read_json(path, form, wanted)
        if not name:
            return record, arrays
        beside = path.with_name(name)
        if not beside.exists():  # the JSON file may be a link to another folder
            beside = path.resolve().with_name(name)
        try:
            large = _read_arrays(beside, digest)
        except FileNotFoundError:
            continue
        if set(large) & set(arrays):
            raise invalid("path", f"{beside}, which is damaged: its arrays are also in the JSON file", _AS_WRITTEN)
        return record, arrays | large
    expected = f"{name} in the same folder"
    raise invalid("path", f"{path} without its array file", expected, "Keep both files together.")


def _read_json(path: Path, form: str, wanted: Sequence[str]) -> tuple[dict[str, Any], dict[str, Tensor], str, str]:
    """The record, the arrays in it, and name and checksum of the file of the others ("" if there are none)."""
    what = _NAMES[form]
    try:
        content = _content(path, _LARGEST_JSON)
        record = open_json(content)
    except Damaged as reason:
        raise invalid("path", f"{path}, which is damaged or not a saved {what} ({reason})", _AS_WRITTEN) from None
    if record.get("format") != form:
        raise invalid("path", f"{path}, which is not a saved {what}", "a file written by save()")
    version = record.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise invalid(
            "path",
            f"{path} in format version {version!r}, written by tcil {record.get('tcil_version')!r:.40}",
            f"format version 1 to {FORMAT_VERSION}",
            "Install the version of tcil that wrote it.",
        )
    if is_sealed_json(content) != (version > 1):
        given = f"{path}, which is damaged (format version {version} {'without' if version > 1 else 'with'} a checksum)"
        raise invalid("path", given, _AS_WRITTEN)
    missing = [key for key in wanted if key not in record]
    if missing:
        raise invalid("path", f"{path} without {', '.join(missing)}", "a complete file written by save()")
    with damage_named(path):
        arrays = {name: _from_inline(value) for name, value in record["arrays"].items()}
        if record["array_file"] is None:
            return record, arrays, "", ""
        name, digest = Path(record["array_file"]["file"]).name, str(record["array_file"]["sha256"])
        if len(os.fsencode(name)) > _LONGEST_NAME:
            raise ValueError(f"an array file whose name has {len(name)} characters")
        path.with_name(name)  # raises for what is no name of a file, such as ""
    return record, arrays, name, digest


def _read_arrays(path: Path, digest: str) -> dict[str, Tensor]:
    """The arrays of a safetensors file with this checksum; FileNotFoundError if there is no such file."""
    with damage_named(path):
        try:
            content = _bytes(path, _LARGEST_ARRAYS)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ValueError(error.strerror) from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise invalid("path", f"{path}, which does not match its checksum", "the array file that save() wrote")
    with damage_named(path):
        return load_tensors(content)


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn the various errors of reading a damaged file into one that names the file."""
    try:
        yield
    except _OF_DAMAGE as error:
        raise invalid("path", f"{path}, which is damaged ({error!r})", _AS_WRITTEN) from error


def encode(value: Any) -> Any:
    """Convert frozen results to plain JSON values; infinities and NaN become strings."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [encode(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def decode(kind: Any, value: Any) -> Any:
    """The inverse of `encode`, based on the type annotations of the result classes; raises for other types."""
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return decode(next(part for part in typing.get_args(kind) if part is not type(None)), value)
    if origin is tuple:
        parts = typing.get_args(kind)
        if not isinstance(value, list):
            raise ValueError(f"{value!r} is not a list")
        if parts[-1] is Ellipsis:
            return tuple(decode(parts[0], entry) for entry in value)
        return tuple(decode(part, entry) for part, entry in zip(parts, value, strict=True))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        # A file of an earlier version lacks what was added since; it has a default.
        needed = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
        if not set(needed) <= set(value) <= set(names):
            raise ValueError(f"the fields {sorted(value)}, not {sorted(names)}")
        return typing.cast(Any, kind)(**{name: decode(hints[name], value[name]) for name in names if name in value})
    if kind is float:
        return _float(value)
    if kind in (bool, int, str) and type(value) is not kind:
        raise ValueError(f"{value!r} is not of type {kind.__name__}")
    if kind is int and value not in _INT64:
        raise ValueError(f"{value} has more than 64 bits")
    return value


def _float(value: Any) -> float:
    """A number as written by `encode`: a finite number, or the name of infinity or NaN."""
    if isinstance(value, str):
        return _UNBOUNDED[value]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def _fits_inline(value: Tensor) -> bool:
    return 0 < value.numel() <= _INLINE_ELEMENTS and value.dtype in _DTYPES.values()


def _inline(value: Tensor) -> dict[str, Any]:
    return {"dtype": str(value.dtype).removeprefix("torch."), "value": encode(value.tolist())}


def _from_inline(entry: dict[str, Any]) -> Tensor:
    dtype = _DTYPES[entry["dtype"]]
    kind: type = float if dtype.is_floating_point else bool if dtype == torch.bool else int

    def checked(value: Any) -> Any:
        return [checked(part) for part in value] if isinstance(value, list) else decode(kind, value)

    return torch.tensor(checked(entry["value"]), dtype=dtype)
