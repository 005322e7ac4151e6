"""Temperature scaling of logits: one temperature, the first task's for ever, or one per predicted group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from tcil.calibration.arrays import ArrayLike, as_classes, as_logits, logits_and_columns, whole_number
from tcil.calibration.calibrators.base import Calibrator, SingleTemperature
from tcil.calibration.calibrators.inputs import new_class_mask, warn_unless_ok
from tcil.calibration.calibrators.maps import CalibrationMap, GroupTemperatureMap
from tcil.calibration.errors import invalid
from tcil.calibration.options import Verdict
from tcil.calibration.temperature import Solver, TemperatureFit, solve_temperature


@dataclass(eq=False, kw_only=True)
class TemperatureScaling(SingleTemperature):
    """TS (Guo et al. 2017): the temperature that minimises the cross-entropy of the given logits.

    In class-incremental learning the only honest logits are the newest task's validation set, which is why TS alone
    leaves old classes over-confident. On the test set of all classes it is the paper's oracle, Optimal TS.

    >>> import torch, tcil
    >>> logits = 5 * torch.eye(3)[torch.tensor([0, 1, 2, 0])]
    >>> scaling = tcil.TemperatureScaling().fit(logits, torch.tensor([0, 1, 2, 2]))
    >>> round(scaling.temperature_, 3), str(scaling.result_.verdict)
    (2.791, 'ok')
    >>> scaling.predict_proba(logits).max(dim=1).values
    tensor([0.7500, 0.7500, 0.7500, 0.7500], dtype=torch.float64)
    """

    solver: Solver | str = Solver.EXACT
    seed: int = 0
    result_type: ClassVar[type[Any]] = TemperatureFit

    def __post_init__(self) -> None:
        super().__post_init__()
        self.solver = Solver.parse(self.solver, "solver")
        self.seed = whole_number(self.seed, "seed", 0)

    def fit(self, logits: ArrayLike, labels: ArrayLike, *, classes: Iterable[Any] | None = None) -> Self:
        """Fit on logits (N, K) and labels (N,); `classes` names the columns (default 0..K-1)."""
        z, y, names = logits_and_columns(logits, labels, classes)
        result = solve_temperature(z, y, Solver(self.solver), self.seed)
        self._fitted(self._map(result.temperature), names, result)
        warn_unless_ok(result.verdict, "TemperatureScaling", result.n_samples)
        return self


@dataclass(eq=False, kw_only=True)
class FirstTaskTemperatureScaling(SingleTemperature):
    """The first task's temperature, kept for ever: the simplest calibrator that remembers.

    Fit it on the first task's validation logits, then hand `history_` from task to task; later fits use no data.

    >>> import json, torch, tcil
    >>> logits, labels = 5 * torch.eye(3)[torch.tensor([0, 1, 2, 0])], torch.tensor([0, 1, 2, 2])
    >>> first = tcil.FirstTaskTemperatureScaling().fit(logits, labels)
    >>> memo = json.loads(json.dumps(first.history_))
    >>> later = tcil.FirstTaskTemperatureScaling().fit(classes=range(6), history=memo)
    >>> later.temperature_ == first.temperature_, len(later.classes_)
    (True, 6)
    """

    result_type: ClassVar[type[Any]] = TemperatureFit

    def fit(
        self,
        logits: ArrayLike | None = None,
        labels: ArrayLike | None = None,
        *,
        classes: Iterable[Any] | None = None,
        history: dict[str, Any] | None = None,
    ) -> Self:
        """First task: logits and labels. Later tasks: `history=` of the task before, and the classes seen so far."""
        if history is not None:
            return self._recall(history, logits, classes)
        if logits is None or labels is None:
            raise invalid("logits, labels", "none", "the first task's validation set, or history= of an earlier task")
        z, y, names = logits_and_columns(logits, labels, classes)
        result = solve_temperature(z, y)
        memo = {
            "calibrator": type(self).__name__,
            "temperature": result.temperature,
            "verdict": str(result.verdict),
        }
        self._fitted(self._map(result.temperature), names, result, history=memo)
        warn_unless_ok(result.verdict, "FirstTaskTemperatureScaling", result.n_samples)
        return self

    def _recall(self, history: dict[str, Any], logits: ArrayLike | None, classes: Iterable[Any] | None) -> Self:
        memo = history if isinstance(history, dict) else {}
        temperature, verdict = memo.get("temperature"), memo.get("verdict")
        sound = (
            isinstance(temperature, float)
            and 0 < temperature < math.inf
            and memo.get("calibrator") == type(self).__name__
        )
        if not sound or verdict not in set(Verdict):
            raise invalid("history", repr(history)[:80], "history_ of an earlier FirstTaskTemperatureScaling")
        if classes is None and logits is None:
            raise invalid("classes", "None", "the classes seen so far, such as range(20), or this task's logits")
        names = None if classes is None else as_classes(classes, "classes")
        if logits is not None:
            width = as_logits(logits, n_classes=None if names is None else len(names)).shape[1]
            names = names or tuple(range(width))
        assert names is not None
        nan = float("nan")
        result = TemperatureFit(float(temperature), Verdict(verdict), nan, nan, nan, 0)  # type: ignore[arg-type]
        return self._fitted(self._map(result.temperature), names, result, history=dict(memo))


@dataclass(frozen=True)
class GroupTemperatureFit:
    """The two fits of `GroupTemperatureScaling`, by predicted group; None for a group that nothing is predicted into.

    >>> import tcil
    >>> [name for name in tcil.GroupTemperatureFit.__dataclass_fields__]
    ['old', 'new']
    """

    old: TemperatureFit | None
    new: TemperatureFit | None

    @property
    def temperatures(self) -> tuple[float, float]:
        """Those of the old and of the new group; 1 for a group without samples."""
        old, new = (1.0 if fit is None else fit.temperature for fit in (self.old, self.new))
        return old, new

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """That of the old group, then that of the new one."""
        return tuple(Verdict.EMPTY_GROUP if fit is None else fit.verdict for fit in (self.old, self.new))


@dataclass(eq=False, kw_only=True)
class GroupTemperatureScaling(Calibrator):
    """One temperature for samples predicted as old classes and one for those predicted as new.

    Needs labelled logits of all classes (old-task validation data, or an oracle), so it is never ranked with the
    calibrators that do without. A group that nothing is predicted into keeps T = 1, and the fit warns of it where the
    group has classes at all; so does a group whose samples identify no temperature.

    >>> import torch, tcil
    >>> logits = torch.tensor([[3.0, 0, 0], [3, 0, 0], [3, 0, 0], [0, 0, 3], [0, 0, 3], [0, 0, 3], [0, 0, 3]])
    >>> scaling = tcil.GroupTemperatureScaling().fit(logits, torch.tensor([0, 0, 1, 2, 2, 2, 1]), new_classes=[2])
    >>> {group: round(t, 2) for group, t in scaling.temperatures_.items()}
    {'old': 2.16, 'new': 1.67}
    """

    map_type: ClassVar[type[CalibrationMap]] = GroupTemperatureMap
    result_type: ClassVar[type[Any]] = GroupTemperatureFit

    @property
    def temperatures_(self) -> dict[str, float]:
        """The temperature of each predicted group, "old" and "new"."""
        return dict(zip(("old", "new"), self.result_.temperatures, strict=True))

    def fit(
        self,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        new_classes: Iterable[Any],
        classes: Iterable[Any] | None = None,
    ) -> Self:
        """Fit on logits (N, K) and labels (N,) of old and new classes alike."""
        z, y, names = logits_and_columns(logits, labels, classes)
        is_new = new_class_mask(new_classes, names)
        predicted_new = is_new[z.argmax(dim=1)]
        old, new = (
            solve_temperature(z[rows], y[rows]) if bool(rows.any()) else None
            for rows in (~predicted_new, predicted_new)
        )
        result = GroupTemperatureFit(old, new)
        mapping = GroupTemperatureMap(torch.tensor(result.temperatures, dtype=torch.float64), is_new)
        self._fitted(mapping, names, result)
        has_classes = not bool(is_new.all()), True
        for name, fit, verdict, expected in zip(("old", "new"), (old, new), result.verdicts, has_classes, strict=True):
            if expected:
                warn_unless_ok(verdict, f"GroupTemperatureScaling, {name} group", 0 if fit is None else fit.n_samples)
        return self
