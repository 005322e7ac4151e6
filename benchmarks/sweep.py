"""Speed-up of a sweep of eight digits runs on local processes and on Ray, against one after another.

    python -m benchmarks.sweep --out docs/results/sweep.json

The same `tcil sweep` command each time, from its start to its end (Python, torch and Ray start within it), one thread
for each run, into fresh folders; the results are compared byte by byte. All are measured in turn in one run of this
script: what counts is the ratio, on a machine that others may use at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = 8
PLACES = ("serial", "processes", "ray")


def measure(place: str, out: Path, epochs: int) -> float:
    words = [sys.executable, "-m", "tcil", "sweep", "--seeds", ",".join(map(str, range(1, RUNS + 1))), "--on", place]
    words += [
        "--dataset",
        "noisy-digits",
        "--set",
        f"epochs={epochs}",
        "--no-full-data",
        "--cpus-per-run",
        "1",
        "--out",
        str(out),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    started = time.perf_counter()
    subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def results(out: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in sorted(out.glob("*/results.json"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the times")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {place: [] for place in PLACES}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            found = {}
            for place in PLACES:
                out = Path(folder) / f"{place}-{repeat}"
                seconds[place].append(measure(place, out, options.epochs))
                found[place] = results(out)
                print(f"{place}: {seconds[place][-1]:.1f} s", flush=True)
            assert len(found["serial"]) == RUNS
            assert all(found[place] == found["serial"] for place in PLACES), "places give different results"
    middle = {place: statistics.median(times) for place, times in seconds.items()}
    record = {
        "command": " ".join(["python -m benchmarks.sweep", *sys.argv[1:]]),
        "runs": RUNS,
        "epochs": options.epochs,
        "cores": os.cpu_count(),
        "load_average_at_the_end": [round(value, 1) for value in os.getloadavg()],
        "seconds": {place: [round(value, 1) for value in times] for place, times in seconds.items()},
        "speed_up": {place: round(middle["serial"] / middle[place], 2) for place in PLACES[1:]},
        "same_bytes": True,
    }
    print(json.dumps(record, indent=1))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
