"""A worker of the disturbed sweep: without pages, and struck at one of its steps if it is told so.

    python -m benchmarks.faults.worker [--stroke NAME --at STEP --flag FILE]

The flag is a file: of all workers of a sweep, the one that makes it is struck.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.faults import seams

BEAT = 0.25  # seconds between its signs of life, where it is to be struck


def _no_more_memory() -> None:
    """From here on the kernel refuses memory to this process."""
    resource.setrlimit(resource.RLIMIT_AS, (2**20, resource.RLIM_INFINITY))


def _refused_to_torch() -> None:
    _no_more_memory()
    torch.empty(2**40)


def _refused_to_python() -> None:
    _no_more_memory()
    bytearray(2**36)


STROKES: dict[str, Callable[[], None]] = {
    "memory refused to torch": _refused_to_torch,
    "memory refused to Python": _refused_to_python,
    "killed for its memory": lambda: os.kill(os.getpid(), signal.SIGKILL),  # as the kernel's OOM killer does
    "halted": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "waiting for ever": lambda: time.sleep(10**6),
}


def words(stroke: str = "", at: int = 0, flag: Path | None = None) -> list[str]:
    """What Python is to be told to start one."""
    own = ["--stroke", stroke, "--at", str(at), "--flag", str(flag)] if stroke else []
    return ["-m", "benchmarks.faults.worker", *own]


def strike_at(step: int, flag: Path, stroke: str) -> None:
    steps = 0

    def act() -> None:
        nonlocal steps
        steps += 1
        if steps == step:
            try:
                flag.touch(exist_ok=False)
            except FileExistsError:
                return
            STROKES[stroke]()

    seams.before_each_step(act)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stroke", choices=STROKES)
    parser.add_argument("--at", type=int, help="the step")
    parser.add_argument("--flag", type=Path)
    options = parser.parse_args()
    seams.without_pages()
    if options.stroke:
        seams.beat_every(BEAT)
        strike_at(options.at, options.flag, options.stroke)
    seams.work()


if __name__ == "__main__":
    main()
