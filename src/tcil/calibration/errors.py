"""Errors and warnings: each names the argument, what was given, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CalibrationWarning(UserWarning):
    """Something in the data was found and handled; `result_.verdicts` says the same in code.

    >>> import warnings, tcil
    >>> warnings.simplefilter("ignore", tcil.CalibrationWarning)   # the verdicts are still in `result_`
    """


class NotFittedError(RuntimeError):
    """A calibrator was used before `fit`.

    >>> import tcil
    >>> try:
    ...     tcil.TCIL().transform([[1.0, 2.0]])
    ... except tcil.NotFittedError as error:
    ...     print(error)
    TCIL is not fitted yet: call fit(...) first
    """


class NotReachableError(RuntimeError):
    """A calibrator has no answer for this model (PerturbTS's "n/a"); `result_` says where it stopped.

    >>> import tcil
    >>> issubclass(tcil.NotReachableError, RuntimeError)
    True
    """


class WeightsMismatchError(RuntimeError):
    """A calibrator was asked to work on weights other than those it was fitted on.

    >>> import tcil
    >>> issubclass(tcil.WeightsMismatchError, RuntimeError)
    True
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
