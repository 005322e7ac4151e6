"""What a set of runs will cost: trainings, images, and a time estimated from a short measurement."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tcil.experiments.run import NETWORKS, Run
from tcil.experiments.settings import RunSettings


def show_plan(runs: list[RunSettings], data: Path | None, console: Console) -> None:
    """A line per run, and the sum."""
    table = Table(title=f"{len(runs)} trainings")
    for name in ("run", "tasks", "images", "estimated time"):
        table.add_column(name, justify="left" if name == "run" else "right")
    total = 0.0
    for settings in runs:
        run = Run(settings, Path(settings.name), data=data)
        images = sum(
            settings.epochs * (len(task.train) + (settings.memory if task.index else 0)) for task in run.stream
        )
        seconds = images * seconds_per_image(settings, run.dataset.image_shape)
        total += seconds
        table.add_row(settings.name, str(len(run.stream)), f"{images:,}", _clock(seconds))
    console.print(table)
    console.print(
        f"about {_clock(total)} one after another on this machine; DER and fine-tuning take more", highlight=False
    )


def seconds_per_image(settings: RunSettings, shape: tuple[int, ...]) -> float:
    """One training step of the network, measured (the best of three)."""
    factory = NETWORKS.get(settings.network)
    if factory is None:
        return float("nan")
    model = factory(10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(settings.batch_size, *shape).contiguous(memory_format=torch.channels_last)
    y = torch.zeros(settings.batch_size, dtype=torch.long)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        times.append(time.perf_counter() - started)
    return min(times) / settings.batch_size


def _clock(seconds: float) -> str:
    if seconds != seconds:
        return "unknown"
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
