"""Every expected output in the project's reference cases."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import tcil
from tcil.calibration.calibrators.ensemble import _best_temperature
from tcil.calibration.calibrators.noise_levels import nelder_mead_levels
from tcil.calibration.calibrators.perturbed import union_temperature
from tcil.metrics.calibration_error import bin_of

HERE = Path(__file__).resolve().parent
CASES = json.loads((HERE / "reference_cases.json").read_text())
A = CASES["case_A_12x4"]
B = CASES["case_B_metric_edges"]
D = CASES["case_D_perturb_ts"]


def as_probs(confidences, correct):
    """Two-class rows with the given top confidence in column 0, or in column 1 where it is below one half."""
    conf = np.asarray(confidences)
    # Enough columns that the stated confidence is the largest entry of its row.
    rows = np.zeros((len(conf), 12))
    rows[:, 0] = conf
    rows[:, 1:] = (1 - conf)[:, None] / 11
    return rows, np.where(np.asarray(correct) == 1, 0, 1)


def test_the_copy_is_the_shared_file():
    shared = HERE.parent.parent / "shared" / "reference" / "reference_cases.json"
    if shared.exists():
        assert json.loads(shared.read_text()) == CASES


class TestTemperature:
    def test_exact(self):
        fit = tcil.fit_temperature(A["logits"], A["labels"])
        assert fit.temperature == pytest.approx(A["ts_ce"]["T_exact_brentq"], rel=1e-12)
        assert fit.temperature == pytest.approx(A["ts_ce"]["T_newton"], rel=1e-12)
        assert fit.nll_before == pytest.approx(A["nll_T1"], rel=1e-12)
        assert fit.nll_after == pytest.approx(A["ts_ce"]["nll_at_T"], rel=1e-12)
        assert abs(fit.gradient) <= 1e-10

    def test_agrees_with_other_solvers(self):
        fit = tcil.fit_temperature(A["logits"], A["labels"])
        assert fit.temperature == pytest.approx(A["ts_ce"]["T_sklearn_1.9_TemperatureScaling"], rel=1e-7)
        assert fit.temperature == pytest.approx(A["ts_ce"]["T_zhang_LBFGSB"], rel=1e-6)

    def test_sgd_is_the_authors(self):
        fit = tcil.fit_temperature(A["logits"], A["labels"], solver="sgd")
        assert fit.temperature == pytest.approx(A["ts_ce"]["T_tcil_official_SGD_lr0.1_100ep_fullbatch"], rel=1e-6)
        assert fit.temperature == pytest.approx(A["ts_ce"]["T_tcil_official_tune_temp_batch_efficient"], rel=1e-6)

    def test_probabilities(self):
        scaling = tcil.TemperatureScaling().fit(A["logits"], A["labels"])
        np.testing.assert_allclose(scaling.predict_proba(A["eval_logits"]), A["ts_ce"]["eval_probs"], rtol=1e-10)

    @pytest.mark.parametrize(
        ("name", "verdict", "limit"),
        [
            ("all_correct", "all_correct", 0.0),
            ("anti_informative", "anti_informative", float("inf")),
            ("constant_logits", "constant_logits", 1.0),
        ],
    )
    def test_degenerate(self, name, verdict, limit):
        case = next(c for c in CASES["case_C_degenerate_temperature"] if c["name"] == name)
        fit = tcil.fit_temperature(case["logits"], case["labels"])
        assert (fit.temperature, fit.verdict, fit.limit) == (1.0, verdict, limit)

    @pytest.mark.parametrize("name", ["shift_invariance", "scale_equivariance"])
    def test_invariance(self, name):
        case = next(c for c in CASES["case_C_degenerate_temperature"] if c["name"] == name)
        fit = tcil.fit_temperature(case["logits"], case["labels"])
        assert fit.temperature == pytest.approx(case["expected_T"], rel=1e-12)

    def test_every_degenerate_case_is_tested(self):
        names = {c["name"] for c in CASES["case_C_degenerate_temperature"]}
        assert names == {
            "all_correct", "anti_informative", "constant_logits", "shift_invariance", "scale_equivariance",
        }  # fmt: skip


class TestEnsemble:
    def test_temperature_by_squared_error(self):
        z = torch.tensor(A["logits"], dtype=torch.float64)
        onehot = torch.nn.functional.one_hot(torch.tensor(A["labels"]), 4).double()
        temperature = _best_temperature(z, onehot)
        assert temperature == pytest.approx(A["ts_mse"]["T_exact_grid+golden"], rel=1e-7)
        error = (torch.softmax(z / temperature, dim=1) - onehot).square().mean().item()
        assert error == pytest.approx(A["ts_mse"]["mse_mean_over_NK"], rel=1e-12)
        assert temperature == pytest.approx(A["ts_mse"]["T_zhang_LBFGSB"], rel=1e-6)

    def test_probabilities(self):
        ensemble = tcil.EnsembleTemperatureScaling().fit(A["logits"], A["labels"])
        want = A["ets_mse"]
        np.testing.assert_allclose(ensemble.predict_proba(A["eval_logits"]), want["eval_probs_exact"], atol=1e-7)
        np.testing.assert_allclose(ensemble.predict_proba(A["eval_logits"]), want["eval_probs_original"], atol=1e-6)
        assert ensemble.result_.mse_after == pytest.approx(want["mse_exact"], rel=1e-10)
        assert ensemble.result_.mse_after < want["mse_TS_only"]
        np.testing.assert_allclose(ensemble.result_.weights, want["weights_exact_QP"], atol=1e-4)


class TestIsotonic:
    def test_probabilities(self):
        isotonic = tcil.MulticlassIsotonic().fit(A["logits"], A["labels"])
        probs = isotonic.predict_proba(A["eval_logits"])
        np.testing.assert_allclose(probs, A["irm"]["eval_probs_normalised"], rtol=1e-9)
        unnormalised = np.asarray(A["irm"]["eval_probs_original_unnormalised"])
        np.testing.assert_allclose(probs, unnormalised / unnormalised.sum(1, keepdims=True), rtol=1e-9)

    def test_knots(self):
        mapping = tcil.MulticlassIsotonic().fit(A["logits"], A["labels"])._mapping()
        np.testing.assert_allclose(mapping.knots.numpy(), A["irm"]["isotonic_X_thresholds"], rtol=1e-12)
        np.testing.assert_allclose(mapping.values.numpy(), A["irm"]["isotonic_y_thresholds"], atol=1e-14)

    def test_argmax(self):
        isotonic = tcil.MulticlassIsotonic().fit(A["logits"], A["labels"])
        same = isotonic.predict_proba(A["eval_logits"]).argmax(1) == np.asarray(A["eval_logits"]).argmax(1)
        assert bool(same.all()) is A["irm"]["argmax_preserved"]


class TestMetrics:
    probs = torch.softmax(torch.tensor(A["logits"], dtype=torch.float64), dim=1)
    want = A["metrics_T1_10bins"]

    @pytest.mark.parametrize(
        ("metric", "key"),
        [
            (tcil.metrics.expected_calibration_error, "ece_right_closed"),
            (tcil.metrics.adaptive_calibration_error, "aece_official"),
            (tcil.metrics.brier_score, "brier_sum_over_classes"),
            (tcil.metrics.negative_log_likelihood, "nll"),
            (tcil.metrics.classwise_calibration_error, "classwise_ece_10"),
        ],
    )
    def test_case_a(self, metric, key):
        assert metric(self.probs, A["labels"]) == pytest.approx(self.want[key], rel=1e-12)

    def test_accuracy_and_cross_checks(self):
        assert tcil.metrics.accuracy(self.probs, A["labels"]) == pytest.approx(A["accuracy"])
        checks = self.want["cross_checks"]
        ece = tcil.metrics.expected_calibration_error(self.probs, A["labels"])
        assert ece == pytest.approx(checks["tcil_official_utils.cal_ece"])
        assert ece == pytest.approx(checks["guo__ECELoss(10)"], rel=1e-6)
        assert ece == pytest.approx(checks["focal_calibration_ECELoss(10)"], rel=1e-6)
        aece = tcil.metrics.adaptive_calibration_error(self.probs, A["labels"])
        assert aece == pytest.approx(checks["tcil_official_utils.cal_aece"])
        classwise = tcil.metrics.classwise_calibration_error(self.probs, A["labels"])
        assert classwise == pytest.approx(checks["focal_calibration_ClasswiseECELoss(10)"], rel=1e-6)
        brier = tcil.metrics.brier_score(self.probs, A["labels"])
        assert brier / 4 == pytest.approx(self.want["brier_mean_over_classes"])

    def test_confidences(self):
        conf, correct = self.probs.max(dim=1).values.numpy(), self.probs.argmax(1).numpy() == np.asarray(A["labels"])
        np.testing.assert_allclose(conf, self.want["confidences"], rtol=1e-12)
        np.testing.assert_array_equal(correct.astype(int), self.want["correct"])

    def test_edges(self):
        probs, labels = as_probs(B["confidences"], B["correct"])
        bins = tcil.metrics.reliability_bins(probs, labels)
        np.testing.assert_array_equal(bin_of(np.asarray(B["confidences"]), 10), B["bin_index_right_closed"])
        np.testing.assert_array_equal(bins.count, B["bin_counts_right_closed"])
        assert bins.count.sum() == B["n"]
        ece = tcil.metrics.expected_calibration_error(probs, labels, n_bins=B["n_bins"])
        assert ece == pytest.approx(B["ece_right_closed_paper"], rel=1e-12)
        aece = tcil.metrics.adaptive_calibration_error(probs, labels)
        assert aece == pytest.approx(B["aece_official_remainder_in_last_bin"], rel=1e-12)
        assert np.nanmax(np.abs(bins.accuracy - bins.confidence)) == pytest.approx(B["mce_right_closed"])

    def test_authors_floor_bins_differ_only_on_edges(self):
        """The authors' ECE uses floor bins: moving each confidence off its edge gives their number."""
        conf = np.asarray(B["confidences"])
        on_edge = np.isclose(conf * 10, np.round(conf * 10)) & (conf < 1)
        probs, labels = as_probs(np.where(on_edge, conf + 1e-12, conf), B["correct"])
        ece = tcil.metrics.expected_calibration_error(probs, labels)
        assert ece == pytest.approx(B["ece_floor_official_code"], rel=1e-9)


class TestPerturbTS:
    inputs = torch.tensor(D["inputs"], dtype=torch.float64)
    labels = torch.tensor(D["labels"])
    weight = torch.tensor(D["weight"], dtype=torch.float64)
    noise = torch.tensor(D["unit_noise"], dtype=torch.float64)

    def logits(self, magnitude):
        return (self.inputs + magnitude * self.noise) @ self.weight.T

    @pytest.mark.parametrize("name", ["levels_6_start_0.1", "levels_6_start_1.0", "levels_10_start_1.0"])
    def test_collapsing_search(self, name):
        case = D[name]

        def accuracy_at(magnitude):
            return (self.logits(magnitude).argmax(1) == self.labels).double().mean().item()

        clean = accuracy_at(0.0)
        targets = np.linspace(clean, 1 / 4, len(case["epsilons"])).tolist()
        np.testing.assert_allclose(targets, case["target_accuracies"])
        levels = nelder_mead_levels(accuracy_at, targets, start=float(name.split("_")[-1]))
        np.testing.assert_allclose([level.noise for level in levels], case["epsilons"], rtol=1e-9)
        np.testing.assert_allclose([level.accuracy for level in levels], case["achieved_accuracies"])
        assert [level.evaluations for level in levels] == case["function_evaluations_per_level"]
        union = torch.cat([self.logits(level.noise) for level in levels])
        labels = self.labels.repeat(len(levels))
        assert tcil.fit_temperature(union, labels).temperature == pytest.approx(case["T_union_exact"], rel=1e-8)
        assert union_temperature(union, labels, bounded=True)[0] == pytest.approx(
            case["T_union_original_LBFGSB"], rel=1e-5
        )
        clean_fit = tcil.fit_temperature(self.logits(0.0), self.labels)
        assert clean_fit.temperature == pytest.approx(case["T_clean_exact"], rel=1e-10)
