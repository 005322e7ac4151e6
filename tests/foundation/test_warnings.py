"""Warnings point at the line of the user."""

from __future__ import annotations

import warnings

import pytest

import tcil
from tcil.foundation.errors import warn, warnings_of


@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_a_fit_warns_at_the_line_that_calls_it(method):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(tcil.TemperatureScaling(), method)([[2.0, 0.0], [0.0, 3.0]], [0, 1])
    assert [warning.filename for warning in caught] == [__file__]


def test_the_task_is_named_inside_its_block_only():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with warnings_of("task 3"):
            warn("few rows")
        warn("few rows")
    assert [str(warning.message) for warning in caught] == ["task 3: few rows", "few rows"]
