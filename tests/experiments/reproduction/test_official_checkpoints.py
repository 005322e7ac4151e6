"""The authors' own networks on the real CIFAR-100, against figures measured independently with an exact solver."""

from __future__ import annotations

import pytest
import torch

import tcil
from research import official

# accuracy, then ECE of vanilla, TS, T-CIL and Optimal TS (all %), then T of the target, T-CIL and the optimum
EXPECTED = {
    0: (87.80, 8.29, 3.03, 3.04, 3.06, 2.367, 2.371, 2.152),
    2: (69.40, 18.92, 9.66, 4.59, 2.80, 1.691, 2.690, 2.263),
    4: (54.94, 29.02, 15.73, 3.35, 4.32, 1.745, 2.786, 2.449),
    6: (48.91, 31.45, 19.43, 5.68, 3.16, 1.565, 2.235, 2.416),
    8: (42.14, 36.63, 25.68, 5.71, 4.16, 1.473, 2.378, 2.480),
}
MAGNITUDES = {0: 0.038, 2: 0.030, 4: 0.031, 6: 0.024, 8: 0.030}


@pytest.mark.timeout(900)
@pytest.mark.real
@pytest.mark.parametrize("index", EXPECTED, ids=lambda index: f"task{index}")
def test_official_checkpoint(index):
    folder = official.data_folder()
    if folder is None:
        pytest.fail("TCIL_DATA names no folder with cifar-100-python/ and official-er-cifar100/")
    torch.set_num_threads(2)
    task = official.load(folder, index)
    accuracy, vanilla, ts, t_cil, optimal, target_t, t_cil_t, optimal_t = EXPECTED[index]
    classes = range(task.seen)
    logits, labels = tcil.predict_logits(task.model, task.test, classes=classes)
    on_valid = tcil.predict_logits(task.model, task.valid, classes=classes)
    ece = tcil.metrics.expected_calibration_error

    def close(probs, expected):
        assert 100 * ece(probs, labels) == pytest.approx(expected, abs=0.3)

    probs = torch.softmax(logits.double(), dim=1)
    assert 100 * tcil.metrics.accuracy(probs, labels) == pytest.approx(accuracy, abs=0.03)
    close(probs, vanilla)
    new_task = tcil.TemperatureScaling().fit(*on_valid)
    assert new_task.temperature_ == pytest.approx(target_t, rel=0.01)
    close(new_task.predict_proba(logits), ts)
    oracle = tcil.TemperatureScaling().fit(logits, labels)
    assert oracle.temperature_ == pytest.approx(optimal_t, rel=0.01)
    close(oracle.predict_proba(logits), optimal)
    calibrator = tcil.TCIL().fit(task.model, task.memory, task.valid, task.new_classes)
    result = calibrator.result_
    assert result.target_temperature == pytest.approx(target_t, rel=0.01)
    assert result.temperature == pytest.approx(t_cil_t, rel=0.01)
    assert result.magnitude == pytest.approx(MAGNITUDES[index], abs=1e-3)
    assert result.reachable
    assert result.verdicts == ("ok",)
    close(calibrator.predict_proba(logits), t_cil)
    bisected = tcil.TCIL(search="bisection").fit(task.model, task.memory, task.valid, task.new_classes).result_
    assert (result.magnitude, result.temperature) == (bisected.magnitude, bisected.temperature)
    assert len(result.trace) <= 6 < len(bisected.trace)
