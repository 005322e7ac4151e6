"""Datasets by name, one file each; user datasets by `package.module:factory` or an entry point."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tcil.foundation.errors import invalid, shortened
from tcil.foundation.extensions import called, extension, found, resolve
from tcil.incremental.data.datasets.files import unreadable
from tcil.incremental.data.images import Dataset

__all__ = ["DATASETS", "DatasetEntry", "dataset_reader", "load_dataset"]


@dataclass(frozen=True)
class DatasetEntry:
    """A built-in dataset: a one-line description, and the function that reads it from a folder.

    `options`: names in `OPTIONS` that the function accepts as keyword arguments.
    """

    meaning: str
    home: str
    needs_folder: bool = True
    options: tuple[str, ...] = ()

    def load(self, folder: Path | None, **options: int) -> Dataset:
        """Read the dataset; its module is imported only now."""
        dataset: Dataset = resolve(self.home, "dataset")(folder, **options)
        return dataset


_HERE = "tcil.incremental.data.datasets"
# Options of datasets: unit, smallest and largest value.
OPTIONS = {
    "image_side": ("of pixels ", 1, 9999),
    "train_per_class": ("of images ", 1, 100_000),
    "test_per_class": ("of images ", 1, 100_000),
    "data_seed": ("", 0, 2**63 - 1),
}
_DRAWN = ("train_per_class", "test_per_class", "data_seed")
_OWN = "a function of the --data folder that returns tcil's Dataset"
DATASETS = {
    "letters": DatasetEntry(
        "20 letters drawn from matplotlib's fonts, in any number of images; no files needed",
        f"{_HERE}.letters:load", False, _DRAWN,
    ),
    "letters-large": DatasetEntry(
        "40 distinct letters and digits, drawn in the same way", f"{_HERE}.letters:load_large", False, _DRAWN
    ),
    "digits": DatasetEntry("scikit-learn's 8x8 digits, 10 classes; no files needed", f"{_HERE}.digits:load", False),
    "noisy-digits": DatasetEntry(
        "the digits with noise, hard enough for over-confidence", f"{_HERE}.digits:load_noisy", False
    ),
    "cifar10": DatasetEntry("CIFAR-10, 10 classes, from cifar-10-batches-py/", f"{_HERE}.cifar:load_cifar10"),
    "cifar100": DatasetEntry("CIFAR-100, 100 classes, from cifar-100-python/", f"{_HERE}.cifar:load_cifar100"),
    "tiny-imagenet": DatasetEntry(
        "Tiny-ImageNet, 200 classes of 64x64, from tiny-imagenet-200/", f"{_HERE}.tiny_imagenet:load",
        options=("image_side",)
    ),
    "image-folder": DatasetEntry(
        "your own images: DIR/train/CLASS/* and DIR/test/CLASS/*", f"{_HERE}.image_folder:load", options=("image_side",)
    ),
}  # fmt: skip


def load_dataset(
    name: str,
    folder: str | Path | None = None,
    image_side: int | None = None,
    *,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    data_seed: int | None = None,
) -> Dataset:
    """Load a dataset by name.

    Parameters
    ----------
    name : str
        A built-in dataset, an entry point in `tcil.datasets`, or `package.module:name` of a function that takes the
        folder.
    folder : str or Path, optional
        Folder with the files of the dataset.
    image_side : int, optional
        Side in pixels to which images are scaled; only for image-folder (default 32) and tiny-imagenet (default 64).
    train_per_class, test_per_class : int, optional
        Number of images per class; only for letters and letters-large.
    data_seed : int, optional
        Seed of the images (default 0); only for letters and letters-large.

    Returns
    -------
    Dataset
        The dataset, with its images in memory.

    Examples
    --------
    >>> from tcil.extending import load_dataset
    >>> len(load_dataset("digits").test)
    898
    """
    if folder is not None and not isinstance(folder, (str, os.PathLike)):
        raise invalid("data", repr(folder), "the path of a folder")
    root = None if folder is None else Path(folder).expanduser()
    read = dataset_reader(
        name,
        image_side=image_side,
        train_per_class=train_per_class,
        test_per_class=test_per_class,
        data_seed=data_seed,
    )
    entry = DATASETS.get(name)
    if entry is not None and entry.needs_folder and root is None:
        raise unreadable("no folder", f"the folder that holds {name}", "Pass --data DIR.")
    try:
        dataset = read(root) if entry else called("dataset", name, read, root, _OWN, passing=(OSError, ValueError))
    except OSError as error:
        raise unreadable(
            f"{root or 'no folder'}, where {name} cannot be read ({error})", "a folder of readable files"
        ) from error
    if not isinstance(dataset, Dataset):
        raise invalid("dataset", f"{name!r}, which returned {found(dataset)}", _OWN)
    for kind, part in (("training", dataset.train), ("test", dataset.test)):
        labels, n_classes = part.labels.unique().tolist(), dataset.n_classes
        if unknown := [label for label in labels if not 0 <= label < n_classes]:
            given = f"{name!r}, which has {kind} images with the labels {shortened(unknown)}"
            advice = "Leave out images without a label." if min(unknown) < 0 else ""
            raise invalid(
                "dataset", given, f"labels from 0 to {n_classes - 1}, one for each of its class names", advice
            )
    return dataset


def dataset_reader(name: str, **options: int | None) -> Callable[[Path | None], Dataset]:
    """A function that reads the dataset of that name, with these options, from a folder; nothing is read yet."""
    given = {option: value for option, value in options.items() if value is not None}
    entry = DATASETS.get(name)
    read = _own_reader(name) if entry is None else entry.load
    for option, value in given.items():
        if entry is None or option not in entry.options:
            able = ", ".join(other for other, accepts in DATASETS.items() if option in accepts.options)
            raise invalid(option, f"{value} for {name}", f"none, or the dataset {able}")
        unit, least, most = OPTIONS[option]
        if type(value) is not int or not least <= value <= most:
            raise invalid(option, f"{value!r}", f"a whole number {unit}from {least} to {most}")
    return partial(read, **given) if given else read


def _own_reader(name: str) -> Callable[[Path | None], Dataset]:
    read: Callable[[Path | None], Dataset] = extension("dataset", name, DATASETS)
    try:
        inspect.signature(read).bind(None)
    except (TypeError, ValueError):
        raise invalid("dataset", repr(name), _OWN, f"It is {found(read)}.") from None
    return read
