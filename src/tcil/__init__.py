"""tcil: calibrated confidence for classifiers that keep learning new classes.

    calibrator = tcil.TCIL().fit(model, memory=(x_mem, y_mem), valid=(x_val, y_val), new_classes=range(90, 100))
    calibrated = calibrator.wrap(model)

More names are in `tcil.decisions` (thresholds and prediction sets), `tcil.results` (results of fits), `tcil.options`
(named choices and verdicts), `tcil.distributed` (multiple processes) and `tcil.extending` (base classes for your own
calibrators, learners and datasets). Names are loaded on first use: `import tcil` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.3.0.dev0"

if TYPE_CHECKING:
    from tcil import decisions as decisions
    from tcil import distributed as distributed
    from tcil import extending as extending
    from tcil import metrics, networks
    from tcil import options as options
    from tcil import results as results
    from tcil.calibration.calibrators import (
        PACT,
        TCIL,
        EnsembleTemperatureScaling,
        FirstTaskTemperatureScaling,
        GroupTemperatureScaling,
        MulticlassIsotonic,
        PerturbedTemperatureScaling,
        StatisticsTemperatureScaling,
        TemperatureScaling,
        load,
    )
    from tcil.calibration.prediction import predict_logits
    from tcil.calibration.temperature import fit_temperature
    from tcil.foundation.errors import (
        CalibrationWarning,
        NotFittedError,
        NotReachableError,
        WeightsMismatchError,
    )

_CALIBRATORS, _ERRORS = "tcil.calibration.calibrators", "tcil.foundation.errors"
_HOMES = {
    "PACT": _CALIBRATORS,
    "TCIL": _CALIBRATORS,
    "EnsembleTemperatureScaling": _CALIBRATORS,
    "FirstTaskTemperatureScaling": _CALIBRATORS,
    "GroupTemperatureScaling": _CALIBRATORS,
    "MulticlassIsotonic": _CALIBRATORS,
    "PerturbedTemperatureScaling": _CALIBRATORS,
    "StatisticsTemperatureScaling": _CALIBRATORS,
    "TemperatureScaling": _CALIBRATORS,
    "load": _CALIBRATORS,
    "fit_temperature": "tcil.calibration.temperature",
    "predict_logits": "tcil.calibration.prediction",
    "CalibrationWarning": _ERRORS,
    "NotFittedError": _ERRORS,
    "NotReachableError": _ERRORS,
    "WeightsMismatchError": _ERRORS,
}
_MODULES = ("decisions", "distributed", "extending", "metrics", "networks", "options", "results")
# Names of version 0.1 that have moved: an error says where they are.
_MOVED = {
    "CalibratedModel": "tcil.results.CalibratedModel",
    "CalibrationMap": "tcil.extending.CalibrationMap",
    "Calibrator": "tcil.extending.Calibrator",
    "DirectionPolicy": "tcil.options.DirectionPolicy",
    "EnsembleFit": "tcil.results.EnsembleResult",
    "GroupTemperatureFit": "tcil.results.GroupTemperatureResult",
    "IsotonicFit": "tcil.results.IsotonicResult",
    "NoiseLevel": "tcil.results.NoiseLevel",
    "NoiseSearch": "tcil.options.NoiseSearch",
    "PACTEvidence": "tcil.results.PACTEvidence",
    "PACTResult": "tcil.results.PACTResult",
    "PerturbedFit": "tcil.results.PerturbedResult",
    "SearchMethod": "tcil.options.SearchMethod",
    "SearchStep": "tcil.results.SearchStep",
    "Solver": "tcil.options.Solver",
    "TCILEvidence": "tcil.results.TCILEvidence",
    "TCILResult": "tcil.results.TCILResult",
    "TemperatureFit": "tcil.results.TemperatureFit",
    "Verdict": "tcil.options.Verdict",
    "sharded": "tcil.distributed.sharded",
}

__all__ = [
    "PACT",
    "TCIL",
    "CalibrationWarning",
    "EnsembleTemperatureScaling",
    "FirstTaskTemperatureScaling",
    "GroupTemperatureScaling",
    "MulticlassIsotonic",
    "NotFittedError",
    "NotReachableError",
    "PerturbedTemperatureScaling",
    "StatisticsTemperatureScaling",
    "TemperatureScaling",
    "WeightsMismatchError",
    "__version__",
    "fit_temperature",
    "load",
    "metrics",
    "networks",
    "predict_logits",
]

if not TYPE_CHECKING:  # type checkers know the names above, and no others

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return importlib.import_module(f"tcil.{name}")
        if name in _HOMES:
            return globals().setdefault(name, getattr(importlib.import_module(_HOMES[name]), name))
        moved = f": it is {_MOVED[name]} since version 0.2" if name in _MOVED else ""
        raise AttributeError(f"module 'tcil' has no attribute {name!r}{moved}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
