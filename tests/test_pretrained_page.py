"""The tables of docs/pretrained.md are what `python -m research.pretrained` draws from the kept runs."""

from __future__ import annotations

from conftest import ROOT
from research import pretrained


def test_the_tables_are_those_of_the_kept_runs():
    page = (ROOT / "docs/pretrained.md").read_text(encoding="utf-8")
    drawn = page.split(pretrained.BEGIN)[1].split(pretrained.END)[0]
    assert drawn.strip() == "\n".join(pretrained.lines())


def test_every_regime_has_the_calibrators_of_the_tables():
    for title, runs in pretrained.studies().items():
        for run in runs:
            for task in run["tasks"][1:]:
                assert {"vanilla", "ts", "exemplar-ts", "reserve-ts", "optimal-ts"} <= set(task), title
