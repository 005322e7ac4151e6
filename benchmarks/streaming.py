"""Peak memory of a T-CIL fit whose exemplars come from a loader: it must not grow with their number.

    python -m benchmarks.streaming --exemplars 100000       (45 minutes; 5,000 take two)

Images of 224 x 224 are made on the fly, so that only what the fit itself keeps is in memory: one batch, the new
exemplars (2,400 of 100,000) with their perturbation, and one row of logits per exemplar.
"""

from __future__ import annotations

import argparse
import resource
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import tcil

BATCH, CLASSES, NEW = 100, 20, (18, 19)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 32, stride=32), nn.Linear(8 * 49, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(torch.relu(self.conv(x)).flatten(1))
        return logits


class Memory:
    """Noise around a pattern per class, the same in every pass; new classes are rare."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.noise = torch.randn(BATCH, 3, 224, 224)
        self.patterns = torch.randn(CLASSES, 3, 7, 7).repeat_interleave(32, 2).repeat_interleave(32, 3)

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        labels = (torch.arange(BATCH) + index * BATCH) % CLASSES
        return self.noise.roll(index, 0) + 0.25 * self.patterns[labels], labels

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = torch.arange(BATCH)
        for index in range(self.batches):
            images, labels = self.batch(index)
            spare = (labels >= NEW[0]) & (rows != 18) & (rows != 19) & (index % 20 > 0)
            yield images, torch.where(spare, labels - NEW[0], labels)


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exemplars", type=int, default=5000)
    count = parser.parse_args().exemplars
    warnings.simplefilter("ignore", tcil.CalibrationWarning)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    memory, network = Memory(count // BATCH), Network()
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    for index in range(40):
        images, labels = memory.batch(index)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    labels = NEW[0] + torch.arange(200) % 2
    valid = 4 * torch.randn(200, 3, 224, 224) + 0.06 * memory.patterns[labels], labels
    before = peak()
    result = tcil.TCIL().fit(network, memory, valid, NEW).result_
    n, new, size = result.n_exemplars, result.n_new_exemplars, 3 * 224 * 224 * 4 / 1e9
    print(
        f"{n} exemplars ({n * size:.1f} GB of images), {new} of them new ({new * size:.2f} GB)\n"
        f"peak memory {before:.2f} GB before the fit, {peak():.2f} GB after\n"
        f"T {result.temperature:.3f}, magnitude {result.magnitude:.4f}, {', '.join(result.verdicts)}"
    )


if __name__ == "__main__":
    main()
