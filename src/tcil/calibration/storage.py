"""Fitted calibrators on disk: JSON for what people read, safetensors for arrays, atomic renames, never pickle."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import secrets
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from tcil.calibration.errors import invalid

FORMAT = "tcil-calibrator"
FORMAT_VERSION = 1
_INLINE_ELEMENTS = 16  # arrays up to this size are written into the JSON itself
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "int64": torch.int64, "bool": torch.bool}


def write(path: Path, record: dict[str, Any], arrays: dict[str, Tensor]) -> Path:
    """Write the record, small arrays inside it and larger ones in `<path>.safetensors` beside it."""
    from tcil import __version__

    if path.suffix != ".json":
        raise invalid("path", str(path), "a file name that ends in .json")
    if not path.parent.is_dir():
        raise invalid("path", str(path), "a file in a folder that exists", f"Make {path.parent} first.")
    inline = {name: value for name, value in arrays.items() if value.numel() <= _INLINE_ELEMENTS}
    large = {name: value.contiguous() for name, value in arrays.items() if name not in inline}
    beside = None
    if large:
        content = save_tensors(large)
        digest = hashlib.sha256(content).hexdigest()
        # The array file is named by its content: an older JSON never meets newer arrays.
        beside = {"file": f"{path.stem}.{digest[:12]}.safetensors", "sha256": digest}
        replace_file(path.with_name(beside["file"]), content)
    before = _array_file(path)
    whole = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "tcil_version": __version__,
        **record,
        "arrays": {name: _inline(value) for name, value in inline.items()},
        "array_file": beside,
    }
    replace_file(path, json.dumps(whole, indent=2, allow_nan=False).encode())
    if before is not None and (beside is None or before.name != beside["file"]):
        before.unlink(missing_ok=True)  # the arrays of what was saved here before
    return path


def _array_file(path: Path) -> Path | None:
    """The array file that an earlier save to this path left beside it."""
    try:
        record = json.loads(path.read_text("utf-8"))
        name = record["array_file"]["file"] if record["format"] == FORMAT else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return path.with_name(name) if name and Path(name).name == name else None


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record and its arrays; damaged or foreign files are refused."""
    try:
        record = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise invalid("path", f"{path} ({error.strerror})", "an existing file written by save()") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise invalid("path", f"{path}, which is not JSON ({error})", "a file written by save()") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise invalid("path", f"{path}, which is not a saved calibrator", "a file written by save()")
    if record.get("format_version") != FORMAT_VERSION:
        raise invalid(
            "path",
            f"{path} in format version {record.get('format_version')!r}, written by tcil {record.get('tcil_version')}",
            f"format version {FORMAT_VERSION}",
            "Install a tcil of the version that wrote it.",
        )
    wanted = (
        "calibrator",
        "options",
        "classes",
        "head_width",
        "columns",
        "features",
        "model_hash",
        "result",
        "history",
    )
    missing = [key for key in wanted if key not in record]
    if missing:
        raise invalid("path", f"{path} without {', '.join(missing)}", "a whole file written by save()")
    try:
        arrays = {name: _from_inline(value) for name, value in record["arrays"].items()}
        beside = record["array_file"] and path.with_name(Path(record["array_file"]["file"]).name)
        digest = beside and record["array_file"]["sha256"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise invalid("path", f"{path}, which is damaged ({error!r})", "a file as save() wrote it") from error
    if beside:
        if not beside.exists():
            expected = f"{beside.name} beside it"
            raise invalid("path", f"{path} without its array file", expected, "Move the two together.")
        content = beside.read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            raise invalid("path", f"{beside}, which does not match its checksum", "the array file that save() wrote")
        arrays |= load_tensors(content)
    return record, arrays


def encode(value: Any) -> Any:
    """Frozen results as plain JSON; infinities and NaN as strings, since JSON has none."""
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
    """The inverse of `encode`, guided by the type annotations of the result classes."""
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return decode(next(part for part in typing.get_args(kind) if part is not type(None)), value)
    if origin is tuple:
        parts = typing.get_args(kind)
        if parts[-1] is Ellipsis:
            return tuple(decode(parts[0], entry) for entry in value)
        return tuple(decode(part, entry) for part, entry in zip(parts, value, strict=True))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        return typing.cast(Any, kind)(**{name: decode(hints[name], value[name]) for name in names})
    return float(value) if kind is float else value


def _inline(value: Tensor) -> dict[str, Any]:
    return {"dtype": str(value.dtype).removeprefix("torch."), "value": encode(value.tolist())}


def _from_inline(entry: dict[str, Any]) -> Tensor:
    value, dtype = entry["value"], _DTYPES[entry["dtype"]]
    if dtype.is_floating_point:  # infinities and NaN are text
        value = [float(x) for x in value] if isinstance(value, list) else float(value)
    return torch.tensor(value, dtype=dtype)


def replace_file(path: Path, content: bytes) -> None:
    """Write beside the target, flush to disk, then rename: a reader sees the old file or the new one.

    Where it cannot be written (a full disk, say), the error names the file, the old one stays, and no part is left.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")  # a name that nobody can foresee
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
