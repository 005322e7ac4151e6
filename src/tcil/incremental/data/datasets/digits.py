"""scikit-learn's digits: 1,797 real 8x8 images that need no download, clean or with noise."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tcil.incremental.data.images import Dataset, ImageSet

# In units of the pixels' standard deviation. Chosen so that networks behave as in the paper: correct on their
# exemplars, over-confident on the test set.
NOISE = 1.2


def load(folder: Path | None = None) -> Dataset:
    """The original images."""
    images, labels = _read()
    return _dataset("digits", images, labels, padding=1)


def load_noisy(folder: Path | None = None) -> Dataset:
    """The images at a quarter of their contrast with fixed Gaussian noise, so that the sum fits into 0..255."""
    images, labels = _read()
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    noisy = 0.5 + 0.25 * (images - 0.5 + NOISE * images.std() * noise)
    return _dataset("noisy-digits", noisy.clamp(0, 1), labels, padding=0)


def _read() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(digits.target, dtype=torch.long)


def _dataset(name: str, pixels: Tensor, labels: Tensor, padding: int) -> Dataset:
    """Use every second image for the test set, so that both halves have all writers and classes."""
    images = (pixels * 255).round().to(torch.uint8)
    train, test = slice(0, None, 2), slice(1, None, 2)
    train_pixels = images[train].float() / 255
    return Dataset(
        name=name,
        train=ImageSet(images[train], labels[train]),
        test=ImageSet(images[test], labels[test]),
        class_names=tuple(str(d) for d in range(10)),
        mean=(float(train_pixels.mean()),),
        std=(float(train_pixels.std()),),
        padding=padding,
        flip=False,
    )
