"""The counts are written once more when all is done."""

from __future__ import annotations

import pytest

from fuzz.cases import COUNTS


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    COUNTS.write()
