"""Memory on another scale than the validation set is told; classes that merely look different are not."""

from __future__ import annotations

import functools
import itertools
import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tcil
from tcil.calibration.inputs.input_scale import InputScale
from tcil.foundation.options import Verdict

# How the same pixels, from 0 to 1, may be held.
FORMS = {
    "normalised": lambda pixels, mean, spread: (pixels - mean) / spread,
    "from -1 to 1": lambda pixels, mean, spread: 2 * pixels - 1,
    "from 0 to 1": lambda pixels, mean, spread: pixels,
    "from 0 to 255": lambda pixels, mean, spread: 255 * pixels,
}
# Two ways to centre are too much alike to be told apart: documented.
DIFFERENT = [pair for pair in itertools.permutations(FORMS, 2) if set(pair) != {"normalised", "from -1 to 1"}]


class Pictures:
    """Images by class, to be drawn for a task and held in some form."""

    def __init__(self, pixels, labels, seed=0):
        self.pixels, self.labels = pixels, labels
        self.mean, self.spread = (f((0, 2, 3), keepdim=True)[0] for f in (pixels.mean, pixels.std))
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, classes, n):
        rows = [(self.labels == c).nonzero().squeeze(1) for c in classes]
        return torch.cat([own[torch.randperm(len(own), generator=self.generator)[:n]] for own in rows])

    def held(self, rows, form):
        return FORMS[form](self.pixels[rows], self.mean, self.spread)

    def scale(self, rows, form, change=lambda x: x):
        return scale_of(change(self.held(rows, form)))


def scale_of(inputs, batch=64):
    scale = InputScale()
    for part in inputs.split(batch):
        scale.add(part)
    return scale


DATA = functools.cache(load_digits)


def digits():
    images, target = torch.tensor(DATA().images, dtype=torch.float32), torch.tensor(DATA().target)
    return Pictures(images[:, None] / 16, target)


def letters():
    """Black and white, little ink."""
    found = digits()
    return Pictures(nn.functional.pad((found.pixels > 0.5).float(), (6, 6, 6, 6)), found.labels)


def photographs():
    """Smooth in space, each with a brightness, a contrast and a colour of its own, and one of its class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 6
    own = torch.rand(6, 3, 1, 1, generator=generator)
    tint = torch.rand(600, 3, 1, 1, generator=generator)
    contrast = 0.1 + 0.5 * torch.rand(600, 1, 1, 1, generator=generator)
    waves = nn.functional.interpolate(torch.randn(600, 3, 3, 3, generator=generator), size=8, mode="bilinear")
    return Pictures((0.5 * own[labels] + 0.5 * tint + contrast * waves).clamp(0, 1), labels)


WORLDS = {"digits": digits, "letters": letters, "photographs": photographs}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
class TestPictures:
    def test_no_false_alarm(self, world):
        """Validation sets of 20 to 40 images, down to one exemplar a class, tasks of one or two classes."""
        pictures = world()
        n_classes = int(pictures.labels.max()) + 1
        for exemplars, n_valid, n_new, first in itertools.product(
            (1, 2, 20), (20, 40), (1, 2), range(0, n_classes - 2, 3)
        ):
            new, old = range(first, first + n_new), [c for c in range(n_classes) if not first <= c < first + n_new]
            rows = pictures.draw(new, exemplars), pictures.draw(old, exemplars), pictures.draw(new, n_valid // n_new)
            for form in FORMS:
                memory_new, memory_old, valid = (pictures.scale(part, form) for part in rows)
                assert not memory_new.differs_from(valid, same_classes=True), (form, exemplars, n_valid, new)
                assert not memory_old.differs_from(valid, same_classes=False), (form, exemplars, n_valid, new)

    @pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=lambda form: form.replace(" ", "_"))
    def test_other_scales_are_seen(self, world, one, other):
        pictures = world()
        for n_valid, new in ((20, [0]), (40, [0, 1]), (20, [4, 5])):
            memory, valid = pictures.draw(new, 20), pictures.draw(new, n_valid // len(new))
            assert pictures.scale(memory, one).differs_from(pictures.scale(valid, other), same_classes=True)

    def test_normalised_twice_is_seen(self, world):
        pictures = world()
        rows = pictures.draw([0, 1], 20), pictures.draw([0, 1], 20)
        twice = pictures.scale(rows[0], "normalised", lambda x: (x - pictures.mean) / pictures.spread)
        ratio = float(twice.deviations.mean() / pictures.scale(rows[1], "normalised").deviations.mean())
        assert twice.differs_from(pictures.scale(rows[1], "normalised"), same_classes=True) == (ratio > 3)


class TestFeatures:
    """Vectors may have any distribution: heavy tails and few examples raise no alarm."""

    @pytest.mark.parametrize("exemplars", [1, 2, 5, 40])
    @pytest.mark.parametrize("kind", ["normal", "cauchy", "lognormal", "sparse", "one dimension"])
    def test_no_false_alarm(self, kind, exemplars):
        generator = torch.Generator().manual_seed(0)
        for _ in range(60):
            width = 1 if kind == "one dimension" else 5
            x = torch.randn(exemplars + 20, width, generator=generator)
            if kind == "cauchy":
                x = x / torch.randn(len(x), 5, generator=generator)
            elif kind == "lognormal":
                x = (1.5 * x).exp()
            elif kind == "sparse":
                x = x.relu() * (torch.rand(len(x), 5, generator=generator) < 0.1)
            assert not scale_of(x[:exemplars]).differs_from(scale_of(x[exemplars:]), same_classes=True)

    def test_other_classes_are_not_compared(self):
        one, other = torch.ones(50, 4) + 0.1 * torch.rand(50, 4), -100 * torch.rand(50, 4) - 1
        assert not scale_of(one).differs_from(scale_of(other), same_classes=False)

    @pytest.mark.parametrize("change", [lambda x: 255 * x, lambda x: (x - 0.3) / 0.37], ids=["times 255", "centred"])
    def test_other_scales_are_seen(self, change):
        found = digits()
        flat = found.pixels.flatten(1)
        memory, valid = flat[found.draw([0, 1], 10)], flat[found.draw([0, 1], 20)]
        assert scale_of(memory).differs_from(scale_of(change(valid)), same_classes=True)
        assert scale_of(change(memory)).differs_from(scale_of(valid), same_classes=True)


class TestStatistics:
    @pytest.mark.parametrize("batch", [1, 7, 64])
    @pytest.mark.parametrize("shape", [(50, 3, 4, 4), (50, 6), (50,), (50, 3, 9)])
    def test_by_channel_whatever_the_batches(self, batch, shape):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 1e3
        scale = scale_of(x, batch)
        channels = x.double().reshape(50, shape[1] if len(shape) > 1 else 1, -1).transpose(0, 1).flatten(1)
        assert torch.allclose(scale.deviations, channels.std(dim=1, correction=0), rtol=1e-3)
        assert scale.n_examples == 50

    def test_the_first_examples_are_enough(self):
        """However long the set is, and however it is cut into batches."""
        x = torch.rand(1000, 3, 2, 2, generator=torch.Generator().manual_seed(0))
        for batch in (1, 100, 1000):
            scale = scale_of(x, batch)
            assert scale.n_examples == 256
            assert torch.allclose(scale.deviations, x[:256].double().std(dim=(0, 2, 3), correction=0), rtol=1e-4)

    def test_odd_inputs_raise_nothing(self):
        plain, empty = scale_of(torch.rand(9, 3, 2, 2)), InputScale()
        others = [empty, *(scale_of(x) for x in (torch.zeros(9, 3, 2, 2), torch.full((9, 3, 2, 2), 1e38),
                  torch.rand(9, 5, 2, 2), torch.rand(9, 0), torch.ones(9, 3, dtype=torch.long)))]  # fmt: skip
        for other in others:
            assert plain.differs_from(other, same_classes=True) in (True, False)
            assert other.differs_from(plain, same_classes=False) in (True, False)
            assert str(other)
        assert not plain.differs_from(empty, same_classes=True)


def told(call):
    """What a call returns, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        returned = call()
    return returned, [str(warning.message) for warning in caught]


class TestFit:
    """What a user sees."""

    def task(self, memory_form, valid_form, old_form=None):
        pictures = photographs()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 6))
        old, new, valid = pictures.draw(range(4), 10), pictures.draw([4, 5], 10), pictures.draw([4, 5], 20)
        inputs = torch.cat([pictures.held(old, old_form or memory_form), pictures.held(new, memory_form)])
        memory = inputs, pictures.labels[torch.cat([old, new])]
        return model, memory, (pictures.held(valid, valid_form), pictures.labels[valid])

    @pytest.mark.parametrize(
        ("memory_form", "valid_form", "text"),
        [
            ("from 0 to 1", "normalised", r"memory: values from 0 to 1 .*; valid: values from -"),
            ("normalised", "from 0 to 1", r"memory: values from -.*; valid: values from .* to 1 "),
            ("from 0 to 255", "normalised", r"memory: values from 0 to 255 .*; valid: values from -"),
            ("from 0 to 1", "from 0 to 255", r"memory: values from 0 to 1 .*; valid: .* to 255 "),
        ],
    )
    def test_told(self, memory_form, valid_form, text):
        model, memory, valid = self.task(memory_form, valid_form)
        for who, fit in (
            ("T-CIL", lambda *data: tcil.TCIL().fit(model, *data, [4, 5])),
            ("PACT", lambda *data: tcil.PACT().fit(model, *data, [4, 5], imbalance=4.0)),
        ):
            result, warned = told(lambda fit=fit: fit(memory, valid).result_)
            (line,) = [message for message in warned if "did you normalise both" in message]
            assert re.search(rf"{who}: .*{text}", line)
            assert Verdict.INPUT_SCALES_DIFFER in result.verdicts
            assert Verdict.OK not in result.verdicts

    @pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
    @pytest.mark.parametrize("form", FORMS)
    def test_not_told_where_both_are_alike(self, form):
        model, memory, valid = self.task(form, form)
        loaders = (DataLoader(TensorDataset(*part), batch_size=7) for part in (memory, valid))
        for data in ((memory, valid), loaders):
            assert Verdict.INPUT_SCALES_DIFFER not in tcil.TCIL().fit(model, *data, [4, 5]).result_.verdicts

    def test_only_old_exemplars(self):
        model, memory, valid = self.task("normalised", "normalised", old_form="from 0 to 1")
        _, warned = told(lambda: tcil.TCIL().fit(model, memory, valid, [4, 5]))
        assert any("old classes in memory: values from 0 to 1 " in message for message in warned)


@pytest.mark.real
def test_cifar100():
    """Tasks of ten classes, normalised, with 20 to 40 validation images."""
    from tcil.incremental.data.datasets.cifar import load_cifar100

    train = load_cifar100(Path(os.environ["TCIL_DATA"])).train
    pictures = Pictures(train.images / 255, train.labels)
    for task, per_class, exemplars in itertools.product(range(1, 10), (2, 4), (2, 20)):
        new, old = range(10 * task, 10 * task + 10), range(10 * task)
        rows = pictures.draw(new, exemplars), pictures.draw(old, exemplars), pictures.draw(new, per_class)
        for form in FORMS:
            memory_new, memory_old, valid = (pictures.scale(part, form) for part in rows)
            assert not memory_new.differs_from(valid, same_classes=True)
            assert not memory_old.differs_from(valid, same_classes=False)
        for one, other in DIFFERENT:
            assert pictures.scale(rows[0], one).differs_from(pictures.scale(rows[2], other), same_classes=True)
