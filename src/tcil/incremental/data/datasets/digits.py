"""scikit-learn's digits: 1,797 real 8x8 images, always at hand; clean, or with noise that makes them hard."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tcil.incremental.data.images import Dataset, ImageSet

# In units of the pixels' own deviation. Chosen so that networks are where the paper's are: right on their exemplars,
# over-confident on the test set.
NOISE = 1.2


def load(folder: Path | None = None) -> Dataset:
    """The images as they are."""
    images, labels = _read()
    return _dataset("digits", images, labels, padding=1)


def load_noisy(folder: Path | None = None) -> Dataset:
    """The images at a quarter of their contrast, so that fixed Gaussian noise fits into 0..255 beside them."""
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
    """Every second image is for the test, so that both halves have all writers and classes."""
    images = (pixels * 255).round().to(torch.uint8)
    train, test = slice(0, None, 2), slice(1, None, 2)
    known = images[train].float() / 255
    return Dataset(
        name=name,
        train=ImageSet(images[train], labels[train]),
        test=ImageSet(images[test], labels[test]),
        class_names=tuple(str(d) for d in range(10)),
        mean=(float(known.mean()),),
        std=(float(known.std()),),
        padding=padding,
        flip=False,
    )
