"""Features on disk: computed once, by content, from where it was stopped; and the networks that read them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tcil.extending import Backbone, Dataset, ImageSet
from tcil.incremental.data.images import Pixels
from tcil.incremental.learners.base import grow_head
from tcil.incremental.pretrained import backbones, features, networks
from tcil.incremental.pretrained.features import Cut, FeatureCache
from tcil.incremental.pretrained.heads import CosineHead

SIDE = 12


class Counting(nn.Module):
    """A trunk that counts the images it has seen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU())

    def forward(self, x):
        Counting.total += len(x)
        return self.layers(x)

    total = 0


def make_backbone(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        last = nn.Sequential(
            nn.Conv2d(6, 10, 3, stride=2), nn.BatchNorm2d(10), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        made = Backbone("tiny", Counting(), last, (0.5,) * 3, (0.5,) * 3, multiple=4)
    for part in (made.trunk, made.last):
        part.eval().requires_grad_(False)
    return made


def images(n_train=25, n_test=9, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def part(n):
        return ImageSet(
            torch.randint(0, 256, (n, 3, 8, 8), generator=generator, dtype=torch.uint8), torch.arange(n) % 3
        )

    return Dataset("own", part(n_train), part(n_test), ("a", "b", "c"), (0.5,) * 3, (0.2,) * 3)


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(features, "ROWS", 10)
    monkeypatch.setattr(features, "BATCH", 4)
    Counting.total = 0


@pytest.fixture
def cache(tmp_path):
    return FeatureCache(tmp_path, make_backbone(), SIDE)


@pytest.fixture
def tiny(monkeypatch):
    networks.loaded.cache_clear()
    networks._width.cache_clear()
    monkeypatch.setitem(backbones.BACKBONES, "tiny", make_backbone)
    yield
    networks.loaded.cache_clear()
    networks._width.cache_clear()


def test_features_are_those_of_the_backbone(cache):
    own = images()
    made = cache.dataset(own, Cut.FEATURES)
    assert made.train.images.shape == (25, 10, 1, 1)
    assert made.train.images.dtype == torch.half
    expected = cache.backbone.features(own.train.images, SIDE)
    assert torch.allclose(made.train.images.flatten(1).float(), expected, atol=2e-3)
    assert torch.equal(made.train.labels, own.train.labels)
    x = Pixels(made).plain(made.train, torch.arange(25))
    assert float(x.square().mean().sqrt()) == pytest.approx(1.0, abs=0.01)
    assert torch.equal(Pixels(made).augmented(made.train, torch.arange(25), torch.Generator()), x)


def test_they_are_computed_once(cache):
    cache.dataset(images(), Cut.FEATURES)
    once = Counting.total
    again = cache.dataset(images(), Cut.FEATURES)
    assert Counting.total == once
    assert again.fingerprint() == cache.dataset(images(), Cut.FEATURES).fingerprint()


def test_maps_serve_features(cache):
    maps = cache.dataset(images(), Cut.MAPS)
    assert maps.image_shape == (6, 6, 6)
    once = Counting.total
    of_maps = cache.dataset(images(), Cut.FEATURES).train.images
    assert Counting.total == once
    assert maps.fingerprint() != cache.dataset(images(), Cut.FEATURES).fingerprint()
    other = FeatureCache(cache.folder / "other", cache.backbone, SIDE).dataset(images(), Cut.FEATURES)
    assert torch.allclose(of_maps.float(), other.train.images.float(), atol=2e-3)


def test_an_interrupted_cache_goes_on_with_the_next_file(cache):
    def stop(done, files):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.dataset(images(), Cut.FEATURES, stop)
    before = Counting.total
    told = []
    cache.dataset(images(), Cut.FEATURES, lambda done, files: told.append((done, files)))
    assert told == [(done, 4) for done in range(5)]
    assert 15 <= Counting.total - before < 25  # two files are left; a few images more fold batch norms


@pytest.mark.parametrize("damage", [b"", b"{}", None])
def test_a_damaged_file_is_computed_again(cache, damage):
    whole = cache.dataset(images(), Cut.FEATURES).train.images
    file = next(cache.folder.rglob("train-0000010.safetensors"))
    file.write_bytes(file.read_bytes()[:-7] if damage is None else damage)
    assert torch.equal(cache.dataset(images(), Cut.FEATURES).train.images, whole)


def cached(cache, name):
    return next(cache.folder.rglob(name))


def test_a_flipped_bit_is_found(cache):
    whole = cache.dataset(images(), Cut.FEATURES)
    file = cached(cache, "test-0000000.safetensors")
    before = file.read_bytes()
    for place in (-1, -20, 60):
        content = bytearray(before)
        content[place] ^= 0x40
        file.write_bytes(content)
        again = cache.dataset(images(), Cut.FEATURES)
        assert torch.equal(again.test.images, whole.test.images)
        assert file.read_bytes() == before


def test_a_file_in_the_place_of_another_is_found(cache):
    """Of the same cache, or of another backbone's, for as many images of the same shape."""
    own = images(n_train=9)
    whole = cache.dataset(own, Cut.FEATURES)
    file = cached(cache, "test-0000000.safetensors")
    other = FeatureCache(cache.folder / "other", make_backbone(seed=1), SIDE)
    other.dataset(own, Cut.FEATURES)
    for taken in (cached(cache, "train-0000000.safetensors"), cached(other, "test-0000000.safetensors")):
        file.write_bytes(taken.read_bytes())
        assert torch.equal(cache.dataset(own, Cut.FEATURES).test.images, whole.test.images)


def test_files_of_older_versions_are_computed_again(cache):
    """They have no checksum."""
    whole = cache.dataset(images(), Cut.FEATURES)
    file = cached(cache, "test-0000000.safetensors")
    sealed, stored = file.read_bytes(), load_file(file)
    save_file({name: torch.zeros_like(tensor) for name, tensor in stored.items()}, file)
    again = cache.dataset(images(), Cut.FEATURES)
    assert torch.equal(again.test.images, whole.test.images)
    assert again.fingerprint() == whole.fingerprint()
    assert file.read_bytes() == sealed


def test_the_name_of_a_backbone_may_have_spaces(cache):
    spaced = FeatureCache(cache.folder, replace(cache.backbone, name="my tiny = one"), SIDE)
    spaced.dataset(images(), Cut.FEATURES)
    once = Counting.total
    spaced.dataset(images(), Cut.FEATURES)
    assert Counting.total == once


@pytest.mark.parametrize("place", ["all", "home", "cut", "file"])
def test_nothing_is_written_through_a_link(tmp_path, place):
    """As in run folders, beside which this one is: a link would choose which files are overwritten."""
    cache = FeatureCache(tmp_path / "out" / "features", make_backbone(), SIDE)
    home = cache.home(str(images().fingerprint()["sha256"]))
    cut = home / Cut.FEATURES.value
    link = {"all": cache.folder, "home": home, "cut": cut, "file": cut / "train-0000010.safetensors"}[place]
    target = tmp_path / "outside"
    target.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(target / "features" if place == "file" else target)
    with pytest.raises(ValueError, match=r"a link to .*outside.*Nothing was written"):
        cache.dataset(images(), Cut.FEATURES)
    assert not list(target.iterdir())
    assert link.is_symlink()


def test_other_content_has_another_folder(cache):
    own = images().fingerprint()["sha256"]
    assert cache.home(own) == cache.home(own)
    others = [
        FeatureCache(cache.folder, make_backbone(seed=1), SIDE).home(own),
        FeatureCache(cache.folder, cache.backbone, 16).home(own),
        FeatureCache(cache.folder, replace(cache.backbone, mean=(0.4,) * 3), SIDE).home(own),
        cache.home(images(seed=1).fingerprint()["sha256"]),
    ]
    assert len({cache.home(own), *others}) == 5


@pytest.mark.parametrize("options", ["", ",head=cosine", ",tune=last"])
def test_the_whole_network_answers_images_as_the_trained_part_answers_features(tiny, tmp_path, options):
    own = images()
    named = networks.pretrained_factory(f"pretrained:tiny,side={SIDE}{options}")
    factory, inputs = named.inputs(own, tmp_path)
    assert inputs.image_shape == factory.input_shape
    network = factory(3).eval()
    below = network(Pixels(inputs).plain(inputs.test, torch.arange(9)))
    backbone = networks.loaded("tiny")
    whole = factory.whole(network, inputs).eval()(backbone.normalised(own.test.images))
    assert torch.allclose(below, whole, atol=0.02)
    assert torch.equal(below.argmax(1), whole.argmax(1))


def test_training_leaves_the_statistics_of_batch_norms(tiny):
    network = networks.pretrained_factory(f"pretrained:tiny,side={SIDE},tune=last")(3).train()
    norm = network.last[1]
    before = norm.running_mean.clone()
    network(torch.randn(8, 6, 6, 6)).sum().backward()
    assert torch.equal(norm.running_mean, before)
    assert network.last[0].weight.grad is not None
    assert network.fc.training


def test_a_cosine_head_grows_and_keeps_its_scale():
    model = nn.Module()
    model.fc = CosineHead(4, 2, scale=7.0)
    x = torch.randn(3, 4)
    before = model.fc(x)
    grow_head(model, 5)
    assert model.fc(x).shape == (3, 5)
    assert torch.allclose(model.fc(x)[:, :2], before)
    assert isinstance(model.fc, CosineHead)


def test_images_of_other_channels_are_refused(tiny, tmp_path):
    own = images()
    wide = ImageSet(torch.zeros(4, 2, 8, 8, dtype=torch.uint8), torch.arange(4) % 3)
    factory = networks.pretrained_factory(f"pretrained:tiny,side={SIDE}")
    with pytest.raises(ValueError, match="images of 2 channels"):
        factory.inputs(replace(own, train=wide, test=wide, mean=own.mean[:2], std=own.std[:2]), tmp_path)
