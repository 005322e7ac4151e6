"""The types that users see: mypy checks the `assert_type`s (`make lint`), pytest that values are of these types."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import tcil
from tcil.extending import Calibrator
from tcil.results import (
    CalibratedModel,
    EnsembleResult,
    GroupTemperatureResult,
    IsotonicResult,
    PACTResult,
    PerturbedResult,
    TCILResult,
    TemperatureFit,
)

LOGITS = 5 * torch.eye(3)[torch.tensor([0, 1, 2, 0])]
LABELS = torch.tensor([0, 1, 2, 2])
Floats = npt.NDArray[np.float64]


def test_tensors_give_tensors_and_arrays_give_arrays() -> None:
    scaling = assert_type(tcil.TemperatureScaling().fit(LOGITS, LABELS), tcil.TemperatureScaling)
    assert isinstance(assert_type(scaling.transform(LOGITS), Tensor), Tensor)
    assert isinstance(assert_type(scaling.predict_proba(LOGITS), Tensor), Tensor)
    assert assert_type(scaling.transform(LOGITS.numpy()), Floats).dtype == np.float64
    assert assert_type(scaling.predict_proba(LOGITS.numpy()), Floats).dtype == np.float64
    assert isinstance(assert_type(scaling.predict_proba([[1.0, 2.0, 0.5]]), Floats), np.ndarray)


def test_results_have_their_own_types() -> None:
    assert isinstance(
        assert_type(tcil.TemperatureScaling().fit(LOGITS, LABELS).result_, TemperatureFit), TemperatureFit
    )
    first = tcil.FirstTaskTemperatureScaling().partial_fit(LOGITS, LABELS)
    assert isinstance(assert_type(first.result_, TemperatureFit), TemperatureFit)
    group = tcil.GroupTemperatureScaling().fit(LOGITS, LABELS, range(3))
    assert isinstance(assert_type(group.result_, GroupTemperatureResult), GroupTemperatureResult)
    ensemble = tcil.EnsembleTemperatureScaling().fit(LOGITS, LABELS)
    assert isinstance(assert_type(ensemble.result_, EnsembleResult), EnsembleResult)
    isotonic = tcil.MulticlassIsotonic().fit(LOGITS, LABELS)
    assert isinstance(assert_type(isotonic.result_, IsotonicResult), IsotonicResult)


def test_calibrators_on_models() -> None:
    network, valid = nn.Linear(2, 2), (torch.randn(30, 2), torch.arange(30) % 2)
    perturbed = tcil.PerturbedTemperatureScaling(search="nelder-mead").fit(network, valid)
    assert isinstance(assert_type(perturbed.result_, PerturbedResult), PerturbedResult)
    assert isinstance(assert_type(perturbed.wrap(network), CalibratedModel), CalibratedModel)


def known_to_mypy_only(t_cil: tcil.TCIL, pact: tcil.PACT, anything: Calibrator) -> None:
    """Fitted elsewhere in the tests."""
    assert_type(t_cil.result_, TCILResult)
    assert_type(t_cil.temperature_, float)
    assert_type(pact.result_, PACTResult)
    assert_type(pact.clone(), tcil.PACT)
    assert_type(pact.set_params(tolerance=0.01), tcil.PACT)
    assert_type(anything.predict_proba(LOGITS), Tensor)


def test_predict_logits_gives_what_it_got() -> None:
    network, x, y = nn.Linear(2, 3), np.ones((6, 2), dtype=np.float32), np.arange(6) % 3
    arrays = assert_type(tcil.predict_logits(network, (x, y)), tuple[npt.NDArray[Any], npt.NDArray[np.int64]])
    assert [type(part) for part in arrays] == [np.ndarray, np.ndarray]
    pair = (torch.from_numpy(x), torch.from_numpy(y))
    tensors = assert_type(tcil.predict_logits(network, pair), tuple[Tensor, Tensor])
    assert [type(part) for part in tensors] == [Tensor, Tensor]


def test_loading(tmp_path: Path) -> None:
    path = tcil.TemperatureScaling().fit(LOGITS, LABELS).save(tmp_path / "c.json")
    assert assert_type(tcil.TemperatureScaling.load(path), tcil.TemperatureScaling).temperature_ > 0
    assert isinstance(tcil.load(path), Calibrator)


def test_metrics() -> None:
    probs = tcil.TemperatureScaling().fit(LOGITS, LABELS).predict_proba(LOGITS)
    assert isinstance(assert_type(tcil.metrics.accuracy(probs, LABELS), tcil.metrics.Score), float)
    assert_type(tcil.metrics.calibration_estimate(probs, LABELS), tcil.metrics.CalibrationEstimate)
    assert_type(tcil.metrics.compare_calibration(probs, probs, LABELS), tcil.metrics.CalibrationComparison)
