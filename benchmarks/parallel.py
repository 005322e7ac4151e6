"""Two runs side by side, one thread each, against one after the other.

    python -m benchmarks.parallel        (two minutes; part of make bench)

Real `tcil run` processes on the digits, with OMP_NUM_THREADS=1, by the clock; twice in turns, the best of each. Where
others hold the cores, the clock says little; so the processor time of the same runs stands beside it: half of what the
two take together over what they take alone is what two free cores would give.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import ledger

EPOCHS, ROUNDS = 15, 2


def start(seed: int, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tcil", "run", "--dataset", "digits", "--seeds", str(seed)]
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
    found: dict[bool, list[ledger.Seconds]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for together, times in found.items():
            before = spent()
            seconds, _ = ledger.timed(partial(run, together))
            times.append(ledger.Seconds(seconds.wall, spent() - before))
    apart, beside = (ledger.least(found[together]) for together in (False, True))
    details = {"one after the other": f"{apart.wall:.1f} s", "side by side": f"{beside.wall:.1f} s"}
    details |= {"processor time": f"{apart.cpu:.1f} s and {beside.cpu:.1f} s"}
    what = f"two runs side by side / one after the other, {os.cpu_count()} cores"
    return [
        ledger.Figure("parallel/two", what, beside.wall / apart.wall, at_most=0.65, details=details),
        ledger.Figure("parallel/free", "the same by processor time, as on two free cores", beside.cpu / apart.cpu / 2),
    ]


def spent() -> float:
    """Processor time of all processes that were started and have ended."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    ledger.present("many runs at once", measure)
