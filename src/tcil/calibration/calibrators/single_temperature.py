"""The base class of calibrators that fit a single temperature."""

from __future__ import annotations

from typing import ClassVar, cast

import torch

from tcil.calibration.calibrators.base import Calibrator, Result
from tcil.calibration.calibrators.maps import CalibrationMap, TemperatureMap


class SingleTemperature(Calibrator[Result]):
    """Base class of calibrators that fit a single temperature.

    Attributes
    ----------
    temperature_ : float
        The fitted temperature: logits are divided by it.

    Examples
    --------
    >>> import tcil
    >>> from tcil.extending import SingleTemperature
    >>> isinstance(tcil.TCIL(), SingleTemperature), isinstance(tcil.PACT(), SingleTemperature)
    (True, False)
    """

    map_type: ClassVar[type[CalibrationMap]] = TemperatureMap

    @property
    def temperature_(self) -> float:
        """The fitted temperature, greater than 0."""
        return float(cast(TemperatureMap, self._mapping()).temperature)

    @staticmethod
    def _map(temperature: float) -> TemperatureMap:
        return TemperatureMap(torch.tensor(temperature, dtype=torch.float64))
