"""What a T-CIL fit costs, counted in images through the user's model, beside the floor.

    make bench        (or: python benchmarks/calibration.py)

Counts come from a hook on the model itself. The time is given only as a ratio to the bare forward and backward passes
of the same network on the same images, measured alternately in the same run. Digits always; the authors' ResNet-32
after task 8 of CIFAR-100 where TCIL_DATA names the data.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tcil

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "examples")]
import digits
import official

BATCH = 128


def count_images(model: nn.Module, run: Callable[[], Any]) -> tuple[dict[str, int], Any]:
    """How many images went through the model, and how many of those with a graph behind them."""
    seen = {"forward only": 0, "forward and backward": 0}

    def note(_: nn.Module, __: Any, output: Tensor) -> None:
        seen["forward and backward" if output.requires_grad else "forward only"] += len(output)

    handle = model.register_forward_hook(note)
    try:
        return seen, run()
    finally:
        handle.remove()


def bare_passes(model: nn.Module, images: Tensor, n_forward: int, n_backward: int) -> float:
    """Seconds for that many images, bare: eval mode, frozen parameters, channels_last, full batches."""
    model = copy.deepcopy(model).eval().requires_grad_(False)
    images = images.contiguous(memory_format=torch.channels_last)

    def batches(total: int) -> Iterator[Tensor]:
        for start in range(0, total, BATCH):
            size = min(BATCH, total - start)
            yield images[torch.arange(start, start + size) % len(images)]

    started = time.perf_counter()
    with torch.no_grad():
        for batch in batches(n_forward):
            model(batch)
    for batch in batches(n_backward):
        batch.requires_grad_()
        torch.autograd.grad(model(batch).sum(), batch)
    return time.perf_counter() - started


def measure(name: str, task: Any, table: Table, repeats: int) -> None:
    def fit() -> Any:
        return tcil.TCIL(batch_size=BATCH).fit(task.model, task.memory, task.valid, task.new_classes).result_

    for parameter in task.model.parameters():  # what training left behind
        parameter.grad = None
    counts, result = count_images(task.model, fit)
    n, new, valid = result.n_exemplars, result.n_new_exemplars, result.n_valid
    floor = {"forward only": n + 10 * new + n + valid, "forward and backward": n}
    ratios = []
    for _ in range(repeats):
        started = time.perf_counter()
        fit()
        whole = time.perf_counter() - started
        ratios.append(whole / bare_passes(task.model, task.memory[0], *floor.values()))
    ratios.sort()
    for kind in floor:
        table.add_row(name, kind, str(counts[kind]), str(floor[kind]), f"{counts[kind] / floor[kind]:.2f}")
    table.add_row(name, "time of fit / bare passes of the floor", "", "", f"{ratios[len(ratios) // 2]:.2f}")
    grads = sum(p.grad is not None for p in task.model.parameters())
    table.add_row(name, "parameters left with a gradient", str(grads), "0", "")


def main() -> None:
    warnings.simplefilter("ignore", tcil.CalibrationWarning)
    torch.set_num_threads(1)
    table = Table(title="T-CIL: images through the model per fit, and the floor")
    for column in ("network", "what", "counted", "floor", "ratio"):
        table.add_column(column, justify="left" if column in ("network", "what") else "right")
    *_, last = digits.learn()
    measure("small CNN, digits, task 4", last, table, repeats=9)
    folder = official.data_folder()
    if folder is not None:
        measure("ResNet-32, CIFAR-100, task 8", official.load(folder, 8), table, repeats=3)
    console = Console(width=110)
    console.print(table)
    console.print(
        "floor: one feature pass and one gradient pass over the memory, 10 passes over the new exemplars,\n"
        "one pass over the perturbed memory, one over the validation set."
        + ("" if folder else " TCIL_DATA is not set: digits only.")
    )


if __name__ == "__main__":
    main()
