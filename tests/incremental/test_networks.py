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
