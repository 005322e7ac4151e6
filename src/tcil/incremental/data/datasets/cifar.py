"""CIFAR-10 and CIFAR-100 from the folders of their python version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tcil.incremental.data.datasets.files import check_md5, read_pickle, require, unreadable
from tcil.incremental.data.images import Dataset, ImageSet

_CIFAR10 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
}
_CIFAR100 = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}


def load_cifar10(folder: Path) -> Dataset:
    """CIFAR-10 from `folder`/cifar-10-batches-py or from `folder` itself, normalised as by the paper's authors."""
    root, where = _locate(folder, "cifar-10-batches-py", "test_batch", "cifar10")
    batches = [name for name in _CIFAR10 if name.startswith("data_batch")]
    train = _images(root, batches, b"labels", _CIFAR10, where)
    test = _images(root, ["test_batch"], b"labels", _CIFAR10, where)
    names = _names(root, "batches.meta", b"label_names", _CIFAR10, where)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    return Dataset("cifar10", train, test, names, mean, std, revision=2)


def load_cifar100(folder: Path) -> Dataset:
    """CIFAR-100 (fine classes) from `folder`/cifar-100-python or from `folder` itself, normalised as by the authors."""
    root, where = _locate(folder, "cifar-100-python", "train", "cifar100")
    train = _images(root, ["train"], b"fine_labels", _CIFAR100, where)
    test = _images(root, ["test"], b"fine_labels", _CIFAR100, where)
    names = _names(root, "meta", b"fine_label_names", _CIFAR100, where)
    return Dataset("cifar100", train, test, names, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))


def _locate(folder: Path, name: str, sign: str, dataset: str) -> tuple[Path, str]:
    where = (
        f"Run 'tcil download {dataset} --data {folder}', or unpack the python version so that {folder / name} exists."
    )
    return (folder if (folder / sign).exists() else require(folder / name, where)), where


def _read(root: Path, name: str, sums: dict[str, str], where: str) -> tuple[Path, dict[bytes, Any]]:
    path = require(root / name, where)
    check_md5(path, sums[name], where)
    return path, read_pickle(path)


def _images(root: Path, files: list[str], labels_key: bytes, sums: dict[str, str], where: str) -> ImageSet:
    pixels, labels = [], []
    for name in files:
        path, record = _read(root, name, sums, where)
        data, file_labels = record.get(b"data"), record.get(labels_key)
        if not isinstance(data, np.ndarray) or file_labels is None or data.shape != (len(file_labels), 3072):
            raise unreadable(f"{path} without 3x32x32 images and their labels", "the file of the release", where)
        pixels.append(torch.from_numpy(np.ascontiguousarray(data)).view(-1, 3, 32, 32))
        labels.append(torch.as_tensor(file_labels, dtype=torch.long))
    return ImageSet(torch.cat(pixels), torch.cat(labels))


def _names(root: Path, file: str, key: bytes, sums: dict[str, str], where: str) -> tuple[str, ...]:
    path, record = _read(root, file, sums, where)
    names = record.get(key)
    if not isinstance(names, list):
        raise unreadable(f"{path} without class names", "the file of the release", where)
    return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)
