"""The numbers of PACT that were measured or chosen, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tcil.calibration.calibrators.arguments import positive
from tcil.foundation.errors import invalid, unknown_name


@dataclass(frozen=True, kw_only=True)
class PACTConstants:
    """How far PACT trusts each piece of its evidence.

    The first eight are standard deviations of natural logarithms, measured once on the development runs (seed 1 of the
    four learners on 20 classes of CIFAR-100, against the T and b that fit the test set best; docs/beyond.md). An
    `error` is what a piece is off by beyond its sampling error, which is computed. The last three were chosen
    beforehand. On networks of quite another kind, measure them anew on runs whose test labels are known.

    Parameters
    ----------
    surrogate_temperature_error : float, default 0.12
        Of log T, where it is fitted on perturbed exemplars of old classes.
    surrogate_bias_error : float, default 0.58
        Of b, where it is fitted on them.
    new_class_error : float, default 0.07
        Of log T, where it is fitted on the new classes among themselves.
    label_shift_error : float, default 0.30
        Of b by label shift.
    temperature_drift : float, default 0.10
        By how much log T changes from one task to the next.
    bias_drift : float, default 0.28
        By how much b does, beyond half the change of log(imbalance).
    first_drift : float, default 0.40
        By how much log T changes from a task without old classes to the next.
    bias_spread : float, default 0.38
        Of b at the first task with old classes, beside that of a uniform one between 0 and log(imbalance).
    prior_error : float, default 1.0
        Of log T before any evidence.
    prior_reach : float, default 2.0
        So far from 0 may log T be by that prior: farther off, logits have another scale, and it moves along.
    most_surprise : float, default 3.0
        So many errors may label shift be from what is believed by then.

    Examples
    --------
    >>> import tcil
    >>> from tcil.options import PACTConstants
    >>> trusting = tcil.PACT(constants=PACTConstants(label_shift_error=0.1))
    >>> trusting.constants.label_shift_error, trusting.constants.bias_drift
    (0.1, 0.28)
    """

    surrogate_temperature_error: float = 0.12
    surrogate_bias_error: float = 0.58
    new_class_error: float = 0.07
    label_shift_error: float = 0.30
    temperature_drift: float = 0.10
    bias_drift: float = 0.28
    first_drift: float = 0.40
    bias_spread: float = 0.38
    prior_error: float = 1.0
    prior_reach: float = 2.0
    most_surprise: float = 3.0

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, positive(getattr(self, field.name), f"constants.{field.name}"))

    @classmethod
    def parse(cls, value: Any) -> PACTConstants:
        """Constants as they are given to PACT: as such, or by name, as they are stored; others keep their default."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise invalid("constants", repr(value), "PACTConstants, or a dict of some of its fields")
        names = [field.name for field in fields(cls)]
        for name in value:
            if name not in names:
                raise unknown_name("constants", name, names)
        return cls(**value)


MEASURED = PACTConstants()
