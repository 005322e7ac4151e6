"""Tiny-ImageNet from its folder; its labelled `val` images are the test set."""

from __future__ import annotations

from pathlib import Path

import torch

from tcil.calibration.errors import invalid
from tcil.incremental.datasets.files import require
from tcil.incremental.datasets.pictures import decode
from tcil.incremental.images import Dataset, ImageSet

SIDE = 64


def load(folder: Path) -> Dataset:
    """`folder`/tiny-imagenet-200, or a folder of the same layout with fewer classes."""
    where = f"Run 'tcil download tiny-imagenet --data {folder}', or unpack the release so that its train/ is there."
    nested = folder / "tiny-imagenet-200"
    root = folder if (folder / "wnids.txt").exists() else require(nested, where)
    present = {path.name for path in require(root / "train", where).iterdir() if path.is_dir()}
    listed = require(root / "wnids.txt", where).read_text().split()
    if set(listed) - present:
        raise invalid(
            "data", f"{root} without train/{sorted(set(listed) - present)[0]}", "every class of wnids.txt", where
        )
    ids = [name for name in listed if name in present]
    column = {name: i for i, name in enumerate(ids)}
    train_paths, train_labels = [], []
    for name in ids:
        found = sorted((root / "train" / name / "images").glob("*.JPEG"))
        train_paths += found
        train_labels += [column[name]] * len(found)
    test_paths, test_labels = [], []
    annotations = require(root / "val" / "val_annotations.txt", where).read_text().splitlines()
    for line in annotations:
        file, name = line.split("\t")[:2]
        if name in column:
            test_paths.append(require(root / "val" / "images" / file, where))
            test_labels.append(column[name])
    if not train_paths or not test_paths:
        raise invalid(
            "data", f"{root} with {len(train_paths)} training and {len(test_paths)} test images", "some of each"
        )
    words = dict(line.split("\t")[:2] for line in _lines(root / "words.txt") if "\t" in line)
    return Dataset(
        name="tiny-imagenet",
        train=ImageSet(decode(train_paths, SIDE, root / "train.cache.safetensors"), torch.tensor(train_labels)),
        test=ImageSet(decode(test_paths, SIDE, root / "val.cache.safetensors"), torch.tensor(test_labels)),
        class_names=tuple(words.get(name, name).split(",")[0] for name in ids),
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
    )


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
