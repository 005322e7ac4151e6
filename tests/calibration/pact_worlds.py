"""Classes for which the truth of PACT's T and b is known, shared by its tests."""

from __future__ import annotations

import math

import torch
from torch import nn

import tcil

K, OLD, DIMENSIONS, OVERCONFIDENCE = 6, 4, 8, 2.5
NEW = range(OLD, K)


class World:
    """Gaussian classes, and a network that is the exact posterior under unbalanced training, times 2.5."""

    def __init__(self, imbalance: float, seed: int = 0, separation: float = 0.8) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.centres = separation * torch.randn(K, DIMENSIONS, generator=self.generator)
        prior = torch.zeros(K)
        prior[OLD:] = math.log(imbalance)
        self.model = nn.Linear(DIMENSIONS, K)
        with torch.no_grad():
            self.model.weight.copy_(OVERCONFIDENCE * self.centres)
            self.model.bias.copy_(OVERCONFIDENCE * (prior - self.centres.square().sum(dim=1) / 2))

    def draw(self, labels, noise=1.0):
        return self.centres[labels] + noise * torch.randn(len(labels), DIMENSIONS, generator=self.generator), labels

    def memory(self):
        """Exemplars lie nearer to their class's centre than unseen images do: the network knows them by heart."""
        return self.draw(torch.arange(120) % K, noise=0.3)

    def logits(self, labels):
        with torch.no_grad():
            x, y = self.draw(labels)
            return self.model(x), y


def new_labels(n):
    return OLD + torch.arange(n) % (K - OLD)


MEMO = {"calibrator": "PACT", "log_temperature": [0.7, 0.01], "bias": [0.9, 0.02], "log_imbalance": 2.0, "model": ""}
TARGET = tcil.fit_temperature([[1.0, 0.0], [0.0, 1.0], [0.4, 0.0]], [0, 1, 1])
IS_NEW = torch.tensor([column in NEW for column in range(K)])
