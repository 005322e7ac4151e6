"""docs/results.md and docs/results-tables.md are what `make results` writes from the stored runs."""

from __future__ import annotations

import re

import pytest

from conftest import ROOT
from research.overview import pictures
from research.overview.__main__ import written

NUMBER = re.compile(r"\d+(?:\.\d+)?")


def test_pages_are_those_of_the_stored_runs(tmp_path, monkeypatch):
    """The same words, and the same numbers up to one in the last digit: processors round sums differently."""
    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    pages = written()
    assert sorted(page.name for page in pages) == ["results-tables.md", "results.md"]
    assert list(tmp_path.glob("*.svg"))
    for page, text in pages.items():
        shown = page.read_text(encoding="utf-8")
        assert NUMBER.sub("0", text) == NUMBER.sub("0", shown), f"run `make results`: {page.relative_to(ROOT)} is old"
        for now, then in zip(NUMBER.findall(text), NUMBER.findall(shown), strict=True):
            decimals = len(now.partition(".")[2])
            assert float(now) == pytest.approx(float(then), abs=1.01 * 10**-decimals if decimals else 0)
