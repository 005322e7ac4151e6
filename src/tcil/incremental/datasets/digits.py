"""scikit-learn's digits: 1,797 real 8x8 images, always at hand."""

from __future__ import annotations

from pathlib import Path

import torch

from tcil.incremental.images import Dataset, ImageSet


def load(folder: Path | None = None) -> Dataset:
    """Every second image is for the test, so that both halves have all writers and classes."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    # 0..16 to 0..255, so that digits are images like the others.
    images = (torch.tensor(digits.images) * (255 / 16)).round().to(torch.uint8)[:, None]
    labels = torch.tensor(digits.target, dtype=torch.long)
    train, test = slice(0, None, 2), slice(1, None, 2)
    pixels = images[train].float() / 255
    return Dataset(
        name="digits",
        train=ImageSet(images[train], labels[train]),
        test=ImageSet(images[test], labels[test]),
        class_names=tuple(str(d) for d in range(10)),
        mean=(float(pixels.mean()),),
        std=(float(pixels.std()),),
        padding=1,
        flip=False,
    )
