"""The networks of the paper, and smaller ones for short runs. Each returns logits; its head is `fc`.

torchvision is not needed. Parameter names follow the common convention (conv1, bn1, layer1.0.conv1, ..., fc), so that
the authors' ResNet-32 checkpoints can be loaded without changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from tcil.foundation.arrays import whole_number
from tcil.foundation.errors import invalid
from tcil.foundation.extensions import PRETRAINED, called, extension, found

__all__ = ["ResNet", "network_factory", "resnet18", "resnet32", "small_cnn", "small_resnet", "tiny_resnet"]

_WIDEST = 10**6  # classes or channels; more is assumed to be a mistake


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context in which new layers draw their weights from this seed; the global generator is restored on exit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut; if the shape changes, the shortcut is a 1x1 convolution with BN."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps of the block."""
        out = torch.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = x if self.downsample is None else self.downsample(x)
        return torch.relu(out + shortcut)


class ResNet(nn.Module):
    """A residual network: stem, stages of residual blocks, global average pooling and a linear head `fc`.

    Each stage after the first halves the image size.

    Parameters
    ----------
    n_classes : int
        Number of classes (columns of the head).
    widths : tuple of int
        Number of channels of each stage.
    depths : tuple of int
        Number of blocks of each stage.
    channels_in : int
        Number of channels of the images.
    stem_stride : int
        Stride of the stem; 2 halves the image size.

    Examples
    --------
    >>> import torch, tcil
    >>> network = tcil.networks.ResNet(n_classes=7, widths=(8, 16), depths=(1, 1))
    >>> network(torch.randn(2, 3, 16, 16)).shape, network.features(torch.randn(2, 3, 16, 16)).shape
    (torch.Size([2, 7]), torch.Size([2, 16]))
    """

    def __init__(
        self,
        *,
        n_classes: int,
        widths: tuple[int, ...],
        depths: tuple[int, ...],
        channels_in: int = 3,
        stem_stride: int = 1,
    ) -> None:
        super().__init__()
        n_classes = whole_number(n_classes, "n_classes", 1, _WIDEST)
        channels_in = whole_number(channels_in, "channels_in", 1, _WIDEST)
        widths, depths = _sizes(widths, "widths"), _sizes(depths, "depths")
        if len(widths) != len(depths):
            raise invalid("depths", f"{len(depths)} numbers", f"{len(widths)}, one for each of widths")
        stem_stride = whole_number(stem_stride, "stem_stride", 1)
        self.conv1 = nn.Conv2d(channels_in, widths[0], 3, stride=stem_stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.stages: list[str] = []
        width = widths[0]
        for index, (channels, depth) in enumerate(zip(widths, depths, strict=True), start=1):
            blocks = []
            for block in range(depth):
                stride = 2 if index > 1 and block == 0 else 1
                blocks.append(ResidualBlock(width, channels, stride))
                width = channels
            self.add_module(f"layer{index}", nn.Sequential(*blocks))
            self.stages.append(f"layer{index}")
        self.fc = nn.Linear(width, n_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x: Tensor) -> Tensor:
        """The input of `fc`: the last feature map, averaged over the image."""
        x = torch.relu(self.bn1(self.conv1(x)))
        for stage in self.stages:
            x = getattr(self, stage)(x)  # torch.export of 2.6 cannot follow get_submodule
        return x.mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (N, classes)."""
        return cast(Tensor, self.fc(self.features(x)))


def resnet32(n_classes: int = 100) -> ResNet:
    """ResNet-32 for 32x32 images: 16, 32 and 64 channels, 64 features. Compatible with the authors' checkpoints.

    Parameters
    ----------
    n_classes : int
        Number of classes (columns of the head).

    Returns
    -------
    ResNet
        The network, with random weights from torch's global generator.

    Examples
    --------
    >>> import torch, tcil
    >>> network = tcil.networks.resnet32()
    >>> network(torch.randn(1, 3, 32, 32)).shape, sum(p.numel() for p in network.parameters())
    (torch.Size([1, 100]), 472756)
    """
    return ResNet(n_classes=n_classes, widths=(16, 32, 64), depths=(5, 5, 5))


def resnet18(n_classes: int = 200) -> ResNet:
    """ResNet-18 for 64x64 images (3x3 stem, no pooling): 64 to 512 channels, 512 features.

    Parameters
    ----------
    n_classes : int
        Number of classes (columns of the head).

    Returns
    -------
    ResNet
        The network, with random weights from torch's global generator.

    Examples
    --------
    >>> import torch, tcil
    >>> tcil.networks.resnet18(n_classes=20)(torch.randn(1, 3, 64, 64)).shape
    torch.Size([1, 20])
    """
    return ResNet(n_classes=n_classes, widths=(64, 128, 256, 512), depths=(2, 2, 2, 2))


def small_cnn(n_classes: int = 10, channels_in: int = 1) -> ResNet:
    """A small residual network for 8x8 digits: 16 and 32 channels, 32 features.

    Parameters
    ----------
    n_classes : int
        Number of classes (columns of the head).
    channels_in : int
        Number of channels of the images.

    Returns
    -------
    ResNet
        The network, with random weights from torch's global generator.

    Examples
    --------
    >>> import torch, tcil
    >>> tcil.networks.small_cnn()(torch.randn(1, 1, 8, 8)).shape
    torch.Size([1, 10])
    """
    return ResNet(n_classes=n_classes, widths=(16, 32), depths=(1, 1), channels_in=channels_in)


def small_resnet(n_classes: int = 100) -> ResNet:
    """A ResNet-8 for 32x32 images, for short runs on a CPU: 24, 48 and 96 channels, one block each, 96 features.

    The stem halves the image size, so that the network can be wider at the same cost; it then memorises its exemplars
    far sooner.

    Parameters
    ----------
    n_classes : int
        Number of classes (columns of the head).

    Returns
    -------
    ResNet
        The network, with random weights from torch's global generator.

    Examples
    --------
    >>> import torch, tcil
    >>> tcil.networks.small_resnet(20)(torch.randn(1, 3, 32, 32)).shape
    torch.Size([1, 20])
    """
    return ResNet(n_classes=n_classes, widths=(24, 48, 96), depths=(1, 1, 1), stem_stride=2)


def tiny_resnet(n_classes: int = 20) -> ResNet:
    """A residual network for 16x16 grey images, for short runs on a CPU: 24 and 48 channels, 48 features.

    The stem halves the image size: a training step takes half the time of `small_cnn`.

    Parameters
    ----------
    n_classes : int
        Number of classes (columns of the head).

    Returns
    -------
    ResNet
        The network, with random weights from torch's global generator.

    Examples
    --------
    >>> import torch, tcil
    >>> tcil.networks.tiny_resnet()(torch.randn(1, 1, 16, 16)).shape
    torch.Size([1, 20])
    """
    return ResNet(n_classes=n_classes, widths=(24, 48), depths=(1, 1), channels_in=1, stem_stride=2)


_OWN = "a function of the number of classes that returns a torch.nn.Module"
NETWORKS: dict[str, Callable[[int], ResNet]] = {
    "resnet32": resnet32,
    "resnet18": resnet18,
    "small_resnet": small_resnet,
    "small_cnn": small_cnn,
    "tiny_resnet": tiny_resnet,
}


def network_factory(name: str) -> Callable[[int], ResNet]:
    """Return the function that creates a network, by its name.

    Parameters
    ----------
    name : str
        A built-in network, an entry point in `tcil.networks`, `package.module:name` of a function that takes the number
        of classes, or `pretrained:NAME` for a head on the features of a pre-trained backbone (see `load_backbone`).

    Returns
    -------
    callable
        A function that takes the number of classes and returns the network.

    Examples
    --------
    >>> import tcil
    >>> tcil.networks.network_factory("small_cnn")(4).fc.out_features
    4
    """
    if not isinstance(name, str):
        raise invalid("network", repr(name), "the name of a network")
    if name in NETWORKS:
        return NETWORKS[name]
    if name.startswith(PRETRAINED):
        from tcil.incremental.pretrained.networks import pretrained_factory

        return cast(Callable[[int], ResNet], pretrained_factory(name))
    return _OwnNetwork(name, extension("network", name, NETWORKS))


@dataclass(frozen=True)
class _OwnNetwork:
    """A user network; the result of its factory is checked at each call."""

    name: str
    factory: Callable[[int], ResNet]

    def __post_init__(self) -> None:
        if not callable(self.factory):
            raise invalid("network", repr(self.name), _OWN, f"It is {found(self.factory)}.")

    def __call__(self, n_classes: int) -> ResNet:
        """Create the network for `n_classes` classes."""
        network = called("network", self.name, self.factory, n_classes, _OWN, passing=())
        if not isinstance(network, nn.Module):
            raise invalid("network", f"{self.name!r}, which returned {found(network)}", _OWN)
        return cast(ResNet, network)


def _sizes(given: object, argument: str) -> tuple[int, ...]:
    sizes = tuple(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes)) else ()
    if not sizes:
        raise invalid(argument, repr(given), "one whole number or more, such as (16, 32, 64)")
    return tuple(whole_number(one, argument, 1, _WIDEST) for one in sizes)
