"""The pictures of studies as charts: each with the words that say the same, and the values drawn."""

from tcil.experiments.reporting.figures.by_task import error_by_task, temperature_by_task
from tcil.experiments.reporting.figures.decisions import claimed_and_achieved, risk_by_coverage
from tcil.experiments.reporting.figures.errors import errors_by_group, errors_by_study
from tcil.experiments.reporting.figures.parts import Values, drawn, listed
from tcil.experiments.reporting.figures.reliability import error_by_class, reliability
from tcil.experiments.reporting.figures.search import search_trace

__all__ = [
    "Values",
    "claimed_and_achieved",
    "drawn",
    "error_by_class",
    "error_by_task",
    "errors_by_group",
    "errors_by_study",
    "listed",
    "reliability",
    "risk_by_coverage",
    "search_trace",
    "temperature_by_task",
]
