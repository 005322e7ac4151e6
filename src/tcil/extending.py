"""Base classes for your own calibrators, learners, datasets and benchmark entries.

To add a calibrator, write a `CalibrationMap` (or use an existing one) and a `Calibrator` whose `fit` ends with
`self._fitted(...)`. It then transforms, wraps, saves and loads like the built-in ones:

>>> from dataclasses import dataclass
>>> import torch
>>> from tcil.extending import Calibrator, TemperatureMap
>>> @dataclass(frozen=True)
... class HalvingResult:
...     n_samples: int
>>> class Halving(Calibrator[HalvingResult]):
...     map_type, result_type = TemperatureMap, HalvingResult
...     def fit(self, logits, labels, *, classes=None):
...         names = tuple(range(logits.shape[1]) if classes is None else classes)
...         return self._fitted(TemperatureMap(torch.tensor(2.0).double()), names, HalvingResult(len(logits)))
>>> halving = Halving().fit(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
>>> halving.predict_proba([[2.0, 0.0]]).round(3)
array([[0.731, 0.269]])

The benchmark accepts learners (`Learner`), datasets (functions that return a `Dataset`), networks and calibrators
(an `Entry`) as `package.module:name` or by entry point. Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tcil.calibration.calibrators.base import Calibrator
    from tcil.calibration.calibrators.maps import CalibrationMap, TemperatureMap
    from tcil.calibration.calibrators.single_temperature import SingleTemperature
    from tcil.calibration.prediction import FeatureRows, predict_features
    from tcil.experiments.runs.entries import Entry, FinishedTask, NotApplicable
    from tcil.foundation.options import Option
    from tcil.foundation.records import Record
    from tcil.incremental.data.datasets import load_dataset
    from tcil.incremental.data.images import Dataset, ImageSet
    from tcil.incremental.learners.base import Head, Learner, LearnerOptions, Stage, TaskData, TaskSize
    from tcil.incremental.learners.er import ER
    from tcil.incremental.pretrained.backbones import Backbone, load_backbone
    from tcil.incremental.schedule import Schedule

_HOMES = {
    "Calibrator": "tcil.calibration.calibrators.base",
    "SingleTemperature": "tcil.calibration.calibrators.single_temperature",
    "CalibrationMap": "tcil.calibration.calibrators.maps",
    "TemperatureMap": "tcil.calibration.calibrators.maps",
    "FeatureRows": "tcil.calibration.prediction",
    "predict_features": "tcil.calibration.prediction",
    "Option": "tcil.foundation.options",
    "Record": "tcil.foundation.records",
    "Dataset": "tcil.incremental.data.images",
    "ImageSet": "tcil.incremental.data.images",
    "load_dataset": "tcil.incremental.data.datasets",
    "Head": "tcil.incremental.learners.base",
    "Learner": "tcil.incremental.learners.base",
    "LearnerOptions": "tcil.incremental.learners.base",
    "Schedule": "tcil.incremental.schedule",
    "Stage": "tcil.incremental.learners.base",
    "TaskData": "tcil.incremental.learners.base",
    "TaskSize": "tcil.incremental.learners.base",
    "ER": "tcil.incremental.learners.er",
    "Backbone": "tcil.incremental.pretrained.backbones",
    "load_backbone": "tcil.incremental.pretrained.backbones",
    "Entry": "tcil.experiments.runs.entries",
    "FinishedTask": "tcil.experiments.runs.entries",
    "NotApplicable": "tcil.experiments.runs.entries",
}

__all__ = [
    "ER",
    "Backbone",
    "CalibrationMap",
    "Calibrator",
    "Dataset",
    "Entry",
    "FeatureRows",
    "FinishedTask",
    "Head",
    "ImageSet",
    "Learner",
    "LearnerOptions",
    "NotApplicable",
    "Option",
    "Record",
    "Schedule",
    "SingleTemperature",
    "Stage",
    "TaskData",
    "TaskSize",
    "TemperatureMap",
    "load_backbone",
    "load_dataset",
    "predict_features",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'tcil.extending' has no attribute {name!r}")
        return globals().setdefault(name, getattr(importlib.import_module(_HOMES[name]), name))


def __dir__() -> list[str]:
    return __all__
