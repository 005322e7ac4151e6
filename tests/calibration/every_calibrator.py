"""Every calibrator, fitted on one task."""

from __future__ import annotations

import tcil


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
