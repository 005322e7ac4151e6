"""What may happen to files on disk: bytes that flip, JSON that says something else, files that go or grow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.strategies import JUNK
from tcil.experiments.runs import store

CANARY = "fuzz_canary"  # a module that tells when it is imported; the tests put it where it would be found
BYTES = (
    "flip",
    "cut",
    "empty",
    "longer",
    "noise",
    "deep",
    "digits",
    "gone",
    "swap",
    "folder",
)  # damage that a checksum shows
JSON = ("replace", "remove", "add", "nudge")  # somebody's own edit: sealed anew, or left without a seal
VALUES = st.one_of(
    JUNK,
    st.sampled_from(
        ["x" * 3000, "<script>alert(1)</script>", "$x_", "%s {0}", f"{CANARY}:touch", "/etc", "a\nb", "\ud800"]
    ),
)


@dataclass(frozen=True)
class Mutation:
    """One change of one file; `place` is drawn from 0 to 1 and says where, `value` what is put there."""

    file: str
    kind: str
    place: float
    value: Any = None
    sealed: bool = True

    def apply(self, folder: Path) -> None:
        """Do it to the file in this folder."""
        path = folder / self.file
        if self.kind in JSON:
            self._edit(path)
            return
        content = path.read_bytes()
        at = min(int(self.place * len(content)), len(content) - 1)
        if self.kind == "gone":
            path.unlink()
        elif self.kind == "folder":
            path.unlink()
            path.mkdir()
        elif self.kind == "swap":
            others = sorted(other for other in folder.rglob("*") if other.suffix == path.suffix and other != path)
            path.write_bytes(others[int(self.place * len(others)) % len(others)].read_bytes() if others else b"")
        else:
            path.write_bytes({
                "flip": content[:at] + bytes([content[at] ^ (1 << int(self.place * 8e6) % 8)]) + content[at + 1 :],
                "cut": content[:at],
                "empty": b"",
                "longer": content + content[at:],
                "noise": bytes((i * 37 + at) % 256 for i in range(200)),
                "deep": b"[" * 100_000,
                "digits": b'{"tasks": ' + b"9" * 5000 + b"}",
            }[self.kind])  # fmt: skip

    def _edit(self, path: Path) -> None:
        content = path.read_bytes()
        record = json.loads(content)
        was_sealed = content.startswith(b'{"checksum"')
        record.pop("checksum", None)
        places = _places(record)
        holder, key = places[int(self.place * len(places))]
        if self.kind == "remove":
            del holder[key]
        elif self.kind == "replace":
            holder[key] = self.value
        elif self.kind == "nudge":
            holder[key] = _nudged(holder[key])
        elif isinstance(holder, dict):
            holder["more"] = self.value
        else:
            holder.append(self.value)
        try:
            path.write_bytes(store.seal_json(record) if was_sealed and self.sealed else json.dumps(record).encode())
        except ValueError:  # NaN has no seal
            path.write_text(json.dumps(record))


def _nudged(value: Any) -> Any:
    """Another value of the same type, not far from it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 1.25 if isinstance(value, float) else value + 1
    return value + "0" if isinstance(value, str) else value


def _places(record: Any) -> list[tuple[Any, Any]]:
    """Every value in a record, by what holds it and its key or number there."""
    found: list[tuple[Any, Any]] = []
    keys = list(record) if isinstance(record, dict) else range(len(record)) if isinstance(record, list) else ()
    for key in keys:
        found.append((record, key))
        found.extend(_places(record[key]))
    return found


PLACES = st.floats(0, 1, exclude_max=True, width=32)


@st.composite
def mutations(draw: st.DrawFn, files: Sequence[str], kinds: Sequence[str] = JSON + BYTES) -> Mutation:
    """A change of one of these files; only JSON is edited."""
    file = draw(st.sampled_from(files))
    kind = draw(st.sampled_from([kind for kind in kinds if kind in BYTES or file.endswith(".json")]))
    value = draw(VALUES) if kind in ("replace", "add") else None
    return Mutation(file, kind, draw(PLACES), value, draw(st.booleans()))


def fresh_copy(source: Path, target: Path) -> Path:
    """The folder as it was, in place of what an earlier case left."""
    if target.is_symlink():
        target.unlink()
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
    return target


def content_of(folder: Path) -> dict[str, bytes | str]:
    """Every file under a folder, and every link, by name."""
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }
