"""The public name of `tcil.calibration.metrics`."""

from tcil.calibration.metrics import *  # noqa: F403
from tcil.calibration.metrics import __all__ as __all__
