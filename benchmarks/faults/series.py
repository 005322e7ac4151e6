"""The series: which faults and how often, what is stored of them, and the command."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path

import torch

import benchmarks.faults
from benchmarks.faults.checks import Lost
from benchmarks.faults.disks import failed_write, full_disk, power_cut
from benchmarks.faults.filesystems import can_mount
from benchmarks.faults.lab import EPOCHS, SEEDS, TASKS, Lab
from benchmarks.faults.nodes import Nodes, killed_node, lost_head
from benchmarks.faults.processes import killed_driver, killed_worker, signalled, signalled_sweep, struck_worker
from benchmarks.faults.runs import damaged_file, not_a_number, two_sweeps, two_versions
from benchmarks.faults.worker import STROKES
from tcil.foundation.files import replace_file

SEED = 20261116


def kinds(lab: Lab, nodes: Nodes) -> dict[str, tuple[int, Callable[[], int]]]:
    """Every kind of fault, how often it is injected in a round, and how."""
    disk = "full disk" if can_mount() else "full disk (simulated: no mount allowed)"
    return {
        "SIGKILL of a worker": (1, partial(killed_worker, lab)),
        "SIGKILL of the driver": (1, partial(killed_driver, lab)),
        "failed write (file-size limit)": (4, partial(failed_write, lab)),
        disk: (4, partial(full_disk, lab)),
        "power cut (unsynced writes dropped)": (6, partial(power_cut, lab)),
        "truncated or bit-flipped file": (5, partial(damaged_file, lab)),
        "two versions of tcil": (3, partial(two_versions, lab)),
        "two sweeps on one folder": (1, partial(two_sweeps, lab)),
        "SIGTERM": (1, partial(signalled, lab, signal.SIGTERM, times=3)),
        "SIGUSR1": (1, partial(signalled, lab, signal.SIGUSR1, times=3)),
        "SIGTERM to a sweep on processes": (1, partial(signalled_sweep, lab, signal.SIGTERM, *lab.processes)),
        **{f"worker {stroke}": (1, partial(struck_worker, lab, stroke)) for stroke in STROKES},
        "NaN loss": (1, partial(not_a_number, lab)),
        "SIGKILL of a Ray node": (1, lambda: killed_node(lab, nodes.get())),
        "SIGKILL of Ray's head": (1, lambda: lost_head(lab, nodes.get())),
    }


@dataclass
class Series:
    """What was injected so far: `faults` by kind, `next` the number of the one to come."""

    seed: int
    faults: dict[str, int] = field(default_factory=dict)
    in_all: int = 0
    lost: int = 0
    losses: list[str] = field(default_factory=list)
    next: int = 0
    seconds: int = 0

    @classmethod
    def read(cls, path: Path, seed: int) -> Series:
        """The series in the file, if it holds one of this seed; else a new one."""
        record = json.loads(path.read_text()) if path.exists() else {}
        own = {one.name for one in fields(cls)}
        if record.get("seed") != seed or "next" not in record:
            return cls(seed)
        return cls(**{name: value for name, value in record.items() if name in own})

    def write(self, path: Path, command: str, steps: int) -> None:
        """Store it, with the command that goes on with it and what the sweep is."""
        sweep = {"runs": len(SEEDS), "tasks": TASKS, "epochs": EPOCHS, "steps": steps}
        record = {**asdict(self), "command": command, "sweep": sweep}
        replace_file(path, (json.dumps(record, indent=1) + "\n").encode())

    def inject(self, name: str, fault: Callable[[], int]) -> None:
        """One more, and what came of it."""
        try:
            count = fault()
        except Lost as what:
            self.lost += 1
            self.losses.append(f"{self.next} {name}: {what}"[:2000])
            print(f"LOST {self.next} {name}: {what}", flush=True)
            count = 1
        self.faults[name] = self.faults.get(name, 0) + count
        self.in_all += count
        self.next += 1

    def show(self) -> None:
        print("\n| fault | injected |\n|---|---:|")
        for name, count in self.faults.items():
            print(f"| {name} | {count} |")
        print(f"\n{self.in_all} faults in {self.seconds} s, {self.lost} with a loss")


def main() -> None:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.faults", None, benchmarks.faults.__doc__, formatter_class=words
    )
    parser.add_argument("--faults", type=int, default=200, help="at least so many")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the counts; a series in it is continued")
    parser.add_argument("--again", action="store_true", help="start the series anew")
    parser.add_argument("--only", default="", help="only kinds of fault whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TCIL_LAYOUT", "channels_last")  # else every process measures which is faster
    go_on = options.out is not None and not options.again
    series = Series.read(options.out, options.seed) if go_on else Series(options.seed)
    command = f"python -m benchmarks.faults --faults {options.faults} --out {options.out}"
    before, first, started, nodes = series.seconds, series.in_all, time.monotonic(), Nodes()
    print(f"seed {options.seed}, {first} faults so far", flush=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(nodes):
        lab = Lab(Path(folder), random.Random(options.seed))
        chosen = {name: kind for name, kind in kinds(lab, nodes).items() if options.only in name}
        plan = [(name, fault) for name, (times, fault) in chosen.items() for _ in range(times)]
        for number in itertools.count(series.next):
            if series.in_all >= options.faults:
                break
            name, fault = plan[number % len(plan)]
            lab.draw = random.Random(f"{options.seed} {number} {name}")  # its own: a resumed series is the same
            if "Ray" not in name:
                nodes.close()
            series.inject(name, fault)
            lab.clear()
            spent = time.monotonic() - started
            series.seconds = round(before + spent)
            if options.out:
                series.write(options.out, command, lab.steps)
            left = max(0, options.faults - series.in_all) * spent / max(1, series.in_all - first) / 60
            print(f"{spent:6.0f} s  {series.in_all:3d} faults, {left:4.0f} min left  {name}", flush=True)
    series.show()
    sys.exit(1 if series.lost else 0)
