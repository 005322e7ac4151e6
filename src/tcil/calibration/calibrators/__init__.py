"""The calibrators, one file per method; `base` is what they share, `maps` what they leave behind."""

from tcil.calibration.calibrators.base import CalibratedModel, Calibrator, SingleTemperature, load
from tcil.calibration.calibrators.ensemble import EnsembleFit, EnsembleTemperatureScaling
from tcil.calibration.calibrators.isotonic import IsotonicFit, MulticlassIsotonic
from tcil.calibration.calibrators.maps import CalibrationMap
from tcil.calibration.calibrators.pact import PACT, PACTEvidence, PACTResult
from tcil.calibration.calibrators.perturbed import (
    NoiseLevel,
    NoiseSearch,
    PerturbedFit,
    PerturbedTemperatureScaling,
)
from tcil.calibration.calibrators.tcil import TCIL, TCILEvidence, TCILResult
from tcil.calibration.calibrators.temperature_scaling import (
    FirstTaskTemperatureScaling,
    GroupTemperatureFit,
    GroupTemperatureScaling,
    TemperatureScaling,
)

__all__ = [
    "PACT",
    "TCIL",
    "CalibratedModel",
    "CalibrationMap",
    "Calibrator",
    "EnsembleFit",
    "EnsembleTemperatureScaling",
    "FirstTaskTemperatureScaling",
    "GroupTemperatureFit",
    "GroupTemperatureScaling",
    "IsotonicFit",
    "MulticlassIsotonic",
    "NoiseLevel",
    "NoiseSearch",
    "PACTEvidence",
    "PACTResult",
    "PerturbedFit",
    "PerturbedTemperatureScaling",
    "SingleTemperature",
    "TCILEvidence",
    "TCILResult",
    "TemperatureScaling",
    "load",
]
