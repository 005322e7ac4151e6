"""What happens to runs and their folders: damage, another version, another sweep, a loss of NaN.

Each fault returns how many it injected.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from benchmarks.faults.checks import contents, require, until
from benchmarks.faults.lab import SEEDS, Lab, Patch, count_steps, nothing
from benchmarks.faults.learner import poison
from tcil.experiments.config.settings import FORMAT
from tcil.foundation.checksums import open_json, seal_json


def is_read_again(path: Path) -> bool:
    """Whether a run that goes on reads this file, and does not write it anew or remove it unseen."""
    if path.name in ("indices.safetensors", "logits.safetensors"):
        return (path.parent / "results.json").exists()  # else the sweep was killed while this task was calibrated
    if path.name in ("epoch.safetensors", "stage.safetensors"):
        return not (path.parent / "model.safetensors").exists()
    return True


def damaged_file(lab: Lab, patch: Patch = nothing) -> int:
    """A file cut short or with one bit flipped, in a finished or an interrupted sweep: named if read, and made anew."""
    out = lab.fresh()
    sweep = lab.start(out)
    if lab.draw.random() < 0.6:  # else it is finished first
        until(lambda: list(out.glob("*/task-*/epoch.safetensors")), "an epoch")
        time.sleep(lab.moment(0.8))
        if sweep.running():
            os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait()
    files = sorted(path for path in out.rglob("*") if path.suffix in (".json", ".safetensors"))
    victim = lab.draw.choice([path for path in files if path.name != "status.json"])
    read = is_read_again(victim)
    content = bytearray(victim.read_bytes())
    if lab.draw.random() < 0.3:
        content = content[: lab.draw.randrange(len(content))]
    else:
        content[lab.draw.randrange(len(content))] ^= 1 << lab.draw.randrange(8)
    victim.write_bytes(content)
    said = lab.settle(out, patch=patch, anew=victim.relative_to(out).parts[0])
    require(
        f"{victim} is damaged" in said or not read, f"{victim} was damaged and nothing was said of it: {said[-800:]}"
    )
    return 1


def two_versions(lab: Lab, patch: Patch = nothing) -> int:
    """A folder of a newer format: refused with both versions, untouched. One that an older tcil began: resumed."""
    out = lab.fresh()
    sweep = lab.start(out)
    until(lambda: list(out.glob("*/task-*/epoch.safetensors")), "an epoch")
    time.sleep(lab.moment(0.5))
    if sweep.running():
        os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait()
    run = lab.draw.choice(sorted(path.parent for path in out.glob("*/environment.json")))
    note = run / "environment.json"
    before = note.read_bytes()
    newer = {"format": FORMAT + 1, "tcil": "99.0"}
    note.write_bytes(seal_json({**open_json(before), **newer}, note.name))
    files = {name: content for name, content in contents(out).items() if name.startswith(run.name)}
    code, said = lab.start(out, patch=patch).wait()
    require(code == 1 and f"in format {FORMAT + 1} of run folders" in said and "99.0" in said, f"{code}: {said[-800:]}")
    now = {name: content for name, content in contents(out).items() if name.startswith(run.name)}
    require(now == files, "a run of another format was changed")
    note.write_bytes(seal_json({**open_json(before), "tcil": "0.0.1"}, note.name))
    said = lab.settle(out)
    told = "was started with tcil 0.0.1 and is resumed with" in said
    require(told or f"{run.name}/results.json" in files, f"nothing was said of the other version: {said[-800:]}")
    return 1


def two_sweeps(lab: Lab, patch: Patch = nothing) -> int:
    """Two sweeps on one folder: between them every step is taken once."""
    out, log = lab.fresh(), lab.folder / f"steps-{time.monotonic_ns()}"

    def both() -> None:
        count_steps(log)
        patch()

    first = lab.start(out, patch=both)
    time.sleep(lab.moment(1.0))
    second = lab.start(out, patch=both)
    for sweep in (first, second):
        code, said = sweep.wait()
        require(code == 0, f"one of two sweeps gave the exit code {code}: {said[-800:]}")
    taken = log.stat().st_size
    require(taken == lab.steps, f"{taken} steps instead of {lab.steps}")
    lab.settle(out)
    return 1


def not_a_number(lab: Lab, patch: Patch = nothing) -> int:
    """A loss of NaN: that run stops with a verdict, the other one goes on; repaired, the same command does the rest."""
    out = lab.fresh()

    def poisoned() -> None:
        poison()
        patch()

    code, said = lab.start(out, study="faulty", patch=poisoned).wait()
    require(code == 1, f"the exit code is {code}")
    require("the loss is nan" in said, f"no clear verdict: {said[-800:]}")
    require(len(list(out.glob("*/results.json"))) == len(SEEDS) - 1, "the other run did not go on")
    lab.settle(out, study="faulty")
    return 1
