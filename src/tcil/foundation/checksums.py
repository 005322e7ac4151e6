"""Files with checksums: each contains a SHA-256 over all its other bytes.

The checksum is in the file itself, since two files cannot be renamed atomically. JSON files begin with
`{"checksum": "sha256:..."`; safetensors files have it in the header. The same content gives the same bytes. Files of
older versions without checksums remain readable. In run folders, the file's name is stored with the checksum, so that
an intact file in the place of another is rejected too. Run folders and saved calibrators share this module.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # JSON is read without torch
    from torch import Tensor

_BLANK = b"0" * 64
_JSON_START, _JSON_END = b'{"checksum": "sha256:', b'"'
_HEX = re.compile(rb'[0-9a-f]{64}[" ]')
_NOTE = b'"note":"sha256='
_OLD_NOTES, _OWN_NOTES = {"stage", "epoch"}, ("sha256", "file")


class Damaged(ValueError):
    """The content is not what was written."""


def seal_json(record: Mapping[str, object], name: str = "") -> bytes:
    """The record as JSON with its checksum and the name of its file; the same record gives the same bytes.

    >>> seal_json({"b": 1, "a": 2})[85:]
    b'",\\n "a": 2,\\n "b": 1\\n}\\n'
    >>> open_json(seal_json({"b": 1, "a": 2}))
    {'a': 2, 'b': 1}
    """
    body = (json.dumps(record, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()[1:]
    body = (f" {name}" if name else "").encode() + _JSON_END + (b"," if record else b"") + body
    return _JSON_START + _digest(body) + body


def is_sealed_json(content: bytes) -> bool:
    """Whether a JSON file carries a checksum."""
    return content.startswith(_JSON_START)


def open_json(content: bytes, name: str = "") -> dict[str, Any]:
    """The record in a JSON file; raises `Damaged` if the checksum or, in a run folder, the name does not match."""
    if is_sealed_json(content):
        start, end = len(_JSON_START), len(_JSON_START) + len(_BLANK)
        if content[start:end] != _digest(content[end:]):
            raise Damaged("its checksum does not match")
    elif _HEX.match(content, len(_JSON_START)):
        raise Damaged("its first bytes were changed")  # it has a checksum, but not the key before it
    try:
        record = json.loads(content.decode(), object_pairs_hook=distinct, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"it is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise Damaged(f"it holds a JSON {type(record).__name__}, not an object")
    if is_sealed_json(content):
        _check_name(record.pop("checksum").partition(" ")[2], name)
    return record


def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object from its pairs; raises if a key occurs twice, since either value could be meant."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return entries


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def seal_tensors(tensors: dict[str, Tensor], note: dict[str, str] | None = None, name: str = "") -> bytes:
    """Named tensors as safetensors, with a note, the checksum and the name of the file in the header.

    >>> import torch
    >>> content = seal_tensors({"a": torch.zeros(2)}, {"epoch": "3"})
    >>> open_tensors(content)
    ({'a': tensor([0., 0.])}, {'epoch': '3'})
    >>> try:
    ...     open_tensors(content[:-1])
    ... except Damaged as error:
    ...     print(error)
    its checksum does not match
    """
    from safetensors.torch import save

    # A single metadata entry: safetensors writes several in random order.
    words = {"sha256": _BLANK.decode(), **({"file": name} if name else {}), **(note or {})}
    content = bytearray(save(tensors, metadata={"note": " ".join(f"{key}={value}" for key, value in words.items())}))
    at = content.index(_NOTE) + len(_NOTE)
    content[at : at + len(_BLANK)] = _digest(content)
    return bytes(content)


def open_tensors(content: bytes, name: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the note in a file; raises `Damaged` if the checksum or the name does not match."""
    from safetensors.torch import load

    header = 8 + int.from_bytes(content[:8], "little")
    at = content.find(_NOTE, 8, header)
    if at >= 0:
        at += len(_NOTE)
        blank = bytearray(content)
        blank[at : at + len(_BLANK)] = _BLANK
        if content[at : at + len(_BLANK)] != _digest(blank):
            raise Damaged("its checksum does not match")
    try:
        note = json.loads(content[8:header]).get("__metadata__") or {}
        if at >= 0:
            note = dict(word.split("=", 1) for word in note["note"].split(" "))
            _check_name(note.get("file", ""), name)
            note = {key: value for key, value in note.items() if key not in _OWN_NOTES}
        elif not set(note) <= _OLD_NOTES:
            raise Damaged("its header was changed")
        return load(content), note
    except Damaged:
        raise
    except Exception as error:  # a damaged file fails in many ways
        raise Damaged(f"it is not safetensors: {error}") from None


def _check_name(stored: str, name: str) -> None:
    if stored and name and stored != name:
        raise Damaged(f"it is {stored}, in the place of another file")


def _digest(content: bytes | bytearray) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
