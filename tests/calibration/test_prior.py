"""Other class frequencies at prediction: the exact shift, its estimation and its error, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import tcil
from tcil.foundation.arrays import halving_search
from tcil.options import PriorMethod

K = 4


def world(prior, n, seed=0, spread=1.4):
    """Gaussian classes of which the posterior is known: logits for equal frequencies, and labels."""
    rng = np.random.default_rng(seed)
    centres = spread * np.eye(K)
    labels = rng.choice(K, n, p=np.asarray(prior) / np.sum(prior))
    x = centres[labels] + rng.standard_normal((n, K))
    return torch.tensor(x @ centres.T - 0.5 * (centres**2).sum(axis=1)), torch.tensor(labels)


@pytest.fixture
def scaling():
    """T of one, for logits that are right for equal frequencies."""
    return tcil.TemperatureScaling().fit(*world(np.ones(K), 4000))


def pact(keep=True):
    """A PACT with known T and b; classes 2 and 3 are new."""
    from tcil.calibration.calibrators.maps import PriorAdjustedMap

    result = tcil.results.PACTResult(2.0, 0.1, 0.7, 0.1, 3.0, (tcil.options.Verdict.OK,), (), None)
    number = torch.tensor
    mapping = PriorAdjustedMap(
        number(2.0).double(), number(0.7).double(), number([False, False, True, True]), number(keep)
    )
    return tcil.PACT(keep_predictions=keep)._fitted(mapping, (0, 1, 2, 3), result)


class TestShift:
    def test_is_bayes_rule(self, scaling):
        logits, prior = world(np.ones(K), 50)[0], torch.tensor([5.0, 1.0, 3.0, 1.0]).double()
        expected = scaling.predict_proba(logits) * prior
        expected = expected / expected.sum(dim=1, keepdim=True)
        assert torch.allclose(scaling.predict_proba(logits, prior=prior), expected, atol=1e-12)

    def test_gives_the_true_posterior(self):
        prior = [0.7, 0.2, 0.06, 0.04]
        logits, labels = world(prior, 20000)
        exact = tcil.TemperatureScaling()._fitted(
            tcil.extending.TemperatureMap(torch.tensor(1.0).double()),
            (0, 1, 2, 3),
            tcil.fit_temperature(logits, labels),
        )
        for column, share in enumerate(prior):  # calibrated in every column: the mean is the frequency
            own = float(exact.predict_proba(logits, prior=prior)[:, column].mean())
            assert own == pytest.approx(share, abs=0.01)
        assert float(exact.predict_proba(logits)[:, 0].mean()) < prior[0] - 0.1

    def test_moves_pacts_bias_by_the_log_prior(self):
        logits, prior = world(np.ones(K), 60)[0], np.array([4.0, 2.0, 1.0, 1.0])
        bias = torch.tensor([0.7, 0.7, 0.0, 0.0]) + torch.tensor(prior).log()
        expected = torch.softmax(logits / 2 + bias, dim=1)
        assert torch.allclose(pact(keep=False).predict_proba(logits, prior=prior), expected, atol=1e-12)

    def test_pact_keeps_what_the_network_predicts_at_that_prior(self):
        logits, prior = world(np.ones(K), 300)[0], torch.tensor([1.0, 1.0, 6.0, 6.0])
        kept = pact().predict_proba(logits, prior=prior)
        assert torch.equal(kept.argmax(1), (logits / 2 + prior.log()).argmax(1))
        free = pact(keep=False).predict_proba(logits, prior=prior)
        same = kept.argmax(1) == free.argmax(1)
        assert 0.5 < float(same.float().mean()) < 1
        assert torch.allclose(kept[same], free[same])

    @pytest.mark.parametrize("of", [lambda: pact(), lambda: pact(False)])
    def test_equal_frequencies_change_nothing(self, of):
        logits = world(np.ones(K), 200)[0]
        assert torch.allclose(of().predict_proba(logits, prior=[2] * K), of().predict_proba(logits), atol=1e-12)

    def test_a_class_that_does_not_occur_has_probability_zero(self, scaling):
        probs = scaling.predict_proba(world(np.ones(K), 20)[0], prior=[0, 1, 1, 1])
        assert torch.equal(probs[:, 0], torch.zeros(20).double())
        assert torch.allclose(probs.sum(dim=1), torch.ones(20).double())

    def test_by_label_in_any_order(self):
        logits, labels = world(np.ones(K), 500)
        named = tcil.TemperatureScaling().fit(logits, labels + 7, classes=[7, 8, 9, 10])
        by_label = named.transform(logits, prior={10: 4, 9: 3, 8: 2, 7: 1})
        assert torch.equal(by_label, named.transform(logits, prior=np.array([1, 2, 3, 4])))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_wrap_takes_it_too(self, scaling, dtype):
        network, prior = nn.Linear(6, K).double(), {0: 1, 1: 2, 2: 3, 3: 0}
        x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)).double()
        wrapped = scaling.wrap(network, prior=prior, dtype=dtype)(x)
        assert wrapped.dtype == dtype
        assert torch.allclose(
            wrapped.exp().double(), scaling.predict_proba(network(x).detach(), prior=prior), atol=1e-6
        )


class TestEstimate:
    PRIOR = (0.55, 0.3, 0.1, 0.05)

    @pytest.mark.parametrize("method", list(PriorMethod))
    def test_error_is_right(self, scaling, method):
        """The estimates of many draws scatter as the standard errors say."""
        deviations = []
        for seed in range(30):
            more = {"labelled": world(np.ones(K), 800, seed=1000 + seed)} if method is PriorMethod.BBSE else {}
            exact = scaling if method is PriorMethod.BBSE else _exact()
            found = exact.estimate_prior(world(self.PRIOR, 600, seed=seed)[0], method=method, **more)
            assert found.n_samples == 600
            assert sum(found.prior) == pytest.approx(1)
            deviations.append((np.array(found.prior) - self.PRIOR) / np.array(found.errors))
        deviations = np.array(deviations)
        assert np.abs(deviations.mean(axis=0)).max() < 4.5 / math.sqrt(30)
        assert 0.6 < np.sqrt((deviations**2).mean()) < 1.35

    def test_em_is_the_most_likely_prior(self):
        """No other point of a grid on the simplex is more likely."""
        logits = world(self.PRIOR, 400)[0]
        probs = _exact().predict_proba(logits).numpy()
        found = np.array(_exact().estimate_prior(logits).prior)
        grid = np.random.default_rng(0).dirichlet(np.ones(K), 2000)
        best = np.log(probs @ grid.T).sum(axis=0).max()
        assert np.log(probs @ found).sum() >= best

    def test_its_answer_is_a_prior(self, scaling):
        logits, labels = world(self.PRIOR, 5000)
        found = scaling.estimate_prior(logits)
        nll = [
            tcil.metrics.negative_log_likelihood(scaling.predict_proba(logits, prior=p), labels) for p in (found, None)
        ]
        assert nll[0] < nll[1] - 0.05

    def test_em_uses_what_pact_believes_and_not_what_it_shows(self):
        logits = world(self.PRIOR, 500)[0]
        assert pact(True).estimate_prior(logits).prior == pact(False).estimate_prior(logits).prior


def _exact():
    logits, labels = world(np.ones(K), 50)
    fit = tcil.fit_temperature(logits, labels)
    mapping = tcil.extending.TemperatureMap(torch.tensor(1.0).double())
    return tcil.TemperatureScaling()._fitted(mapping, (0, 1, 2, 3), fit)


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ([1, 2, 3], r"prior: got shape \(3,\); expected \(4,\)"),
        ([1, 2, 3, -1], "frequencies of 0 or more"),
        ([0, 0, 0, 0], "not all of them 0"),
        ([1, 2, 3, float("nan")], "frequencies of 0 or more"),
        ({0: 1, 1: 2, 2: 3}, r"no frequency of the classes \[3\]"),
        ({0: 1, 1: 2, 2: 3, 3: 1, 9: 1}, r"frequencies of the classes \[9\]"),
        ("often", "prior: got str"),
    ],
)
def test_odd_priors_are_refused(scaling, prior, message):
    with pytest.raises(ValueError, match=message):
        scaling.predict_proba(torch.randn(3, K), prior=prior)
    with pytest.raises(ValueError, match=message):
        scaling.wrap(nn.Linear(3, K), prior=prior)


def test_rows_in_which_nothing_can_occur_are_refused(scaling):
    masked = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, -torch.inf, -torch.inf, -torch.inf]])
    with pytest.raises(ValueError, match="not masked in row 1"):
        scaling.predict_proba(masked, prior=[0, 1, 1, 1])


class TestRefusedEstimates:
    def test_methods(self, scaling):
        with pytest.raises(ValueError, match="expected one of em, bbse"):
            scaling.estimate_prior(torch.randn(5, K), method="me")
        with pytest.raises(ValueError, match="labelled: got NoneType"):
            scaling.estimate_prior(torch.randn(5, K), method="bbse")
        with pytest.raises(ValueError, match="does not use"):
            scaling.estimate_prior(torch.randn(5, K), labelled=world(np.ones(K), 50))

    def test_labelled_data_without_a_class(self, scaling):
        logits, labels = world([1, 1, 1, 0], 100)
        with pytest.raises(ValueError, match=r"no rows of the classes \[3\]"):
            scaling.estimate_prior(logits, method="bbse", labelled=(logits, labels))

    def test_predictions_that_tell_nothing(self, scaling):
        logits = torch.tensor([[3.0, 0, 0, 0]]).repeat(40, 1)
        with pytest.raises(ValueError, match="cannot be inverted"):
            scaling.estimate_prior(logits, method="bbse", labelled=(logits, torch.arange(40) % K))


class TestFloat32:
    def calibrators(self):
        logits, labels = world(np.ones(K), 300)
        group = tcil.GroupTemperatureScaling().fit(logits, labels, [2, 3])
        kinds = (tcil.TemperatureScaling, tcil.EnsembleTemperatureScaling, tcil.MulticlassIsotonic)
        return [group, pact(), pact(False), *(kind().fit(logits, labels) for kind in kinds)]

    def test_is_close_and_predicts_the_same(self):
        network = nn.Linear(K, K)
        x = 8 * torch.randn(2000, K, generator=torch.Generator().manual_seed(1))
        for calibrator in self.calibrators():
            with torch.no_grad():
                wide, narrow = (calibrator.wrap(network, dtype=dtype)(x) for dtype in (torch.float64, torch.float32))
            assert narrow.dtype == torch.float32, calibrator
            assert torch.allclose(narrow.exp().double(), wide.exp(), atol=3e-6), calibrator
            assert torch.equal(narrow.argmax(1), wide.argmax(1)), calibrator

    def test_the_fitted_calibrator_stays_as_it_was(self):
        for calibrator in self.calibrators():
            calibrator.wrap(nn.Linear(K, K), dtype=torch.float32)
            assert all(value.dtype != torch.float32 for value in calibrator._mapping().buffers())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.int64, "float32", None])
    def test_other_types_are_refused(self, scaling, dtype):
        with pytest.raises(ValueError, match="dtype: got"):
            scaling.wrap(nn.Linear(K, K), dtype=dtype)

    def test_a_temperature_beyond_float32_is_refused(self):
        logits, labels = world(np.ones(K), 100)
        tiny = tcil.TemperatureScaling().fit(1e-60 * logits, labels)
        with pytest.raises(ValueError, match=r"cannot represent temperature"):
            tiny.wrap(nn.Linear(K, K), dtype=torch.float32)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 100])
def test_halving_search_is_searchsorted(size):
    generator = torch.Generator().manual_seed(size)
    table = torch.randn(size, generator=generator).double().sort().values
    values = torch.cat([torch.randn(200, generator=generator).double(), table, torch.tensor([torch.inf, -torch.inf])])
    assert torch.equal(halving_search(table, values), torch.searchsorted(table, values))


class TestClassesThatComeBack:
    """New classes are those of the newest task's data, whether they were seen before or not."""

    def data(self):
        generator = torch.Generator().manual_seed(0)
        centres = torch.randn(4, 12, generator=generator)

        def draw(labels):
            labels = torch.as_tensor(labels)
            return centres[labels] + torch.randn(len(labels), 12, generator=generator), labels

        torch.manual_seed(0)
        network, memory = nn.Linear(12, 4), draw(torch.arange(48) % 4)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.03)
        for _ in range(80):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(memory[0]), memory[1]).backward()
            optimizer.step()
        return network, memory, draw

    def test_they_are_new_classes(self):
        """Class 0 of the first task comes back with class 3: both have held-out data, and both are new."""
        network, memory, draw = self.data()
        valid = draw([0, 3] * 60)
        back = tcil.TCIL().fit(network, memory, valid, new_classes=[0, 3])
        assert back.result_.n_valid == 120
        assert back.result_.n_new_exemplars == 24
        presented = {0: 100, 1: 10, 2: 10, 3: 100}
        pact = tcil.PACT().fit(network, memory, valid, new_classes=[0, 3], imbalance=presented)
        assert pact.result_.imbalance == 10.0
        assert pact._mapping().is_new.tolist() == [True, False, False, True]

    def test_as_old_classes_their_data_is_left_out_and_said_so(self):
        network, memory, draw = self.data()
        with pytest.warns(tcil.CalibrationWarning, match="valid: 60 rows"):
            calibrator = tcil.TCIL().fit(network, memory, draw([0, 3] * 60), new_classes=[3])
        assert calibrator.result_.n_valid_ignored == 60
        assert tcil.options.Verdict.OLD_ROWS_IN_VALID in calibrator.result_.verdicts

    def test_all_of_them_is_like_a_first_task(self):
        network, memory, draw = self.data()
        pact = tcil.PACT().fit(network, memory, draw(torch.arange(120) % 4), new_classes=range(4))
        assert (pact.bias_, pact.result_.imbalance, pact.result_.bias_error) == (0.0, 1.0, None)

    def test_the_history_goes_on(self):
        """Two tasks, then a class of the first again: what is remembered of T and b is kept."""
        network, memory, draw = self.data()
        pact = tcil.PACT()
        for step, new in enumerate(([0, 1], [2, 3], [0, 3])):
            with torch.no_grad():
                network.weight += 0.01 * step  # a task's training
            rows = memory[1] <= max(new) if step == 0 else torch.ones(48, dtype=torch.bool)
            part = memory[0][rows], memory[1][rows]
            pact.partial_fit(network, part, draw(new * 60), new_classes=new, imbalance=5.0 if step else None)
        assert pact.result_.evidence[0].source == "history"
