"""Datasets in memory: what is checked when one is made, and images as inputs of a network."""

from __future__ import annotations

import pytest
import torch

from tcil.incremental.data.images import Dataset, ImageSet, Pixels


class TestPixels:
    def dataset(self, flip=True, padding=2):
        rng = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (50, 3, 8, 8), generator=rng, dtype=torch.uint8)
        part = ImageSet(images, torch.zeros(50, dtype=torch.long))
        return Dataset("x", part, part, ("a",), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), padding, flip)

    def test_plain_is_the_definition(self):
        data = self.dataset()
        want = (data.train.images[:4].float() / 255 - torch.tensor(data.mean)[:, None, None]) / torch.tensor(data.std)[
            :, None, None
        ]
        got = Pixels(data).plain(data.train, torch.arange(4))
        assert torch.allclose(got, want, atol=1e-5)
        assert got.is_contiguous(memory_format=torch.channels_last)

    def test_augmented_is_a_crop_of_the_padded_image_maybe_mirrored(self):
        data = self.dataset()
        pixels, rows = Pixels(data), torch.arange(50)
        got = pixels.augmented(data.train, rows, torch.Generator().manual_seed(1))
        padded = torch.nn.functional.pad(data.train.images, (2, 2, 2, 2))
        seen, mirrored = set(), 0
        for i in range(50):
            choices = {}
            for dy in range(5):
                for dx in range(5):
                    crop = padded[i : i + 1, :, dy : dy + 8, dx : dx + 8]
                    choices[dy, dx, False] = crop
                    choices[dy, dx, True] = crop.flip(3)
            normal = {k: pixels._normalised(v) for k, v in choices.items()}
            (found,) = [k for k, v in normal.items() if torch.allclose(v[0], got[i], atol=1e-5)]
            seen.add(found[:2])
            mirrored += found[2]
        assert len(seen) > 15
        assert 10 < mirrored < 40
        assert got.is_contiguous(memory_format=torch.channels_last)

    def test_digits_are_not_mirrored(self):
        data = self.dataset(flip=False, padding=0)
        got = Pixels(data).augmented(data.train, torch.arange(9), torch.Generator().manual_seed(1))
        assert torch.allclose(got, Pixels(data).plain(data.train, torch.arange(9)))

    def test_augmentation_follows_its_generator(self):
        data = self.dataset()
        one, same, other = (
            Pixels(data).augmented(data.train, torch.arange(9), torch.Generator().manual_seed(s)) for s in (1, 1, 2)
        )
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


class TestOwnDatasets:
    """What a dataset of the user's own has wrong is told where it is made."""

    IMAGES, LABELS = torch.zeros(6, 3, 4, 4, dtype=torch.uint8), torch.arange(6) % 2

    def made(self, **changes):
        part = ImageSet(self.IMAGES, self.LABELS)
        usual = {"train": part, "test": part, "class_names": ("a", "b"), "mean": (0.5,) * 3, "std": (0.2,) * 3}
        return Dataset("mine", **usual | changes)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"mean": (0.5, 0.5)}, "mean: got 2 numbers; expected one for each of 3 channels, or one for all"),
            ({"std": (0.2, 0.0, 0.2)}, r"std: got \(0.2, 0.0, 0.2\); expected finite numbers above 0"),
            ({"mean": (0.5, float("nan"), 0.5)}, r"mean: got \(0.5, nan, 0.5\); expected finite numbers"),
            ({"test": ImageSet(IMAGES[:0], LABELS[:0])}, "test: got no images; expected some of every class"),
            (
                {"test": ImageSet(IMAGES[:, :, :2], LABELS)},
                r"test: got images of shape \(3, 2, 4\); expected \(3, 4, 4\)",
            ),
        ],
    )
    def test_parts_that_do_not_fit(self, changes, message):
        with pytest.raises(ValueError, match=message):
            self.made(**changes)
        assert self.made().n_classes == 2

    def test_arrays_are_not_tensors(self):
        with pytest.raises(ValueError, match="labels: got ndarray; expected a torch tensor"):
            ImageSet(self.IMAGES, self.LABELS.numpy())
