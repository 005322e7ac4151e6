"""What a run leaves, as types: frozen records, checked where they are read, and versioned.

Fields that are not described here are kept, and written again. Nothing here needs torch.
"""

from tcil.experiments.runs.results.about import DataNote, Environment, FormatNote, StoredSettings
from tcil.experiments.runs.results.files import Draws, Packed, kind_of
from tcil.experiments.runs.results.row import (
    ALL,
    ALPHA,
    COVERAGES,
    NEW,
    OLD,
    RANKED,
    RISKS,
    WITH_OPTIONS,
    Bins,
    ByClass,
    ByTask,
    CalibratorRow,
    DecisionFigures,
    FitSummary,
    NoiseLevel,
    RiskFigure,
    SetFigure,
    TraceStep,
)
from tcil.experiments.runs.results.run import RunResult, first_task
from tcil.experiments.runs.results.task import VERSION, MemorySummary, TaskResult

__all__ = [
    "ALL",
    "ALPHA",
    "COVERAGES",
    "NEW",
    "OLD",
    "RANKED",
    "RISKS",
    "VERSION",
    "WITH_OPTIONS",
    "Bins",
    "ByClass",
    "ByTask",
    "CalibratorRow",
    "DataNote",
    "DecisionFigures",
    "Draws",
    "Environment",
    "FitSummary",
    "FormatNote",
    "MemorySummary",
    "NoiseLevel",
    "Packed",
    "RiskFigure",
    "RunResult",
    "SetFigure",
    "StoredSettings",
    "TaskResult",
    "TraceStep",
    "first_task",
    "kind_of",
]
