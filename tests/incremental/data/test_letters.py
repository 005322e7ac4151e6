"""Letters: the same images everywhere, as many as asked for, training and test images independent."""

from __future__ import annotations

import random
import warnings

import matplotlib
import numpy as np
import pytest
import torch

from research.letters import ALIKE, CLASSES, similarity
from tcil.experiments.config.settings import build
from tcil.incremental.data.datasets import DATASETS, load_dataset
from tcil.incremental.data.datasets import letters as module


def small(**options):
    return load_dataset("letters", train_per_class=6, test_per_class=4, **options)


@pytest.fixture(scope="module")
def letters():
    return small()


class TestImages:
    def test_sizes_and_classes(self, letters):
        assert letters.image_shape == (1, 16, 16)
        assert letters.n_classes == len(set(letters.class_names)) == 20
        assert torch.bincount(letters.train.labels).tolist() == [6] * 20
        assert torch.bincount(letters.test.labels).tolist() == [4] * 20
        assert not letters.flip
        pixels = letters.train.images.double() / 255
        assert float(pixels.mean()) == pytest.approx(letters.mean[0])
        assert float(pixels.std()) == pytest.approx(letters.std[0], rel=1e-3)

    def test_default_sizes(self):
        default = load_dataset("letters")
        assert (len(default.train), len(default.test)) == (20 * 220, 20 * 200)
        distinct = {image.tobytes() for part in (default.train, default.test) for image in part.images.numpy()}
        assert len(distinct) == 20 * 420

    def test_the_seed_is_all_that_counts(self, letters):
        assert small().fingerprint() == small(data_seed=0).fingerprint() == letters.fingerprint()
        other = small(data_seed=1)
        for one, another in ((letters.train, other.train), (letters.test, other.test)):
            assert (one.images != another.images).flatten(1).any(1).all()

    def test_a_larger_set_begins_with_the_smaller(self, letters, monkeypatch):
        monkeypatch.setattr(module, "_AT_ONCE", 5)  # drawn in pieces, the images are the same
        larger = load_dataset("letters", train_per_class=9, test_per_class=7)
        for part, count, more in (("train", 6, 9), ("test", 4, 7)):
            whole = getattr(larger, part).images.view(20, more, 16, 16)
            assert torch.equal(whole[:, :count], getattr(letters, part).images.view(20, count, 16, 16))

    def test_training_and_test_images_are_independent(self):
        drawn = module.load(characters="AB", train_per_class=300, test_per_class=300, noise=0)
        train, test = (part.images.double().flatten(1) for part in (drawn.train, drawn.test))
        same = (train - train.mean(0)) * (test - test.mean(0))  # of the same number and class
        assert abs(float(same.mean()) / float(train.std() * test.std())) < 0.6
        assert not torch.equal(drawn.train.images, drawn.test.images)
        rows = np.corrcoef(train[:300].numpy(), test[:300].numpy())[:300, 300:]
        beside, others = np.diag(rows).mean(), rows[~np.eye(300, dtype=bool)].mean()
        assert beside == pytest.approx(others, abs=0.05)  # no nearer to its own number than to any other

    def test_classes_can_be_told_apart(self):
        """Without noise, the mean images of the training set tell many test images apart."""
        drawn = module.load(train_per_class=100, test_per_class=20, noise=0)
        means = drawn.train.images.double().view(20, 100, -1).mean(1)
        means = (means - means.mean(1, keepdim=True)) / means.std(1, keepdim=True)
        said = (drawn.test.images.double().flatten(1) @ means.T).argmax(1)
        assert float((said == drawn.test.labels).double().mean()) > 0.3  # 0.05 by chance

    def test_noise_has_the_deviation_that_is_asked_for(self):
        plain, noisy = (module.load(characters="T", train_per_class=400, test_per_class=1, noise=n) for n in (0, 20))
        difference = noisy.train.images.double() - plain.train.images.double()
        assert float(difference.std()) == pytest.approx(20, rel=0.05)
        assert float(difference.mean()) == pytest.approx(0, abs=0.5)

    def test_no_global_state_is_touched(self, letters):
        random.seed(5), np.random.seed(5), torch.manual_seed(5)  # noqa: NPY002
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        again = small()
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        assert before == after
        assert again.fingerprint() == letters.fingerprint()


class TestGlyphs:
    @pytest.mark.skipif(
        matplotlib.__version__ not in module.PINNED_WITH, reason=f"glyphs are pinned with {module.PINNED_WITH}"
    )
    def test_they_are_the_pinned_ones(self):
        for characters, pinned in module.PINNED.items():
            assert module.checksum(characters) == pinned

    def test_others_are_noted_and_used(self, monkeypatch):
        monkeypatch.setitem(module.PINNED, "AB", module.checksum("AB"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module.load(characters="AB", train_per_class=1, test_per_class=1)
        monkeypatch.setitem(module.PINNED, "AB", "other")
        with pytest.warns(UserWarning, match=r"^letters: the fonts of matplotlib .* differ"):
            assert len(module.load(characters="AB", train_per_class=1, test_per_class=1).train) == 2

    def test_a_font_that_is_missing(self, monkeypatch, tmp_path):
        monkeypatch.setattr(matplotlib, "get_data_path", lambda: str(tmp_path))
        monkeypatch.setattr(module, "_font", module._font.__wrapped__)  # not from its cache
        with pytest.raises(ValueError, match=r"^data: got no .*DejaVuSans\.ttf.*Reinstall matplotlib"):
            module.outline("A", "DejaVuSans")

    def test_ink_of_a_square_with_a_hole(self):
        """Of 6x6 pixels, with a hole of 2x2 that winds the other way."""
        square = np.array([[-3, -3], [3, -3], [3, 3], [-3, 3]], float)
        hole = np.array([[-1, -1], [-1, 1], [1, 1], [1, -1]], float)
        ends = np.concatenate([np.stack([one, np.roll(one, -1, axis=0)], axis=1) for one in (square, hole)])
        pixels = module.coverage(ends)[2::4, 2::4]  # points in the middle of pixels
        want = np.zeros((24, 24), int)
        want[9:15, 9:15], want[11:13, 11:13] = 64, 0
        assert pixels.shape == (23, 23)
        full = module.coverage(ends)
        assert full.sum() / 16 == want.sum()
        assert set(np.unique(full[[46, 46], [46, 36]])) == {0, 64}


class TestLarge:
    def test_shape(self):
        drawn = load_dataset("letters-large", train_per_class=2, test_per_class=1)
        assert drawn.name == "letters-large"
        assert drawn.n_classes == len(set(drawn.class_names)) == CLASSES >= 40
        settings = build({"dataset": "letters-large"})
        assert settings.tasks == 10
        assert settings.memory == 20 * CLASSES
        assert 250 * CLASSES >= 10_000  # test images

    def test_no_look_alikes(self):
        characters = module.LARGE_CHARACTERS + "Oo0cSsvwxzl1"
        alike = similarity(characters)
        assert alike[:CLASSES, :CLASSES][~np.eye(CLASSES, dtype=bool)].max() < ALIKE
        for one, another in ("Oo", "O0", "cC", "sS", "vV", "wW", "xX", "zZ", "lI", "1I"):
            assert alike[characters.index(one), characters.index(another)] >= ALIKE


class TestOptions:
    @pytest.mark.parametrize("option", ["train_per_class", "test_per_class"])
    @pytest.mark.parametrize("value", [0, -1, 100_001, 1.5, "many", True])
    def test_bad_sizes(self, option, value):
        with pytest.raises(ValueError, match=rf"^{option}: got .*expected a whole number of images from 1 to 100000"):
            load_dataset("letters", **{option: value})
        with pytest.raises(ValueError, match=rf"^{option}: got"):
            build({"dataset": "letters", option: value})
        with pytest.raises(ValueError, match=rf"^{option}: got"):
            module.load(**{option: value})

    @pytest.mark.parametrize("seed", [-1, 2**63, 0.5])
    def test_bad_seeds(self, seed):
        with pytest.raises(ValueError, match=r"^data_seed: got"):
            load_dataset("letters", data_seed=seed)
        with pytest.raises(ValueError, match=r"^data_seed: got"):
            build({"dataset": "letters", "data_seed": seed})

    @pytest.mark.parametrize("option", ["train_per_class", "test_per_class", "data_seed"])
    def test_datasets_without_them(self, option):
        for name in set(DATASETS) - {"letters", "letters-large"}:
            with pytest.raises(ValueError, match=rf"^{option}: got 5 for {name}; expected none, or .*letters"):
                load_dataset(name, **{option: 5})

    @pytest.mark.parametrize("characters", ["", "AA", "\U0001f600", " "])
    def test_bad_characters(self, characters):
        with pytest.raises(ValueError, match=r"^characters: got"):
            module.load(characters=characters, train_per_class=1, test_per_class=1)

    @pytest.mark.parametrize("noise", [-1, float("nan"), float("inf")])
    def test_bad_noise(self, noise):
        with pytest.raises(ValueError, match=r"^noise: got"):
            module.load(noise=noise)

    def test_they_are_part_of_the_key_only_where_given(self):
        plain, more = build({}), build({"train_per_class": 500})
        assert "train_per_class" not in plain.model_dump(mode="json")
        assert more.data_options == {"train_per_class": 500}
        assert plain.key != more.key


def test_the_default_run_is_letters():
    settings = build({})
    assert (settings.dataset, settings.tasks, settings.memory) == ("letters", 5, 400)
    assert settings == build({"dataset": "letters"}) == build({"preset": "letters"})
    assert build({"dataset": "noisy-digits"}).dataset == "noisy-digits"
