"""The authors' ER checkpoints on CIFAR-100 (seed 1, validation size 100), ready to calibrate.

The data is not part of this project. TCIL_DATA names a folder with `cifar-100-python/` (the original python version)
and `official-er-cifar100/` (the authors' checkpoints and index files).
"""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tcil

CHECKPOINTS = (0, 2, 4, 6, 8)
# The constants that the authors normalise with.
MEAN, STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)


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


def data_folder() -> Path | None:
    """The folder that TCIL_DATA names, if it holds what is needed."""
    folder = Path(os.environ.get("TCIL_DATA", "data")).expanduser()
    wanted = [folder / "cifar-100-python" / "train", folder / "official-er-cifar100"]
    return folder if all(path.exists() for path in wanted) else None


class _ArraysOnly(pickle.Unpickler):
    """CIFAR's files are pickles: only numpy arrays and plain containers may come out of them."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray") and name in (
            "ndarray",
            "dtype",
            "_reconstruct",
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a CIFAR file")


@cache
def _split(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    content = (folder / "cifar-100-python" / name).read_bytes()
    record = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    return torch.from_numpy(record[b"data"]).view(-1, 3, 32, 32), torch.tensor(record[b"fine_labels"])


def _prepared(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def load(folder: Path, index: int) -> OfficialTask:
    """The checkpoint after task `index` (from 0)."""
    stem = folder / "official-er-cifar100"
    suffix = f"1_seed_10_tasks_100_val_{index}_task"
    model = tcil.networks.resnet32()
    model.load_state_dict(torch.load(stem / f"ER_{suffix}.pt", weights_only=True, map_location="cpu"))
    train, test = _split(folder, "train"), _split(folder, "test")
    chosen = {
        kind: torch.from_numpy(np.load(stem / f"ER_{kind}_indices_{suffix}.npy", allow_pickle=False))
        for kind in ("buffer", "valid")
    }
    seen = 10 * (index + 1)
    rows = test[1] < seen
    return OfficialTask(
        index,
        model.eval(),
        (_prepared(train[0][chosen["buffer"]]), train[1][chosen["buffer"]]),
        (_prepared(train[0][chosen["valid"]]), train[1][chosen["valid"]]),
        (_prepared(test[0][rows]), test[1][rows]),
        range(seen - 10, seen),
        seen,
    )
