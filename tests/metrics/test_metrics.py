"""Metrics against slow loops, independent libraries, and what they must obey."""

from __future__ import annotations

import inspect
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

from tcil import metrics

RNG = np.random.default_rng(0)
N, K = 600, 7


def draw(n=N, k=K, sharp=2.0, seed=0):
    rng = np.random.default_rng(seed)
    logits = sharp * rng.standard_normal((n, k))
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    flat = np.exp(logits / 2) / np.exp(logits / 2).sum(1, keepdims=True)
    labels = np.array([rng.choice(k, p=row) for row in flat])
    return probs, labels


PROBS, LABELS = draw()
SCALARS = [
    metrics.accuracy,
    metrics.expected_calibration_error,
    metrics.adaptive_calibration_error,
    metrics.classwise_calibration_error,
    metrics.debiased_calibration_error,
    metrics.smooth_calibration_error,
    metrics.confidence_gap,
    metrics.negative_log_likelihood,
    metrics.brier_score,
    metrics.area_under_risk_coverage,
    metrics.risk_at_coverage,
]
ids = [metric.__name__ for metric in SCALARS]


def loop_ece(conf, hit, n_bins=10):
    total = 0.0
    for i in range(n_bins):
        inside = [j for j in range(len(conf)) if i / n_bins < conf[j] <= (i + 1) / n_bins]
        if inside:
            gap = np.mean([hit[j] for j in inside]) - np.mean([conf[j] for j in inside])
            total += len(inside) / len(conf) * abs(gap)
    return total


@pytest.mark.parametrize("n_bins", [1, 7, 10, 15])
def test_ece_is_the_definition(n_bins):
    conf, hit = PROBS.max(1), PROBS.argmax(1) == LABELS
    assert metrics.expected_calibration_error(PROBS, LABELS, n_bins) == pytest.approx(loop_ece(conf, hit, n_bins))


def test_aece_is_the_definition():
    conf, hit = PROBS.max(1), PROBS.argmax(1) == LABELS
    order = sorted(range(N), key=lambda i: conf[i])
    size = N // 7
    parts = [order[i * size : (i + 1) * size] for i in range(6)] + [order[6 * size :]]
    want = sum(abs(np.mean(conf[p]) - np.mean(hit[p])) * len(p) / N for p in parts)
    assert metrics.adaptive_calibration_error(PROBS, LABELS, 7) == pytest.approx(want)


def test_classwise_is_the_mean_over_classes():
    want = np.mean([loop_ece(PROBS[:, k], k == LABELS) for k in range(K)])
    assert metrics.classwise_calibration_error(PROBS, LABELS) == pytest.approx(want)


def drawn_confidences(n, seed, power):
    """Confidences of a class above 1/2 that is right with probability confidence ** power, and the labels."""
    rng = np.random.default_rng(seed)
    confidence = 0.5 + 0.5 * rng.random(n)
    right = rng.random(n) < confidence**power
    return np.stack([confidence, 1 - confidence], axis=1), (~right).astype(int)


# python -m pip install --no-deps --target DIR relplot==1.0 deprecation uncertainty-calibration (version as installed,
# unpinned)
# relplot.metrics.smECE_slow(confidence, right); with `calibration`, pairs = list(zip(confidence, right)):
# sqrt(max(unbiased_square_ce(bin(pairs, get_equal_bins(list(confidence), num_bins=10))), 0))
PUBLISHED = {
    (300, 0, 1.0): (0.039775, 0.0738453),
    (300, 1, 2.0): (0.186924, 0.1910634),
    (3000, 2, 1.5): (0.098678, 0.1100500),
    (3000, 3, 1.0): (0.014634, 0.0),
}


@pytest.mark.parametrize("case", PUBLISHED, ids=str)
def test_published_implementations_agree(case):
    """relplot cuts its kernel off at a distance of 1/2, and searches its width to 1/1024."""
    drawn = drawn_confidences(*case)
    assert metrics.smooth_calibration_error(*drawn) == pytest.approx(PUBLISHED[case][0], abs=2e-3)
    assert metrics.debiased_calibration_error(*drawn) == pytest.approx(PUBLISHED[case][1], abs=1e-6)


def test_smooth_ece_is_the_definition():
    """By the kernel's mirror images, on another grid: the error smoothed with the width that it equals."""
    (probs, labels), t = drawn_confidences(200, 5, 3.0), (np.arange(2000) + 0.5) / 2000
    confidence, value = probs[:, 0], metrics.smooth_calibration_error(probs, labels)
    apart = t[:, None, None] - np.stack([s * confidence + 2 * k for s in (1, -1) for k in (-2, -1, 0, 1, 2)])
    kernel = np.exp(-0.5 * np.square(apart / value)).sum(axis=1) / (value * np.sqrt(2 * np.pi))
    assert np.abs(kernel @ (confidence - (labels == 0)) / len(labels)).mean() == pytest.approx(value, abs=1e-5)


def test_smooth_ece_of_an_even_gap_is_the_gap():
    probs = np.tile([0.9, 0.1], (100, 1))
    wrong = np.arange(100) % 2  # the kernel of width 0.4 spreads the gap of 0.4, and keeps its sum
    assert metrics.smooth_calibration_error(probs, wrong) == pytest.approx(0.4, abs=1e-6)


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_smooth_ece_of_confidence_1_that_is_always_wrong_is_1(n):
    assert metrics.smooth_calibration_error([[0.0, 1.0]] * n, [0] * n) == pytest.approx(1, abs=1e-9)
    assert metrics.smooth_calibration_error([[1e-320, 1.0]] * n, [0] * n) == pytest.approx(1, abs=1e-9)


def test_debiased_ece_is_unbiased():
    """Over many draws of honest labels the mean square is 0; and a gap of 0.2 is found in few samples."""
    rng, probs = np.random.default_rng(0), np.tile([0.7, 0.3], (20, 1))
    labels = (rng.random((2000, 20)) > 0.7).astype(int)
    hits = (labels == 0).mean(axis=1)
    squares = np.square(0.7 - hits) - hits * (1 - hits) / 19
    own = [metrics.debiased_calibration_error(probs, row) for row in labels[:50]]
    assert own == pytest.approx(np.sqrt(np.maximum(squares[:50], 0)))
    assert abs(squares.mean()) < 4 * squares.std() / np.sqrt(2000)


def test_debiased_ece_of_one_sample_cannot_be_told():
    assert metrics.debiased_calibration_error([[0.9, 0.1]], [1]) == 0


def test_aurc_is_the_definition():
    conf, wrong = PROBS.max(1), PROBS.argmax(1) != LABELS
    order = sorted(range(N), key=lambda i: -conf[i])
    risks = [np.mean(wrong[order[: i + 1]]) for i in range(N)]
    assert metrics.area_under_risk_coverage(PROBS, LABELS) == pytest.approx(np.mean(risks))
    assert metrics.risk_at_coverage(PROBS, LABELS, 0.5) == pytest.approx(risks[N // 2 - 1])
    assert metrics.risk_at_coverage(PROBS, LABELS, 1.0) == pytest.approx(1 - metrics.accuracy(PROBS, LABELS))


def test_scikit_learn_agrees():
    from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

    assert metrics.accuracy(PROBS, LABELS) == pytest.approx(accuracy_score(LABELS, PROBS.argmax(1)))
    assert metrics.negative_log_likelihood(PROBS, LABELS) == pytest.approx(log_loss(LABELS, PROBS))
    theirs = brier_score_loss(LABELS, PROBS, labels=list(range(K)), scale_by_half=False)
    assert metrics.brier_score(PROBS, LABELS) == pytest.approx(theirs)


def test_torchmetrics_agrees_off_the_edges():
    """Its bins are left-closed, so the two agree where no confidence lies on an edge."""
    from torchmetrics.functional.classification import multiclass_calibration_error

    theirs = multiclass_calibration_error(torch.tensor(PROBS), torch.tensor(LABELS), num_classes=K, n_bins=10)
    assert metrics.expected_calibration_error(PROBS, LABELS) == pytest.approx(theirs.item(), abs=1e-6)


@pytest.mark.parametrize("metric", SCALARS, ids=ids)
class TestEveryMetric:
    def test_kinds(self, metric):
        value = metric(PROBS, LABELS)
        assert isinstance(value, float)
        assert metric(torch.tensor(PROBS), torch.tensor(LABELS)) == pytest.approx(value)
        assert metric(PROBS.tolist(), LABELS.tolist()) == pytest.approx(value)

    def test_order_does_not_matter(self, metric):
        rows = RNG.permutation(N)
        assert metric(PROBS[rows], LABELS[rows]) == pytest.approx(metric(PROBS, LABELS))

    def test_groups_are_the_metric_of_the_group(self, metric):
        groups = metrics.predicted_groups(PROBS, new_classes=[5, 6])
        value = metric(PROBS, LABELS, groups=groups)
        assert value == metric(PROBS, LABELS)
        assert set(value.by_group) == {"old", "new"}
        for group, part in value.by_group.items():
            assert part == pytest.approx(metric(PROBS[groups == group], LABELS[groups == group]))

    def test_classes_name_the_columns(self, metric):
        names = [30, 4, 17, 2, 99, 5, 61]
        labels = np.asarray(names)[LABELS]
        assert metric(PROBS, labels, classes=names) == metric(PROBS, LABELS)
        with pytest.raises(ValueError, match="classes: got 6 labels; expected 7"):
            metric(PROBS, labels, classes=names[:-1])

    def test_weights(self, metric):
        assert metric(PROBS, LABELS, sample_weight=np.full(N, 3.0)) == pytest.approx(metric(PROBS, LABELS))
        kept = RNG.random(N) < 0.5
        assert metric(PROBS, LABELS, sample_weight=kept) == pytest.approx(metric(PROBS[kept], LABELS[kept]))
        # AECE has bins of N // B samples, whatever their weight; chance depends on how many samples there are.
        if metric not in (metrics.adaptive_calibration_error, metrics.debiased_calibration_error):
            twice = np.where(kept, 2.0, 1.0)
            rows = np.concatenate([np.arange(N), np.flatnonzero(kept)])
            # AURC reads the risk once per sample, so repeating a sample is weighting it only up to 1/N.
            slack = 2e-3 if metric is metrics.area_under_risk_coverage else 1e-12
            repeated = metric(PROBS[rows], LABELS[rows])
            assert metric(PROBS, LABELS, sample_weight=twice) == pytest.approx(repeated, abs=slack)

    def test_weights_and_groups_together(self, metric):
        groups, weight = LABELS % 2, RNG.random(N)
        value = metric(PROBS, LABELS, sample_weight=weight, groups=groups)
        for group, part in value.by_group.items():
            rows = groups == group
            assert part == pytest.approx(metric(PROBS[rows], LABELS[rows], sample_weight=weight[rows]))

    def test_logits_are_refused(self, metric):
        with pytest.raises(ValueError, match=r"probs: got values from .*; expected probabilities"):
            metric(np.log(PROBS), LABELS)

    def test_bad_labels_are_refused(self, metric):
        with pytest.raises(ValueError, match=r"labels: got the label 7"):
            metric(PROBS, np.where(LABELS == 0, 7, LABELS))
        with pytest.raises(ValueError, match=r"labels: got 599 labels; expected 600"):
            metric(PROBS, LABELS[1:])
        with pytest.raises(ValueError, match=r"groups: got shape \(599,\)"):
            metric(PROBS, LABELS, groups=LABELS[1:])
        with pytest.raises(ValueError, match="sample_weight: got negative"):
            metric(PROBS, LABELS, sample_weight=-np.ones(N))


def test_rows_without_weight_count_for_nothing():
    loss = metrics.negative_log_likelihood([[1, 0], [0.5, 0.5]], [1, 0], sample_weight=[0, 1])
    assert loss == pytest.approx(np.log(2))
    weight = np.where(LABELS % 2 == 0, 0.0, 1.0)
    for metric in SCALARS:
        assert set(metric(PROBS, LABELS, sample_weight=weight, groups=LABELS % 2).by_group) == {1}
    assert set(metrics.brier_parts(PROBS, LABELS, sample_weight=weight, groups=LABELS % 2).by_group) == {1}
    metrics.calibration_estimate(PROBS, LABELS, sample_weight=weight, n_resamples=50, groups=LABELS % 2)
    with pytest.raises(ValueError, match="groups: got values that cannot be ordered"):
        metrics.accuracy(PROBS[:2], LABELS[:2], groups=np.array([None, "a"], dtype=object))


def test_ties_share_their_error():
    probs = np.array([[0.8, 0.2]] * 4)
    labels = np.array([0, 1, 0, 1])
    assert metrics.area_under_risk_coverage(probs, labels) == pytest.approx(0.5)
    assert metrics.risk_at_coverage(probs, labels, 0.25) == pytest.approx(0.5)


class TestBrierParts:
    def test_parts_sum_and_are_not_negative(self):
        parts = metrics.brier_parts(PROBS, LABELS, groups=LABELS % 2)
        for part in (parts, *parts.by_group.values()):
            assert part.brier == pytest.approx(part.calibration + part.refinement)
            assert part.calibration >= 0
            assert part.refinement >= 0
        assert parts.brier == pytest.approx(metrics.brier_score(PROBS, LABELS))

    def test_sharpening_costs_calibration_not_refinement(self):
        """A monotone change of a two-class score moves calibration only."""
        p, labels = draw(3000, 2)
        sharp = p**3 / (p**3).sum(1, keepdims=True)
        one, other = metrics.brier_parts(p, labels), metrics.brier_parts(sharp, labels)
        assert other.refinement == pytest.approx(one.refinement)
        assert other.calibration > one.calibration + 0.01

    def test_weights_are_repetitions(self):
        twice = np.where(LABELS == 0, 2.0, 1.0)
        rows = np.concatenate([np.arange(N), np.flatnonzero(LABELS == 0)])
        weighted, repeated = (
            metrics.brier_parts(PROBS, LABELS, sample_weight=twice),
            metrics.brier_parts(PROBS[rows], LABELS[rows]),
        )
        assert weighted.refinement == pytest.approx(repeated.refinement)


class TestNoise:
    def test_floor_is_the_ece_of_a_calibrated_model(self):
        rng = np.random.default_rng(1)
        probs, _ = draw(800, 5, seed=2)
        scores = []
        for _ in range(300):
            hit = rng.random(800) < probs.max(1)
            labels = np.where(hit, probs.argmax(1), (probs.argmax(1) + 1) % 5)
            scores.append(metrics.expected_calibration_error(probs, labels))
        assert metrics.noise_floor(probs) == pytest.approx(np.mean(scores), rel=0.05)

    def test_same_seed_same_floor(self):
        assert metrics.noise_floor(PROBS, seed=3) == metrics.noise_floor(PROBS, seed=3)
        assert metrics.noise_floor(PROBS, seed=3) != metrics.noise_floor(PROBS, seed=4)

    def test_floor_by_group(self):
        groups = metrics.predicted_groups(PROBS, new_classes=[6])
        floor = metrics.noise_floor(PROBS, groups=groups)
        assert floor.by_group["new"] > floor  # fewer samples, more noise

    def test_interval_covers_the_true_error(self):
        """Confidence c, accuracy c - 0.1: the true error is 0.1, and 95 % intervals should mostly cover it."""
        rng = np.random.default_rng(5)
        covered, trials = 0, 120
        for trial in range(trials):
            conf = rng.uniform(0.5, 1.0, 500)
            probs = np.stack([conf, 1 - conf], axis=1)
            labels = (rng.random(500) >= conf - 0.1).astype(int)
            estimate = metrics.calibration_estimate(probs, labels, n_resamples=300, seed=trial)
            covered += estimate.low <= 0.1 <= estimate.high
        assert covered / trials > 0.88

    def test_perfect_calibration_is_not_above_noise(self):
        rng = np.random.default_rng(6)
        flagged = 0
        for trial in range(60):
            conf = rng.uniform(0.5, 1.0, 500)
            labels = (rng.random(500) >= conf).astype(int)
            estimate = metrics.calibration_estimate(
                np.stack([conf, 1 - conf], axis=1), labels, n_resamples=200, seed=trial
            )
            flagged += estimate.above_noise
        assert flagged <= 8  # 5 in 100 by chance: 3 of 60, and never as many as 9

    def test_poor_calibration_is_above_noise(self):
        assert metrics.calibration_estimate(PROBS, LABELS, n_resamples=50).above_noise

    def test_estimate_by_group(self):
        groups = metrics.predicted_groups(PROBS, new_classes=[5, 6])
        whole = metrics.calibration_estimate(PROBS, LABELS, groups=groups, n_resamples=100)
        rows = groups == "old"
        alone = metrics.calibration_estimate(PROBS[rows], LABELS[rows], n_resamples=100)
        assert whole.by_group["old"] == alone


def two_classes(confidence):
    return np.stack([confidence, 1 - confidence], axis=1)


class TestComparison:
    def test_a_difference_that_is_there_is_told(self):
        rng = np.random.default_rng(7)
        accuracy = rng.uniform(0.5, 0.8, 1000)
        labels = (rng.random(1000) >= accuracy).astype(int)
        good, poor = two_classes(accuracy), two_classes(accuracy + 0.15)
        found = metrics.compare_calibration(poor, good, labels)
        assert found.verdict == "better"
        assert found.before == metrics.expected_calibration_error(poor, labels)
        assert found.after == metrics.expected_calibration_error(good, labels)
        assert found.difference == found.after - found.before
        assert found.n == 1000
        back = metrics.compare_calibration(good, poor, labels)
        assert (back.low, back.high, back.verdict) == (pytest.approx(-found.high), pytest.approx(-found.low), "worse")

    def test_prints_the_verdict_of_each_group(self):
        labels = np.arange(400) % 10 // 6
        before, after = np.tile([0.9, 0.1], (400, 1)), np.tile([0.65, 0.35], (400, 1))
        printed = str(metrics.compare_calibration(before, after, labels, groups=np.repeat(["old", "new"], 200)))
        assert "verdict        better" in printed
        assert "by group: old  0.3 -> 0.05 (better)" in printed

    def test_equal_errors_are_seldom_told_apart(self):
        """Over- and under-confident by 0.05: 5 % of verdicts should be wrong, 6 of 120."""
        rng, told = np.random.default_rng(8), 0
        for trial in range(120):
            accuracy = rng.uniform(0.6, 0.9, 400)
            labels = (rng.random(400) >= accuracy).astype(int)
            above, below = two_classes(accuracy + 0.05), two_classes(accuracy - 0.05)
            told += metrics.compare_calibration(above, below, labels, n_resamples=200, seed=trial).verdict != "not told"
        assert told <= 14

    def test_calibrated_models_of_other_confidences_are_seldom_told_apart(self):
        """The noise of ten bins is larger than that of one: by itself it is no difference."""
        rng, told = np.random.default_rng(9), 0
        for trial in range(120):
            accuracy = rng.uniform(0.55, 0.99, 300)
            labels = (rng.random(300) >= accuracy).astype(int)
            constant = two_classes(np.full(300, 0.77))
            found = metrics.compare_calibration(constant, two_classes(accuracy), labels, n_resamples=200, seed=trial)
            told += found.verdict != "not told"
        assert told <= 14

    def test_a_handful_of_images_tells_nothing(self):
        found = metrics.compare_calibration([[0.9, 0.1]], [[0.6, 0.4]], [0])
        assert (found.n, found.verdict) == (1, "not told")

    @pytest.mark.parametrize("classes", [{0, 1}, 5])
    def test_classes_are_checked(self, classes):
        with pytest.raises(ValueError, match=r"^classes: got"):
            metrics.compare_calibration([[0.9, 0.1]], [[0.6, 0.4]], [0], classes=classes)

    def test_a_model_and_itself(self):
        found = metrics.compare_calibration(PROBS, PROBS, LABELS, n_resamples=50)
        assert (found.difference, found.low, found.high, found.verdict) == (0, 0, 0, "not told")

    def test_groups_and_weights(self):
        groups, flat = metrics.predicted_groups(PROBS, new_classes=[5, 6]), np.full_like(PROBS, 1 / PROBS.shape[1])
        whole = metrics.compare_calibration(PROBS, flat, LABELS, groups=groups, n_resamples=100)
        rows = groups == "old"
        alone = metrics.compare_calibration(PROBS[rows], flat[rows], LABELS[rows], n_resamples=100)
        assert whole.by_group["old"] == alone
        weighted = metrics.compare_calibration(PROBS, flat, LABELS, sample_weight=rows.astype(float), n_resamples=100)
        assert (weighted.low, weighted.high) == (pytest.approx(alone.low), pytest.approx(alone.high))

    @pytest.mark.parametrize(
        ("after", "message"),
        [
            (PROBS[:, :-1] / PROBS[:, :-1].sum(axis=1, keepdims=True), "after: got 6 classes; expected 7, as before"),
            (np.log(PROBS), "after: got values from"),
            (PROBS[:5], "after: got 5 rows; expected"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, after, message):
        with pytest.raises(ValueError, match=message):
            metrics.compare_calibration(PROBS, after, np.minimum(LABELS, 5))

    def test_the_model_that_is_wrong_is_named(self):
        with pytest.raises(ValueError, match=r"^before: got 5 rows; expected"):
            metrics.compare_calibration(PROBS[:5], PROBS, LABELS)


def test_predicted_groups_in_label_space():
    groups = metrics.predicted_groups([[0.1, 0.9], [0.8, 0.2]], new_classes=[40], classes=[7, 40])
    assert groups.tolist() == ["new", "old"]
    with pytest.raises(ValueError, match="new_classes: got the labels"):
        metrics.predicted_groups([[0.1, 0.9]], new_classes=[40])


def test_reliability_bins_by_group():
    bins = metrics.reliability_bins(PROBS, LABELS, groups=LABELS % 2)
    assert (bins.by_group[0].count + bins.by_group[1].count == bins.count).all()
    assert bins.weight.sum() == pytest.approx(1.0)


def test_scores_survive_pickling_and_arithmetic():
    score = metrics.accuracy(PROBS, LABELS, groups=LABELS % 2)
    again = pickle.loads(pickle.dumps(score))
    assert again == score
    assert again.by_group == score.by_group
    assert 100 * score == pytest.approx(100 * float(score))


def test_every_metric_takes_groups_and_weights():
    for name in metrics.__all__:
        function = getattr(metrics, name)
        if inspect.isfunction(function) and name != "predicted_groups":
            assert {"groups", "sample_weight"} <= set(inspect.signature(function).parameters), name


# --- odd but usable, and not usable -------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", SCALARS, ids=ids)
class TestOddInput:
    def test_a_class_of_probability_zero_takes_no_part(self, metric):
        wider = np.insert(PROBS, 3, 0.0, axis=1)
        labels = LABELS + (LABELS >= 3)
        assert metric(wider, labels) == pytest.approx(metric(PROBS, LABELS), rel=1e-12)

    def test_order_does_not_matter_under_ties(self, metric):
        probs = np.round(PROBS, 1)
        probs[:, 0] += 1 - probs.sum(1)
        probs = np.abs(probs) / np.abs(probs).sum(1, keepdims=True)
        weight = np.arange(1, N + 1.0)
        for order in (np.arange(N)[::-1], np.argsort(LABELS), np.random.default_rng(3).permutation(N)):
            assert metric(probs[order], LABELS[order]) == pytest.approx(metric(probs, LABELS), rel=1e-9)
            value = metric(probs[order], LABELS[order], sample_weight=weight[order])
            assert value == pytest.approx(metric(probs, LABELS, sample_weight=weight), rel=1e-9)

    @pytest.mark.parametrize("scale", [1e308, 1e-300, 5e-324])
    def test_extreme_weights(self, metric, scale):
        groups, weight = LABELS % 2, np.where(LABELS % 3 == 0, 1.0, 0.0 if scale < 1e-300 else 0.5)
        want = metric(PROBS, LABELS, sample_weight=weight, groups=groups)
        got = metric(PROBS, LABELS, sample_weight=scale * weight, groups=groups)
        assert got == pytest.approx(want)
        assert got.by_group == pytest.approx(want.by_group)

    def test_weights_that_no_sum_can_hold(self, metric):
        with pytest.raises(
            ValueError, match=r"sample_weight: got weights from 1e-300 to 1e\+308; expected positive weig"
        ):
            metric(PROBS, LABELS, sample_weight=np.where(LABELS == 0, 1e308, 1e-300))

    @pytest.mark.parametrize(
        ("probs", "message"),
        [
            (torch.tensor(PROBS) + 1j, "probs: got dtype torch.complex128; expected a dense tensor of real numbers"),
            (PROBS + 1j, "probs: got ndarray of dtype complex128"),
            (np.ma.masked_array(PROBS, mask=PROBS > 0.9), "probs: got a masked array with masked entries"),
            (torch.tensor(PROBS).to_sparse(), "probs: got a sparse tensor"),
            (torch.tensor(PROBS, device="meta"), "probs: got a tensor on the meta device"),
            (np.where(np.eye(N, K) > 0, -1e-3, PROBS), "probs: got values from -0.001"),
        ],
    )
    def test_refused(self, metric, probs, message):
        with pytest.raises(ValueError, match=message):
            metric(probs, LABELS)

    @pytest.mark.parametrize("groups", [np.where(LABELS == 1, np.nan, LABELS), torch.full((N,), float("nan"))])
    def test_nan_is_no_group(self, metric, groups):
        with pytest.raises(ValueError, match=r"groups: got NaN for \d+ of 600 samples"):
            metric(PROBS, LABELS, groups=groups)


def test_masked_arrays_are_refused_everywhere():
    hidden = np.ma.masked_array(LABELS, mask=LABELS == 1)
    with pytest.raises(ValueError, match="groups: got a masked array"):
        metrics.accuracy(PROBS, LABELS, groups=hidden)
    with pytest.raises(ValueError, match="sample_weight: got a masked array"):
        metrics.accuracy(PROBS, LABELS, sample_weight=hidden + 1)
    with pytest.raises(ValueError, match="labels: got a masked array"):
        metrics.accuracy(PROBS, hidden)
    assert metrics.accuracy(np.ma.masked_array(PROBS), LABELS) == metrics.accuracy(PROBS, LABELS)  # nothing is hidden


def test_rounding_below_zero_reaches_no_result():
    """p = -1e-7 is 0: no NaN from its logarithm, no bin below the first, no negative share."""
    probs = np.array([[1 + 1e-7, -1e-7], [0.4, 0.6]])
    given = probs.copy()
    assert metrics.negative_log_likelihood(probs, [1, 0]) == np.inf
    assert metrics.negative_log_likelihood(probs, [0, 1]) == pytest.approx(-np.log(0.6) / 2, rel=1e-12)
    assert metrics.confidence_gap(probs, [0, 1]) == pytest.approx(-0.2, rel=1e-12)
    assert metrics.brier_score(probs, [0, 1]) == pytest.approx(0.16, rel=1e-12)
    np.testing.assert_array_equal(probs, given)


def test_predicted_groups_need_a_prediction():
    for odd in (np.nan, np.inf):
        with pytest.raises(ValueError, match=r"probs: got NaN or infinity in 1 of 2 rows"):
            metrics.predicted_groups([[0.2, 0.8], [odd, 0.5]], [1])
    with pytest.raises(ValueError, match=r"probs: got dtype torch.complex64"):
        metrics.predicted_groups(torch.tensor([[0.2, 0.8]]) + 1j, [1])
    assert metrics.predicted_groups([[-np.inf, -3.0], [1.0, -np.inf]], {1}).tolist() == ["new", "old"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.noise_floor(PROBS, seed=2**70), "seed: got a number of 71 bits"),
        (lambda: metrics.calibration_estimate(PROBS, LABELS, seed="x"), "seed: got 'x'"),
        (lambda: metrics.expected_calibration_error(PROBS, LABELS, n_bins=10**30), "n_bins: got a number of 100 bits"),
        (lambda: metrics.calibration_estimate(PROBS, LABELS, level="all"), "level: got 'all'"),
        (lambda: metrics.risk_at_coverage(PROBS, LABELS, coverage=None), "coverage: got None"),
    ],
)
def test_odd_numbers(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_fractions_are_numbers():
    half = metrics.calibration_estimate(PROBS, LABELS, level=Fraction(1, 2))
    assert half == metrics.calibration_estimate(PROBS, LABELS, level=0.5)


def test_aece_of_ties_does_not_depend_on_the_order_of_rows():
    """Ten samples of confidence 0.8, half of them right."""
    probs = np.tile([0.8, 0.2], (10, 1))
    orders = [[0] * 5 + [1] * 5, [1] * 5 + [0] * 5, [0, 1] * 5]
    scores = {round(metrics.adaptive_calibration_error(probs, labels, n_bins=2), 12) for labels in orders}
    assert scores == {0.5}
    weight = np.array([1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    values = [
        metrics.adaptive_calibration_error(probs, labels, n_bins=2, sample_weight=w)
        for labels, w in ((np.array([0, 1] * 5)[o], weight[o]) for o in (np.arange(10), np.arange(10)[::-1]))
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-12)
