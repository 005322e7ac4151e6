"""Calibrators that are fitted on a model: refused by name or calibrated, and always handed back untouched."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import tcil
from fuzz import oracles
from fuzz.cases import cases
from fuzz.networks import CLASSES, NEW, STRANGE, USUAL, Data, draw_data

ENTRY = "models"
KINDS = ("t-cil", "pact", "perturb-ts", "logits")
ARGUMENTS = ("model", "memory", "valid", "data", "new_classes", "classes", "columns", "features", "device",
             "batch_size", "imbalance", "history")  # fmt: skip
SEEDS = st.integers(0, 20)


def fitted(kind: str, model: Any, data: Data, device: Any = None, **options: Any) -> Any:
    """A calibrator fitted on the model; or its logits, where only these are asked for."""
    if kind == "logits":
        return tcil.predict_logits(model, data.memory, device=device, **options)
    if kind == "perturb-ts":
        named = {"classes": range(CLASSES)} | options
        return tcil.PerturbedTemperatureScaling(n_levels=2, device=device).fit(model, valid=data.memory, **named)
    if kind == "pact":
        return tcil.PACT(tolerance=0.02, device=device).fit(model, data.memory, data.valid, NEW, imbalance=5, **options)
    return tcil.TCIL(tolerance=0.02, device=device).fit(model, data.memory, data.valid, NEW, **options)


def sound(kind: str, answer: Any, model: Any, data: Data) -> None:
    """What a calibrator of a model promises, on its exemplars."""
    if kind == "logits":
        assert torch.isfinite(answer[0][:, :CLASSES]).all()
        return
    logits, _ = tcil.predict_logits(model, data.memory, classes=range(CLASSES))
    try:
        probs = oracles.probabilities(answer.predict_proba(logits), len(logits), CLASSES)
    except tcil.NotReachableError:
        assert kind == "perturb-ts"
        return
    oracles.sound_temperature(answer.temperature_)
    oracles.same_argmax(probs, logits.double().numpy())


@cases(test=24, fuzz=700)
@given(st.sampled_from(sorted(USUAL)), st.sampled_from(KINDS), SEEDS)
def test_usual_models(name, kind, seed):
    model, data = USUAL[name](seed), draw_data(seed)
    with oracles.nothing_changed(model, data.memory, data.valid):
        call = lambda: fitted(kind, model, data)  # noqa: E731
        answer = oracles.answered(oracles.attempt(ENTRY, call, ARGUMENTS))
        sound(kind, answer, model, data)
        if kind in ("t-cil", "pact") and not any(isinstance(m, (nn.Dropout, nn.BatchNorm1d)) for m in model.modules()):
            wrapped = answer.wrap(model)(data.memory[0].to(next(model.parameters()).dtype)).exp()
            logits, _ = tcil.predict_logits(model, data.memory, classes=range(CLASSES))
            oracles.near(wrapped.detach(), answer.predict_proba(logits), relative=1e-4, absolute=1e-5)


@cases(test=40, fuzz=900)
@given(st.sampled_from(sorted(STRANGE)), st.sampled_from(KINDS), SEEDS)
def test_strange_models(name, kind, seed):
    model, data = STRANGE[name](seed), draw_data(seed)
    with oracles.nothing_changed(model, data.memory, data.valid):
        answer = oracles.attempt(ENTRY, lambda: fitted(kind, model, data), ARGUMENTS)
        if answer is not None and name not in ("two classes", "no weights"):  # by chance as wide as they should be
            sound(kind, answer, model, data)


@cases(test=16, fuzz=300)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(
        ["meta", "cuda", "cuda:7", "mps", "xla", "nonsense", "", 5, -1, None, "cpu", "cpu:3", [], 2.5, b"cpu"]
    ),
)
@example("t-cil", "meta")
def test_devices(kind, device):
    model, data = USUAL["plain"](0), draw_data(0)
    with oracles.nothing_changed(model, data.memory, data.valid):
        answer = oracles.attempt(ENTRY, lambda: fitted(kind, model, data, device), ARGUMENTS)
        if device in (None, "cpu"):
            sound(kind, oracles.answered(answer), model, data)
        elif device == "meta":
            oracles.refused(answer)


ODD_OPTIONS = {
    "classes": [
        {0, 1, 2, 3},
        [3, 2, 1, 0],
        range(3),
        range(5),
        "0123",
        4,
        [0, 1, 2, 2],
        [0, 1, 2, "3"],
        [2**70, 1, 2, 3],
    ],
    "columns": [
        {0, 1, 2, 3},
        [0, 1, 2, 9],
        [-1, 0, 1, 2],
        [0, 0, 1, 2],
        "abcd",
        4,
        [0.0, 1.0, 2.0, 3.0],
        [2**70, 0, 1, 2],
    ],
    "features": ["fc", "body", "none", "", 5, lambda x: x, (lambda x: x, lambda f: f), (), ("fc",), lambda x: None],
    "unpack": [5, ("x",), "xy", (0, 1), lambda batch: batch, []],
}


@cases(test=24, fuzz=500)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(sorted(ODD_OPTIONS)).flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from(ODD_OPTIONS[name]))
    ),
)
@example("t-cil", ("columns", {0, 1, 2, 3}))
def test_odd_options(kind, option):
    name, value = option
    if name == "features" and kind in ("perturb-ts", "logits"):
        return
    model, data = USUAL["plain"](1), draw_data(1)
    with oracles.nothing_changed(model, data.memory, data.valid):
        answer = oracles.attempt(ENTRY, lambda: fitted(kind, model, data, **{name: value}), (*ARGUMENTS, "unpack"))
    if isinstance(value, set):
        oracles.refused(answer)


@cases(test=12, fuzz=300)
@given(st.sampled_from(KINDS[:3]), SEEDS, st.permutations(range(24)), st.sampled_from([7, 64]))
def test_row_order(kind, seed, order, batch):
    """T-CIL's answer does not depend on the order of the exemplars; nor does PACT's."""
    if kind == "perturb-ts":  # one draw of noise for each row in turn
        return
    model, data = USUAL["plain"](seed).double(), draw_data(seed)
    wide = Data(*((x.double(), y) for x, y in (data.memory, data.valid)))
    turned = Data(*((x[list(order)], y[list(order)]) for x, y in (wide.memory, wide.valid)))
    make = tcil.PACT if kind == "pact" else tcil.TCIL
    more = {"imbalance": 5} if kind == "pact" else {}
    found = []
    for one in (wide, turned):
        call = lambda one=one: make(batch_size=batch).fit(model, one.memory, one.valid, NEW, **more)  # noqa: E731
        found.append(oracles.answered(oracles.attempt(ENTRY, call, ARGUMENTS)).temperature_)
    assert np.isclose(*found, rtol=1e-5), found
