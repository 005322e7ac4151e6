"""Errors and warnings. Messages name the argument, what was given, what was expected and what to do."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import itertools
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

# Packages that call each other between the user's line and a warning, frameworks with integrations among them.
_PASSED_OVER = (
    "tcil.calibration",
    "tcil.decisions",
    "tcil.foundation",
    "tcil.integrations",
    "avalanche",
    "lightning",
    "torch",
    "contextlib",
)
_SAME = {"nearest": "closest", "furthest": "farthest"}  # other words for valid names
_task: ContextVar[str] = ContextVar("task", default="")


class CalibrationWarning(UserWarning):
    """Warns that data or a model are unusual and how this was handled. Verdicts of a fit are also in `result_`.

    Examples
    --------
    >>> import warnings, tcil
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", tcil.CalibrationWarning)
    ...     fit = tcil.TemperatureScaling().fit([[2.0, 0.0], [0.0, 3.0]], [0, 1])
    >>> str(fit.result_.verdict)
    'all_correct'
    """


class NotFittedError(RuntimeError, AttributeError):
    """Raised when a calibrator is used before `fit`.

    It is also an AttributeError, so that `hasattr(calibrator, "temperature_")` works.

    Examples
    --------
    >>> import tcil
    >>> try:
    ...     tcil.TCIL().transform([[1.0, 2.0]])
    ... except tcil.NotFittedError as error:
    ...     print(error)
    TCIL is not fitted yet: call fit(...) first
    >>> hasattr(tcil.TCIL(), "temperature_")
    False
    """


class NotReachableError(RuntimeError, AttributeError):
    """Raised when a calibrator has no result for a model (PerturbTS's "n/a"); `result_` shows where the search stopped.

    It is also an AttributeError, so that `hasattr(calibrator, "temperature_")` is False.

    Examples
    --------
    The output of this network does not depend on its input, so no noise lowers its accuracy.

    >>> import torch, tcil, warnings
    >>> network = torch.nn.Linear(2, 2)
    >>> network.weight.data, network.bias.data = torch.zeros(2, 2), torch.tensor([2.0, 0.0])
    >>> valid = torch.randn(30, 2), torch.arange(30) // 20
    >>> with warnings.catch_warnings(action="ignore"):
    ...     perturbed = tcil.PerturbedTemperatureScaling().fit(network, valid)
    >>> try:
    ...     perturbed.temperature_
    ... except tcil.NotReachableError as error:
    ...     print(str(error).partition(":")[0], perturbed.result_.reachable)
    PerturbedTemperatureScaling has no temperature (n/a) False
    """


class WeightsMismatchError(RuntimeError):
    """Raised when a calibrator is used with other weights than those it was fitted on.

    Examples
    --------
    >>> import torch, tcil
    >>> network, valid = torch.nn.Linear(2, 2), (torch.randn(30, 2), torch.arange(30) % 2)
    >>> calibrator = tcil.PerturbedTemperatureScaling(search="nelder-mead").fit(network, valid)
    >>> network.weight.data += 1
    >>> try:
    ...     calibrator.wrap(network)
    ... except tcil.WeightsMismatchError as error:
    ...     print(str(error).partition("(")[0])
    model: its weights are not those that this PerturbedTemperatureScaling was fitted on
    """


@contextlib.contextmanager
def warnings_of(task: str) -> Iterator[None]:
    """Begin the warnings of `warn` with the task that they are about."""
    token = _task.set(f"{task}: ")
    try:
        yield
    finally:
        _task.reset(token)


def warn(message: str) -> None:
    """A CalibrationWarning that points at the user's line, not at the one of this library or of a framework."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not any(name == package or name.startswith(f"{package}.") for package in _PASSED_OVER):
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(_task.get() + message, CalibrationWarning, stacklevel=level)


def nearest(name: object, valid: Iterable[str]) -> str:
    """A hint at the valid name that was probably meant; empty if none is similar.

    >>> nearest("nearest", ["closest", "farthest"])
    "Did you mean 'closest'?"
    """
    names = list(valid)
    near = [_SAME[name]] if isinstance(name, str) and _SAME.get(name) in names else []
    near = near or difflib.get_close_matches(str(name), names, n=1)
    return f"Did you mean {near[0]!r}?" if near else ""


def shortened(values: Iterable[object], most: int = 8) -> str:
    """The first of some values as a list in an error; dots stand for the others.

    >>> shortened([1, 2]), shortened(range(100), 3)
    ('[1, 2]', '[0, 1, 2, ...]')
    """
    first = list(itertools.islice(values, most + 1))
    shown = ", ".join(map(repr, first[:most]))
    return f"[{shown}, ...]" if len(first) > most else f"[{shown}]"


def unknown_name(argument: str, given: object, valid: Iterable[str], otherwise: str = "") -> ValueError:
    """The error for a name that is not one of the valid ones."""
    names = list(valid)
    return invalid(argument, repr(given), "one of " + ", ".join(names), nearest(given, names) or otherwise)


def invalid(argument: str, given: str, expected: str, advice: str = "") -> ValueError:
    """The error for invalid input, in the format that all such messages share."""
    message = f"{argument}: got {given}; expected {expected}."
    return ValueError(f"{message} {advice}".rstrip())
