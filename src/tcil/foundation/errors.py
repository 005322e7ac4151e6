"""Errors and warnings: each names the argument, what was given, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CalibrationWarning(UserWarning):
    """Something unusual was found in the data and handled; `result_` has the same as a verdict.

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
    """A calibrator was used before `fit`. An AttributeError too, so that `hasattr(calibrator, "temperature_")` works.

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
    """A calibrator has no result for this model (PerturbTS's "n/a"); `result_` says where the search stopped.

    An AttributeError too, so that `hasattr(calibrator, "temperature_")` is False.

    Examples
    --------
    A network that answers the same whatever it sees: no noise lowers its accuracy.

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
    """A calibrator was asked to work on weights other than those it was fitted on.

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


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint at the known name that was probably meant; empty where none is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"Did you mean {near[0]!r}?" if near else ""


def unknown_name(argument: str, given: object, known: Iterable[str], otherwise: str = "") -> ValueError:
    """The error for a name that is not among the known ones."""
    names = list(known)
    return invalid(argument, repr(given), "one of " + ", ".join(names), nearest(given, names) or otherwise)


def invalid(argument: str, given: str, expected: str, advice: str = "") -> ValueError:
    """The one shape of message for bad input."""
    message = f"{argument}: got {given}; expected {expected}."
    return ValueError(f"{message} {advice}".rstrip())
