"""Images per second of the training loop against the bare forward, backward and step of the same network.

    python benchmarks/training.py

Both are timed alternately in one run, on one thread; the ratio is what counts. The bare step works on one fixed batch,
so the loop's batching, augmentation and bookkeeping are what is measured.
"""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from tcil.incremental.images import Dataset, ImageSet
from tcil.incremental.learners.base import Schedule, Stage
from tcil.incremental.networks import resnet32, small_resnet
from tcil.incremental.training import EpochState, OptimizerKind, make_optimizer, train_stage

BATCH, STEPS, REPEATS = 128, 6, 5


def dataset() -> Dataset:
    """Random images of CIFAR's size: the pixels do not matter for the time."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (BATCH * STEPS, 3, 32, 32), generator=generator, dtype=torch.uint8)
    part = ImageSet(images, torch.arange(len(images)) % 10)
    return Dataset("random", part, part, tuple(map(str, range(10))), (0.5,) * 3, (0.25,) * 3)


def loop(model: nn.Module, data: Dataset) -> float:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), y)

    stage = Stage("train", torch.arange(len(data.train)), Schedule(1, 0.1, (), 2e-4), loss, list(model.parameters()))
    started = time.perf_counter()
    train_stage(
        model, stage, data, data.train.labels, batch_size=BATCH, optimizer=OptimizerKind.SGD,
        generator=torch.Generator().manual_seed(0), state=EpochState(), on_epoch=lambda state, loss: None,
    )  # fmt: skip
    return time.perf_counter() - started


def bare(model: nn.Module) -> float:
    x = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    y = torch.arange(BATCH) % 10
    optimizer = make_optimizer(OptimizerKind.SGD, list(model.parameters()), 0.1, 2e-4)
    model.train()
    started = time.perf_counter()
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return time.perf_counter() - started


def main() -> None:
    torch.set_num_threads(1)
    data = dataset()
    table = Table(title="training loop against the bare step, one thread")
    for column in ("network", "loop, images/s", "bare, images/s", "ratio"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for name, factory in (("ResNet-32", resnet32), ("small ResNet", small_resnet)):
        model = factory(10).to(memory_format=torch.channels_last)
        bare(model)  # warm up
        pairs = [(loop(model, data), bare(model)) for _ in range(REPEATS)]
        best = min(first for first, _ in pairs), min(second for _, second in pairs)
        speeds = [BATCH * STEPS / seconds for seconds in best]
        table.add_row(name, f"{speeds[0]:.0f}", f"{speeds[1]:.0f}", f"{speeds[0] / speeds[1]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
