"""Datasets by name, each in its own file; anything else by `package.module:factory` or an entry point."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tcil.calibration.errors import invalid
from tcil.incremental.extensions import called, extension, found, resolve
from tcil.incremental.images import Dataset

__all__ = ["DATASETS", "DatasetEntry", "dataset_reader", "load_dataset"]


@dataclass(frozen=True)
class DatasetEntry:
    """A known dataset: one line on what it is, and the function that reads it from a folder."""

    meaning: str
    home: str
    needs_folder: bool = True

    def load(self, folder: Path | None) -> Dataset:
        """Read it; the module is imported only now."""
        dataset: Dataset = resolve(self.home, "dataset")(folder)
        return dataset


_HERE = "tcil.incremental.datasets"
_OWN = "a function of the --data folder that returns tcil's Dataset"
DATASETS = {
    "digits": DatasetEntry("scikit-learn's 8x8 digits, 10 classes; no files needed", f"{_HERE}.digits:load", False),
    "noisy-digits": DatasetEntry(
        "the same under noise: hard enough that confidence goes wrong", f"{_HERE}.digits:load_noisy", False
    ),
    "cifar10": DatasetEntry("CIFAR-10, 10 classes, from cifar-10-batches-py/", f"{_HERE}.cifar:load_cifar10"),
    "cifar100": DatasetEntry("CIFAR-100, 100 classes, from cifar-100-python/", f"{_HERE}.cifar:load_cifar100"),
    "tiny-imagenet": DatasetEntry(
        "Tiny-ImageNet, 200 classes of 64x64, from tiny-imagenet-200/", f"{_HERE}.tiny_imagenet:load"
    ),
    "image-folder": DatasetEntry(
        "your own images: DIR/train/CLASS/* and DIR/test/CLASS/*", f"{_HERE}.image_folder:load"
    ),
}


def load_dataset(name: str, folder: str | Path | None = None) -> Dataset:
    """A dataset by name from `folder`; one of the user's own is a factory, called with the folder.

    >>> from tcil.incremental.datasets import load_dataset
    >>> len(load_dataset("digits").test)
    898
    """
    root = None if folder is None else Path(folder).expanduser()
    read, entry = dataset_reader(name), DATASETS.get(name)
    if entry is not None and entry.needs_folder and root is None:
        raise invalid("data", "no folder", f"the folder that holds {name}", "Say --data DIR.")
    try:
        dataset = read(root) if entry else called("dataset", name, read, root, _OWN, passing=(OSError, ValueError))
    except OSError as error:
        raise invalid(
            "data", f"{root or 'no folder'}, where {name} cannot be read ({error})", "a folder of readable files"
        ) from error
    if not isinstance(dataset, Dataset):
        raise invalid("dataset", f"{name!r}, which returned {found(dataset)}", _OWN)
    return dataset


def dataset_reader(name: str) -> Callable[[Path | None], Dataset]:
    """What reads the dataset of that name from a folder; nothing is read yet."""
    if name in DATASETS:
        return DATASETS[name].load
    read: Callable[[Path | None], Dataset] = extension("dataset", name, DATASETS)
    try:
        inspect.signature(read).bind(None)
    except (TypeError, ValueError):
        raise invalid("dataset", repr(name), _OWN, f"It is {found(read)}.") from None
    return read
