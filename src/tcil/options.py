"""Named choices: string enums whose members say what they mean. A plain string of the same value serves as well.

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
