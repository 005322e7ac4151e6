"""The networks of the paper."""

from __future__ import annotations

import pytest

from tcil.incremental import networks


@pytest.mark.parametrize("make", networks.NETWORKS.values(), ids=networks.NETWORKS)
@pytest.mark.parametrize("n_classes", [0, -1, 1.5, "3", True, 10**9])
def test_numbers_of_classes_that_cannot_be(make, n_classes):
    with pytest.raises(ValueError, match=r"^n_classes: got "):
        make(n_classes)


def test_channels_that_cannot_be():
    with pytest.raises(ValueError, match=r"^channels_in: got 0"):
        networks.small_cnn(4, channels_in=0)


@pytest.mark.parametrize(
    ("wrong", "argument"),
    [
        ({"widths": (), "depths": ()}, "widths"),
        ({"widths": 8}, "widths"),
        ({"widths": (8, 0)}, "widths"),
        ({"depths": (1,)}, "depths"),
        ({"depths": (1, 1.5)}, "depths"),
        ({"stem_stride": 0}, "stem_stride"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be(wrong, argument):
    with pytest.raises(ValueError, match=rf"^{argument}: got "):
        networks.ResNet(**{"n_classes": 3, "widths": (8, 16), "depths": (1, 1), **wrong})


@pytest.mark.parametrize("name", [None, 5, ["resnet32"]])
def test_names_that_are_no_text(name):
    with pytest.raises(ValueError, match=r"^network: got "):
        networks.network_factory(name)
