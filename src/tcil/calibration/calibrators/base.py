"""What all calibrators share: options, transform, predict_proba, wrap, partial_fit, save and load."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, cast, overload

import torch
from torch import Tensor, nn

from tcil.calibration import storage
from tcil.calibration.calibrators.fitted import FittedState, History, check_sound, restored
from tcil.calibration.calibrators.maps import CalibrationMap, TemperatureMap, full_precision, on_device
from tcil.calibration.calibrators.wrapped import CalibratedModel
from tcil.calibration.inputs.classifier import UsedWeights, unwrap, weights_hash
from tcil.calibration.inputs.features import FeatureSource
from tcil.foundation.arrays import (
    ArrayLike,
    Floats,
    NotTensor,
    as_logits,
    as_tensor,
    same_kind,
)
from tcil.foundation.errors import NotFittedError, WeightsMismatchError, invalid, unknown_name

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # with a default: `Calibrator` alone is a Calibrator of any result

    Result = TypeVar("Result", default=Any)
else:
    from typing import TypeVar

    Result = TypeVar("Result")


@dataclass(eq=False, kw_only=True)
class Calibrator(ABC, Generic[Result]):
    """A post-hoc calibrator: options at construction, data in `fit`, fitted values with a trailing underscore.

    Subclass it for a method of your own: set `map_type` to a `CalibrationMap` and `result_type` to a frozen dataclass,
    and end `fit` with `self._fitted(...)`. It then transforms, wraps, saves and loads like the rest.

    Attributes
    ----------
    classes_ : tuple of int
        The label of each logit column.
    result_ : dataclass
        What `fit` found, with its verdicts.
    history_ : dict or None
        What the next task's `fit` takes as `history=`, where a method learns from earlier tasks.

    Examples
    --------
    >>> import tcil
    >>> calibrator = tcil.TCIL(policy="random", batch_size=32)
    >>> calibrator
    TCIL(policy='random', batch_size=32)
    >>> calibrator.set_params(batch_size=64).get_params()["tolerance"]
    0.001
    >>> calibrator.clone()
    TCIL(policy='random')
    """

    map_type: ClassVar[type[CalibrationMap]]
    result_type: ClassVar[type[Any]]
    fit: ClassVar[Callable[..., Any]]
    _known: ClassVar[dict[str, dict[str, type[Calibrator]]]] = {}  # by name and module: what files may name

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Calibrator._known.setdefault(cls.__name__, {})[cls.__module__] = cls
        if "__repr__" not in vars(cls):
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]  # dataclass() would write another one

    def __post_init__(self) -> None:
        self._state: FittedState | None = None

    # options -------------------------------------------------------------------------------------------------

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The options by name, as in scikit-learn.

        Parameters
        ----------
        deep : bool
            For scikit-learn's sake; no option has options of its own.

        Returns
        -------
        dict
            Every option and its value.
        """
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}

    def set_params(self, **options: Any) -> Self:
        """Change options by name; they hold from the next `fit` on. If one is refused, none is changed.

        Parameters
        ----------
        **options
            Options of the constructor.

        Returns
        -------
        Self
            This calibrator.
        """
        known = self.get_params()
        for name in options:
            if name not in known:
                raise unknown_name(f"option of {type(self).__name__}", name, known)
        checked = type(self)(**{**known, **options})
        for name in known:
            setattr(self, name, getattr(checked, name))
        return self

    def clone(self) -> Self:
        """A calibrator with the same options that is not fitted; `sklearn.base.clone` gives the same.

        Returns
        -------
        Self
            A new calibrator.
        """
        return type(self)(**self.get_params())

    def __repr__(self) -> str:
        defaults = {field.name: _default(field) for field in dataclasses.fields(self)}
        changed = {name: value for name, value in self.get_params().items() if value != defaults[name]}
        shown = (f"{name}={str(value) if isinstance(value, str) else value!r}" for name, value in changed.items())
        return f"{type(self).__name__}({', '.join(shown)})"

    # fitted values -------------------------------------------------------------------------------------------

    @property
    def classes_(self) -> tuple[int, ...]:
        """The label of each logit column."""
        return self._fit_state.classes

    @property
    def result_(self) -> Result:
        """The frozen result of `fit`, with its verdicts."""
        return cast(Result, self._fit_state.result)

    @property
    def history_(self) -> History | None:
        """What the next task's `fit` takes as `history=` (small, JSON), where a method learns from earlier tasks."""
        return self._fit_state.history

    # use -----------------------------------------------------------------------------------------------------

    def partial_fit(self, *args: Any, **kwargs: Any) -> Self:
        """Fit after a task, on top of the tasks before: one calibrator that lives beside the learner.

        The same as `fit(..., history=...)` with the history that this calibrator keeps, and saves and loads with
        itself. Methods that learn nothing from earlier tasks simply fit. `fit` without `history` starts anew.

        Parameters
        ----------
        *args, **kwargs
            Those of `fit`, without `history`.

        Returns
        -------
        Self
            This calibrator, fitted. If the fit fails, it is left as it was.

        Examples
        --------
        >>> import torch, tcil
        >>> calibrator = tcil.FirstTaskTemperatureScaling()
        >>> logits, labels = 5 * torch.eye(3)[torch.tensor([0, 1, 2, 0])], torch.tensor([0, 1, 2, 2])
        >>> first = calibrator.partial_fit(logits, labels).temperature_
        >>> calibrator.partial_fit(torch.randn(8, 6), torch.arange(8) % 6).temperature_ == first
        True
        """
        if "history" in kwargs:
            advice = "Use fit(..., history=...) to pass one from outside."
            raise invalid("history", "one given to partial_fit", "none: the calibrator keeps its own", advice)
        if "history" in inspect.signature(self.fit).parameters:
            kwargs["history"] = None if self._state is None else self._state.history
        return cast(Self, self.fit(*args, **kwargs))

    @overload
    def transform(self, logits: Tensor, features: ArrayLike | None = None) -> Tensor: ...
    @overload
    def transform(self, logits: NotTensor, features: ArrayLike | None = None) -> Floats: ...
    def transform(self, logits: ArrayLike, features: ArrayLike | None = None) -> Tensor | Floats:
        """Calibrated log-probabilities.

        Parameters
        ----------
        logits : tensor or array (N, K)
            One column for each class in `classes_`.
        features : tensor or array (N, D), optional
            Needed only by calibrators whose map asks for them (`needs_features`).

        Returns
        -------
        tensor or array (N, K)
            In float64: a tensor for a tensor, else a numpy array.
        """
        mapping = self._mapping()
        z = as_logits(logits, n_classes=len(self.classes_))
        extra = None
        if mapping.needs_features:
            if features is None:
                raise invalid("features", "None", f"the features (N, D) that {type(self).__name__} was fitted on")
            extra = as_tensor(features, "features").to(z.device)
            if len(extra) != len(z):
                raise invalid("features", f"{len(extra)} rows", f"{len(z)}, one for each row of logits")
        with torch.no_grad(), full_precision(z.device.type):
            return same_kind(on_device(mapping, z.device)(z, extra), logits)

    @overload
    def predict_proba(self, logits: Tensor, features: ArrayLike | None = None) -> Tensor: ...
    @overload
    def predict_proba(self, logits: NotTensor, features: ArrayLike | None = None) -> Floats: ...
    def predict_proba(self, logits: ArrayLike, features: ArrayLike | None = None) -> Tensor | Floats:
        """Calibrated probabilities: the exponential of `transform`.

        Parameters
        ----------
        logits : tensor or array (N, K)
            One column for each class in `classes_`.
        features : tensor or array (N, D), optional
            Needed only by calibrators whose map asks for them (`needs_features`).

        Returns
        -------
        tensor or array (N, K)
            In float64: a tensor for a tensor, else a numpy array.
        """
        log_probs = self.transform(logits, features)
        if isinstance(log_probs, Tensor):
            return log_probs.exp()
        return cast(Floats, torch.from_numpy(log_probs).exp().numpy())

    def wrap(self, model: nn.Module, *, wider_head: bool = False, force: bool = False) -> CalibratedModel:
        """The model with calibrated log-probabilities for output: an `nn.Module` to save, export or serve.

        It holds the plain network: DataParallel, DDP and torch.compile are taken off, so that state-dict keys are the
        network's own. The network is shared, not copied: `wrap(model).eval()` puts `model` in evaluation mode too, so
        call `model.train()` before you resume training. Floating-point inputs are cast to the precision of its
        weights, as `fit` does.

        A head that has grown since, by columns or by further heads, is the same model for `classes_`, as long as
        nothing else has changed. Its new classes have no calibrated probability, so that calling the wrapped model is
        refused unless `wider_head` says to leave them out: it then answers as before the head grew.

        Parameters
        ----------
        model : torch.nn.Module
            The network that the calibrator was fitted on.
        wider_head : bool
            Leave out the classes by which the head has grown since `fit`.
        force : bool
            Accept weights other than those fitted on.

        Returns
        -------
        tcil.results.CalibratedModel
            Gives log-probabilities (N, K) in float64.
        """
        mapping, state = self._mapping(), self._fit_state
        if not isinstance(model, nn.Module):
            raise invalid("model", type(model).__name__, "a torch.nn.Module that returns logits")
        if not force:
            self.check_weights(model)
        width = None if wider_head or force else (state.head_width or len(state.classes))
        return CalibratedModel(unwrap(model), mapping, state.classes, width, state.columns, state.source)

    def check_weights(self, model: nn.Module) -> None:
        """Raise `WeightsMismatchError` if `fit` saw a model and `model` has other weights for the classes seen.

        Parameters
        ----------
        model : torch.nn.Module
            The network to compare.
        """
        state = self._fit_state
        known = state.model_hash
        if known is None:
            return
        same = known.match(model, state.used) if isinstance(known, UsedWeights) else weights_hash(model) == known
        if not same:
            tied = known.digest if isinstance(known, UsedWeights) else known
            raise WeightsMismatchError(
                f"model: its weights are not those that this {type(self).__name__} was fitted on (hash {tied}). "
                "Fit again after every change of the weights, or pass force=True if you know better."
            )

    # disk ----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, model: nn.Module | None = None) -> Path:
        """Write JSON at `path` (and larger arrays as safetensors beside it), by atomic rename, with checksums.

        Parameters
        ----------
        path : str or Path
            A file name that ends in .json.
        model : torch.nn.Module, optional
            Record the hash of its weights, for calibrators that were fitted on logits alone.

        Returns
        -------
        Path
            The file written.
        """
        state, source, known = self._fit_state, self._fit_state.source, self._fit_state.model_hash
        if model is not None:
            self.check_weights(model)
            known = known or weights_hash(model)
        check_sound(type(self), state)
        record = {
            "calibrator": type(self).__name__,
            "options": _plain_options(self),
            "classes": list(state.classes),
            "head_width": state.head_width,
            "columns": state.columns,
            "features": None if source is None else [list(source.heads), source.body, source.call],
            "model_hash": storage.encode(known),
            "result": storage.encode(state.result),
            "history": state.history,
        }
        return storage.write(
            storage.as_path(path), record, {name: value.cpu() for name, value in state.mapping.named_buffers()}
        )

    @classmethod
    def load(cls, path: str | Path, *, model: nn.Module | None = None, force: bool = False) -> Self:
        """Read a saved calibrator.

        Called on `Calibrator` it gives whatever class the file names; called on a subclass it insists on that one.

        Parameters
        ----------
        path : str or Path
            A file written by `save`.
        model : torch.nn.Module, optional
            Refuse the file if the calibrator was fitted on other weights than these.
        force : bool
            Accept other weights.

        Returns
        -------
        Self
            The fitted calibrator, with its history.
        """
        path = storage.as_path(path)
        record, arrays = storage.read(path)
        kind = cls._named(record["calibrator"], path)
        if not issubclass(kind, cls):
            raise invalid("path", f"{path}, a saved {kind.__name__}", f"a saved {cls.__name__}")
        with storage.damage_named(path):
            calibrator = kind(**record["options"])
            calibrator._state = restored(kind, record, arrays)
        if model is not None and not force:
            calibrator.check_weights(model)
        return calibrator

    @classmethod
    def _named(cls, name: object, path: str | Path) -> type[Calibrator]:
        """The calibrator that a file names: only classes that are defined already, never something to import."""
        kinds = list(Calibrator._known.get(name, {}).values()) if isinstance(name, str) else []
        if cls in kinds:
            return cls
        if len(kinds) > 1:
            homes = ", ".join(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds))
            advice = "Call load on the class itself."
            raise invalid("path", f"{path}, a saved {name!r}", f"a name that one class has, not {homes}", advice)
        if not kinds:
            known = ", ".join(sorted(Calibrator._known))
            advice = "Import the module that defines it first."
            raise invalid("path", f"{path}, a saved {name!r}", f"one of {known}", advice)
        return kinds[0]

    # for subclasses ------------------------------------------------------------------------------------------

    def _check_options(self) -> None:
        """Check options that were assigned since, as the constructor does; `fit` begins with it."""
        checked = copy.copy(self)
        checked.__post_init__()
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(checked, field.name))

    def _fitted(
        self,
        mapping: CalibrationMap,
        classes: tuple[int, ...],
        result: Any,
        *,
        head_width: int | None = None,
        columns: tuple[int, ...] | None = None,
        source: FeatureSource | None = None,
        model_hash: UsedWeights | str | None = None,
        history: History | None = None,
    ) -> Self:
        """Take over what `fit` found, all at once: a failed fit leaves the calibrator as it was."""
        self._state = FittedState(mapping, classes, result, head_width, columns, source, model_hash, history)
        return self

    @property
    def _fit_state(self) -> FittedState:
        if self._state is None:
            raise NotFittedError(f"{type(self).__name__} is not fitted yet: call fit(...) first")
        return self._state

    def _mapping(self) -> CalibrationMap:
        return self._fit_state.mapping


def load(path: str | Path, *, model: nn.Module | None = None, force: bool = False) -> Calibrator:
    """Read a saved calibrator, of whatever class.

    Parameters
    ----------
    path : str or Path
        A file written by a calibrator's `save`.
    model : torch.nn.Module, optional
        Refuse the file if the calibrator was fitted on other weights than these.
    force : bool
        Accept other weights.

    Returns
    -------
    tcil.extending.Calibrator
        The fitted calibrator, with its history.

    Examples
    --------
    >>> import tempfile, tcil
    >>> scaling = tcil.TemperatureScaling().fit([[2.0, 0.5], [0.1, 1.0], [0.7, 0.2]], [0, 1, 1])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = tcil.load(scaling.save(f"{folder}/calibrator.json"))
    >>> again.temperature_ == scaling.temperature_
    True
    """
    return Calibrator.load(path, model=model, force=force)


class SingleTemperature(Calibrator[Result]):
    """A calibrator whose whole answer is one temperature.

    Attributes
    ----------
    temperature_ : float
        What logits are divided by.

    Examples
    --------
    >>> import tcil
    >>> from tcil.extending import SingleTemperature
    >>> isinstance(tcil.TCIL(), SingleTemperature), isinstance(tcil.PACT(), SingleTemperature)
    (True, False)
    """

    map_type: ClassVar[type[CalibrationMap]] = TemperatureMap

    @property
    def temperature_(self) -> float:
        """The fitted temperature, greater than 0."""
        return float(cast(TemperatureMap, self._mapping()).temperature)

    @staticmethod
    def _map(temperature: float) -> TemperatureMap:
        return TemperatureMap(torch.tensor(temperature, dtype=torch.float64))


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _plain_options(calibrator: Calibrator) -> Mapping[str, Any]:
    values = calibrator.get_params().items()
    return {name: str(v) if isinstance(v, torch.device) else storage.encode(v) for name, v in values}
