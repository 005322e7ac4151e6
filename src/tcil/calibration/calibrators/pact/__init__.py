"""PACT: `evidence` is what a task's data say, `filter` what is believed from task to task, `calibrator` the rest."""

from tcil.calibration.calibrators.pact.calibrator import PACT, PACTResult
from tcil.calibration.calibrators.pact.constants import PACTConstants
from tcil.calibration.calibrators.pact.evidence import PACTEvidence
from tcil.calibration.calibrators.pact.filter import PACTFilter

__all__ = ["PACT", "PACTConstants", "PACTEvidence", "PACTFilter", "PACTResult"]
