"""The network that the examples share: letters, learned four at a time in five tasks with a small memory.

`tasks()` trains once, by the plain loop of the first example, and keeps the networks under build/gallery; later calls
read them. The key of the cache is this file and the arguments.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tcil
from tcil.extending import load_dataset

Examples = tuple[Tensor, Tensor]
CACHE = Path(os.environ.get("TCIL_GALLERY_CACHE", Path(__file__).resolve().parents[2] / "build" / "gallery"))
N_TASKS, NEW = 5, 4  # tasks, and classes of each
EPOCHS = int(os.environ.get("TCIL_GALLERY_EPOCHS", "12"))  # tests take fewer


@dataclass(frozen=True)
class Task:
    """What is at hand after a task."""

    model: nn.Module
    memory: Examples  # exemplars of every class seen
    valid: Examples  # held-out images of the new classes
    test: Examples  # unseen images of every class seen
    new_classes: tuple[int, ...]
    imbalance: float  # training images of a new class for each one of an old class


def letters(train_per_class: int = 120, test_per_class: int = 80) -> tuple[Examples, Examples]:
    """Training and test images of all 20 letters, normalised as the network takes them."""
    data = load_dataset("letters", train_per_class=train_per_class, test_per_class=test_per_class)
    mean, std = torch.tensor(data.mean).view(1, -1, 1, 1), torch.tensor(data.std).view(1, -1, 1, 1)
    train, test = (((part.images / 255 - mean) / std, part.labels) for part in (data.train, data.test))
    return train, test


def of_classes(examples: Examples, classes: range) -> Examples:
    """The examples of these classes."""
    rows = (examples[1] >= classes.start) & (examples[1] < classes.stop)
    return examples[0][rows], examples[1][rows]


def per_class(examples: Examples, count: int, generator: torch.Generator) -> tuple[Examples, Examples]:
    """`count` random examples of each class, and the rest."""
    images, labels = examples
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        rows = (labels == label).nonzero().squeeze(1)
        chosen[rows[torch.randperm(len(rows), generator=generator)[:count]]] = True
    return (images[chosen], labels[chosen]), (images[~chosen], labels[~chosen])


def train(model: nn.Module, examples: Examples, epochs: int, generator: torch.Generator) -> None:
    """Cross-entropy over new images and memory together: Experience Replay."""
    images, labels = examples
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [epochs // 2, epochs * 3 // 4])
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(labels), generator=generator).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
        schedule.step()
    model.eval()


def tasks(*, n_tasks: int = N_TASKS, memory: int = 200, valid_per_class: int = 20, seed: int = 1) -> list[Task]:
    """Every task in turn; trained at the first call, read from the cache later."""
    told = (memory, valid_per_class, seed, EPOCHS)
    key = hashlib.sha256(Path(__file__).read_bytes() + repr(told).encode()).hexdigest()[:12]
    train_set, test_set = letters()
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tcil.networks.tiny_resnet(n_classes=N_TASKS * NEW)
    old: Examples = (train_set[0][:0], train_set[1][:0])
    done = list[Task]()
    for number in range(n_tasks):
        new, seen = range(NEW * number, NEW * (number + 1)), range(NEW * (number + 1))
        valid, fresh = per_class(of_classes(train_set, new), valid_per_class, generator)
        both = torch.cat([fresh[0], old[0]]), torch.cat([fresh[1], old[1]])
        imbalance = (len(fresh[1]) / NEW) / (len(old[1]) / new.start) if number else 1.0
        batches = torch.Generator().manual_seed(1000 * seed + number)
        kept = CACHE / f"letters-{key}-task{number}.safetensors"
        if kept.exists():
            model.load_state_dict(load_file(kept))
            model.eval()
        else:
            train(model, both, EPOCHS, batches)
            CACHE.mkdir(parents=True, exist_ok=True)
            partial = kept.with_suffix(".part")
            save_file(model.state_dict(), partial)
            partial.replace(kept)
        old, _ = per_class(both, memory // len(seen), generator)
        network = tcil.networks.tiny_resnet(n_classes=N_TASKS * NEW)
        network.load_state_dict(model.state_dict())
        done.append(Task(network.eval(), old, valid, of_classes(test_set, seen), tuple(new), imbalance))
    return done
