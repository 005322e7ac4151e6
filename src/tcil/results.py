"""Results of fits: the frozen records in `result_`, and the model that `wrap` returns.

Records print as aligned lines in a terminal and as a table in a notebook.

>>> import tcil
>>> print(tcil.fit_temperature([[4.0, 0.0], [0.0, 4.0], [4.0, 0.0]], [0, 1, 1]))
TemperatureFit
  temperature  5.771
  verdict      ok
  nll before   1.351
  nll after    0.6365
  ...
"""

from tcil.calibration.calibrators import (
    CalibratedModel,
    EnsembleResult,
    GroupTemperatureResult,
    IsotonicResult,
    NoiseLevel,
    PACTEvidence,
    PACTResult,
    PerturbedResult,
    StatisticsResult,
    TCILEvidence,
    TCILResult,
)
from tcil.calibration.perturbation import SearchStep
from tcil.calibration.prior import PriorEstimate
from tcil.calibration.temperature import TemperatureFit

__all__ = [
    "CalibratedModel",
    "EnsembleResult",
    "GroupTemperatureResult",
    "IsotonicResult",
    "NoiseLevel",
    "PACTEvidence",
    "PACTResult",
    "PerturbedResult",
    "PriorEstimate",
    "SearchStep",
    "StatisticsResult",
    "TCILEvidence",
    "TCILResult",
    "TemperatureFit",
]
