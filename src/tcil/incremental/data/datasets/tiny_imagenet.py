"""Tiny-ImageNet from its folder; its labelled `val` images are the test set."""

from __future__ import annotations

from pathlib import Path

import torch

from tcil.foundation.files import read_regular
from tcil.incremental.data.datasets.files import require, unreadable
from tcil.incremental.data.datasets.pictures import BICUBIC, decode
from tcil.incremental.data.images import Dataset, ImageSet

SIDE = 64


def load(folder: Path, image_side: int | None = None) -> Dataset:
    """Tiny-ImageNet from `folder`/tiny-imagenet-200, or from a folder of the same layout with fewer classes.

    `image_side` is 64 pixels by default. Other sizes are scaled by area averaging and cached separately.
    """
    side = image_side or SIDE
    ending, scaling = ("cache.safetensors", BICUBIC) if side == SIDE else (f"cache-{side}.safetensors", "BOX")
    where = f"Run 'tcil download tiny-imagenet --data {folder}', or unpack the release so that its train/ is there."
    nested = folder / "tiny-imagenet-200"
    root = folder if (folder / "wnids.txt").exists() else require(nested, where)
    present = {path.name for path in require(root / "train", where).iterdir() if path.is_dir()}
    listed = _text(require(root / "wnids.txt", where)).split()
    if set(listed) - present:
        raise unreadable(f"{root} without train/{sorted(set(listed) - present)[0]}", "every class of wnids.txt", where)
    ids = [name for name in listed if name in present]
    column = {name: i for i, name in enumerate(ids)}
    train_paths, train_labels = [], []
    for name in ids:
        files = sorted((root / "train" / name / "images").glob("*.JPEG"))
        train_paths += files
        train_labels += [column[name]] * len(files)
    test_paths, test_labels = [], []
    annotations = _text(require(root / "val" / "val_annotations.txt", where)).splitlines()
    for line in annotations:
        file, name = line.split("\t")[:2]
        if name in column:
            test_paths.append(require(root / "val" / "images" / file, where))
            test_labels.append(column[name])
    if not train_paths or not test_paths:
        raise unreadable(f"{root} with {len(train_paths)} training and {len(test_paths)} test images", "some of each")
    words = dict(line.split("\t")[:2] for line in _text(root / "words.txt").splitlines() if "\t" in line)
    return Dataset(
        name="tiny-imagenet",
        train=ImageSet(decode(train_paths, side, root / f"train.{ending}", scaling), torch.tensor(train_labels)),
        test=ImageSet(decode(test_paths, side, root / f"val.{ending}", scaling), torch.tensor(test_labels)),
        class_names=tuple(words.get(name, name).split(",")[0] for name in ids),
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
    )


def _text(path: Path) -> str:
    return read_regular(path).decode() if path.exists() else ""
