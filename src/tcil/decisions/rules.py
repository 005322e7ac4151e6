"""What thresholds and prediction sets share: checked images and their groups, options, files, the wrapped network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tcil.calibration import storage
from tcil.calibration.calibrators.wrapped import CalibratedModel
from tcil.calibration.inputs.weights import unwrap
from tcil.foundation.arrays import (
    ArrayLike,
    Floats,
    Ints,
    as_classes,
    as_labels,
    as_probabilities,
    label_columns,
)
from tcil.foundation.errors import NotFittedError, invalid, shortened, warn
from tcil.foundation.parameters import Parameterised
from tcil.metrics.sample import check_share

Bools = npt.NDArray[np.bool_]
Result = TypeVar("Result")
_WANTED = ("rule", "options", "classes", "new_classes", "result")


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Probabilities, columns of the true labels, and which columns are new classes."""

    probs: Floats
    columns: Ints
    new: Bools  # of each column
    classes: tuple[int, ...]

    @property
    def is_new(self) -> Bools:
        """Whether the true class of each image is new."""
        own: Bools = self.new[self.columns]
        return own


def labelled_images(
    probs: ArrayLike,
    labels: ArrayLike,
    new_classes: Iterable[Any] | None,
    classes: Iterable[Any] | None,
    ids: ArrayLike | None,
    used_ids: ArrayLike | None,
) -> LabelledImages:
    """What a user gave, checked: no label is unknown, and no image was used before."""
    rows = as_probabilities(probs)
    names = class_names(rows.shape[1], classes)
    own = label_columns(
        as_labels(labels, length=len(rows)), None if classes is None else names, "labels", rows.shape[1]
    ).numpy()
    refuse_used(ids, used_ids, len(rows))
    return LabelledImages(rows, own, new_columns(names, new_classes), names)


def class_names(n_columns: int, classes: Iterable[Any] | None) -> tuple[int, ...]:
    """The label of each column."""
    names = tuple(range(n_columns)) if classes is None else as_classes(classes, "classes")
    if len(names) != n_columns:
        raise invalid("classes", f"{len(names)} labels", f"{n_columns}, one for each column")
    return names


def new_columns(names: tuple[int, ...], new_classes: Iterable[Any] | None) -> Bools:
    """Which columns are new classes; none where there are no groups."""
    if new_classes is None:
        return np.zeros(len(names), bool)
    new = set(as_classes(new_classes, "new_classes", ordered=False))
    if unknown := sorted(new.difference(names)):
        raise invalid("new_classes", f"the labels {shortened(unknown)}", f"labels among the {len(names)} columns")
    return np.array([name in new for name in names], bool)


def refuse_used(ids: ArrayLike | None, used_ids: ArrayLike | None, n: int) -> None:
    """Images that the network was trained on, or a calibrator fitted on, cannot back a promise."""
    if ids is None and used_ids is None:
        return
    if ids is None or used_ids is None:
        raise invalid("ids", "ids without used_ids, or the other way round", "both, or neither")
    own = as_labels(ids, "ids", length=n).numpy()
    used = as_labels(used_ids, "used_ids").numpy()
    if len(np.unique(own)) != len(own):
        raise invalid("ids", "the same image twice", "every calibration image once: copies are not independent")
    common = np.intersect1d(own, used)
    if len(common):
        raise invalid(
            "ids",
            f"{len(common)} images that were used before ({shortened(common.tolist())[1:-1]})",
            "images that neither the network nor the calibrator has seen",
            "Keep a reserve out of training, and fit the calibrator on other images.",
        )


def check_stratified(images: LabelledImages, rows: Iterable[Bools], columns: Iterable[Bools]) -> None:
    """Every class of a group has the same number of images, as a stratified draw leaves it."""
    for own, mine in zip(rows, columns, strict=True):
        sizes = np.bincount(images.columns[own], minlength=len(images.classes))[mine]
        if len(sizes) and sizes.min() != sizes.max():
            raise invalid(
                "labels",
                f"from {sizes.min()} to {sizes.max()} images of a class",
                "the same number of images of every class of a group, with design='stratified'",
            )


def check_open_share(value: Any, argument: str) -> float:
    """A number above 0 and below 1."""
    check_share(value, argument, "a number above 0 and below 1", whole=False)
    return float(value)


@dataclass(eq=False, kw_only=True)
class DecisionRule(Parameterised, ABC, Generic[Result]):
    """A rule on top of probabilities: options at construction, images in `fit`, then `predict`, `wrap` and `save`."""

    result_type: ClassVar[type[Any]]
    _known: ClassVar[dict[str, type[DecisionRule[Any]]]] = {}  # what files may name

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "result_type"):  # not a base class
            DecisionRule._known[cls.__name__] = cls

    def __post_init__(self) -> None:
        self._state: tuple[tuple[int, ...], Bools, Any] | None = None

    # fitted values -------------------------------------------------------------------------------------------

    @property
    def classes_(self) -> tuple[int, ...]:
        """The label of each probability column."""
        return self._fit_state[0]

    @property
    def new_classes_(self) -> tuple[int, ...]:
        """The labels of the new classes; empty where the rule knows none."""
        classes, new, _ = self._fit_state
        return tuple(label for label, is_new in zip(classes, new, strict=True) if is_new)

    @property
    def result_(self) -> Result:
        """What `fit` found: the thresholds, the promise and its assumptions."""
        return cast(Result, self._fit_state[2])

    @property
    def _fit_state(self) -> tuple[tuple[int, ...], Bools, Any]:
        if self._state is None:
            raise NotFittedError(f"{type(self).__name__} is not fitted yet: call fit(...) first")
        return self._state

    def _fitted(self, classes: tuple[int, ...], new: Bools, result: Result) -> Self:
        self._state = (classes, new, result)
        return self

    def _rows(self, probs: ArrayLike) -> Floats:
        """Checked probabilities for `predict`."""
        rows = as_probabilities(probs)
        if rows.shape[1] != len(self.classes_):
            raise invalid(
                "probs",
                f"{rows.shape[1]} columns",
                f"{len(self.classes_)}, one for each class in classes_",
                "After a new task, fit the rule again: its promise was for the classes of its own task.",
            )
        return rows

    # use -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def _head(self) -> nn.Module:
        """The rule as a module from probabilities to what `wrap` returns."""

    def wrap(self, model: nn.Module, *, calibrated: bool = True) -> DecidingModel:
        """The model followed by this rule, as one `nn.Module` to serve or export.

        Parameters
        ----------
        model : torch.nn.Module
            Returns logits or log-probabilities with a column for each class in `classes_`: usually what the
            `wrap` of a calibrator gave, whose probabilities the rule was fitted on. With other probabilities than
            those, what the rule promises does not hold.
        calibrated : bool
            False where the rule was fitted on the softmax of the model itself. Otherwise a model without a calibrator
            raises a `CalibrationWarning`.

        Returns
        -------
        tcil.decisions.DecidingModel
            The network with the rule for output.
        """
        self._fit_state  # noqa: B018  # an unfitted rule has nothing to wrap
        if not isinstance(model, nn.Module):
            raise invalid("model", type(model).__name__, "a torch.nn.Module that returns logits or log-probabilities")
        if isinstance(unwrap(model), DecidingModel):
            expected = "what the wrap of a calibrator gave, or a network"
            raise invalid("model", "a model that has a decision rule already", expected)
        if calibrated and not any(isinstance(part, CalibratedModel) for part in model.modules()):
            warn(
                f"model: {type(model).__name__} is not wrapped by a calibrator. The rule holds for the probabilities"
                " that it was fitted on: wrap the model with their calibrator first, or say calibrated=False if they"
                " were the softmax of the model itself."
            )
        served = unwrap(model)
        if isinstance(served, CalibratedModel) and served.classes != self.classes_:
            given = f"a calibrated model of the classes {shortened(served.classes)}"
            expected = f"the classes of the rule, {shortened(self.classes_)}, in this order"
            raise invalid("model", given, expected, "Pass classes=calibrator.classes_ to fit of the rule.")
        return DecidingModel(served, self._head(), self.classes_)

    # disk ----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write the fitted rule as JSON, by atomic rename, with a checksum.

        Parameters
        ----------
        path : str or Path
            A file name that ends in .json. A leading `~` is not expanded, and a symbolic link is replaced.

        Returns
        -------
        Path
            The file written.
        """
        record = {
            "rule": type(self).__name__,
            "options": {name: storage.encode(value) for name, value in self.get_params().items()},
            "classes": list(self.classes_),
            "new_classes": list(self.new_classes_),
            "result": storage.encode(self.result_),
        }
        return storage.write(storage.as_path(path), record, {}, storage.RULE_FORMAT)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a saved rule. Called on a subclass, it insists on that one.

        Parameters
        ----------
        path : str or Path
            A file written by `save`.

        Returns
        -------
        Self
            The fitted rule.
        """
        path = storage.as_path(path)
        record, _ = storage.read(path, storage.RULE_FORMAT, _WANTED)
        kind = DecisionRule._known.get(record["rule"]) if isinstance(record["rule"], str) else None
        if kind is None or not issubclass(kind, cls):
            wanted = cls.__name__ if cls is not DecisionRule else ", ".join(sorted(DecisionRule._known))
            raise invalid("path", f"{path}, a saved {record['rule']!r:.40}", f"a saved {wanted}")
        with storage.damage_named(path):
            rule = kind(**record["options"])
            names = as_classes(storage.decode(tuple[int, ...], record["classes"]), "classes")
            new = storage.decode(tuple[int, ...], record["new_classes"])
            result = storage.decode(kind.result_type, record["result"])
            rule._state = (names, new_columns(names, new or None), result)
            rule._check_restored()
        return rule

    def _check_restored(self) -> None:
        """Refuse thresholds that no fit could have left."""


def load(path: str | Path) -> DecisionRule[Any]:
    """Read a saved decision rule, of whatever class.

    Parameters
    ----------
    path : str or Path
        A file written by the `save` of a rule.

    Returns
    -------
    RiskThreshold, ModelBasedThreshold or ConformalSets
        The fitted rule.

    Examples
    --------
    >>> import tempfile
    >>> from tcil import decisions
    >>> sets = decisions.ConformalSets(alpha=0.5, by="marginal").fit([[0.9, 0.1], [0.4, 0.6], [0.3, 0.7]], [0, 1, 0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = decisions.load(sets.save(f"{folder}/sets.json"))
    >>> again.result_ == sets.result_
    True
    """
    return DecisionRule.load(path)


class DecidingModel(nn.Module):
    """A network followed by a decision rule; made by the `wrap` of a rule. The network is shared, not copied.

    Attributes
    ----------
    model : torch.nn.Module
        The network, calibrated or not.
    rule : torch.nn.Module
        From probabilities to the decision.
    classes : tuple of int
        The label of each column.

    Examples
    --------
    >>> import torch
    >>> from tcil import decisions
    >>> sets = decisions.ConformalSets(alpha=0.5, by="marginal").fit([[0.9, 0.1], [0.4, 0.6], [0.3, 0.7]], [0, 1, 0])
    >>> sets.wrap(torch.nn.Linear(4, 2), calibrated=False)(torch.randn(3, 4)).shape
    torch.Size([3, 2])
    """

    def __init__(self, model: nn.Module, rule: nn.Module, classes: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self.rule, self.classes = model, rule, classes
        home = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
        self.rule.to(home)
        self.training = model.training

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The rule's decision on the inputs; all arguments go to the network."""
        scores = self.model(x, *args, **kwargs)
        if scores.shape[1] != len(self.classes):
            raise invalid("model", f"{scores.shape[1]} columns", f"{len(self.classes)}, as the rule was fitted on")
        return self.rule(torch.softmax(scores.double(), dim=1))


def answer(found: Tensor, given: object) -> Any:
    """A tensor where a tensor was given, else a numpy array."""
    return found.to(given.device) if isinstance(given, Tensor) else found.numpy()
