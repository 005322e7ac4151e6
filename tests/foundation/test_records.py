"""Results print well: aligned lines in a terminal, an escaped table in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import pytest
import torch

import tcil
from tcil.foundation.records import Record, as_text


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner(Record):
    temperature: float
    other: int
    verdict: Colour


@dataclass(frozen=True)
class Outer(Record):
    a: float
    longer_name: Inner
    steps: tuple[Inner, ...]
    kinds: tuple[Colour, ...]
    by_group: dict[str, Inner]


INNER = Inner(1 / 3, 4, Colour.RED)
OUTER = Outer(1234.5678, INNER, (INNER, INNER, INNER), (Colour.RED, Colour.RED), {"<old>": INNER})


def test_terminal():
    assert str(OUTER).splitlines() == [
        "Outer",
        "  a                1235",
        "  longer name      temperature 0.3333, verdict red",
        "  steps            3 x Inner",
        "  kinds            red, red",
        "  by group: <old>  temperature 0.3333, verdict red",
    ]


@dataclass(frozen=True)
class Answer(Record):
    steps: tuple[Outer, ...]
    assumptions: tuple[str, ...]

    @property
    def message(self) -> str:
        return "Accept from 0.5 on."


def test_an_answer_is_told_in_words_first_with_the_fields_of_few_parts():
    few = Answer((OUTER,), ("one, two", "three"))
    assert str(few).splitlines() == [
        "Answer",
        "  message      Accept from 0.5 on.",
        "  steps        a 1235, longer name temperature 0.3333, verdict red, kinds red, red, by group 1 entries",
        "  assumptions  one, two",
        "  assumptions  three",
    ]


def test_decisions_and_grouped_scores_show_what_was_asked_for():
    probs, labels = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]), [0, 1, 1]
    rule = tcil.decisions.ModelBasedThreshold(risk=0.25).fit(probs)
    assert "Accept from 0.7 on" in str(rule.result_)
    assert "threshold 0.7" in rule.result_._repr_html_()
    groups = ["old", "new", "new"]
    score = tcil.metrics.accuracy(probs, labels, groups=groups)
    assert repr(score) == "0.6667 (new 0.5, old 1)"
    assert float(str(score)) == score
    assert f"{score:.2f}" == "0.67"
    assert repr(tcil.metrics.accuracy(probs, [0, 1, 0])) == "1.0"
    bins = tcil.metrics.reliability_bins(probs, labels, n_bins=2, groups=groups)
    assert str(bins).count("ReliabilityBins") == bins._repr_html_().count("<table>") == 3


def test_a_wrapped_model_shows_its_temperature():
    network = torch.nn.Linear(3, 2)
    scaling = tcil.TemperatureScaling().fit(torch.tensor([[2.0, 0.0], [0.0, 2.0], [1.0, 0.0]]), torch.tensor([0, 1, 1]))
    shown = str(scaling.wrap(network))
    assert f"TemperatureMap(temperature={scaling.temperature_:.4g})" in shown


def test_notebook():
    table = OUTER._repr_html_()
    assert table.count("<tr>") == 5
    assert "by group: &lt;old&gt;" in table
    assert "<old>" not in table


def test_repr_stays_that_of_the_dataclass():
    assert repr(INNER) == "Inner(temperature=0.3333333333333333, other=4, verdict=<Colour.RED: 'red'>)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (True, "yes"),
        (12345678, "12345678"),
        (torch.zeros(3, 4), "Tensor of shape (3, 4)"),
        ((torch.zeros(2, 2), torch.zeros(2)), "Tensor of shape (2, 2), Tensor of shape (2,)"),
        (tuple(range(7)), "7 entries"),
        ((Colour.RED,) * 7, ", ".join(["red"] * 7)),
        (slice("a" * 50, "b" * 50), "slice"),
        ((), ""),
        ({"a": 1}, "1 entries"),
        (Colour.RED, "red"),
        (object, repr(object)),
    ],
)
def test_values(value, text):
    assert as_text(value) == text


def test_every_result_of_a_fit_prints():
    for name in tcil.results.__all__:
        kind = getattr(tcil.results, name)
        assert issubclass(kind, Record) or name == "CalibratedModel"


def test_bins_are_a_table():
    bins = tcil.metrics.reliability_bins([[0.9, 0.1], [0.3, 0.7]], [0, 0], n_bins=4)
    lines = str(bins).splitlines()
    assert len(lines) == 2 + 4
    assert len({len(line) for line in lines[1:]}) == 1
    assert bins._repr_html_().count("<tr>") == 5
