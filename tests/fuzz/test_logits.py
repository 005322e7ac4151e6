"""Calibrators that are fitted on logits: every matrix is refused by name, or calibrated soundly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import tcil
from fuzz import oracles
from fuzz.cases import cases
from fuzz.strategies import (
    BAD_CLASSES,
    BAD_LABELS,
    CLASS_CONTAINERS,
    CONTAINERS,
    LABEL_CONTAINERS,
    MASKS,
    ODD,
    UNUSABLE,
    LogitSet,
    logit_sets,
)

ENTRY = "logits"
KINDS = ("ts", "sgd", "first", "group", "ets", "irm")
ARGUMENTS = ("logits", "labels", "classes", "new_classes")


def fitted(kind: str, logits: Any, labels: Any, classes: Any = None, new: Any = (0,)) -> tcil.extending.Calibrator:
    """One of the calibrators, fitted."""
    if kind == "group":
        return tcil.GroupTemperatureScaling().fit(logits, labels, classes=classes, new_classes=new)
    made = {
        "ts": tcil.TemperatureScaling,
        "sgd": lambda: tcil.TemperatureScaling(solver="sgd"),
        "first": tcil.FirstTaskTemperatureScaling,
        "ets": tcil.EnsembleTemperatureScaling,
        "irm": tcil.MulticlassIsotonic,
    }[kind]()
    return made.fit(logits, labels, classes=classes)


def temperatures(calibrator: tcil.extending.Calibrator) -> list[float]:
    if isinstance(calibrator, tcil.GroupTemperatureScaling):
        return list(calibrator.temperatures_.values())
    if isinstance(calibrator, tcil.MulticlassIsotonic):
        return []
    return [calibrator.result_.temperature]


def answer(kind: str, given: LogitSet, container: Any = "array", labels: Any = "array") -> tuple[Any, np.ndarray]:
    """A calibrator fitted on a set that is in order, and its probabilities of the same set."""
    z, y = CONTAINERS[container](given.logits), LABEL_CONTAINERS[labels](given.labels)
    with oracles.nothing_changed(z, y):
        calibrator = oracles.answered(oracles.attempt(ENTRY, lambda: fitted(kind, z, y), ARGUMENTS))
        probs = oracles.probabilities(calibrator.predict_proba(z), *given.logits.shape)
    return calibrator, probs


def is_probabilities(logits: np.ndarray) -> bool:
    """Rows that are probabilities by chance are refused, and rightly."""
    return bool((logits >= 0).all() and (np.abs(logits.sum(axis=1) - 1) < 0.01).all())


def at_an_edge(given: LogitSet) -> bool:
    """Whether the set lies where a verdict turns: there the last digit decides."""
    z = given.logits - given.logits.max(axis=1, keepdims=True)
    own = z[np.arange(len(z)), given.labels]
    spread = -z.mean()
    return bool(abs((own - z.mean(axis=1)).mean()) <= 1e-9 * spread)


@cases(test=40, fuzz=1500)
@given(
    logit_sets(), st.sampled_from(KINDS), st.sampled_from(sorted(CONTAINERS)), st.sampled_from(sorted(LABEL_CONTAINERS))
)
def test_answers_are_sound(given, kind, container, labels):
    assume(not is_probabilities(given.logits))
    calibrator, probs = answer(kind, given, container, labels)
    for temperature in temperatures(calibrator):
        oracles.sound_temperature(temperature)
    oracles.same_argmax(probs, given.logits)
    if kind in ("ts", "first"):
        oracles.nll_not_above_one(given.logits, given.labels, calibrator.temperature_)
        fit = tcil.fit_temperature(given.logits, given.labels)
        assert fit.nll_after <= fit.nll_before * (1 + 1e-12)
        oracles.near(fit.temperature, calibrator.temperature_)
    if kind == "ets":
        assert calibrator.result_.mse_after <= calibrator.result_.mse_before + 1e-12


@cases(test=40, fuzz=1000)
@given(
    logit_sets(least_rows=2),
    st.sampled_from([kind for kind in KINDS if kind != "sgd"]),  # the order of its batches is the rows' own
    st.sampled_from(sorted(CONTAINERS)),
    st.integers(0, 2**32 - 1),
)
def test_order_shift_and_container_do_not_matter(given, kind, container, seed):
    assume(not is_probabilities(given.logits) and not at_an_edge(given))
    rng = np.random.default_rng(seed)
    _, plain = answer(kind, given)
    order = rng.permutation(len(given.labels))
    _, turned = answer(kind, LogitSet(given.logits[order], given.labels[order]))
    oracles.near(turned, plain[order], absolute=1e-7)
    moved = given.logits + rng.integers(-64, 65, (len(order), 1)) / 8
    assume(not is_probabilities(moved))
    _, shifted = answer(kind, LogitSet(moved, given.labels))
    oracles.near(shifted, plain, absolute=1e-7)
    _, held = answer(kind, given, container)
    oracles.near(held, plain, absolute=1e-7)


@cases(test=40, fuzz=1000)
@given(
    logit_sets(least_rows=2, least_classes=3),
    st.sampled_from(KINDS),
    st.sampled_from(MASKS),
    st.sampled_from(["float64", "float32"]),
)
def test_a_masked_class_takes_no_part(given, kind, mask, dtype):
    """A column of -inf, or of a number that stands for it, changes nothing but the width."""
    rest = LogitSet(given.logits[:, 1:], given.labels % (given.width - 1))
    assume(not is_probabilities(rest.logits) and not at_an_edge(rest))
    mask = max(mask, float(np.finfo(np.float32).min)) if dtype == "float32" and np.isfinite(mask) else mask
    z = np.column_stack([np.full(len(given.labels), mask), rest.logits]).astype(dtype)
    with oracles.nothing_changed(z):
        calibrator = oracles.answered(
            oracles.attempt(ENTRY, lambda: fitted(kind, z, rest.labels + 1, new=[1]), ARGUMENTS)
        )
    probs = oracles.probabilities(calibrator.predict_proba(z), *z.shape)
    assert (probs[:, 0] == 0).all(), probs[:, 0]
    without, wanted = answer(kind, rest)
    oracles.near(probs[:, 1:], wanted, absolute=1e-6)
    if kind != "ets":  # whose temperature and weights may stand for one another
        oracles.near(temperatures(calibrator), temperatures(without))


_SMALL = LogitSet(np.array([[-1.15, -2.75], [-2.55, -2.9], [-1.95, 1.88], [0.9, 2.48]]), np.array([1, 1, 1, 0]))


@cases(test=60, fuzz=1500)
@example(_SMALL, "ts", "tiny")  # T was below the smallest normal number, and had no inverse
@given(logit_sets(), st.sampled_from(KINDS), st.sampled_from(sorted(UNUSABLE) + sorted(ODD)))
def test_hostile_logits(given, kind, oddity):
    z = (UNUSABLE | ODD)[oddity](given.logits)
    y = given.labels[:1] if oddity == "one row" else given.labels
    with oracles.nothing_changed(z, y):
        calibrator = oracles.attempt(ENTRY, lambda: fitted(kind, z, y), ARGUMENTS)
    if oddity in UNUSABLE:
        oracles.refused(calibrator)
    if calibrator is None:
        return
    for temperature in temperatures(calibrator):
        oracles.sound_temperature(temperature)
    oracles.probabilities(calibrator.predict_proba(z), len(y), given.width)


@cases(test=30, fuzz=500)
@given(logit_sets(), logit_sets(), st.sampled_from(KINDS), st.sampled_from(sorted(UNUSABLE) + sorted(ODD)))
def test_hostile_logits_after_the_fit(given, later, kind, oddity):
    """What was fitted on good logits is asked about others: of another width, masked, huge."""
    assume(not is_probabilities(given.logits))
    calibrator, before = answer(kind, given)
    z = (UNUSABLE | ODD)[oddity](later.logits)
    with oracles.nothing_changed(z):
        probs = oracles.attempt(ENTRY, lambda: calibrator.predict_proba(z), ARGUMENTS)
    if oddity in UNUSABLE or later.width != given.width:
        oracles.refused(probs)
    if probs is not None:
        oracles.probabilities(probs, len(probs), given.width)
    oracles.near(calibrator.predict_proba(given.logits), before)


@cases(test=40, fuzz=500)
@given(logit_sets(), st.sampled_from(KINDS), st.sampled_from(sorted(BAD_LABELS)))
def test_hostile_labels(given, kind, oddity):
    assume(not is_probabilities(given.logits))
    y = BAD_LABELS[oddity](given.labels)
    with oracles.nothing_changed(given.logits, y):
        oracles.refused(oracles.attempt("labels and classes", lambda: fitted(kind, given.logits, y), ARGUMENTS))


@cases(test=30, fuzz=400)
@given(logit_sets(), st.sampled_from(KINDS), st.sampled_from(sorted(BAD_CLASSES)), st.booleans())
@example(LogitSet(np.array([[4.0, 0], [0, 4], [4, 0]]), np.array([0, 1, 1])), "ts", "set", False)
def test_hostile_classes(given, kind, oddity, as_new):
    """In `classes`, or among the new classes of those that ask for them."""
    assume(not is_probabilities(given.logits) and not (as_new and kind != "group"))
    odd = BAD_CLASSES[oddity](given.width)
    fine = as_new and oddity in ("set", "frozen set", "too few")  # their order means nothing; fewer are usual
    assume(not fine)
    more = {"new": odd} if as_new else {"classes": odd}
    call = lambda: fitted(kind, given.logits, given.labels, **more)  # noqa: E731
    oracles.refused(oracles.attempt("labels and classes", call, ARGUMENTS))


@cases(test=20, fuzz=400)
@given(logit_sets(), st.sampled_from(["ts", "group", "ets"]), st.sampled_from(sorted(CLASS_CONTAINERS)), st.randoms())
def test_named_columns(given, kind, container, random):
    """Columns in any order under their labels give what the natural order gives."""
    assume(not is_probabilities(given.logits) and not at_an_edge(given))
    ordered = np.sort(given.logits, axis=1)
    assume(kind != "group" or bool((ordered[:, -1] > ordered[:, -2]).all()))  # between equals, the order decides
    _, plain = answer(kind, given)
    order = random.sample(range(given.width), given.width)
    classes = CLASS_CONTAINERS[container]([10 * column for column in order])
    call = lambda: fitted(kind, given.logits[:, order], 10 * given.labels, classes, new=[0])  # noqa: E731
    turned = oracles.answered(oracles.attempt("labels and classes", call, ARGUMENTS))
    assert turned.classes_ == tuple(10 * column for column in order)
    oracles.near(turned.predict_proba(given.logits[:, order]), plain[:, order], absolute=1e-6)


def test_not_fitted():
    """The oracles above would not see it."""
    with pytest.raises(tcil.NotFittedError):
        tcil.TemperatureScaling().transform([[1.0, 2.0]])
