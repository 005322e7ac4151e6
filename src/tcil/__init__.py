"""tcil: honest confidence for classifiers that keep learning new classes.

    calibrator = tcil.TCIL().fit(model, memory=(x_mem, y_mem), valid=(x_val, y_val), new_classes=range(90, 100))
    calibrated = calibrator.wrap(model)

Names are loaded when they are first used, so that what needs no torch starts without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tcil import metrics, networks
    from tcil.calibration.calibrators import (
        PACT,
        TCIL,
        CalibratedModel,
        CalibrationMap,
        Calibrator,
        EnsembleFit,
        EnsembleTemperatureScaling,
        FirstTaskTemperatureScaling,
        GroupTemperatureFit,
        GroupTemperatureScaling,
        IsotonicFit,
        MulticlassIsotonic,
        NoiseLevel,
        NoiseSearch,
        PACTEvidence,
        PACTResult,
        PerturbedFit,
        PerturbedTemperatureScaling,
        TCILEvidence,
        TCILResult,
        TemperatureScaling,
        load,
    )
    from tcil.calibration.errors import (
        CalibrationWarning,
        NotFittedError,
        NotReachableError,
        WeightsMismatchError,
    )
    from tcil.calibration.options import Verdict
    from tcil.calibration.perturbation import DirectionPolicy, SearchMethod, SearchStep
    from tcil.calibration.prediction import predict_logits
    from tcil.calibration.ranks import sharded
    from tcil.calibration.temperature import Solver, TemperatureFit, fit_temperature

# Where public names are looked for when they are first used.
_HOMES = (
    "tcil.calibration.calibrators",
    "tcil.calibration.errors",
    "tcil.calibration.options",
    "tcil.calibration.perturbation",
    "tcil.calibration.prediction",
    "tcil.calibration.ranks",
    "tcil.calibration.temperature",
)
_MODULES = ("metrics", "networks")

__all__ = [
    "PACT",
    "TCIL",
    "CalibratedModel",
    "CalibrationMap",
    "CalibrationWarning",
    "Calibrator",
    "DirectionPolicy",
    "EnsembleFit",
    "EnsembleTemperatureScaling",
    "FirstTaskTemperatureScaling",
    "GroupTemperatureFit",
    "GroupTemperatureScaling",
    "IsotonicFit",
    "MulticlassIsotonic",
    "NoiseLevel",
    "NoiseSearch",
    "NotFittedError",
    "NotReachableError",
    "PACTEvidence",
    "PACTResult",
    "PerturbedFit",
    "PerturbedTemperatureScaling",
    "SearchMethod",
    "SearchStep",
    "Solver",
    "TCILEvidence",
    "TCILResult",
    "TemperatureFit",
    "TemperatureScaling",
    "Verdict",
    "WeightsMismatchError",
    "__version__",
    "fit_temperature",
    "load",
    "metrics",
    "networks",
    "predict_logits",
    "sharded",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tcil.{name}")
    if name in __all__:
        for home in map(importlib.import_module, _HOMES):
            if name in vars(home):
                return globals().setdefault(name, vars(home)[name])
    raise AttributeError(f"module 'tcil' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
