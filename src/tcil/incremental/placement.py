"""The memory layout and the number of threads for training on a CPU, chosen by measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from tcil.incremental.arithmetic import Arithmetic
from tcil.incremental.data.layout import Layout
from tcil.incremental.networks import seeded


@dataclass(frozen=True)
class Placement:
    """A layout and a number of threads; `images_per_second` are the measurements behind the choice, if any."""

    layout: Layout
    threads: int
    images_per_second: tuple[tuple[str, float], ...] = ()

    def record(self) -> dict[str, object]:
        """The placement as an entry of the run's environment."""
        measured = {name: round(speed, 1) for name, speed in self.images_per_second}
        return {"layout": str(self.layout), "threads": self.threads, "images_per_second": measured}


# How much faster than the default (channels last, all threads) another choice must be. Rounding depends on the layout,
# so noise must not decide it; using fewer threads does no harm.
_LAYOUT_GAIN, _THREAD_GAIN = 1.5, 1.1
# Other processes may disturb some measurements, so they are repeated and the fastest counts. Small batches favour one
# thread, so batches are not smaller than necessary.
_LARGEST_BATCH, _FEWEST_TURNS, _MOST_TURNS, _SECONDS = 64, 3, 12, 4.0
_FP32 = Arithmetic()


def layout_of_environment() -> Layout | None:
    """The layout that TCIL_LAYOUT names; None if it is not set."""
    named = os.environ.get("TCIL_LAYOUT")
    return Layout.parse(named, "TCIL_LAYOUT") if named else None


@cache
def choose_placement(
    network: Callable[[int], nn.Module], shape: tuple[int, ...], batch_size: int, arithmetic: Arithmetic = _FP32
) -> Placement:
    """The faster layout, with one thread or all, measured by a few training steps on batches of this size (at most 64).

    If OMP_NUM_THREADS or TCIL_LAYOUT are set, they decide. The choice holds for all runs of a process.
    """
    threads = torch.get_num_threads()
    counts = [threads] if "OMP_NUM_THREADS" in os.environ or threads == 1 else [threads, 1]
    chosen = layout_of_environment()
    layouts = list(Layout) if chosen is None else [chosen]
    ways = [(layout, count) for layout in layouts for count in counts]
    if len(ways) == 1:
        return Placement(*ways[0])
    batch_size = min(batch_size, _LARGEST_BATCH)
    with seeded(0):  # leaves the global generator unchanged
        models = {layout: network(10).to(memory_format=layout.form) for layout in layouts}  # type: ignore[call-overload]
    seconds = {way: float("inf") for way in ways}
    try:
        started = time.perf_counter()
        for turn in range(_MOST_TURNS):
            if turn >= _FEWEST_TURNS and time.perf_counter() - started > _SECONDS:
                break
            for layout, count in ways:
                torch.set_num_threads(count)
                took = step_seconds(models[layout], shape, layout, batch_size, arithmetic)
                seconds[layout, count] = min(seconds[layout, count], took)
    finally:
        torch.set_num_threads(threads)

    def handicapped(way: tuple[Layout, int]) -> float:
        layout, count = way
        return seconds[way] * (_LAYOUT_GAIN ** (layout is not layouts[0])) * (_THREAD_GAIN ** (count != threads))

    speeds = tuple((f"{layout}, {count} threads", batch_size / took) for (layout, count), took in seconds.items())
    return Placement(*min(ways, key=handicapped), speeds)


def step_seconds(
    model: nn.Module,
    shape: tuple[int, ...],
    layout: Layout,
    batch_size: int,
    arithmetic: Arithmetic = _FP32,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The time of one forward and backward pass of a batch, in seconds of this clock."""
    x = torch.randn(batch_size, *shape, generator=torch.Generator().manual_seed(0))
    x = x.contiguous(memory_format=layout.form)
    y = torch.zeros(batch_size, dtype=torch.long)
    started = clock()
    with arithmetic.cast(x.device):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return clock() - started


def alone_seconds(
    model: nn.Module, shape: tuple[int, ...], layout: Layout, batch_size: int, arithmetic: Arithmetic = _FP32
) -> float:
    """The same by the processor time of this thread alone: other processes hardly change it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return step_seconds(model, shape, layout, batch_size, arithmetic, time.thread_time)
    finally:
        torch.set_num_threads(threads)
