"""What happens to disks: a write refused, no space left, the power cut. Each fault returns how many it injected."""

from __future__ import annotations

import json
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults import seams
from benchmarks.faults.checks import PASSING, require, require_nothing_half_written, require_whole
from benchmarks.faults.filesystems import Disk, budget, can_mount, in_own_namespace, mount
from benchmarks.faults.lab import Lab, Patch, nothing


def failed_write(lab: Lab, patch: Patch = nothing) -> int:
    """The kernel refuses to write beyond a size: the run fails and names the file, and the old one is untouched."""
    out, at, share = lab.fresh(), lab.draw.randrange(4, 40), lab.draw.random()
    note = lab.folder / f"{out.name}-failed.json"

    def limited(write: Callable[[Path, bytes], None]) -> Callable[[Path, bytes], None]:
        count = 0

        def written(path: Path, content: bytes) -> None:
            nonlocal count
            count += path.name not in PASSING
            if count != at or path.name in PASSING:
                write(path, content)
                return
            old = path.read_bytes().hex() if path.exists() else None
            note.write_text(json.dumps({"path": str(path), "old": old}))
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * len(content)), hard))
            try:
                write(path, content)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

        return written

    def limit() -> None:
        patch()
        seams.around_writes(limited)

    code, said = lab.start(out, patch=limit).wait()
    failed = json.loads(note.read_text())
    path, old = Path(failed["path"]), failed["old"]
    require(code == 1 and str(path) in said and "File too large" in said, f"no clear error: {code}, {said[-800:]}")
    require_nothing_half_written(out)
    now = path.read_bytes().hex() if path.exists() else None
    require(now == old, f"{path.name} is not as it was before the failed write")
    lab.settle(out)
    return 1


def power_cut(lab: Lab, patch: Patch = nothing) -> int:
    """The power fails: what was not flushed to disk is gone, cut short or zeros. What was stored is still there."""
    out, at = lab.fresh(), lab.draw.randint(1, lab.syncs)
    note = lab.folder / f"{out.name}-stored.json"
    disk = Disk(out, at, note, random.Random(lab.draw.random()))

    def with_disk() -> None:
        disk.install()
        patch()

    code, said = lab.start(out, patch=with_disk).wait()
    if code == 0:
        return 0
    require(code == -signal.SIGKILL, f"exit code {code}: {said[-800:]}")
    for path, acceptable in json.loads(note.read_text()).items():
        now = Path(path).read_bytes().hex() if Path(path).exists() else None
        require(now in acceptable, f"{path} was stored, and is lost in the power cut")
    require_whole(out)
    lab.settle(out)
    return 1


def full_disk(lab: Lab, patch: Patch = nothing, mounting: bool | None = None) -> int:
    """A file system of its own that fills up: runs fail and name the file, nothing is half-written; with space, on.

    Where no file system can be mounted, or with `mounting=False`, the same error from where the kernel would give it.
    """
    size = int(lab.draw.uniform(0.05, 0.9) * sum(map(len, lab.reference("study").values())))
    folder = lab.folder / f"{lab.fresh().name}-disk"
    folder.mkdir()
    if can_mount() if mounting is None else mounting:
        in_own_namespace(lambda: _fill(lab, folder / "out", patch, lambda room: mount(folder, room), size))
    else:

        def limited() -> None:
            budget(size)
            patch()

        _fill(lab, folder / "out", limited, lambda room: None, size)
    return 1


def _fill(lab: Lab, out: Path, patch: Patch, make_room: Callable[[int], None], size: int) -> None:
    make_room(size)
    code, said = lab.start(out, patch=patch).wait()
    require(code == 1, f"the exit code is {code}: {said[-800:]}")
    named = f"{out}/" in said and "could not be written (No space left on device)" in said
    require(named, f"no clear error: {said[-800:]}")
    require_nothing_half_written(out)
    require_whole(out)
    make_room(2**30)
    lab.settle(out)
