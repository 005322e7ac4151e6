"""Named choices: string enums whose members have a `meaning`. Plain strings of the same value are accepted too.

>>> import tcil
>>> tcil.TCIL(policy="random").policy is tcil.options.DirectionPolicy.RANDOM
True
"""

from tcil.calibration.calibrators import NoiseSearch, PACTConstants
from tcil.calibration.perturbation import DirectionPolicy, SearchMethod
from tcil.calibration.prior import PriorMethod
from tcil.calibration.temperature import Solver
from tcil.foundation.options import Verdict

__all__ = ["DirectionPolicy", "NoiseSearch", "PACTConstants", "PriorMethod", "SearchMethod", "Solver", "Verdict"]
