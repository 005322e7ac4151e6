"""The digits, for tests of learners and of their training."""

from __future__ import annotations

import pytest

from tcil.incremental.data.datasets import load_dataset


@pytest.fixture(scope="session")
def digits():
    return load_dataset("digits")
