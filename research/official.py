"""The authors' ER checkpoints on CIFAR-100 (seed 1, validation size 100), ready to calibrate.

The data is not part of this project. TCIL_DATA names a folder with `cifar-100-python/` (the original python version)
and `official-er-cifar100/` (the authors' checkpoints and index files).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import tcil
from tcil.incremental.data.datasets import load_dataset
from tcil.incremental.data.images import Dataset, ImageSet, Pixels

CHECKPOINTS = (0, 2, 4, 6, 8)


@dataclass(frozen=True)
class OfficialTask:
    """A checkpoint with what calibration may use of its task, and the test set of all classes seen."""

    index: int
    model: tcil.networks.ResNet
    memory: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    new_classes: range
    seen: int

    @property
    def imbalance(self) -> float | None:
        """Training images of a new class (500 less 10 for validation) for each exemplar of an old one."""
        return 490 / (2000 // self.new_classes.start) if self.index else None


def data_folder() -> Path | None:
    """The folder that TCIL_DATA names, if it holds what is needed."""
    folder = Path(os.environ.get("TCIL_DATA", "data")).expanduser()
    wanted = [folder / "cifar-100-python" / "train", folder / "official-er-cifar100"]
    return folder if all(path.exists() for path in wanted) else None


@cache
def _cifar(folder: Path) -> Dataset:
    return load_dataset("cifar100", folder)


def load(folder: Path, index: int) -> OfficialTask:
    """The checkpoint after task `index` (from 0)."""
    stem = folder / "official-er-cifar100"
    suffix = f"1_seed_10_tasks_100_val_{index}_task"
    model = tcil.networks.resnet32()
    model.load_state_dict(torch.load(stem / f"ER_{suffix}.pt", weights_only=True, map_location="cpu"))
    data = _cifar(folder)
    pixels = Pixels(data)
    chosen = {
        kind: torch.from_numpy(np.load(stem / f"ER_{kind}_indices_{suffix}.npy", allow_pickle=False))
        for kind in ("buffer", "valid")
    }
    seen = 10 * (index + 1)
    rows = (data.test.labels < seen).nonzero().squeeze(1)

    def examples(part: ImageSet, rows: Tensor) -> tuple[Tensor, Tensor]:
        return pixels.plain(part, rows), part.labels[rows]

    return OfficialTask(
        index,
        model.eval(),
        examples(data.train, chosen["buffer"]),
        examples(data.train, chosen["valid"]),
        examples(data.test, rows),
        range(seen - 10, seen),
        seen,
    )
