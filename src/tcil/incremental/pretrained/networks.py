"""Networks on top of a pre-trained backbone: `pretrained:NAME`, with options after commas.

The frozen part of the backbone is run once (see `features`); the rest is trained, stored and calibrated.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from tcil.foundation.errors import invalid, unknown_name
from tcil.foundation.extensions import PRETRAINED
from tcil.foundation.options import Option
from tcil.incremental.data.images import Dataset
from tcil.incremental.pretrained.backbones import Backbone, load_backbone, scaled
from tcil.incremental.pretrained.features import Cut, FeatureCache, OnFile
from tcil.incremental.pretrained.heads import CosineHead

SIDE = 96
_MOST_PIXELS = 2048
_BLANK = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)


class HeadKind(Option):
    """The classification layer on top of a pre-trained backbone."""

    LINEAR = "linear", "a linear layer"
    COSINE = "cosine", "cosines between features and class weights, times a learned scale"


class Tuned(Option):
    """Which part of a pre-trained backbone is trained."""

    NONE = "none", "none: only the head is trained, on features that are computed once"
    LAST = "last", "the last block, on feature maps that are computed once"


class PretrainedNetwork(nn.Module):
    """The trained part on top of a frozen backbone: its last block, if that is tuned, and the head `fc`.

    Its inputs are cached features (N, F, 1, 1) or, with a last block, feature maps (N, C, H, W). Batch norms of that
    block keep their pre-trained statistics, because a task has few images and few classes.
    """

    def __init__(self, n_features: int, n_classes: int, head: HeadKind, last: nn.Module | None, scale: float) -> None:
        super().__init__()
        self.last = nn.Flatten() if last is None else last
        self.fc: nn.Linear = (nn.Linear if head is HeadKind.LINEAR else CosineHead)(n_features, n_classes)
        self.scale = scale

    def train(self, mode: bool = True) -> Self:
        """Set training mode, except for batch norms."""
        super().train(mode)
        for module in self.last.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def features(self, x: Tensor) -> Tensor:
        """The input of `fc`."""
        return cast(Tensor, self.last(x if self.scale == 1.0 else x * self.scale))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (N, classes)."""
        return cast(Tensor, self.fc(self.features(x)))


@dataclass(frozen=True)
class PretrainedFactory:
    """Creates networks on a pre-trained backbone; `inputs` computes their training data.

    Attributes
    ----------
    backbone : str
        The name of the backbone.
    side : int
        Side in pixels to which images are scaled.
    head : HeadKind
        The classification layer.
    tune : Tuned
        The part that is trained besides the head.
    input_scale : float
        The number by which cached maps were divided; the last block multiplies them by it again.
    """

    backbone: str
    side: int = SIDE
    head: HeadKind = HeadKind.LINEAR
    tune: Tuned = Tuned.NONE
    input_scale: float = 1.0

    @property
    def cut(self) -> Cut:
        """Where the backbone is split."""
        return Cut.FEATURES if self.tune is Tuned.NONE else Cut.MAPS

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of the network's input for one image."""
        backbone = loaded(self.backbone)
        if self.cut is Cut.FEATURES:
            return (_width(self.backbone, self.side), 1, 1)
        with torch.no_grad():
            return tuple(backbone.trunk(backbone.images(_BLANK, self.side)).shape[1:])

    def __call__(self, n_classes: int) -> PretrainedNetwork:
        """Create the network for `n_classes` classes."""
        backbone = loaded(self.backbone)
        if self.side % backbone.multiple:
            raise invalid("side", f"{self.side}", f"a multiple of {backbone.multiple} for {self.backbone}")
        last = None
        if self.tune is Tuned.LAST:
            last = copy.deepcopy(backbone.last).requires_grad_(True)
            if not any(True for _ in last.parameters()):
                raise invalid("network", f"tune=last with {self.backbone}", "a backbone whose last block is known")
        return PretrainedNetwork(_width(self.backbone, self.side), n_classes, self.head, last, self.input_scale)

    def inputs(
        self, images: Dataset, cache: Path, on_file: OnFile = lambda done, files: None
    ) -> tuple[PretrainedFactory, Dataset]:
        """The factory of networks that read cached features, and the dataset with features instead of images."""
        if images.image_shape[0] not in (1, 3):
            raise invalid("network", f"images of {images.image_shape[0]} channels", "1 or 3 for a pre-trained backbone")
        features = FeatureCache(cache, loaded(self.backbone), self.side).dataset(images, self.cut, on_file)
        scale = features.std[0] if self.cut is Cut.MAPS else 1.0
        factory = PretrainedFactory(self.backbone, self.side, self.head, self.tune, scale)
        return factory, features

    def whole(self, network: nn.Module, features: Dataset) -> nn.Module:
        """The backbone and a network trained on cached features, as one module for normalised images of any size."""
        backbone = loaded(self.backbone)
        below = [] if self.tune is Tuned.LAST else [backbone.last]
        return WholeNetwork(nn.Sequential(backbone.trunk, *below), network, self.side, 1.0 / features.std[0])


class WholeNetwork(nn.Module):
    """A frozen backbone followed by the network that was trained on its features: from images to logits.

    Parameters
    ----------
    frozen : torch.nn.Module
        Maps images of side x side pixels to features or feature maps.
    network : torch.nn.Module
        Maps these to logits.
    side : int
        Side in pixels to which images are scaled.
    scale : float
        Factor by which features are multiplied before the network.
    """

    def __init__(self, frozen: nn.Module, network: nn.Module, side: int, scale: float = 1.0) -> None:
        super().__init__()
        self.frozen, self.network, self.side, self.scale = frozen, network, side, scale

    def forward(self, images: Tensor) -> Tensor:
        """Logits of normalised images."""
        maps: Tensor = self.frozen(scaled(images, self.side)) * self.scale
        return cast(Tensor, self.network(maps if maps.ndim == 4 else maps[:, :, None, None]))


@functools.cache
def loaded(name: str) -> Backbone:
    """A backbone, loaded once per process."""
    return load_backbone(name)


@functools.cache
def _width(name: str, side: int) -> int:
    """The number of features of a backbone."""
    return loaded(name).features(_BLANK, side).shape[1]


def input_shape(factory: object) -> tuple[int, ...] | None:
    """The input shape of networks on a pre-trained backbone; None for other factories, whose networks read images."""
    return factory.input_shape if isinstance(factory, PretrainedFactory) else None


def is_pretrained(name: str) -> bool:
    """Whether a network's name stands for a pre-trained backbone.

    >>> from tcil.incremental.pretrained.networks import is_pretrained
    >>> is_pretrained("pretrained:efficientnet_lite0,side=64"), is_pretrained("resnet32")
    (True, False)
    """
    return name.startswith(PRETRAINED)


def pretrained_factory(name: str) -> PretrainedFactory:
    """The factory for `pretrained:NAME,option=value,...`; the backbone is loaded when it is first needed.

    >>> from tcil.incremental.pretrained.networks import pretrained_factory
    >>> factory = pretrained_factory("pretrained:efficientnet_lite0,side=64,head=cosine")
    >>> factory.side, factory.head.value, factory.tune.value
    (64, 'cosine', 'none')
    """
    backbone, *options = name.removeprefix(PRETRAINED).split(",")
    if not backbone:
        raise invalid("network", repr(name), "pretrained:NAME", "Such as pretrained:efficientnet_lite0.")
    values: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if key not in _OPTIONS:
            raise unknown_name("option of a pretrained network", key, _OPTIONS)
        if not equals or key in values:
            raise invalid("network", repr(name), f"{key}=value, once")
        values[key] = _OPTIONS[key](value)
    return PretrainedFactory(backbone, **values)


def _side(value: str) -> int:
    if not value.isascii() or not value.isdecimal() or not 1 <= int(value[:9]) <= _MOST_PIXELS:
        raise invalid("side", repr(value), f"a number of pixels from 1 to {_MOST_PIXELS}")
    return int(value)


_OPTIONS: dict[str, Callable[[str], Any]] = {
    "side": _side,
    "head": lambda value: HeadKind.parse(value, "head"),
    "tune": lambda value: Tuned.parse(value, "tune"),
}
