"""Images in memory as uint8 tensors; crop, flip and normalisation are batched tensor operations."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tcil.foundation.errors import invalid
from tcil.incremental.data.layout import Layout

_KINDS = (torch.uint8, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images and their labels.

    Attributes
    ----------
    images : tensor (N, C, H, W)
        Images in uint8, or feature maps of a frozen backbone in half or single precision.
    labels : tensor (N,)
        Class labels in int64.

    Examples
    --------
    >>> import torch
    >>> from tcil.extending import ImageSet
    >>> len(ImageSet(torch.zeros(5, 3, 8, 8, dtype=torch.uint8), torch.arange(5)))
    5
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        for name, value in (("images", self.images), ("labels", self.labels)):
            if not isinstance(value, Tensor):
                raise invalid(name, type(value).__name__, "a torch tensor", "torch.from_numpy(array) makes one.")
        if self.images.dtype not in _KINDS or self.images.ndim != 4:
            raise invalid(
                "images",
                f"{self.images.dtype} of shape {tuple(self.images.shape)}",
                "uint8 images (N, C, H, W), or feature maps",
            )
        if self.labels.dtype != torch.long or self.labels.shape != (len(self.images),):
            raise invalid(
                "labels", f"{self.labels.dtype} of shape {tuple(self.labels.shape)}", f"int64, ({len(self.images)},)"
            )

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A classification dataset: training and test images, and their normalisation and augmentation.

    Attributes
    ----------
    name : str
        Name in run folders and tables.
    train, test : ImageSet
        Training and test images.
    class_names : tuple of str
        Name of each class, by label.
    mean, std : tuple of float
        Mean and standard deviation of each channel, for pixels from 0 to 1.
    padding : int
        Padding of random crops, in pixels.
    flip : bool
        Whether images may be mirrored (digits may not).
    layout : Layout
        Memory layout of batches.
    revision : int
        Version of the reader's normalisation: runs of other revisions are not resumed.
    source : dict, optional
        Identifies the original images if this dataset holds features computed from them. Default: a checksum.

    Examples
    --------
    >>> from tcil.extending import load_dataset
    >>> digits = load_dataset("digits")
    >>> digits.n_classes, digits.image_shape, digits.flip
    (10, (1, 8, 8), False)
    """

    name: str
    train: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int = 4
    flip: bool = True
    layout: Layout = Layout.CHANNELS_LAST
    revision: int = 1
    source: Mapping[str, int | str] | None = None

    def __post_init__(self) -> None:
        channels, shape = self.image_shape[0], tuple(self.test.images.shape[1:])
        for name, part in (("train", self.train), ("test", self.test)):
            if not len(part):
                raise invalid(name, "no images", "some of every class")
        if shape != self.image_shape:
            raise invalid("test", f"images of shape {shape}", f"{self.image_shape}, as train has")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if self.train.images.dtype == torch.uint8 and len(values) not in (1, channels):
                raise invalid(name, f"{len(values)} numbers", f"one for each of {channels} channels, or one for all")
            if not all(math.isfinite(value) and (name == "mean" or value > 0) for value in values):
                raise invalid(name, str(tuple(values)), "finite numbers" + (" above 0" if name == "std" else ""))

    @property
    def n_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Channels, height and width."""
        return tuple(self.train.images.shape[1:])

    def fingerprint(self) -> dict[str, int | str]:
        """Identifies these images and labels."""
        if self.source is not None:
            return dict(self.source)
        digest = hashlib.sha256()
        for part in (self.train, self.test):
            for tensor in (part.images, part.labels):
                digest.update(tensor.cpu().contiguous().numpy().tobytes())
        revision = {"revision": self.revision} if self.revision > 1 else {}  # revision 1 is stored without a number
        return {"train": len(self.train), "test": len(self.test), "sha256": digest.hexdigest(), **revision}

    def treatment(self) -> dict[str, object]:
        """How these images become inputs of a network: normalised, cropped after padding, mirrored."""
        return {"mean": list(self.mean), "std": list(self.std), "padding": self.padding, "flip": self.flip}

    def to(self, device: torch.device) -> Dataset:
        """The same dataset with its images on `device`; labels stay on the CPU, where tasks are split."""
        train, test = (ImageSet(part.images.to(device), part.labels) for part in (self.train, self.test))
        return replace(self, train=train, test=test)


class Pixels:
    """Turns rows of an image set into network inputs.

    >>> import torch
    >>> from tcil.incremental.data.datasets import load_dataset
    >>> from tcil.incremental.data.images import Pixels
    >>> digits = load_dataset("digits")
    >>> pixels = Pixels(digits)
    >>> rows = torch.arange(4)
    >>> pixels.plain(digits.train, rows).shape
    torch.Size([4, 1, 8, 8])
    >>> pixels.augmented(digits.train, rows, torch.Generator().manual_seed(0)).shape
    torch.Size([4, 1, 8, 8])
    """

    def __init__(self, dataset: Dataset) -> None:
        device = dataset.train.images.device
        std = torch.tensor(dataset.std, device=device).view(1, -1, 1, 1)
        # (x / 255 - mean) / std as one multiplication and one addition.
        self._scale = 1.0 / ((255.0 if dataset.train.images.dtype == torch.uint8 else 1.0) * std)
        self._shift = -torch.tensor(dataset.mean, device=device).view(1, -1, 1, 1) / std
        self._padding, self._flip, self._form = dataset.padding, dataset.flip, dataset.layout.form

    def plain(self, part: ImageSet, rows: Tensor) -> Tensor:
        """Normalised images of these rows."""
        return self._normalised(part.images.index_select(0, rows.to(part.images.device)))

    @property
    def n_views(self) -> int:
        """The number of different images that augmentation can produce from one."""
        return (2 * self._padding + 1) ** 2 * (2 if self._flip else 1)

    def views(self, part: ImageSet, rows: Tensor) -> list[Tensor]:
        """All augmented versions, for datasets without crops: the images and their mirror images."""
        assert self._padding == 0
        plain = self.plain(part, rows)
        return [plain, plain.flip(3)] if self._flip else [plain]

    def augmented(self, part: ImageSet, rows: Tensor, generator: torch.Generator, keep: slice = slice(None)) -> Tensor:
        """Normalised images after a random crop and, if the dataset allows it, a random flip.

        With `keep`, only this part of them is computed; the random draws of an image do not depend on the part.
        """
        return self.drawn(part, rows, generator, keep)[0]

    def drawn(
        self, part: ImageSet, rows: Tensor, generator: torch.Generator, keep: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Augmented images, and their index in `views` for datasets without crops: 0 unchanged, 1 mirrored."""
        images = part.images.index_select(0, rows[keep].to(part.images.device))
        (count, _, height, width), device, pad = images.shape, images.device, self._padding
        offsets = torch.randint(0, 2 * pad + 1, (2, len(rows), 1), generator=generator)[:, keep].to(device)
        if pad:
            padded = torch.nn.functional.pad(images, (pad, pad, pad, pad))
            windows = padded.unfold(2, height, 1).unfold(3, width, 1)
            down, across = offsets.squeeze(2)
            images = windows[torch.arange(count, device=device), :, down, across]
        mirrored = torch.zeros(count, 1, dtype=torch.bool, device=device)
        if self._flip:
            mirrored = (torch.rand(len(rows), 1, generator=generator) < 0.5)[keep].to(device)
            images = torch.where(mirrored[:, :, None, None], images.flip(3), images)
        return self._normalised(images), mirrored.squeeze(1).long()

    def _normalised(self, images: Tensor) -> Tensor:
        """Normalised float images in the dataset's layout, which is changed last since it is slow for bytes."""
        return images.float().mul_(self._scale).add_(self._shift).contiguous(memory_format=self._form)
