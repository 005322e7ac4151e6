"""What the benchmarks share: a measured figure with its goal, timing side by side, and how both are shown and kept."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

Name = TypeVar("Name")


@dataclass(frozen=True)
class Figure:
    """A ratio measured in one run, and the goal it is to reach: at least, or at most."""

    key: str
    what: str
    value: float
    at_least: float | None = None
    at_most: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def goal(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:g}"

    @property
    def met(self) -> bool | None:
        if self.at_least is not None:
            return self.value >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most


@dataclass(frozen=True)
class Seconds:
    """How long something took: by the clock, and of the processor. The second is what others' work disturbs least."""

    wall: float
    cpu: float


def timed(run: Callable[[], Any]) -> tuple[Seconds, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu), result


def best(contestants: Mapping[Name, Callable[[], Any]], rounds: int) -> dict[Name, Seconds]:
    """The least time of each, taken in turns so that a busy spell of the machine meets them all."""
    times: dict[Name, list[Seconds]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            times[name].append(timed(run)[0])
    return {name: least(found) for name, found in times.items()}


def least(found: list[Seconds]) -> Seconds:
    return Seconds(min(s.wall for s in found), min(s.cpu for s in found))


def machine() -> dict[str, Any]:
    names = [line.split(":")[1].strip() for line in _cpu_info() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def has_flag(name: str) -> bool:
    """Whether the processor has these instructions, as Linux calls them."""
    lines = [line.split(":")[1].split() for line in _cpu_info() if line.startswith(("flags", "Features"))]
    return bool(lines) and name in lines[0]


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def table(title: str, figures: list[Figure]) -> Table:
    shown = Table(title=title)
    shown.add_column("what")
    for name in ("measured", "goal", ""):
        shown.add_column(name, justify="right")
    for figure in figures:
        mark = {True: "reached", False: "missed", None: ""}[figure.met]
        shown.add_row(figure.what, f"{figure.value:.3g}", figure.goal, mark)
    return shown


def present(title: str, measure: Callable[[], list[Figure]]) -> None:
    """The main function of a benchmark: measure, print, and with --json leave the figures in a file."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", type=Path, help="where to leave the figures")
    path = parser.parse_args().json
    figures = measure()
    console = Console(width=120)
    console.print(table(title, figures))
    for figure in figures:
        if figure.details:
            console.print(f"{figure.key}: " + ", ".join(f"{k} {v}" for k, v in figure.details.items()), highlight=False)
    if path is not None:
        path.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
