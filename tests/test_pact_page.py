"""The tables of docs/pact.md and docs/pact-history.md are what `python -m research.pact page` writes."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import ROOT
from research import pact
from research.pact import residuals, rounds, verdicts
from research.pact.__main__ import tables_of


@pytest.fixture(scope="module")
def drawn():
    return pact.sections()


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in pact.PAGES.items() for name in names])
def test_the_tables_are_those_of_the_stored_records(path, name, drawn):
    page = (ROOT / path).read_text(encoding="utf-8")
    shown = page.split(f"<!-- tables: {name} -->")[1].split(f"<!-- end of {name} -->")[0]
    assert shown.split() == " ".join(drawn[name]).split()
    assert "@@" not in page


def test_a_world_counts_when_every_learner_was_measured():
    records = pact.stored("final", complete=True)
    by_world = {pact.world_of(record) for record in records}
    assert len(records) == len(by_world) * len(pact.LEARNERS)
    runs = [record["about"]["run"] for record in records]
    expected = {pact.final_settings(world, learner).name for world in pact.FINAL for learner in pact.LEARNERS}
    assert set(runs) <= expected
    assert len(set(runs)) == len(runs)


@pytest.mark.parametrize("name", sorted(path.name for path in pact.STORED.iterdir() if path.is_dir()))
def test_tables_of_every_kept_folder_are_printed(name):
    assert sum(line.startswith("|") for line in tables_of(name)) > 2


def test_a_signal_of_harm_is_judged_at_ten_per_cent_of_false_alarms():
    area, share = verdicts.separation([*range(100), 95.5, 50.0], [False] * 100 + [True] * 2)
    assert area == pytest.approx((96 + 50.5) / 200)
    assert share == 0.5


def test_a_pattern_is_predicted_where_other_groups_have_it_and_not_where_it_is_theirs_alone():
    x = np.linspace(-1, 1, 60)
    groups, even = ["a", "b", "c"] * 20, np.ones(60)
    shared = 3 * x
    assert np.abs(shared - residuals.left_out(x[:, None], shared, groups, even)).max() < 1
    own = np.array([1.0 if group == "a" else 0.0 for group in groups])  # which no other group can tell
    found = residuals.left_out(own[:, None], own, groups, even)
    assert np.square(own - found).mean() > 0.2
    assert residuals.left_out(x[:, None], own, groups, even)[0] == pytest.approx(0, abs=1e-12)


def test_a_rule_counts_harmful_tasks_of_both_forms_together_or_each_by_itself():
    harm = {
        "PACT": 1.5,
        "PACT, round six": 0.5,
        "PACT-R": 0.5,
        "PACT-R, round six": 1.5,
    }  # PACT loses one, PACT-R wins one
    record = {
        "about": {"learner": "er"},
        "scores": {name: [{"pooled": 2.0, "group": 3.0 - ("six" not in name)}] for name in harm},
        "states": [{"n_test": 5_000, "harm": {name: (value, 0.1, value) for name, value in harm.items()}}],
    }
    parts = {rounds.LETTERS: [record]}
    assert rounds.rule(rounds.EIGHT, parts)[-3:] == [
        "| both | PACT and PACT-R | | | 1 (1) | yes |", "", "The rule as a whole: passed.",
    ]  # fmt: skip
    apart = [line for line in rounds.rule(rounds.SEVEN, parts) if line.startswith("| both")]
    assert apart == ["| both | PACT | | | 1 (0) | no |", "| both | PACT-R | | | 0 (1) | yes |"]
    assert rounds.rule(rounds.SEVEN, parts)[-1] == "The rule as a whole: not passed."
