"""A folder of the user's images: train/CLASS/* and test/CLASS/* (or val/CLASS/*).

Files and folders whose names begin with a dot, such as .ipynb_checkpoints, are skipped.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from tcil.incremental.data.datasets.files import require, unreadable
from tcil.incremental.data.datasets.pictures import decode
from tcil.incremental.data.images import Dataset, ImageSet

ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"}


SIDE = 32  # default side in pixels


def load(folder: Path, image_side: int | None = None) -> Dataset:
    """Classes are the sub-folders of train/, in alphabetical order; images are scaled to `image_side` pixels."""
    side = image_side or SIDE
    where = f"Put images at {folder}/train/CLASS/ and {folder}/test/CLASS/."
    root = require(folder / "train", where)
    test_root = folder / "test" if (folder / "test").exists() else require(folder / "val", where)
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and not _hidden(path.name))
    if len(names) < 2:
        raise unreadable(f"{len(names)} class folders in {root}", "at least two", where)
    others = sorted(path.name for path in test_root.iterdir() if path.name not in names and _image_below(path))
    if others:
        what = f"the class folders {others} in {test_root}, which are not in {root}"
        raise unreadable(what, "the same classes in both", "Add training images of them, or move them away.")
    train, test = (_part(part, names, side, where) for part in (root, test_root))
    pixels = train.images.float().div_(255)
    mean, std = (pixels.mean(dim=(0, 2, 3)), pixels.std(dim=(0, 2, 3)).clamp(min=1e-3))
    return Dataset(
        folder.name, train, test, tuple(names), tuple(mean.tolist()), tuple(std.tolist()), padding=max(1, side // 8)
    )


def _image_below(path: Path) -> Path | None:
    """An image in this folder or below it; None for files and hidden folders."""
    if _hidden(path.name) or not path.is_dir():
        return None
    images = (below for below in path.rglob("*") if below.suffix.lower() in ENDINGS)
    return next((image for image in images if not _hidden(image.relative_to(path))), None)


def _hidden(path: str | Path) -> bool:
    """Whether a part of a relative path begins with a dot."""
    return any(part.startswith(".") for part in Path(path).parts)


def _part(root: Path, names: list[str], side: int, where: str) -> ImageSet:
    paths: list[Path] = []
    labels: list[int] = []
    left_out: list[Path] = []
    for label, name in enumerate(names):
        there = sorted(p for p in require(root / name, where).iterdir() if not _hidden(p.name))
        files = [p for p in there if p.suffix.lower() in ENDINGS]
        left_out += [p for p in there if p.suffix.lower() not in ENDINGS and p.is_file()]
        if not files:
            raise unreadable(f"no image in {root / name}", "at least one of every class", where)
        deeper = next(filter(None, map(_image_below, there)), None)
        if deeper is not None:
            raise unreadable(f"{deeper}, an image in a sub-folder of a class", "images in class folders only", where)
        paths += files
        labels += [label] * len(files)
    if left_out:
        endings = ", ".join(sorted({p.suffix.lower() or p.name for p in left_out})[:5])
        count = "1 file is" if len(left_out) == 1 else f"{len(left_out)} files are"
        warnings.warn(f"{root}: {count} not read as an image ({endings})", stacklevel=4)
    return ImageSet(decode(paths, side, root / f"cache-{side}.safetensors"), torch.tensor(labels))
