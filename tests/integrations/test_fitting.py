"""`fit_after_task` passes each calibrator what its `fit` asks for."""

from __future__ import annotations

import pytest

import tcil
from tcil.integrations.fitting import fit_after_task

CALIBRATORS = [
    tcil.TCIL,
    tcil.PACT,
    tcil.TemperatureScaling,
    tcil.FirstTaskTemperatureScaling,
    tcil.EnsembleTemperatureScaling,
    tcil.MulticlassIsotonic,
    tcil.PerturbedTemperatureScaling,
    tcil.StatisticsTemperatureScaling,
]


@pytest.mark.parametrize("kind", CALIBRATORS, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
def test_every_calibrator_of_one_task(kind, digits_tasks):
    first = digits_tasks[0]
    calibrator = fit_after_task(
        kind(),
        first.model,
        memory=first.memory,
        valid=first.valid,
        new_classes=first.new_classes,
        columns=range(first.seen),
    )
    assert calibrator.classes_ == tuple(range(first.seen))
