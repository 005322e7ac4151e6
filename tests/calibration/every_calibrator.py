"""Every calibrator, fitted on one task, and one of the user's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import tcil
from tcil.extending import CalibrationMap, Calibrator, predict_features


def all_calibrators(task):
    seen = range(task.seen)
    logits, labels = tcil.predict_logits(task.model, task.valid, classes=seen)
    on_test = tcil.predict_logits(task.model, task.test, classes=seen)
    known = tcil.StatisticsTemperatureScaling(rank=2).fit(task.model, task.test, seen, classes=seen).history_
    return {
        "TCIL": tcil.TCIL().fit(task.model, task.memory, task.valid, task.new_classes),
        "PACT": tcil.PACT().fit(task.model, task.memory, task.valid, task.new_classes, imbalance=9.0),
        "TemperatureScaling": tcil.TemperatureScaling(solver="sgd", seed=3).fit(logits, labels),
        "FirstTaskTemperatureScaling": tcil.FirstTaskTemperatureScaling().fit(logits, labels),
        "GroupTemperatureScaling": tcil.GroupTemperatureScaling().fit(*on_test, new_classes=task.new_classes),
        "EnsembleTemperatureScaling": tcil.EnsembleTemperatureScaling().fit(logits, labels),
        "MulticlassIsotonic": tcil.MulticlassIsotonic().fit(*on_test),
        "StatisticsTemperatureScaling": tcil.StatisticsTemperatureScaling(rank=2, per_class=5).fit(
            task.model, task.valid, task.new_classes, classes=seen, history=known
        ),
        "PerturbedTemperatureScaling": tcil.PerturbedTemperatureScaling(search="nelder-mead").fit(
            task.model, valid=task.valid, classes=seen
        ),
    }


NAMES = [
    "TCIL",
    "PACT",
    "TemperatureScaling",
    "FirstTaskTemperatureScaling",
    "GroupTemperatureScaling",
    "EnsembleTemperatureScaling",
    "MulticlassIsotonic",
    "PerturbedTemperatureScaling",
    "StatisticsTemperatureScaling",
]


# A calibrator of the user's own, which needs features.


@dataclass(frozen=True)
class NormResult:
    n_samples: int


class NormMap(CalibrationMap):
    """T grows with the norm of the features."""

    needs_features = True

    def __init__(self, slope: Tensor) -> None:
        super().__init__()
        self.set_state(slope=slope)

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        assert features is not None
        return torch.log_softmax(
            logits.double() / (1 + self.slope * features.double().norm(dim=1, keepdim=True)), dim=1
        )


class ByNorm(Calibrator[NormResult]):
    map_type, result_type = NormMap, NormResult

    def fit(self, model, valid, classes=None, columns=None):
        rows = predict_features(model, valid, classes=classes, columns=columns)
        slope = torch.tensor(1 / float(rows.features.norm(dim=1).mean()), dtype=torch.float64)
        return self._fitted(NormMap(slope), rows.classes, NormResult(len(rows.logits)), **rows.seen)
