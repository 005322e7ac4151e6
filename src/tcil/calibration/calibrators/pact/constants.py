"""The numbers of PACT that were measured or chosen, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tcil.calibration.calibrators.arguments import positive, positive_or_zero
from tcil.foundation.errors import invalid, unknown_name


@dataclass(frozen=True, kw_only=True)
class PACTConstants:
    """How far PACT trusts each piece of its evidence.

    They come from development runs of six learners (docs/pact.md): most are near those under which the T and b that
    fit the test set best are most likely. `spread_error`, `first_spread_kept` and those of label shift were chosen on
    these runs, `late_spread_error` and the last three beforehand. Errors and drifts are standard deviations of natural
    logarithms; an `error` is what a piece is off by beyond its sampling error, which is computed. On networks of quite
    another kind, measure them anew on runs whose test labels are known.

    Parameters
    ----------
    spread_ratio : float, default 0.41
        T, divided by the spread of the exemplars' logits (the root mean square about the mean of their row).
    spread_step : float, default 0.085
        By how much the logarithm of that ratio is larger once there are old classes.
    spread_error : float, default 0.15
        Of log T, where it is that ratio times the spread.
    first_spread_error : float, default 0
        Beside it, for the answer of a task without old classes: with few classes the ratio varies more. What is handed
        on to the next task is not concerned.
    late_spread_error : float, default 0.30
        Beside it, where the first fit of a stream is of a task with old classes: then no task without them, where T is
        measured, has shown whether the ratio holds for this network. It was chosen, not measured.
    spread_drift : float, default 0.01
        By how much the logarithm of the ratio changes from one task to the next.
    first_spread_drift : float, default 0.08
        By how much it does from a task without old classes to the next, beside `spread_step`.
    first_spread_kept : float, default 0.5
        By how much of its logarithm the ratio of a task without old classes differs from `spread_ratio` after it, from
        0 (not at all) to 1 (as before). What is beyond three errors is kept as it is.
    few_exemplars : float, default 1.1
        This number, divided by the exemplars of a class, is an error and a drift beside these: with few exemplars the
        spread tells less.
    contrast_error : float, default 0.08
        Of the contrast, log(T of new classes / T of old ones), in the first task with old classes. With 0 all classes
        have one temperature, whatever the drift; see `one_temperature`.
    contrast_drift : float, default 0.06
        By how much the contrast changes from one task to the next.
    surrogate_temperature_error : float, default 0.25
        Of log T, where it is fitted on perturbed exemplars of old classes.
    surrogate_bias_error : float, default 0.10
        Of b, where it is fitted on them, beyond the offset.
    surrogate_offset : float, default 1.0
        Of the offset in b that the surrogate has with a learner, before anything is known of it.
    offset_drift : float, default 0.25
        By how much that offset changes from one task to the next.
    new_class_error : float, default 0.05
        Of log T of the new classes, where it is fitted on them among themselves; none where there are no old ones.
    label_shift_error : float, default 0.35
        Of b by label shift.
    label_shift_offset : float, default 0.13
        By how much b by label shift is too large on average, the same with every learner.
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
        So many errors may a piece be from what is believed by then. Beyond, label shift is trusted less, and what was
        believed of T is where the new classes are that far: until they are just as many errors away. Pieces other than
        label shift make the verdict `out_of_depth` (the new classes only where there are old ones).

    Examples
    --------
    >>> import tcil
    >>> from tcil.options import PACTConstants
    >>> trusting = tcil.PACT(constants=PACTConstants(label_shift_error=0.1))
    >>> trusting.constants.label_shift_error, trusting.constants.bias_drift
    (0.1, 0.85)
    """

    spread_ratio: float = 0.41
    spread_step: float = 0.085
    spread_error: float = 0.15
    first_spread_error: float = 0.0
    late_spread_error: float = 0.30
    spread_drift: float = 0.01
    first_spread_drift: float = 0.08
    first_spread_kept: float = 0.5
    few_exemplars: float = 1.1
    contrast_error: float = 0.08
    contrast_drift: float = 0.06
    surrogate_temperature_error: float = 0.25
    surrogate_bias_error: float = 0.10
    surrogate_offset: float = 1.0
    offset_drift: float = 0.25
    new_class_error: float = 0.05
    label_shift_error: float = 0.35
    label_shift_offset: float = 0.13
    temperature_drift: float = 0.08
    bias_drift: float = 0.85
    first_drift: float = 0.30
    bias_spread: float = 0.30
    prior_error: float = 1.0
    prior_reach: float = 2.0
    most_surprise: float = 3.0

    def __post_init__(self) -> None:
        for field in fields(self):
            check = positive_or_zero if field.name in _MAY_BE_ZERO else positive
            object.__setattr__(self, field.name, check(getattr(self, field.name), f"constants.{field.name}"))
        if self.first_spread_kept > 1:
            raise invalid("constants.first_spread_kept", f"{self.first_spread_kept}", "a number from 0 to 1")

    @classmethod
    def one_temperature(cls) -> PACTConstants:
        """Constants by which all classes have one temperature.

        PACT had them before. On fresh runs of six learners NLL and the error by predicted group are lower with a
        temperature of their own for new classes, and the pooled error is about the same (docs/pact.md).

        Returns
        -------
        PACTConstants
            Those of round six of the study.

        Examples
        --------
        >>> import tcil
        >>> from tcil.options import PACTConstants
        >>> tcil.PACT(constants=PACTConstants.one_temperature()).constants.contrast_error
        0.0
        """
        return cls(**_SIX)

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
        since = frozenset[str]()
        for added, defaults in _EARLIER:  # a file of an earlier version has the defaults of then
            since |= added
            if set(value) == set(names) - since:
                value = {name: own for name, own in value.items() if own != defaults.get(name)}
        return cls(**value)


_MAY_BE_ZERO = frozenset((
    "spread_step", "first_spread_error", "first_spread_kept", "contrast_error", "contrast_drift", "label_shift_offset",
))  # fmt: skip
_SIX = {
    "spread_ratio": 0.44, "spread_step": 0.0, "spread_error": 0.05, "first_spread_error": 0.15, "spread_drift": 0.02,
    "first_spread_kept": 1.0, "contrast_error": 0.0, "contrast_drift": 0.0, "new_class_error": 0.15,
    "label_shift_error": 0.45, "label_shift_offset": 0.0,
}  # fmt: skip
# What each version added, the newest first, and the defaults of the version before it.
_EARLIER: tuple[tuple[frozenset[str], dict[str, float]], ...] = (
    (frozenset(("first_spread_kept",)), _SIX),
    (frozenset(("spread_step", "contrast_error", "contrast_drift", "label_shift_offset")), _SIX),
    (
        frozenset(("spread_ratio", "spread_error", "first_spread_error", "late_spread_error", "spread_drift",
                   "first_spread_drift", "few_exemplars")),
        {"surrogate_temperature_error": 0.30, "new_class_error": 0.06, "label_shift_error": 0.45},
    ),
)  # fmt: skip
MEASURED = PACTConstants()
