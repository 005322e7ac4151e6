"""A cache of the features that a frozen backbone computes for a dataset, in a folder named after its content.

Each file holds the features of a part of the images, in half precision. Files are written atomically, so that
interrupted work resumes with the next file and several processes may fill the same folder. They carry a checksum and
their own name; damaged files, those in the place of another and those of older versions are computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor, nn

from tcil.foundation.boundary import inside
from tcil.foundation.checksums import Damaged, open_tensors, seal_tensors
from tcil.foundation.files import make_folder, read_regular, replace_file
from tcil.foundation.folding import folded_copy
from tcil.incremental.data.images import Dataset, ImageSet
from tcil.incremental.pretrained.backbones import Backbone

FORMAT = 1  # of the files; part of the folder's name, and so of what identifies the images of a stored run
_SEAL = {"features": "sealed"}  # files of older versions have no such note, and no checksum
ROWS, BATCH = 2000, 25  # images per file and per forward pass; on a CPU 25 are 1.5 times as fast as 50

OnFile = Callable[[int, int], None]  # called with the number of finished files and of all files


class Cut(StrEnum):
    """Where the backbone is split; the part before is computed once."""

    MAPS = "maps"  # before the last block, which is then trained
    FEATURES = "features"  # after it


@dataclass(frozen=True)
class FeatureCache:
    """The cached features of one dataset by one backbone.

    Parameters
    ----------
    folder : Path
        Folder of all caches; this one is a subfolder. Like those of runs, it may not be or contain a link.
    backbone : Backbone
        The backbone that computes the features.
    side : int
        Side in pixels to which images are scaled first.
    """

    folder: Path
    backbone: Backbone
    side: int

    def dataset(self, images: Dataset, cut: Cut, on_file: OnFile = lambda done, files: None) -> Dataset:
        """The dataset with features instead of images; features that are not cached yet are computed.

        All features are divided by one number, their root mean square over the training images, so that inputs are on
        the same scale as normalised images.
        """
        fingerprint = images.fingerprint()
        home = self.home(str(fingerprint["sha256"]))
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
        note = {**fingerprint, "sha256": digest}
        return replace(images, train=train, test=test, mean=(0.0,), std=(size,), padding=0, flip=False, source=note)

    def home(self, images: str) -> Path:
        """The folder for images with this checksum; it depends on the weights, the side and the normalisation."""
        b = self.backbone
        content = [FORMAT, b.name, b.digest(), b.mean, b.std, self.side, images]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
        return self.folder / f"{b.name}-{self.side}px-{key}"

    def _part(self, home: Path, part: ImageSet, name: str, start: int, cut: Cut, compute: _Compute) -> Tensor:
        """Features of the images of one file."""
        pixels = part.images[start : start + ROWS]
        file = self._file(home, cut, f"{name}-{start:07d}.safetensors")
        stored = _read(file, len(pixels))
        if stored is None:
            below = None if cut is Cut.MAPS else _read(self._file(home, Cut.MAPS, file.name), len(pixels))
            stored = compute(pixels, below, cut)
            make_folder(file.parent)
            replace_file(file, seal_tensors({cut.value: stored}, _SEAL, _own_name(file)))
        return stored

    def _file(self, home: Path, cut: Cut, name: str) -> Path:
        """The path of a file; raises if a part of it, from the folder of all caches on, is a link."""
        out = self.folder.parent
        return inside(out, str(home.relative_to(out) / cut.value / name))


class _Compute:
    """The backbone with folded batch norms, created when it is first needed."""

    def __init__(self, backbone: Backbone, side: int) -> None:
        self._backbone, self._side = backbone, side
        self._parts: tuple[nn.Module, nn.Module] | None = None

    def __call__(self, pixels: Tensor, maps: Tensor | None, cut: Cut) -> Tensor:
        """Maps or features in half precision; features are always computed from maps in half precision."""
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
    """The content of a cache file; None if it is missing, damaged or of an older version."""
    try:
        stored, note = open_tensors(read_regular(file), _own_name(file))
    except (OSError, Damaged):
        return None
    tensor = stored.get(file.parent.name) if note == _SEAL else None
    if tensor is None or tensor.ndim != 4 or len(tensor) != n_rows or tensor.dtype != torch.half:
        return None
    return tensor if bool(torch.isfinite(tensor).all()) else None


def _own_name(file: Path) -> str:
    """The name that a file carries: the key of its cache, the cut and the file. A backbone's name may have spaces."""
    return f"{file.parent.parent.name.rpartition('-')[2]}/{file.parent.name}/{file.name}"


def _root_mean_square(features: Tensor) -> float:
    """The root mean square, rounded to three digits, which do not depend on the order of summation."""
    squares = sum(float(some.double().square().sum()) for some in features.split(ROWS))
    return float(f"{(squares / features.numel()) ** 0.5:.3g}") or 1.0
