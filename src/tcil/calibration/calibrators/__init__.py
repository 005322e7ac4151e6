"""The calibrators, one file per method; `base` is their base class, `maps` the fitted functions."""

from tcil.calibration.calibrators.base import Calibrator, load
from tcil.calibration.calibrators.class_statistics import StatisticsResult, StatisticsTemperatureScaling
from tcil.calibration.calibrators.ensemble import EnsembleResult, EnsembleTemperatureScaling
from tcil.calibration.calibrators.isotonic import IsotonicResult, MulticlassIsotonic
from tcil.calibration.calibrators.maps import CalibrationMap
from tcil.calibration.calibrators.noise_levels import NoiseLevel, NoiseSearch
from tcil.calibration.calibrators.pact import PACT, PACTConstants, PACTEvidence, PACTResult
from tcil.calibration.calibrators.perturbed import PerturbedResult, PerturbedTemperatureScaling
from tcil.calibration.calibrators.single_temperature import SingleTemperature
from tcil.calibration.calibrators.tcil import TCIL, TCILEvidence, TCILResult
from tcil.calibration.calibrators.temperature_scaling import (
    FirstTaskTemperatureScaling,
    GroupTemperatureResult,
    GroupTemperatureScaling,
    TemperatureScaling,
)
from tcil.calibration.calibrators.wrapped import CalibratedModel

__all__ = [
    "PACT",
    "TCIL",
    "CalibratedModel",
    "CalibrationMap",
    "Calibrator",
    "EnsembleResult",
    "EnsembleTemperatureScaling",
    "FirstTaskTemperatureScaling",
    "GroupTemperatureResult",
    "GroupTemperatureScaling",
    "IsotonicResult",
    "MulticlassIsotonic",
    "NoiseLevel",
    "NoiseSearch",
    "PACTConstants",
    "PACTEvidence",
    "PACTResult",
    "PerturbedResult",
    "PerturbedTemperatureScaling",
    "SingleTemperature",
    "StatisticsResult",
    "StatisticsTemperatureScaling",
    "TCILEvidence",
    "TCILResult",
    "TemperatureScaling",
    "load",
]
