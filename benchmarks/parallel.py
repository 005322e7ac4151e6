"""Two runs side by side, one thread each, against one after the other.

    python benchmarks/parallel.py        (two minutes; part of make bench)

Real `tcil run` processes on the digits, with OMP_NUM_THREADS=1, by the clock; twice in turns, the best of each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import ledger

EPOCHS, ROUNDS = 25, 2


def start(seed: int, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tcil.experiments.cli", "run", "--dataset", "digits", "--seeds", str(seed)]
    command += ["--set", f"epochs={EPOCHS}", "--calibrators", "vanilla,ts,t-cil", "--no-full-data", "--out", str(out)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return subprocess.Popen(command, env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run(together: bool) -> None:
    """Two seeds, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        waiting = []
        for seed in (1, 2):
            process = start(seed, Path(folder))
            waiting.append(process)
            if not together and process.wait():
                raise RuntimeError("tcil run failed")
        if any(process.wait() for process in waiting):
            raise RuntimeError("tcil run failed")


def measure() -> list[ledger.Figure]:
    ways = {"one after the other": partial(run, False), "side by side": partial(run, True)}
    times = ledger.best(ways, ROUNDS)
    seconds = {f"{way}, s": round(t.wall, 1) for way, t in times.items()}
    ratio = times["side by side"].wall / times["one after the other"].wall
    what = f"two runs side by side / one after the other, {os.cpu_count()} cores"
    return [ledger.Figure("parallel/two", what, ratio, at_most=0.65, details=seconds)]


if __name__ == "__main__":
    ledger.present("many runs at once", measure)
