"""TempOpt: exact, invariant, honest about degenerate sets."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tcil
from tcil.calibration import temperature as module

SIZES = st.tuples(st.integers(2, 40), st.integers(2, 8))


@st.composite
def labelled_logits(draw):
    """Logits on a grid of 1/64: exact under the shifts and scales of the properties below."""
    n, k = draw(SIZES)
    ints = draw(hnp.arrays(np.int64, (n, k), elements=st.integers(-640, 640)))
    labels = draw(hnp.arrays(np.int64, (n,), elements=st.integers(0, k - 1)))
    logits = ints / 64.0
    assume(not (np.all(logits >= 0) and np.all(np.abs(logits.sum(1) - 1) < 1e-2)))
    return logits, labels


def mean_nll(logits, labels, temperatures):
    """Of each temperature."""
    z = (logits - logits.max(1, keepdims=True)) / np.reshape(temperatures, (-1, 1, 1))
    return (np.log(np.exp(z).sum(2)) - z[:, np.arange(len(logits)), labels]).mean(1)


@given(labelled_logits())
@settings(max_examples=100, deadline=None)
def test_optimal_against_a_dense_grid(case):
    logits, labels = case
    fit = tcil.fit_temperature(logits, labels)
    assert fit.nll_after <= fit.nll_before + 1e-12
    if fit.verdict == "ok":
        assert abs(fit.gradient) <= 1e-10
        grid = fit.temperature * np.geomspace(1e-3, 1e3, 400)
        assert fit.nll_after <= mean_nll(logits, labels, grid).min() + 1e-12
    else:
        assert fit.temperature == 1.0


@given(labelled_logits(), st.sampled_from([0.25, 0.5, 2.0, 8.0]))
@settings(max_examples=50, deadline=None)
def test_scales_with_the_logits(case, factor):
    logits, labels = case
    assume(not (np.all(logits * factor >= 0) and np.all(np.abs((logits * factor).sum(1) - 1) < 1e-2)))
    one, other = tcil.fit_temperature(logits, labels), tcil.fit_temperature(logits * factor, labels)
    assert one.verdict == other.verdict
    if one.verdict == "ok":
        assert other.temperature == pytest.approx(factor * one.temperature, rel=1e-9)


@given(labelled_logits(), st.integers(-1000, 1000), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_row_offsets_and_order_do_not_matter(case, offset, random):
    logits, labels = case
    rows = list(range(len(labels)))
    columns = list(range(logits.shape[1]))
    random.shuffle(rows)
    random.shuffle(columns)
    place = np.argsort(columns)
    moved = (logits + offset * np.arange(len(labels))[:, None])[rows][:, columns]
    assume(not (np.all(moved >= 0) and np.all(np.abs(moved.sum(1) - 1) < 1e-2)))
    one, other = tcil.fit_temperature(logits, labels), tcil.fit_temperature(moved, place[labels][rows])
    assert one.verdict == other.verdict
    if one.verdict == "ok":
        assert other.temperature == pytest.approx(one.temperature, rel=1e-8)


@pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
@given(labelled_logits())
@settings(max_examples=50, deadline=None)
def test_argmax_stays(case):
    logits, labels = case
    logits = logits.astype(np.float32)
    best = logits.max(1)
    for calibrator in (tcil.TemperatureScaling(), tcil.EnsembleTemperatureScaling(), tcil.MulticlassIsotonic()):
        fitted = calibrator.fit(logits, labels)
        if fitted.result_ is not None and getattr(fitted.result_, "verdict", None) == "uniform":
            continue
        chosen = fitted.transform(logits).argmax(1)
        np.testing.assert_array_equal(logits[np.arange(len(logits)), chosen], best)


def test_isotonic_needs_its_float64():
    """In float32 the tie-break is lost; in float64 no prediction changes (4,000 rows)."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4000, 10, generator=generator)
    labels = torch.where(torch.rand(4000, generator=generator) < 0.5, logits.argmax(1), torch.arange(4000) % 10)
    isotonic = tcil.MulticlassIsotonic().fit(logits, labels)
    log_probs = isotonic.transform(logits)
    assert log_probs.dtype == torch.float64
    assert int((log_probs.argmax(1) != logits.argmax(1)).sum()) == 0
    assert int((log_probs.float().argmax(1) != logits.argmax(1)).sum()) > 0


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_extreme_temperatures_are_not_clamped(scale):
    generator = torch.Generator().manual_seed(1)
    logits = scale * torch.randn(500, 7, generator=generator).double()
    labels = torch.where(torch.rand(500, generator=generator) < 0.3, logits.argmax(1), torch.arange(500) % 7)
    fit = tcil.fit_temperature(logits, labels)
    base = tcil.fit_temperature(logits / scale, labels)
    assert fit.temperature == pytest.approx(scale * base.temperature, rel=1e-9)


@given(labelled_logits(), st.integers(-60, 60))
@settings(max_examples=60, deadline=None)
def test_any_scale_is_as_good_as_another(case, exponent):
    logits, labels = case
    scale = 2.0**exponent
    assume(not (np.all(logits * scale >= 0) and np.all(np.abs((logits * scale).sum(1) - 1) < 1e-2)))
    one, other = tcil.fit_temperature(logits, labels), tcil.fit_temperature(logits * scale, labels)
    assert one.verdict == other.verdict
    if one.verdict == "ok":
        assert other.temperature == pytest.approx(scale * one.temperature, rel=1e-9)


@pytest.mark.parametrize("std", [0.01, 1.0, 30.0, 100.0, 1e6, 1e-300])
def test_random_sets_of_every_scale(std):
    """Newton may come from one side only; the last step must not fall out of the bracket."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        n, k = rng.integers(5, 200), rng.integers(2, 20)
        logits = std * rng.standard_normal((n, k))
        labels = np.where(rng.random(n) < 0.4, logits.argmax(1), rng.integers(0, k, n))
        fit = tcil.fit_temperature(logits, labels)
        assert math.isfinite(fit.temperature)
        assert fit.temperature > 0
        if fit.verdict == "ok":
            assert abs(fit.gradient) <= 1e-10 * max(1.0, std)


def test_nearly_all_correct_gives_a_small_temperature():
    logits = torch.eye(3).double()[torch.arange(300) % 3] * 10
    labels = torch.arange(300) % 3
    labels[0] = 1
    fit = tcil.fit_temperature(logits, labels)
    # 299 of 300 right with a margin of 10: softmax mass on the others is 1/300.
    assert fit.temperature == pytest.approx(10 / math.log(2 * 299 / 1), rel=1e-9)


def test_chunks_give_the_same(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    logits, labels = torch.randn(1000, 10, generator=generator), torch.arange(1000) % 10
    whole = tcil.fit_temperature(logits + 0.5 * torch.eye(10)[labels], labels)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 370)
    assert tcil.fit_temperature(logits + 0.5 * torch.eye(10)[labels], labels).temperature == pytest.approx(
        whole.temperature, rel=1e-12
    )


def test_agrees_with_scikit_learn():
    pytest.importorskip("sklearn", minversion="1.8")  # the first with temperature scaling
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.datasets import load_digits
    from sklearn.frozen import FrozenEstimator
    from sklearn.linear_model import LogisticRegression

    x, y = load_digits(return_X_y=True)
    model = LogisticRegression(C=10, max_iter=200).fit(x[:300], y[:300])
    theirs = CalibratedClassifierCV(FrozenEstimator(model), method="temperature").fit(x[300:], y[300:])
    ours = tcil.TemperatureScaling().fit(model.decision_function(x[300:]), y[300:])
    np.testing.assert_allclose(
        ours.predict_proba(model.decision_function(x[:300])), theirs.predict_proba(x[:300]), atol=1e-5
    )


def test_sgd_under_converges_and_diverges_as_stated():
    generator = torch.Generator().manual_seed(3)
    logits = 8 * torch.randn(100, 10, generator=generator)
    labels = torch.where(torch.rand(100, generator=generator) < 0.6, logits.argmax(1), torch.arange(100) % 10)
    exact, sgd = (tcil.fit_temperature(logits, labels, solver=s).temperature for s in ("exact", "sgd"))
    assert sgd < 0.95 * exact
    # All but one correct: the optimum is a small T, and the authors' schedule steps right over it.
    labels = torch.arange(200) % 4
    near = 0.3 * torch.eye(4)[labels]
    near[0] = 0.3 * torch.eye(4)[1]
    over = tcil.fit_temperature(near, labels, solver="sgd")
    assert (over.verdict, over.temperature, over.limit) == ("diverged", 1.0, 0.0)
    assert 0 < tcil.fit_temperature(near, labels).temperature < 0.28
    # A degenerate set is one whatever the solver.
    all_right = tcil.fit_temperature(3 * torch.eye(4), torch.arange(4), solver="sgd")
    assert (all_right.verdict, all_right.temperature) == ("all_correct", 1.0)


def test_sgd_depends_on_its_seed_only():
    generator = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(400, 5, generator=generator)
    labels = torch.where(torch.rand(400, generator=generator) < 0.6, logits.argmax(1), torch.arange(400) % 5)
    fits = [tcil.fit_temperature(logits, labels, solver="sgd", seed=seed).temperature for seed in (0, 0, 1)]
    assert fits[0] == fits[1] != fits[2]


@pytest.mark.parametrize("kind", [torch.tensor, np.asarray, list])
def test_kind_in_kind_out(kind):
    logits, labels = [[2.0, 0.5], [0.1, 1.0], [0.7, 0.2]], [0, 1, 1]
    scaling = tcil.TemperatureScaling().fit(kind(logits), kind(labels))
    out = scaling.transform(kind(logits))
    assert isinstance(out, torch.Tensor if kind is torch.tensor else np.ndarray)
    np.testing.assert_allclose(np.exp(np.asarray(out)), np.asarray(scaling.predict_proba(kind(logits))))


def test_bfloat16_logits_are_widened():
    logits = torch.tensor([[2.0, 0.5], [0.1, 1.0], [0.7, 0.2]], dtype=torch.bfloat16)
    scaling = tcil.TemperatureScaling().fit(logits, torch.tensor([0, 1, 1]))
    assert scaling.transform(logits).dtype == torch.float64
    assert scaling.temperature_ == tcil.fit_temperature(logits.double(), torch.tensor([0, 1, 1])).temperature


def test_classes_name_the_columns():
    logits = torch.tensor([[2.0, 0.5, 0.1], [0.1, 1.0, 0.3], [0.7, 0.2, 0.1], [0.2, 0.1, 3.0]])
    plain = tcil.fit_temperature(logits, torch.tensor([0, 1, 1, 2]))
    named = tcil.fit_temperature(logits, torch.tensor([70, 3, 3, 9]), classes=[70, 3, 9])
    assert named == plain


def test_degenerate_logits_are_said_aloud():
    with pytest.warns(
        tcil.CalibrationWarning, match=r"TemperatureScaling: every sample is classified correctly.*2 samples"
    ):
        scaling = tcil.TemperatureScaling().fit([[2.0, 0.0], [0.0, 3.0]], [0, 1])
    assert scaling.temperature_ == 1.0


def test_isotonic_is_the_exact_regression_and_scikit_learns():
    """Tiny probabilities are points of their own, however near to each other."""
    from scipy.optimize import isotonic_regression
    from sklearn.isotonic import IsotonicRegression

    rng = np.random.default_rng(0)
    for std in (3.0, 20.0, 60.0):
        logits = std * rng.standard_normal((400, 10))
        labels = np.where(rng.random(400) < 0.6, logits.argmax(1), rng.integers(0, 10, 400))
        probs = torch.softmax(torch.tensor(logits), dim=1).numpy()
        hits = np.eye(10)[labels].ravel()
        place = np.unique(probs.ravel(), return_inverse=True)[1]
        mass = np.bincount(place)
        exact = isotonic_regression(np.bincount(place, weights=hits) / mass, weights=mass.astype(float)).x[place]
        q = exact.reshape(400, 10) + 1e-9 * probs
        got = tcil.MulticlassIsotonic().fit(logits, labels).predict_proba(logits)
        np.testing.assert_allclose(got, q / q.sum(1, keepdims=True), atol=1e-7)
        if std == 3.0:
            theirs = IsotonicRegression(out_of_bounds="clip").fit(probs.ravel(), hits)
            new = rng.standard_normal((50, 10)) * std
            p = torch.softmax(torch.tensor(new), dim=1).numpy()
            q = theirs.predict(p.ravel()).reshape(50, 10) + 1e-9 * p
            fitted = tcil.MulticlassIsotonic().fit(logits, labels)
            np.testing.assert_allclose(fitted.predict_proba(new), q / q.sum(1, keepdims=True), atol=1e-9)


def test_groups_get_their_own_temperature():
    generator = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(600, 4, generator=generator)
    predicted = logits.argmax(1)
    chance = torch.rand(600, generator=generator)
    labels = torch.where(chance < torch.where(predicted >= 2, 0.9, 0.4), predicted, (predicted + 1) % 4)
    scaling = tcil.GroupTemperatureScaling().fit(logits, labels, new_classes=[2, 3])
    for group, rows in (("old", predicted < 2), ("new", predicted >= 2)):
        alone = tcil.fit_temperature(logits[rows], labels[rows]).temperature
        assert scaling.temperatures_[group] == pytest.approx(alone)
        want = torch.log_softmax(logits[rows].double() / alone, dim=1)
        assert torch.allclose(scaling.transform(logits)[rows], want)
    assert scaling.temperatures_["old"] > scaling.temperatures_["new"]


def test_history_goes_from_task_to_task():
    first = tcil.FirstTaskTemperatureScaling().fit([[2.0, 0.5], [0.1, 1.0], [0.7, 0.2]], [0, 1, 1])
    second = tcil.FirstTaskTemperatureScaling().fit(classes=range(4), history=first.history_)
    third = tcil.FirstTaskTemperatureScaling().fit([[0.0] * 5 + [2.0]], [5], history=second.history_)
    assert first.temperature_ == second.temperature_ == third.temperature_
    assert third.classes_ == tuple(range(6))
    assert second.history_ == first.history_
    good = first.history_
    for bad in ({"T": 3}, {**good, "temperature": math.inf}, {**good, "temperature": True}, {**good, "verdict": "x"}, 3,
                {**good, "calibrator": "TCIL"}, {k: v for k, v in good.items() if k != "verdict"}):  # fmt: skip
        with pytest.raises(ValueError, match=r"history: got .*; expected history_ of an earlier"):
            tcil.FirstTaskTemperatureScaling().fit(classes=range(4), history=bad)
    for classes in ([0, 0, 1], [0.5, 1], []):
        with pytest.raises(ValueError, match="classes: got"):
            tcil.FirstTaskTemperatureScaling().fit(classes=classes, history=good)
    assert tcil.FirstTaskTemperatureScaling().fit(classes=np.arange(6), history=good).classes_ == tuple(range(6))
    with pytest.raises(ValueError, match="logits: got 6 columns; expected 3"):
        tcil.FirstTaskTemperatureScaling().fit([[0.0] * 5 + [2.0]], classes=range(3), history=good)


# --- masked classes -----------------------------------------------------------------------------------------------

MASKS = {
    "-inf": -math.inf,
    "-1e4": -1e4,
    "-1e9": -1e9,
    "-1e92": -1e92,
    **{str(kind): torch.finfo(kind).min for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64)},
}
LOGITS_ONLY = {
    "ts": tcil.TemperatureScaling,
    "sgd": lambda: tcil.TemperatureScaling(solver="sgd"),
    "first": tcil.FirstTaskTemperatureScaling,
    "group": tcil.GroupTemperatureScaling,
    "ets": tcil.EnsembleTemperatureScaling,
    "irm": tcil.MulticlassIsotonic,
}


def overconfident(n=300, k=5, seed=6):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(n, k, generator=generator).double()
    guess = torch.randint(k, (n,), generator=generator)
    return logits, torch.where(torch.rand(n, generator=generator) < 0.5, logits.argmax(1), guess)


def fitted_by(name, logits, labels):
    calibrator = LOGITS_ONLY[name]()
    return calibrator.fit(logits, labels, new_classes=[0]) if name == "group" else calibrator.fit(logits, labels)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float64) for name in LOGITS_ONLY),
        *(("ets", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    ],
)
def test_a_masked_column_is_as_if_it_were_not_there(name, dtype):
    logits, labels = overconfident(n=150)
    logits, shifted = logits.to(dtype), labels + (labels >= 2)
    want = fitted_by(name, logits, labels).predict_proba(logits)
    unaware = fitted_by(name, torch.cat([logits, logits[:, :1]], dim=1), labels)
    rest = [0, 1, 3, 4, 5]
    for mask in MASKS.values():
        masked = torch.full((150, 6), mask, dtype=torch.float64).to(dtype)
        masked[:, rest] = logits
        given = masked.clone()
        other = fitted_by(name, masked, shifted)
        probs = other.predict_proba(masked)
        torch.testing.assert_close(probs[:, rest], want, rtol=1e-9, atol=1e-12)
        assert bool((probs[:, 2] == 0).all())
        assert bool((other.transform(masked)[:, 2] == -math.inf).all())
        assert bool((unaware.transform(masked)[:, 2] == -math.inf).all())  # though it was fitted without a mask
        assert torch.equal(masked, given)


CHANGED_MASKS = {
    "-1e4 + z": lambda z, out: z - 1e4 * out,
    "-1e9 + z": lambda z, out: z - 1e9 * out,
    "float16": lambda z, out: z + torch.finfo(torch.float16).min * out,
    "log-softmax": lambda z, out: torch.log_softmax(z.masked_fill(out, -1e4), dim=1),
    "log-softmax of -1e4 + z": lambda z, out: torch.log_softmax(z - 1e4 * out, dim=1),
    "scaled": lambda z, out: 10 * z.masked_fill(out, -1e4),
}


@pytest.mark.parametrize("mask", CHANGED_MASKS.values(), ids=CHANGED_MASKS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float64) for name in LOGITS_ONLY), *(("ets", dtype) for dtype in (torch.float32, torch.bfloat16))],
)
def test_a_mask_may_have_a_logit_added_to_it(name, dtype, mask):
    """In some columns of all rows, and in others of some rows; also a set that says nothing of T."""
    logits, labels = overconfident(n=150, k=6)
    logits = logits.to(dtype)
    out = torch.zeros(150, 6, dtype=torch.bool)
    out[:, 4:] = True
    out[::3, 3] = True
    allowed = torch.where(labels < 3, labels, 0)
    changed = mask(logits, out)
    clean = changed.masked_fill(out, -math.inf)
    want = fitted_by(name, clean, allowed).predict_proba(clean)
    calibrator = fitted_by(name, changed, allowed)
    probs = calibrator.predict_proba(changed)
    torch.testing.assert_close(probs, want, rtol=1e-9, atol=1e-12)
    assert bool((probs[out] == 0).all())
    torch.testing.assert_close(calibrator.predict_proba(changed[:1]), probs[:1])  # the row alone decides
    worst = clean.masked_fill(out, math.inf).argmin(dim=1)
    assert tcil.fit_temperature(changed, worst).verdict == "anti_informative"


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("scale", [3e3, 1e4, 3e4, 1e6])
def test_scores_of_networks_on_a_large_scale_are_no_masks(scale, classes):
    """Some of their logits lie near -1e4 by chance; the others of the row are then no smaller."""
    logits, labels = overconfident(n=5000, k=classes)
    base, other = tcil.fit_temperature(logits, labels), tcil.fit_temperature(scale * logits, labels)
    assert other.temperature / scale == pytest.approx(base.temperature, rel=1e-9)
    binary = torch.stack([torch.zeros(5000).double(), scale * logits[:, 0]], dim=1)
    known = (binary.argmax(dim=1) + (torch.arange(5000) % 10 == 0)) % 2
    assert bool(torch.isfinite(tcil.TemperatureScaling().fit(binary, known).transform(binary)).all())


@pytest.mark.parametrize("mask", [-2e3, -12345.0, -5e4])
def test_other_numbers_are_scores_but_warn(mask):
    logits, labels = overconfident(n=50)
    masked = torch.cat([logits, logits[:, :2] + mask], dim=1)
    with pytest.warns(tcil.CalibrationWarning, match=r"the classes \[5, 6\] are about -.* in 50 of 50 rows.*use -inf"):
        fit = tcil.fit_temperature(masked, labels)
    assert fit.temperature == pytest.approx(tcil.fit_temperature(logits, labels).temperature)
    with pytest.warns(tcil.CalibrationWarning, match=r"the classes \[60\] are"):
        tcil.TemperatureScaling().fit(masked[:, :6], 10 + 10 * labels, classes=range(10, 70, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tcil.fit_temperature(masked[:4], labels[:4])  # too few to tell
        tcil.fit_temperature(torch.cat([logits, 300 * logits], dim=1), labels)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_rows_may_be_masked_on_their_own(mask):
    """A row with a forbidden class, then one that may be one class only: that says nothing of T."""
    logits, labels = overconfident(k=4)
    rows = torch.arange(300) % 3 == 0
    logits[rows, (labels[rows] + 1) % 4] = mask
    want = np.log(np.exp(np.where(logits.numpy() <= -9e3, -np.inf, logits.numpy()) / 3).sum(1)).mean()
    fit = tcil.fit_temperature(logits, labels)
    own = (logits[torch.arange(300), labels] / 3).mean().item()
    at_three = want - own
    assert fit.nll_after < at_three
    alone = torch.full((50, 4), mask, dtype=torch.float64)
    alone[:, 1] = 2.0
    more = tcil.fit_temperature(torch.cat([logits, alone]), torch.cat([labels, torch.ones(50, dtype=torch.long)]))
    assert more.temperature == pytest.approx(fit.temperature, rel=1e-9)
    assert more.nll_after == pytest.approx(fit.nll_after * 300 / 350)
    assert tcil.fit_temperature(alone, torch.ones(50, dtype=torch.long)).verdict == "constant_logits"


def test_a_mask_holds_at_every_temperature():
    """Logits that are hardly worth anything: -1e4 must not come alive at the large temperature that they have."""
    logits = np.tile([1.0, 0.0, 0.0, -1e4], (3000, 1))
    labels = np.repeat([0, 1, 2], [1001, 1000, 999])
    scaling = tcil.TemperatureScaling().fit(logits, labels)
    assert scaling.temperature_ == pytest.approx(1 / math.log(2 * 1001 / 1999))  # about 667
    assert scaling.temperature_ > 600
    probs = scaling.predict_proba([[1.0, 1.0, 1.0, -1e4], [2.0, -np.inf, 2.0, -1e9]])
    np.testing.assert_array_equal(probs[:, 3], 0)
    np.testing.assert_allclose(probs, [[1 / 3, 1 / 3, 1 / 3, 0], [0.5, 0, 0.5, 0]], atol=1e-15)


@pytest.mark.parametrize("scale", [1e-250, 1e50, 1e150, 1e290])
def test_huge_and_tiny_scales_are_no_masks(scale):
    logits, labels = overconfident()
    base, other = tcil.fit_temperature(logits, labels), tcil.fit_temperature(scale * logits, labels)
    assert other.verdict == base.verdict == "ok"
    assert other.temperature / scale == pytest.approx(base.temperature, rel=1e-9)


@pytest.mark.parametrize("scale", [1e92, 1e200, 1e290])
def test_the_authors_schedule_on_a_huge_scale(scale):
    logits, labels = overconfident()
    base, other = (tcil.fit_temperature(size * logits, labels, solver="sgd") for size in (1e50, scale))
    assert other.verdict == base.verdict == "ok"
    assert other.temperature / scale == pytest.approx(base.temperature / 1e50, rel=1e-9)


def test_scores_on_a_scale_of_their_own_are_no_masks():
    """-1e4 beside +3e4 is a score; -1e4 in every column is a row without information."""
    logits, labels = overconfident()
    grid = logits.round() * 1e4
    assert tcil.fit_temperature(grid, labels).temperature == pytest.approx(
        1e4 * tcil.fit_temperature(logits.round(), labels).temperature
    )
    assert tcil.fit_temperature(np.full((3, 3), -1e4), [0, 1, 2]).verdict == "constant_logits"


@pytest.mark.parametrize("name", LOGITS_ONLY)
def test_what_no_mask_explains_is_refused(name):
    logits, labels = overconfident(n=20, k=3)
    wrong = logits.clone()
    wrong[7, labels[7]] = -math.inf
    with pytest.raises(ValueError, match=rf"labels: got the label {labels[7]} in row 7, whose logit is masked"):
        fitted_by(name, wrong, labels)
    for value in (math.nan, math.inf):
        wrong[7, labels[7]] = value
        with pytest.raises(ValueError, match=r"logits: got NaN or infinity in 1 of 20 rows"):
            fitted_by(name, wrong, labels)
    wrong[7] = -math.inf
    with pytest.raises(ValueError, match=r"logits: got row 7 with every class masked"):
        fitted_by(name, wrong, labels)
    with pytest.raises(
        ValueError, match=r"logits: got numbers from -1e\+308 to 1e\+308; expected absolute values of at most"
    ):
        fitted_by(name, [[1e308, -1e308], [-1e308, 1e308], [1e308, -1e308]], [0, 1, 1])


# --- the prediction stays -----------------------------------------------------------------------------------------


def test_isotonic_keeps_the_argmax_of_neighbouring_numbers():
    logits, labels = overconfident()
    isotonic = tcil.MulticlassIsotonic().fit(logits, labels)
    for kind in (np.float32, np.float64):
        top = np.full(200, 3.0, dtype=kind) + np.arange(200, dtype=kind) / 50
        rows = np.stack([np.nextafter(top, kind(-np.inf)), 0 * top, top, 0 * top, 0 * top], axis=1)
        log_probs = isotonic.transform(rows)
        assert (log_probs.argmax(1) == 2).all()
        assert (isotonic.predict_proba(rows).argmax(1) == 2).all()
        np.testing.assert_allclose(np.exp(log_probs).sum(1), 1, rtol=1e-12)
    tie = isotonic.predict_proba([[2.0, 1.0, 2.0, 0.0, 0.0]])[0]
    assert tie[0] == tie[2]


def test_a_uniform_ensemble_says_so_and_keeps_its_predictions():
    logits, labels = 3 * torch.eye(3)[torch.arange(6) % 3], torch.arange(1, 7) % 3
    with pytest.warns(
        tcil.CalibrationWarning, match=r"EnsembleTemperatureScaling: the ensemble puts all its weight.*6 sa"
    ):
        ensemble = tcil.EnsembleTemperatureScaling().fit(logits, labels)
    assert (ensemble.result_.weights, ensemble.result_.verdict) == ((0.0, 0.0, 1.0), "uniform")
    probs = ensemble.predict_proba(logits)
    assert torch.equal(probs.argmax(1), logits.argmax(1))
    torch.testing.assert_close(probs, torch.full((6, 3), 1 / 3).double())


def test_the_largest_temperatures_keep_the_argmax():
    scaling = tcil.TemperatureScaling()._fitted(tcil.TemperatureScaling._map(1e30), (0, 1, 2), None)
    assert scaling.predict_proba([[1.0, 2.0, 3.0], [1.0, 2.0, 0.0]]).argmax(1).tolist() == [2, 1]
    tiny = tcil.TemperatureScaling()._fitted(tcil.TemperatureScaling._map(1e-300), (0, 1, 2), None)
    np.testing.assert_array_equal(tiny.predict_proba([[1e30, 2e30, -3e30], [-1e30, -2e30, -3e30]]), np.eye(3)[[1, 0]])


def test_groups_without_a_temperature_are_said_aloud():
    logits = torch.tensor([[3.0, 0, 0], [3, 0, 0], [3, 1, 0], [0, 0, 3], [0, 1, 3]])
    with pytest.warns(tcil.CalibrationWarning, match="GroupTemperatureScaling, new group: every sample is classified"):
        scaling = tcil.GroupTemperatureScaling().fit(logits, torch.tensor([0, 0, 1, 2, 2]), new_classes=[2])
    assert scaling.result_.verdicts == ("ok", "all_correct")
    with pytest.warns(
        tcil.CalibrationWarning, match=r"new group: no sample is predicted into this group.*\(0 samples\)"
    ):
        scaling = tcil.GroupTemperatureScaling().fit(logits[:3], torch.tensor([0, 0, 1]), new_classes={2})
    assert scaling.result_.verdicts == ("ok", "empty_group")
    # Where every class is new, nobody expects old predictions: no warning.
    first = tcil.GroupTemperatureScaling().fit(logits, torch.tensor([0, 0, 1, 2, 1]), new_classes=range(3))
    assert first.result_.verdicts == ("empty_group", "ok")


def likelihood_and_slope(logits, labels, temperature):
    """The summed NLL and its derivative by 1/T, row by row, each in its own units, and added without rounding."""
    losses, slopes = [], []
    for row, label in zip(logits, labels, strict=True):
        shifted = [value - max(row) for value in row]
        weights = [math.exp(value / temperature) for value in shifted]
        losses.append(math.log(sum(weights)) - shifted[label] / temperature)
        slopes.append(sum(w * s for w, s in zip(weights, shifted, strict=True)) / sum(weights) - shifted[label])
    return math.fsum(losses), math.fsum(slopes)


@pytest.mark.parametrize("small", [1.0, 1e-30, 1e-290])
@pytest.mark.parametrize("power", [60, 95, 150, 290])
def test_rows_on_scales_that_differ_by_hundreds_of_powers_of_ten(power, small):
    """Large rows, all right, say nothing of T; what the small ones say is found all the same."""
    few = [[2.0, 0.0, -1.0], [0.0, 1.5, 1.0], [1.0, 0.0, 0.5], [0.3, 0.2, 1.0]]
    large = [[0.0, 10.0**power, 0.0], [3.0 * 10.0**power, 0.0, 10.0**power]]
    logits, labels = [[small * value for value in row] for row in few] + large, [0, 1, 2, 2, 1, 0]
    fit = tcil.fit_temperature(np.array(logits), labels)
    alone = tcil.fit_temperature(np.array(few), labels[:4]).temperature * small
    assert fit.verdict == "ok"
    assert fit.temperature == pytest.approx(alone, rel=1e-9)
    assert likelihood_and_slope(logits, labels, fit.temperature * 1.001)[1] < 0
    assert likelihood_and_slope(logits, labels, fit.temperature * 0.999)[1] > 0
    assert fit.nll_after <= fit.nll_before
    assert fit.nll_after == pytest.approx(likelihood_and_slope(logits, labels, fit.temperature)[0] / 6, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_is_found_on_any_scales(seed):
    generator = np.random.default_rng(seed)
    scales = 10.0 ** generator.uniform(-140, 140, size=(6, 1))
    logits, labels = generator.normal(size=(6, 3)) * scales, generator.integers(0, 3, size=6)
    labels = np.where(scales[:, 0] > np.median(scales), logits.argmax(1), labels)
    fit = tcil.fit_temperature(logits, labels)
    if fit.verdict == "ok":
        assert likelihood_and_slope(logits, labels, fit.temperature * 1.001)[1] < 0
        assert likelihood_and_slope(logits, labels, fit.temperature * 0.999)[1] > 0
        assert fit.nll_after <= fit.nll_before * (1 + 1e-12)
