"""The training loop against the bare step of the same network, and against a loop as other frameworks write it.

    python -m benchmarks.training        (three minutes; part of make bench)

The bare step is forward, backward and optimizer on one fixed batch, on one thread like the loop beside it: what the
loop adds is batching, augmentation and bookkeeping. The other loop takes its images one by one through PIL (pad, crop,
flip), stacks them in a `DataLoader`, and trains in torch's default layout with its default number of threads; ours
trains with the layout and threads that `tcil run` would choose here. These two are compared by the clock, which favours
whoever has more threads where others keep the cores busy; so their processor time stands beside it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from benchmarks import ledger
from tcil.incremental.arithmetic import Arithmetic
from tcil.incremental.data.images import Dataset, ImageSet
from tcil.incremental.data.layout import Layout
from tcil.incremental.learners.base import Schedule, Stage
from tcil.incremental.learners.der import ExpandableNetwork
from tcil.incremental.learners.frozen import Frozen
from tcil.incremental.networks import resnet32, small_resnet
from tcil.incremental.placement import choose_placement
from tcil.incremental.training import EpochState, OptimizerKind, make_optimizer, train_stage

BATCH, STEPS, ROUNDS = 128, 4, 6
PLAIN_ROUNDS = 16  # by the clock: many short turns, the best of which nobody disturbed
_FP32 = Arithmetic()
MEAN, STD = (0.5,) * 3, (0.25,) * 3


def dataset(layout: Layout, steps: int = STEPS, batch: int = BATCH) -> Dataset:
    """Random images of CIFAR's size: the pixels do not matter for the time."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch * steps, 3, 32, 32), generator=generator, dtype=torch.uint8)
    part = ImageSet(images, torch.arange(len(images)) % 10)
    return Dataset("random", part, part, tuple(map(str, range(10))), MEAN, STD, layout=layout)


def loop(model: nn.Module, data: Dataset, threads: int = 1, arithmetic: Arithmetic = _FP32, batch: int = BATCH) -> None:
    """One epoch of the library's own loop."""
    torch.set_num_threads(threads)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    stage = Stage("train", torch.arange(len(data.train)), Schedule(1, 0.1, (), 2e-4), loss, list(model.parameters()))
    train_stage(
        model, stage, data, data.train.labels, batch_size=batch, optimizer=OptimizerKind.SGD, arithmetic=arithmetic,
        generator=torch.Generator().manual_seed(0), state=EpochState(), on_epoch=lambda state, loss: None,
    )  # fmt: skip


def bare(model: nn.Module, layout: Layout) -> None:
    torch.set_num_threads(1)
    x = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=layout.form)
    y = torch.arange(BATCH) % 10
    optimizer = make_optimizer(OptimizerKind.SGD, list(model.parameters()), 0.1, 2e-4)
    model.train()
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


class Pictures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """One image at a time, padded, cropped, flipped and normalised."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images.permute(0, 2, 3, 1).numpy()
        self.labels = labels.tolist()
        self.mean, self.std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = ImageOps.expand(Image.fromarray(self.images[index]), 4)
        left, upper = random.randint(0, 8), random.randint(0, 8)
        picture = picture.crop((left, upper, left + 32, upper + 32))
        if random.random() < 0.5:
            picture = ImageOps.mirror(picture)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous().float().div(255)
        return (pixels - self.mean) / self.std, self.labels[index]


def plain_loop(model: nn.Module, loader: Any, train: bool = True) -> None:
    """An epoch as it is mostly written; without `train`, the loader alone."""
    torch.set_num_threads(os.cpu_count() or 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-4)
    model.train()
    for x, y in loader:
        if train:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            loss.item()


def against_bare() -> list[ledger.Figure]:
    figures = []
    layout = Layout.CHANNELS_LAST
    for name, factory in (("ResNet-32", resnet32), ("small ResNet", small_resnet)):
        model = factory(10).to(memory_format=layout.form)  # type: ignore[call-overload]
        bare(model, layout)  # warm up
        contestants = {"loop": partial(loop, model, dataset(layout)), "bare": partial(bare, model, layout)}
        times = ledger.best(contestants, ROUNDS)
        speeds = {f"{who}, images/s": round(BATCH * STEPS / t.cpu) for who, t in times.items()}
        figures.append(
            ledger.Figure(
                f"training/bare/{name}", f"{name}: speed of the loop / of the bare step, one thread",
                times["bare"].cpu / times["loop"].cpu, 0.95, details=speeds,
            )
        )  # fmt: skip
    return figures


def against_plain() -> list[ledger.Figure]:
    """Of both networks: the smaller the network, the more its loader weighs."""
    figures = []
    for name, factory, steps in (("ResNet-32", resnet32, 1), ("small ResNet", small_resnet, 4)):
        torch.set_num_threads(os.cpu_count() or 1)
        chosen = choose_placement(factory, (3, 32, 32), BATCH)
        ours = factory(10).to(memory_format=chosen.layout.form)  # type: ignore[call-overload]
        theirs = factory(10)
        data = dataset(chosen.layout, steps)
        loader = torch.utils.data.DataLoader(Pictures(data.train.images, data.train.labels), BATCH, shuffle=True)
        contestants = {
            "ours": partial(loop, ours, data, chosen.threads),
            "plain": partial(plain_loop, theirs, loader),
            "loader": partial(plain_loop, theirs, loader, train=False),
        }
        times = ledger.best(contestants, PLAIN_ROUNDS)
        speeds = {f"{who}, images/s": round(BATCH * steps / t.wall) for who, t in times.items()}
        figures += [
            ledger.Figure(
                f"training/plain/{name}", f"{name}: plain PIL DataLoader loop / ours, by the clock",
                times["plain"].wall / times["ours"].wall, 1.5, details=speeds | chosen.record(),
            ),
            ledger.Figure(
                f"training/plain-cpu/{name}", "the same by processor time", times["plain"].cpu / times["ours"].cpu,
            ),
            ledger.Figure(
                f"training/loader/{name}", "of which the loader: its share of the plain loop",
                times["loader"].wall / times["plain"].wall,
            ),
            ledger.Figure(
                f"training/plain-without-loader/{name}", "the plain loop without its loader / ours",
                (times["plain"].wall - times["loader"].wall) / times["ours"].wall,
            ),
        ]  # fmt: skip
    return figures


def expandable(epochs: int) -> list[ledger.Figure]:
    """DER with three extractors: its second stage on kept features, and its frozen extractors folded."""
    torch.set_num_threads(1)
    layout = Layout.CHANNELS_LAST
    data = replace(dataset(layout), padding=0)
    first = small_resnet(1).to(memory_format=layout.form)  # type: ignore[call-overload]
    model = ExpandableNetwork(first, 10)
    model.expand(10, 2)
    model.expand(10, 2)
    frozen, images = Frozen(model.extractors), torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=layout.form)

    def plain(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model.eval().features(x)

    def finetune(embed: Any, loss: Any) -> None:
        head, rows = list(model.fc.parameters()), torch.arange(len(data.train))
        train_stage(
            model, Stage("finetune", rows, Schedule(epochs, 0.1, (), 5e-4), loss, head, embed), data, data.train.labels,
            batch_size=BATCH, optimizer=OptimizerKind.SGD, generator=torch.Generator().manual_seed(0),
            state=EpochState(), on_epoch=lambda state, loss: None,
        )  # fmt: skip

    def on_features(features: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model.fc(features), y)

    contestants: dict[str, Callable[[], Any]] = {
        "kept": partial(finetune, frozen, on_features),
        "anew": partial(finetune, None, lambda x, y: on_features(plain(x), y)),
        "folded": lambda: [frozen(images) for _ in range(4)],
        "as they are": lambda: [plain(images) for _ in range(4)],
    }
    times = ledger.best(contestants, 3)
    return [
        ledger.Figure(
            "training/der-stage-2", f"DER stage two, {epochs} epochs, no crops: features anew / kept",
            times["anew"].cpu / times["kept"].cpu,
        ),
        ledger.Figure(
            "training/der-frozen", "DER's frozen extractors as they are / folded",
            times["as they are"].cpu / times["folded"].cpu,
        ),
    ]  # fmt: skip


def measure() -> list[ledger.Figure]:
    torch.manual_seed(0)
    return [*against_bare(), *against_plain(), *expandable(epochs=10)]


if __name__ == "__main__":
    ledger.present("training", measure)
