"""A task without data: class patterns under noise, and a network whose head was solved for rather than trained.

Convolutions keep their random weights and batch norms take their statistics from the exemplars; the head is the ridge
regression onto the labels, sharpened. So exemplars are nearly all right, held-out images less, confidence is too high,
and a T-CIL fit does all the work that it does on a trained network.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tcil.incremental.networks import ResNet, seeded


@dataclass(frozen=True)
class SyntheticTask:
    model: ResNet
    memory: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    new_classes: range
    seen: int


def task(network: ResNet, n_exemplars: int, new: int, *, size: int = 32, n_valid: int = 100) -> SyntheticTask:
    """Exemplars spread evenly over the head's classes, the last `new` of which are the new task."""
    seen = network.fc.out_features
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(seen, 3, 4, 4, generator=generator).repeat_interleave(size // 4, 2)
    patterns = patterns.repeat_interleave(size // 4, 3)

    def draw(labels: Tensor, noise: float) -> tuple[Tensor, Tensor]:
        images = patterns[labels] + noise * torch.randn(len(labels), 3, size, size, generator=generator)
        return images / (1 + noise**2) ** 0.5, labels

    memory = draw(torch.arange(n_exemplars) * seen // n_exemplars, 0.5)
    valid = draw(torch.arange(n_valid) % new + seen - new, 1.5)
    settle(network, *memory)
    return SyntheticTask(network.eval(), memory, valid, range(seen - new, seen), seen)


def settle(network: ResNet, images: Tensor, labels: Tensor) -> None:
    """Batch-norm statistics, then the head, from the exemplars."""
    some = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:256]
    with torch.no_grad():
        network.train()
        network(images[some])
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
        network(images[some])
        network.eval()
        features = torch.cat([network.features(batch) for batch in images.split(256)])
        x = torch.cat([features, torch.ones(len(features), 1)], dim=1).double()
        y = torch.nn.functional.one_hot(labels, network.fc.out_features).double()
        penalty = 1e-3 * len(x) * torch.eye(x.shape[1], dtype=torch.float64) * x.square().mean()
        weight = 30 * torch.linalg.solve(x.T @ x + penalty, x.T @ y).T.float()
        network.fc.weight.copy_(weight[:, :-1])
        network.fc.bias.copy_(weight[:, -1])


def make(widths: tuple[int, ...], depths: tuple[int, ...], n_classes: int, stem_stride: int = 1) -> ResNet:
    with seeded(0):
        return ResNet(n_classes=n_classes, widths=widths, depths=depths, stem_stride=stem_stride)
