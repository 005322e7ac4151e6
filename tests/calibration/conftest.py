"""Fixtures of the tests of calibrators."""

from __future__ import annotations

import pytest
from every_calibrator import all_calibrators


@pytest.fixture(scope="session")
def fitted(digits_tasks):
    """A task, and every calibrator by its name, fitted on it."""
    task = digits_tasks[2]
    return task, all_calibrators(task)
