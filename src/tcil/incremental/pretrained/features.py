"""What a frozen backbone makes of a dataset, computed once: files of a cache folder that is named after its content.

A file holds a part of the images, in half precision. It is whole or not there, so that work that was interrupted goes
on with the next file, and several processes may fill the same folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from tcil.foundation.files import make_folder, replace_file
from tcil.foundation.folding import folded_copy
from tcil.incremental.data.images import Dataset, ImageSet
from tcil.incremental.pretrained.backbones import Backbone

FORMAT = 1  # of the files; part of the folder's name
ROWS, BATCH = 2000, 50  # images of a file, and of a forward pass

OnFile = Callable[[int, int], None]  # of the files that are done, and of all


class Cut(StrEnum):
    """Where the backbone is cut: what comes before is computed once."""

    MAPS = "maps"  # before the last block, which is then trained
    FEATURES = "features"  # after it


@dataclass(frozen=True)
class FeatureCache:
    """The cached features of one dataset by one backbone.

    Parameters
    ----------
    folder : Path
        Where caches are; this one is a folder in it.
    backbone : Backbone
        What computes the features.
    side : int
        Pixels to which images are scaled before.
    """

    folder: Path
    backbone: Backbone
    side: int

    def dataset(self, images: Dataset, cut: Cut, on_file: OnFile = lambda done, files: None) -> Dataset:
        """The dataset with features in the place of its images, computed where they are not cached yet.

        Features are divided by their root mean square over the training images, one number for all of them, so that
        inputs are of the size that normalised images have.
        """
        own = images.fingerprint()
        home = self.home(str(own["sha256"]))
        parts = {"test": images.test, "train": images.train}
        files = [(name, start) for name, part in parts.items() for start in range(0, len(part), ROWS)]
        tensors: dict[str, list[Tensor]] = {name: [] for name in parts}
        compute = _Compute(self.backbone, self.side)
        for done, (name, start) in enumerate(files):
            on_file(done, len(files))
            tensors[name].append(self._part(home, parts[name], name, start, cut, compute))
        on_file(len(files), len(files))
        joined = {name: torch.cat(some) for name, some in tensors.items()}
        size = _root_mean_square(joined["train"])
        train, test = (
            ImageSet(joined[name].to(parts[name].images.device), parts[name].labels) for name in ("train", "test")
        )
        digest = hashlib.sha256(f"{home.name} {cut.value}".encode()).hexdigest()
        note = {**own, "sha256": digest}
        return replace(images, train=train, test=test, mean=(0.0,), std=(size,), padding=0, flip=False, source=note)

    def home(self, images: str) -> Path:
        """The folder for images with this checksum: another one for other weights, sides or normalisation."""
        b = self.backbone
        content = [FORMAT, b.name, b.digest(), b.mean, b.std, self.side, images]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
        return self.folder / f"{b.name}-{self.side}px-{key}"

    def _part(self, home: Path, part: ImageSet, name: str, start: int, cut: Cut, compute: _Compute) -> Tensor:
        """Features of the images of one file."""
        pixels = part.images[start : start + ROWS]
        file = home / cut.value / f"{name}-{start:07d}.safetensors"
        stored = _read(file, len(pixels))
        if stored is None:
            below = None if cut is Cut.MAPS else _read(home / Cut.MAPS.value / file.name, len(pixels))
            stored = compute(pixels, below, cut)
            make_folder(file.parent)
            replace_file(file, save({cut.value: stored}))
        return stored


class _Compute:
    """The backbone with folded batch norms, made when it is first needed."""

    def __init__(self, backbone: Backbone, side: int) -> None:
        self._backbone, self._side = backbone, side
        self._parts: tuple[nn.Module, nn.Module] | None = None

    def __call__(self, pixels: Tensor, maps: Tensor | None, cut: Cut) -> Tensor:
        """In half precision; features are made of maps in half precision, whether these were stored or not."""
        rows = []
        with torch.inference_mode():
            for some in range(0, len(pixels), BATCH):
                batch = pixels[some : some + BATCH]
                below = self._maps(batch) if maps is None else maps[some : some + BATCH]
                rows.append(below if cut is Cut.MAPS else self._features(below))
        return torch.cat(rows)

    def _folded(self, sample: Tensor) -> tuple[nn.Module, nn.Module]:
        if self._parts is None:
            trunk = folded_copy(self._backbone.trunk, sample)
            self._parts = trunk, folded_copy(self._backbone.last, trunk(sample))
        return self._parts

    def _maps(self, pixels: Tensor) -> Tensor:
        images = self._backbone.images(pixels, self._side)
        maps: Tensor = self._folded(images[:2])[0](images)
        return maps.half().cpu().contiguous()

    def _features(self, maps: Tensor) -> Tensor:
        last = self._backbone.last if self._parts is None else self._parts[1]
        features: Tensor = last(maps.float().contiguous(memory_format=torch.channels_last))
        return features.half().cpu()[:, :, None, None]


def _read(file: Path, n_rows: int) -> Tensor | None:
    """What a file of the cache holds; None where it is not there, or not whole."""
    try:
        with safe_open(file, framework="pt") as stored:
            tensor: Tensor = stored.get_tensor(file.parent.name)
    except (OSError, SafetensorError):
        return None
    right = tensor.ndim == 4 and len(tensor) == n_rows and tensor.dtype == torch.half
    return tensor if right and bool(torch.isfinite(tensor).all()) else None


def _root_mean_square(features: Tensor) -> float:
    """To three digits, which do not depend on the order of additions."""
    squares = sum(float(some.double().square().sum()) for some in features.split(ROWS))
    return float(f"{(squares / features.numel()) ** 0.5:.3g}") or 1.0
