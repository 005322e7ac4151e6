"""The study of PACT and PACT-R: docs/pact.md, docs/pact-protocol.md.

`worlds` says what is trained, `methods` and `compared` what is compared, `measuring` what is measured and kept,
`tables` how it is summarised. `rounds`, `small` and `confirmation` have the final runs, `leads` what was tried after
them. `constants` fits those of PACT, `sizes` changes one setting at a time, `imbalance` what PACT is told, `draws`
the validation set alone; `verdicts` asks what warns of harm, `residuals` what tells the error; `page` writes the
tables of docs/pact.md and docs/pact-history.md.
"""

from research.pact.measuring import STORED, measure, stored, walk
from research.pact.methods import (
    EARLIER,
    METHODS,
    OURS,
    Method,
    averaged,
    begun,
    believed,
    bennett,
    between,
    log_spread,
    reserve_of,
    tracked,
)
from research.pact.page import PAGES, sections
from research.pact.tables import each_learner, learners, mean, of_learner, ratio_errors, rms, summary, world_of
from research.pact.worlds import FINAL, LEARNERS, RESERVED, WORLDS, final_settings, train

__all__ = [
    "EARLIER",
    "FINAL",
    "LEARNERS",
    "METHODS",
    "OURS",
    "PAGES",
    "RESERVED",
    "STORED",
    "WORLDS",
    "Method",
    "averaged",
    "begun",
    "believed",
    "bennett",
    "between",
    "each_learner",
    "final_settings",
    "learners",
    "log_spread",
    "mean",
    "measure",
    "of_learner",
    "ratio_errors",
    "reserve_of",
    "rms",
    "sections",
    "stored",
    "summary",
    "tracked",
    "train",
    "walk",
    "world_of",
]
