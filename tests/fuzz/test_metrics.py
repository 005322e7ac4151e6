"""Metrics: every input is refused by name, or scored the same in any order, container and scale of weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fuzz import oracles
from fuzz.cases import cases
from fuzz.strategies import (
    BAD_CLASSES,
    BAD_LABELS,
    CONTAINERS,
    LABEL_CONTAINERS,
    ODD,
    UNUSABLE,
    LogitSet,
    logit_sets,
    softmax,
)
from tcil import metrics

ENTRY = "metrics"
ARGUMENTS = ("probs", "labels", "classes", "sample_weight", "groups", "n_bins", "level", "coverage", "n_draws",
             "n_resamples", "new_classes", "seed")  # fmt: skip
SCORES = {
    "accuracy": metrics.accuracy,
    "nll": metrics.negative_log_likelihood,
    "brier": metrics.brier_score,
    "parts": metrics.brier_parts,
    "ece": metrics.expected_calibration_error,
    "aece": metrics.adaptive_calibration_error,
    "classwise": metrics.classwise_calibration_error,
    "gap": metrics.confidence_gap,
    "aurc": metrics.area_under_risk_coverage,
    "risk": metrics.risk_at_coverage,
    "bins": metrics.reliability_bins,
}
RANGES = {"nll": (0, np.inf), "brier": (0, 2), "parts": (0, 2), "gap": (-1, 1)}  # the others are from 0 to 1
BINNED = ("ece", "classwise", "bins")  # an edge between bins may turn with the last digit


@st.composite
def scored(draw: st.DrawFn, least_rows: int = 1) -> LogitSet:
    """Probabilities with their labels; at times rounded (ties), and at times with classes of probability 0."""
    given = draw(logit_sets(least_rows=least_rows))
    probs = softmax(given.logits)
    if draw(st.booleans()):
        probs = np.floor(probs * 16) / 16
        probs[np.arange(len(probs)), probs.argmax(axis=1)] += 1 - probs.sum(axis=1)
    return LogitSet(probs, given.labels)


def figures(answer: Any) -> np.ndarray:
    """An answer as plain numbers; NaN stands for an empty bin."""
    if not dataclasses.is_dataclass(answer):
        return np.array([float(answer)])
    parts = [getattr(answer, field.name) for field in dataclasses.fields(answer) if field.name != "by_group"]
    return np.concatenate([np.atleast_1d(np.asarray(part, dtype=np.float64)) for part in parts])


def score(name: str, probs: Any, labels: Any, **options: Any) -> Any:
    """A metric of something that is in order."""
    with oracles.nothing_changed(probs, labels, *options.values()):
        call = lambda: SCORES[name](probs, labels, **options)  # noqa: E731
        answer = oracles.answered(oracles.attempt(ENTRY, call, ARGUMENTS))
    in_range(name, answer)
    return answer


def in_range(name: str, answer: Any) -> None:
    """Between the least and the most that the metric can be, for every group as well."""
    low, high = RANGES.get(name, (0, 1))
    for one in (answer, *answer.by_group.values()):
        values = figures(one)
        if name == "bins":
            assert abs(one.weight.sum() - 1) < 1e-9
            values = np.concatenate([one.weight, one.confidence[one.count > 0], one.accuracy[one.count > 0]])
        assert not np.isnan(values).any(), (name, values)
        assert (values >= low - 1e-9).all(), (name, values)
        assert (values <= high + 1e-9).all(), (name, values)


def off_the_edges(probs: np.ndarray) -> bool:
    """Whether no probability lies on the edge of one of ten bins, where the last digit decides."""
    return bool((np.abs(probs * 10 - np.rint(probs * 10)) > 1e-6).all())


@cases(test=60, fuzz=1000)
@given(scored(), st.sampled_from(sorted(SCORES)), st.integers(0, 2**32 - 1))
@example(LogitSet(np.array([[0.75, 0.25]] * 6), np.array([0, 1, 1, 0, 1, 0])), "aece", 0)
def test_order_container_and_weights_do_not_matter(given, name, seed):
    rng = np.random.default_rng(seed)
    probs, labels = given.logits, given.labels
    assume(name not in BINNED or off_the_edges(probs))
    plain = figures(score(name, probs, labels))
    order = rng.permutation(len(labels))
    oracles.near(figures(score(name, probs[order], labels[order])), plain)
    weight = rng.choice([1.0, 2.0, 5.0], len(labels))
    weighted = figures(score(name, probs, labels, sample_weight=weight))
    oracles.near(figures(score(name, probs[order], labels[order], sample_weight=weight[order])), weighted)
    container = rng.choice([held for held in sorted(CONTAINERS) if "float32" not in held])
    as_labels = rng.choice(sorted(LABEL_CONTAINERS))
    held = score(name, CONTAINERS[container](probs), LABEL_CONTAINERS[as_labels](labels))
    oracles.near(figures(held), plain)
    scale = rng.choice([1.0, 1e-300, 1e300, 3e-8])
    oracles.near(figures(score(name, probs, labels, sample_weight=np.full(len(labels), scale))), plain)
    if name not in ("aece", "aurc", "bins"):  # these count rows, which differ
        often = rng.integers(0, 3, len(labels))
        assume(often.sum() > 0)
        repeated = score(name, np.repeat(probs, often, axis=0), np.repeat(labels, often))
        oracles.near(figures(score(name, probs, labels, sample_weight=often)), figures(repeated))


@cases(test=30, fuzz=500)
@given(scored(), st.sampled_from(sorted(SCORES)), st.sampled_from(["text", "numbers", "flags", "one"]))
def test_groups_add_up(given, name, kind):
    """Every group's figure is that of its rows alone; the whole is not changed by asking."""
    probs, labels = given.logits, given.labels
    third = np.arange(len(labels)) % 3
    groups = {"text": np.array(["a", "b", "c"])[third], "numbers": third, "flags": third > 0, "one": 0 * third}[kind]
    whole = score(name, probs, labels, groups=groups)
    oracles.near(figures(whole), figures(score(name, probs, labels)))
    assert set(whole.by_group) == set(groups.tolist())
    for group, part in whole.by_group.items():
        rows = groups == group
        oracles.near(figures(part), figures(score(name, probs[rows], labels[rows])))


SPOILED_PROBS = {
    "slightly negative": lambda p: np.column_stack([p[:, 0] + p[:, -1] + 1e-7, *p[:, 1:-1].T, np.full(len(p), -1e-7)]),
    "below by rounding": lambda p: np.column_stack(
        [p[:, 0] + p[:, -1] + 1e-17, *p[:, 1:-1].T, np.full(len(p), -1e-17)]
    ),
    "above one": lambda p: p * 1.001,
    "rounded": lambda p: p.astype(np.float16),
    "one-hot": lambda p: np.eye(p.shape[1])[p.argmax(axis=1)],
    "one-hot whole numbers": lambda p: np.eye(p.shape[1], dtype=np.int64)[p.argmax(axis=1)],
}
NO_PROBS = {
    "logits": lambda p: 20 * p,
    "zeros": np.zeros_like,
    "percent": lambda p: 100 * p,
    "negative": lambda p: np.column_stack([p[:, 0] + 1, -1 + 0 * p[:, 0], *p[:, 1:].T]),
}


@cases(test=60, fuzz=800)
@given(scored(), st.sampled_from(sorted(SCORES)), st.sampled_from([*UNUSABLE, *ODD, *SPOILED_PROBS, *NO_PROBS]))
def test_hostile_probabilities(given, name, oddity):
    probs = (UNUSABLE | ODD | SPOILED_PROBS | NO_PROBS)[oddity](given.logits)
    labels = given.labels[:1] if oddity == "one row" else given.labels
    with oracles.nothing_changed(probs):
        answer = oracles.attempt(ENTRY, lambda: SCORES[name](probs, labels), ARGUMENTS)
    if oddity in UNUSABLE or oddity in NO_PROBS:
        oracles.refused(answer)
    if answer is not None:
        in_range(name, answer)


ODD_WEIGHTS = {
    "negative": (lambda n: -np.ones(n), False),
    "zero": (np.zeros, False),
    "NaN": (lambda n: np.full(n, np.nan), False),
    "infinite": (lambda n: np.append(np.ones(n - 1), np.inf), False),
    "complex": (lambda n: np.ones(n) + 1j, False),
    "masked": (lambda n: np.ma.array(np.ones(n), mask=np.arange(n) == 0), False),
    "text": (lambda n: ["1"] * n, False),
    "too many": (lambda n: np.ones(n + 1), False),
    "matrix": (lambda n: np.ones((n, 1)), False),
    "number": (lambda n: 1.0, False),
    "largest": (lambda n: np.full(n, np.finfo(np.float64).max), True),
    "tiniest": (lambda n: np.full(n, 5e-324), True),
    "far apart": (lambda n: np.where(np.arange(n) == 0, 1e308, 1e-308), True),
    "flags": (lambda n: np.arange(n) % 2 == 0, True),
}
ODD_GROUPS = {
    "NaN": lambda n: np.where(np.arange(n) == 0, np.nan, 1.0),
    "None": lambda n: [None, *range(n - 1)],
    "mixed": lambda n: ["a", *range(n - 1)],
    "objects": lambda n: [{}] * n,
    "too few": lambda n: list(range(n - 1)),
    "matrix": lambda n: np.zeros((n, 1)),
    "number": lambda n: 1,
    "masked": lambda n: np.ma.array(np.zeros(n), mask=np.arange(n) == 0),
    "nested": lambda n: [[0], *[[0, 1]] * (n - 1)],
}
ODD_NUMBERS = [0, -1, 2.5, "10", None, True, float("nan"), float("inf"), [], 2**70, 10**9]


@cases(test=50, fuzz=500)
@given(scored(least_rows=3), st.sampled_from(sorted(SCORES)), st.sampled_from([*ODD_WEIGHTS]))
def test_hostile_weights(given, name, oddity):
    make, usable = ODD_WEIGHTS[oddity]
    weight = make(len(given.labels))
    with oracles.nothing_changed(weight):
        call = lambda: SCORES[name](given.logits, given.labels, sample_weight=weight)  # noqa: E731
        answer = oracles.attempt(ENTRY, call, ARGUMENTS)
    if not usable:
        oracles.refused(answer)
    if answer is not None:
        in_range(name, answer)


@cases(test=50, fuzz=500)
@given(
    scored(least_rows=3),
    st.sampled_from(sorted(SCORES)),
    st.one_of(
        st.tuples(st.just("groups"), st.sampled_from(sorted(ODD_GROUPS))),
        st.tuples(st.just("labels"), st.sampled_from(sorted(BAD_LABELS))),
        st.tuples(st.just("classes"), st.sampled_from(sorted(BAD_CLASSES))),
    ),
)
@example(LogitSet(np.array([[0.75, 0.25]] * 3), np.array([0, 1, 0])), "accuracy", ("groups", "mixed"))
def test_hostile_groups_labels_and_classes(given, name, odd):
    argument, oddity = odd
    n, k = given.logits.shape
    value = {"groups": lambda: ODD_GROUPS[oddity](n), "labels": lambda: BAD_LABELS[oddity](given.labels),
             "classes": lambda: BAD_CLASSES[oddity](k)}[argument]()  # fmt: skip
    arguments = {"labels": given.labels, argument: value}
    with oracles.nothing_changed(value):
        call = lambda: SCORES[name](given.logits, **arguments)  # noqa: E731
        oracles.refused(oracles.attempt(ENTRY, call, ARGUMENTS))


@cases(test=30, fuzz=300)
@given(
    scored(),
    st.sampled_from(["ece", "bins", "floor", "estimate", "comparison", "risk", "groups"]),
    st.sampled_from(ODD_NUMBERS),
)
def test_hostile_options(given, name, odd):
    probs, labels = given.logits, given.labels
    calls = {
        "ece": lambda: metrics.expected_calibration_error(probs, labels, n_bins=odd),
        "bins": lambda: metrics.reliability_bins(probs, labels, n_bins=odd),
        "floor": lambda: metrics.noise_floor(probs, n_draws=3, seed=odd),
        "estimate": lambda: metrics.calibration_estimate(probs, labels, level=odd, n_resamples=5),
        "comparison": lambda: metrics.compare_calibration(probs, probs, labels, level=odd, n_resamples=5),
        "risk": lambda: metrics.risk_at_coverage(probs, labels, coverage=odd),
        "groups": lambda: metrics.predicted_groups(probs, new_classes=odd),
    }
    assume(not (name in ("ece", "bins") and odd == 10**9))  # as many bins as one likes, and as much memory
    answer = oracles.attempt(ENTRY, calls[name], ARGUMENTS)
    if not (name == "floor" and isinstance(odd, int)) and not (name == "risk" and odd is True):
        oracles.refused(answer)


@cases(test=20, fuzz=400)
@given(scored(), st.sampled_from(sorted(UNUSABLE)))
def test_predicted_groups(given, oddity):
    answer = oracles.attempt(ENTRY, lambda: metrics.predicted_groups(given.logits, [0]), ARGUMENTS)
    found = oracles.answered(answer)
    assert [group == "new" for group in found] == (given.logits.argmax(axis=1) == 0).tolist()
    odd = UNUSABLE[oddity](given.logits)
    assume(oddity not in ("empty", "one column"))  # of no rows there are no groups; of one class, one
    oracles.refused(oracles.attempt(ENTRY, lambda: metrics.predicted_groups(odd, [0]), ARGUMENTS))
