"""Temperature scaling of logits: with one temperature, with that of the first task, or with one per predicted group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self, overload

import torch

from tcil.calibration.calibrators.arguments import new_class_mask, warn_unless_ok
from tcil.calibration.calibrators.base import Calibrator
from tcil.calibration.calibrators.fitted import History
from tcil.calibration.calibrators.maps import CalibrationMap, GroupTemperatureMap
from tcil.calibration.calibrators.single_temperature import SingleTemperature
from tcil.calibration.temperature import Solver, TemperatureFit, solve_temperature
from tcil.foundation.arrays import ArrayLike, as_classes, as_logits, logits_and_columns, whole_number
from tcil.foundation.errors import invalid
from tcil.foundation.options import Verdict
from tcil.foundation.records import Record


@dataclass(eq=False, kw_only=True)
class TemperatureScaling(SingleTemperature[TemperatureFit]):
    """TS (Guo et al. 2017): the temperature that minimises the cross-entropy of the given logits.

    In class-incremental learning, only the newest task has held-out logits (its validation set), so that TS leaves old
    classes over-confident. Fitted on the test set of all classes, it is the paper's oracle, Optimal TS.

    Parameters
    ----------
    solver : {"exact", "sgd"}
        How the temperature is found (`tcil.options.Solver`).
    seed : int
        Seed for the order of the SGD solver's batches.

    Attributes
    ----------
    temperature_ : float
        The fitted temperature: logits are divided by it.
    result_ : tcil.results.TemperatureFit
        The temperature with its verdict.
    classes_ : tuple of int
        The label of each logit column.

    Examples
    --------
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
        """Fit on logits and labels.

        Parameters
        ----------
        logits : tensor or array (N, K)
            The network's outputs before softmax.
        labels : tensor or array (N,)
            The class of each row.
        classes : iterable of int, optional
            The label of each logit column. Default: 0 to K - 1.

        Returns
        -------
        Self
            This calibrator, fitted.
        """
        self._check_options()
        z, y, names = logits_and_columns(logits, labels, classes)
        result = solve_temperature(z, y, Solver(self.solver), self.seed)
        self._fitted(self._map(result.temperature), names, result)
        warn_unless_ok(result.verdict, "TemperatureScaling", result.n_samples)
        return self


@dataclass(eq=False, kw_only=True)
class FirstTaskTemperatureScaling(SingleTemperature[TemperatureFit]):
    """The first task's temperature, kept for all tasks: the simplest calibrator with a history.

    Call `partial_fit` with the validation logits of each task. Only those of the first task are used; later ones only
    give the number of classes.

    Attributes
    ----------
    temperature_ : float
        The fitted temperature: logits are divided by it.
    result_ : tcil.results.TemperatureFit
        The temperature with its verdict; in later tasks `n_samples` is 0.
    classes_ : tuple of int
        The label of each logit column.
    history_ : dict
        The first task's temperature, as JSON.

    Examples
    --------
    >>> import torch, tcil
    >>> logits, labels = 5 * torch.eye(3)[torch.tensor([0, 1, 2, 0])], torch.tensor([0, 1, 2, 2])
    >>> calibrator = tcil.FirstTaskTemperatureScaling()
    >>> first = calibrator.partial_fit(logits, labels).temperature_
    >>> later = calibrator.partial_fit(torch.randn(12, 6), torch.arange(12) % 6)
    >>> later.temperature_ == first, len(later.classes_)
    (True, 6)

    The same with a history that is passed from task to task:

    >>> memo = tcil.FirstTaskTemperatureScaling().fit(logits, labels).history_
    >>> tcil.FirstTaskTemperatureScaling().fit(classes=range(6), history=memo).temperature_ == first
    True
    """

    result_type: ClassVar[type[Any]] = TemperatureFit

    @overload
    def fit(
        self,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        classes: Iterable[Any] | None = None,
        history: History | None = None,
    ) -> Self: ...
    @overload
    def fit(self, *, classes: Iterable[Any], history: History) -> Self: ...
    def fit(
        self,
        logits: ArrayLike | None = None,
        labels: ArrayLike | None = None,
        *,
        classes: Iterable[Any] | None = None,
        history: History | None = None,
    ) -> Self:
        """Fit on the first task; in later tasks, return the temperature of the first.

        Parameters
        ----------
        logits : tensor or array (N, K)
            The network's outputs before softmax; optional in later tasks if `classes` is given.
        labels : tensor or array (N,)
            The class of each row; used in the first task only.
        classes : iterable of int, optional
            The label of each logit column. Default: 0 to K - 1.
        history : dict, optional
            `history_` of an earlier task. Default: this is the first task.

        Returns
        -------
        Self
            This calibrator, fitted.
        """
        self._check_options()
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

    def _recall(self, history: History, logits: ArrayLike | None, classes: Iterable[Any] | None) -> Self:
        memo = history if isinstance(history, dict) else {}
        temperature, verdict = memo.get("temperature"), memo.get("verdict")
        sound = (
            isinstance(temperature, float)
            and 0 < temperature < math.inf
            and memo.get("calibrator") == type(self).__name__
        )
        if not sound or verdict not in list(Verdict):
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
class GroupTemperatureResult(Record):
    """The two fits of `GroupTemperatureScaling`.

    Attributes
    ----------
    old, new : tcil.results.TemperatureFit or None
        The fit on samples predicted as old and as new classes; None if there are none.
    temperatures : tuple of two floats
        Temperatures of the old and the new group; 1 for a group without samples.
    verdicts : tuple of two tcil.options.Verdict
        Verdicts of the old and the new group.

    Examples
    --------
    >>> import tcil
    >>> logits = [[3.0, 0, 0], [3, 0, 0], [3, 0, 0], [0, 0, 3], [0, 0, 3], [0, 0, 3], [0, 0, 3]]
    >>> print(tcil.GroupTemperatureScaling().fit(logits, [0, 0, 1, 2, 2, 2, 1], [2]).result_)
    GroupTemperatureResult
      old  temperature 2.164, verdict ok
      new  temperature 1.674, verdict ok
    """

    old: TemperatureFit | None
    new: TemperatureFit | None

    @property
    def temperatures(self) -> tuple[float, float]:
        """Temperatures of the old and the new group; 1 for a group without samples."""
        old, new = (1.0 if fit is None else fit.temperature for fit in (self.old, self.new))
        return old, new

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Verdicts of the old and the new group."""
        return tuple(Verdict.EMPTY_GROUP if fit is None else fit.verdict for fit in (self.old, self.new))


@dataclass(eq=False, kw_only=True)
class GroupTemperatureScaling(Calibrator[GroupTemperatureResult]):
    """One temperature for samples predicted as old classes and one for those predicted as new.

    It needs labelled logits of all classes (old-task validation data, or an oracle), so it is not ranked with the
    calibrators that do not. A group without predicted samples, or whose samples identify no temperature, keeps T = 1.
    The fit warns of this if the group has classes.

    Attributes
    ----------
    temperatures_ : dict
        The temperature of each predicted group, "old" and "new".
    result_ : tcil.results.GroupTemperatureResult
        Both fits.
    classes_ : tuple of int
        The label of each logit column.

    Examples
    --------
    >>> import torch, tcil
    >>> logits = torch.tensor([[3.0, 0, 0], [3, 0, 0], [3, 0, 0], [0, 0, 3], [0, 0, 3], [0, 0, 3], [0, 0, 3]])
    >>> scaling = tcil.GroupTemperatureScaling().fit(logits, torch.tensor([0, 0, 1, 2, 2, 2, 1]), [2])
    >>> {group: round(t, 2) for group, t in scaling.temperatures_.items()}
    {'old': 2.16, 'new': 1.67}
    """

    map_type: ClassVar[type[CalibrationMap]] = GroupTemperatureMap
    result_type: ClassVar[type[Any]] = GroupTemperatureResult

    @property
    def temperatures_(self) -> dict[str, float]:
        """The temperature of each predicted group, "old" and "new"."""
        return dict(zip(("old", "new"), self.result_.temperatures, strict=True))

    def fit(
        self,
        logits: ArrayLike,
        labels: ArrayLike,
        new_classes: Iterable[Any],
        *,
        classes: Iterable[Any] | None = None,
    ) -> Self:
        """Fit on logits and labels of old and new classes.

        Parameters
        ----------
        logits : tensor or array (N, K)
            The network's outputs before softmax.
        labels : tensor or array (N,)
            The class of each row.
        new_classes : iterable of int
            The labels of the newest task.
        classes : iterable of int, optional
            The label of each logit column. Default: 0 to K - 1.

        Returns
        -------
        Self
            This calibrator, fitted.
        """
        self._check_options()
        z, y, names = logits_and_columns(logits, labels, classes)
        is_new = new_class_mask(new_classes, names)
        predicted_new = is_new[z.argmax(dim=1)]
        old, new = (
            solve_temperature(z[rows], y[rows]) if bool(rows.any()) else None
            for rows in (~predicted_new, predicted_new)
        )
        result = GroupTemperatureResult(old, new)
        mapping = GroupTemperatureMap(torch.tensor(result.temperatures, dtype=torch.float64), is_new)
        self._fitted(mapping, names, result)
        has_classes = not bool(is_new.all()), True
        for name, fit, verdict, expected in zip(("old", "new"), (old, new), result.verdicts, has_classes, strict=True):
            if expected:
                warn_unless_ok(verdict, f"GroupTemperatureScaling, {name} group", 0 if fit is None else fit.n_samples)
        return self
