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

    All but `spread_ratio` and the last three are standard deviations of natural logarithms. They were measured on
    development runs of six learners against the T and b that fit the test set best: those under which these are most
    likely (docs/pact.md). An `error` is what a piece is off by beyond its sampling error, which is computed. The last
    three were chosen beforehand. On networks of quite another kind, measure them anew on runs whose test labels are
    known.

    Parameters
    ----------
    spread_ratio : float, default 0.44
        T, divided by the spread of the exemplars' logits (the root mean square about the mean of their row).
    spread_error : float, default 0.05
        Of log T, where it is that ratio times the spread.
    late_spread_error : float, default 0.30
        The same, where the first fit of a stream is of a task with old classes: then no task without them, where T is
        measured, has shown whether the ratio holds for this network. It was chosen, not measured.
    spread_drift : float, default 0.02
        By how much the logarithm of the ratio changes from one task to the next.
    first_spread_drift : float, default 0.08
        By how much it does from a task without old classes to the next.
    few_exemplars : float, default 1.1
        This number, divided by the exemplars of a class, is an error and a drift beside these: with few exemplars the
        spread tells less.
    surrogate_temperature_error : float, default 0.25
        Of log T, where it is fitted on perturbed exemplars of old classes.
    surrogate_bias_error : float, default 0.10
        Of b, where it is fitted on them, beyond the offset.
    surrogate_offset : float, default 1.0
        Of the offset in b that the surrogate has with a learner, before anything is known of it.
    offset_drift : float, default 0.25
        By how much that offset changes from one task to the next.
    new_class_error : float, default 0.15
        Of log T, where it is fitted on the new classes among themselves.
    label_shift_error : float, default 0.45
        Of b by label shift.
    temperature_drift : float, default 0.08
        By how much log T changes from one task to the next, where the spread is not known.
    bias_drift : float, default 0.85
        By how much b does, beyond half the change of log(imbalance). It is large because the surrogate, whose offset
        hardly changes, tells the change far better.
    first_drift : float, default 0.30
        By how much log T changes from a task without old classes to the next, where the spread is not known.
    bias_spread : float, default 0.30
        Of b at the first task with old classes, beside that of a uniform one between 0 and log(imbalance).
    prior_error : float, default 1.0
        Of log T before any evidence, where the spread is not known.
    prior_reach : float, default 2.0
        So far from 0 may log T be by that prior: farther off, logits have another scale, and it moves along.
    most_surprise : float, default 3.0
        So many errors may a piece be from what is believed by then. Beyond, label shift is trusted so much less that it
        is just as many; where it is the new classes, what was believed of T is; and all but label shift make the
        verdict `out_of_depth`.

    Examples
    --------
    >>> import tcil
    >>> from tcil.options import PACTConstants
    >>> trusting = tcil.PACT(constants=PACTConstants(label_shift_error=0.1))
    >>> trusting.constants.label_shift_error, trusting.constants.bias_drift
    (0.1, 0.85)
    """

    spread_ratio: float = 0.44
    spread_error: float = 0.05
    late_spread_error: float = 0.30
    spread_drift: float = 0.02
    first_spread_drift: float = 0.08
    few_exemplars: float = 1.1
    surrogate_temperature_error: float = 0.25
    surrogate_bias_error: float = 0.10
    surrogate_offset: float = 1.0
    offset_drift: float = 0.25
    new_class_error: float = 0.15
    label_shift_error: float = 0.45
    temperature_drift: float = 0.08
    bias_drift: float = 0.85
    first_drift: float = 0.30
    bias_spread: float = 0.30
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
