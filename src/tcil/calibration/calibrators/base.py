"""What all calibrators share: transform, predict_proba, wrap, save and load."""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from tcil.calibration import storage
from tcil.calibration.arrays import (
    ArrayLike,
    as_classes,
    as_logits,
    as_tensor,
    at_least_float32,
    pick_columns,
    same_kind,
)
from tcil.calibration.calibrators.maps import CalibrationMap, TemperatureMap
from tcil.calibration.classifier import UsedWeights, as_taken, unwrap, weights_hash
from tcil.calibration.errors import NotFittedError, WeightsMismatchError, invalid
from tcil.calibration.features import FeatureSource, select_logits


@dataclass(eq=False, kw_only=True)
class Calibrator(ABC):
    """A post-hoc calibrator: options at construction, data in `fit`, fitted values with a trailing underscore.

    Subclass it for a method of your own: set `map_type` to a `CalibrationMap`, and end `fit` with `self._fitted(...)`.
    It then transforms, wraps, saves and loads like the rest.

    >>> import tcil
    >>> isinstance(tcil.TCIL(), tcil.Calibrator)
    True
    """

    map_type: ClassVar[type[CalibrationMap]]
    result_type: ClassVar[type[Any]]
    _known: ClassVar[dict[str, dict[str, type[Calibrator]]]] = {}  # by name and module: what files may name

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Calibrator._known.setdefault(cls.__name__, {})[cls.__module__] = cls

    def __post_init__(self) -> None:
        self._state: _Fitted | None = None

    # fitted values -------------------------------------------------------------------------------------------

    @property
    def classes_(self) -> tuple[int, ...]:
        """The label of each logit column."""
        return self._fit_state.classes

    @property
    def result_(self) -> Any:
        """The frozen result of `fit`, with its verdicts."""
        return self._fit_state.result

    @property
    def history_(self) -> dict[str, Any] | None:
        """What the next task's `fit` takes as `history=` (small, JSON), where a method learns from earlier tasks."""
        return self._fit_state.history

    # use -----------------------------------------------------------------------------------------------------

    def transform(self, logits: ArrayLike, features: ArrayLike | None = None) -> Any:
        """Calibrated log-probabilities (N, K) in float64, as a tensor or array like `logits`.

        `features` are needed only by calibrators whose map asks for them (`needs_features`).
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
        with torch.no_grad(), _full_precision(z.device.type):
            return same_kind(_on(mapping, z.device)(z, extra), logits)

    def predict_proba(self, logits: ArrayLike, features: ArrayLike | None = None) -> Any:
        """Calibrated probabilities: the exponential of `transform`."""
        log_probs = self.transform(logits, features)
        return (
            log_probs.exp() if isinstance(log_probs, Tensor) else cast(Any, torch.from_numpy(log_probs).exp().numpy())
        )

    def wrap(self, model: nn.Module, *, wider_head: bool = False, force: bool = False) -> CalibratedModel:
        """The model with calibrated log-probabilities for output: an `nn.Module` to save, export or serve.

        It holds the plain network: DataParallel, DDP and torch.compile are taken off, so that state-dict keys are the
        network's own. The network is shared, not copied: `wrap(model).eval()` puts `model` in evaluation mode too, so
        call `model.train()` before learning on. Floating-point inputs are cast to the precision of its weights, as
        `fit` does. Weights other than those fitted on are refused unless `force`.

        A head that has grown since, by columns or by further heads, is the same model for `classes_`, as long as
        nothing else has changed. Its new classes have no calibrated probability, so that calling the wrapped model is
        refused unless `wider_head` says to leave them out: it then answers as before the head grew.
        """
        mapping, state = self._mapping(), self._fit_state
        if not isinstance(model, nn.Module):
            raise invalid("model", type(model).__name__, "a torch.nn.Module that returns logits")
        if not force:
            self.check_weights(model)
        width = None if wider_head or force else (state.head_width or len(state.classes))
        return CalibratedModel(unwrap(model), mapping, state.classes, width, state.columns, state.source)

    def check_weights(self, model: nn.Module) -> None:
        """Raise `WeightsMismatchError` if `fit` saw a model and `model` has other weights for the classes seen."""
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

        `model` records the hash of its weights for calibrators that were fitted on logits alone.
        """
        state, source, known = self._fit_state, self._fit_state.source, self._fit_state.model_hash
        if model is not None:
            self.check_weights(model)
            known = known or weights_hash(model)
        _check_sound(type(self), state)
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
        """Read a saved calibrator; with `model`, refuse weights other than those it was fitted on unless `force`.

        Called on `Calibrator` it gives whatever class the file names; called on a subclass it insists on that one.
        """
        path = storage.as_path(path)
        record, arrays = storage.read(path)
        kind = cls._named(record["calibrator"], path)
        if not issubclass(kind, cls):
            raise invalid("path", f"{path}, a saved {kind.__name__}", f"a saved {cls.__name__}")
        with storage.damage_named(path):
            calibrator = kind(**record["options"])
            calibrator._state = _restored(kind, record, arrays)
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
        history: dict[str, Any] | None = None,
    ) -> Self:
        """Take over what `fit` found, all at once: a failed fit leaves the calibrator as it was."""
        self._state = _Fitted(mapping, classes, result, head_width, columns, source, model_hash, history)
        return self

    @property
    def _fit_state(self) -> _Fitted:
        if self._state is None:
            raise NotFittedError(f"{type(self).__name__} is not fitted yet: call fit(...) first")
        return self._state

    def _mapping(self) -> CalibrationMap:
        return self._fit_state.mapping


def load(path: str | Path, *, model: nn.Module | None = None, force: bool = False) -> Calibrator:
    """Whatever calibrator a file holds; with `model`, other weights than it was fitted on are refused unless `force`.

    >>> import tempfile, tcil
    >>> scaling = tcil.TemperatureScaling().fit([[2.0, 0.5], [0.1, 1.0], [0.7, 0.2]], [0, 1, 1])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = tcil.load(scaling.save(f"{folder}/calibrator.json"))
    >>> again.temperature_ == scaling.temperature_
    True
    """
    return Calibrator.load(path, model=model, force=force)


class SingleTemperature(Calibrator):
    """A calibrator whose whole answer is one temperature."""

    map_type: ClassVar[type[CalibrationMap]] = TemperatureMap

    @property
    def temperature_(self) -> float:
        """The fitted temperature, greater than 0."""
        return float(cast(TemperatureMap, self._mapping()).temperature)

    @staticmethod
    def _map(temperature: float) -> TemperatureMap:
        return TemperatureMap(torch.tensor(temperature, dtype=torch.float64))


class CalibratedModel(nn.Module):
    """A network followed by its calibration: gives log-probabilities over `classes`.

    Made by `calibrator.wrap(model)`. The network is shared, not copied.

    >>> import torch, tcil
    >>> network = torch.nn.Linear(4, 3)
    >>> scaling = tcil.TemperatureScaling().fit(5 * torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 2]))
    >>> calibrated = scaling.wrap(network)
    >>> log_probs = calibrated(torch.randn(2, 4))
    >>> log_probs.shape, log_probs.exp().sum(dim=1).allclose(torch.ones(2).double())
    (torch.Size([2, 3]), True)
    """

    def __init__(
        self,
        model: nn.Module,
        mapping: CalibrationMap,
        classes: tuple[int, ...],
        head_width: int | None,
        columns: tuple[int, ...] | None,
        source: FeatureSource | None,
    ) -> None:
        super().__init__()
        if mapping.needs_features and source is None:
            raise invalid("model", "a calibrator that was fitted without a model", "one fitted on the model's features")
        self.model = model
        self.calibration = _clone(mapping)
        home = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
        self.calibration.to(home)
        self.classes = classes
        self._head_width, self._columns = head_width, columns
        self._source = source
        self.training = self.calibration.training = model.training

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """Calibrated log-probabilities of the inputs, (N, K), in float64; all arguments go to the network."""
        inputs = args if x is None else (x, *args)
        # As in fit: the first tensor is the input, and comes in the precision of the weights.
        given = next((value for value in (*inputs, *kwargs.values()) if isinstance(value, Tensor)), None)
        if given is not None:
            taken = as_taken(self.model, given)
            inputs = tuple(taken if value is given else value for value in inputs)
            kwargs = {key: taken if value is given else value for key, value in kwargs.items()}
        features = None
        if self.calibration.needs_features and self._source is not None:
            logits, features = self._source.run(self.model, *inputs, **kwargs)
            features = at_least_float32(features.flatten(1))
        else:
            logits = select_logits(self.model(*inputs, **kwargs))
        width, known = logits.shape[1], len(self.classes)
        if width < known or (self._head_width is not None and width != self._head_width):
            raise invalid(
                "model",
                f"{width} logits",
                f"{self._head_width or known}, as the calibrator was fitted on",
                "Fit a new calibrator after a new task, or say wrap(model, wider_head=True) to slice the head.",
            )
        with _full_precision(logits.device.type):
            return cast(Tensor, self.calibration(pick_columns(logits, known, self._columns), features))


@dataclass(frozen=True)
class _Fitted:
    mapping: CalibrationMap
    classes: tuple[int, ...]
    result: Any
    head_width: int | None = None
    columns: tuple[int, ...] | None = None
    source: FeatureSource | None = None
    model_hash: UsedWeights | str | None = None
    history: dict[str, Any] | None = None

    @property
    def used(self) -> Sequence[int]:
        """The logit columns of the classes."""
        return self.columns or range(len(self.classes))


def _restored(kind: type[Calibrator], record: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> _Fitted:
    """The fitted state in a record; raises on anything that no fit could have written."""
    state = _Fitted(
        mapping=kind.map_type(**arrays),
        classes=_labels(record["classes"], "classes"),
        result=storage.decode(kind.result_type, record["result"]),
        head_width=storage.decode(int | None, record["head_width"]),
        columns=None if record["columns"] is None else _labels(record["columns"], "columns"),
        source=_source(record["features"]),
        model_hash=_weights(record["model_hash"]),
        history=record["history"],
    )
    width, columns = state.head_width, state.used
    if len(columns) != len(state.classes) or min(columns) < 0:
        raise ValueError(f"{len(columns)} columns for {len(state.classes)} classes")
    if width is not None and max(columns) >= width:
        raise ValueError(f"the column {max(columns)} of a head with {width}")
    if not isinstance(state.history, dict | None):
        raise ValueError("a history that is no record")
    _check_sound(kind, state)
    return state


def _labels(value: Any, argument: str) -> tuple[int, ...]:
    return as_classes(storage.decode(tuple[int, ...], value), argument)


def _source(value: Any) -> FeatureSource | None:
    if value is None:
        return None
    heads, body, call = storage.decode(tuple[tuple[str, ...], str | None, int], value)
    if call < 0 or not (heads or body):
        raise ValueError(f"features {value}")
    return FeatureSource(heads, body, call)


def _weights(value: Any) -> UsedWeights | str | None:
    return cast(UsedWeights | str | None, storage.decode(UsedWeights if isinstance(value, dict) else str | None, value))


def _check_sound(kind: type[Calibrator], state: _Fitted) -> None:
    """Refuse arrays that are not such as a fit leaves them, or that say something else than the result."""
    mapping, result = state.mapping, state.result
    if getattr(result, "temperature", 0.0) is None:  # no answer: the map is never used
        return
    if not mapping.sound(len(state.classes)):
        shown = {name: value.tolist() for name, value in mapping.named_buffers() if value.numel() < 10}
        raise invalid("calibrator", f"arrays that no {kind.__name__} has ({shown})", "those of a successful fit")
    for name, value in mapping.named_buffers():
        told = getattr(result, name, None)
        numbers = told if isinstance(told, tuple) else (told,)
        if not all(isinstance(number, (int, float)) for number in numbers):
            continue
        if torch.tensor(told, dtype=value.dtype).tolist() != value.tolist():
            given = f"{name} {value.tolist()} in its map and {told} in its result"
            raise invalid("calibrator", given, "the same in both")


@contextlib.contextmanager
def _full_precision(device_type: str) -> Iterator[None]:
    """No autocast: a calibration map never runs below float32."""
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    with torch.autocast(device_type, enabled=False):
        yield


def _plain_options(calibrator: Calibrator) -> Mapping[str, Any]:
    values = {field.name: getattr(calibrator, field.name) for field in dataclasses.fields(calibrator)}
    return {k: str(v) if isinstance(v, torch.device) else storage.encode(v) for k, v in values.items()}


def _clone(mapping: CalibrationMap) -> CalibrationMap:
    return type(mapping)(**{name: value.clone() for name, value in mapping.named_buffers()})


def _on(mapping: CalibrationMap, device: torch.device) -> CalibrationMap:
    """The map on the logits' device; the fitted one stays on the CPU."""
    return mapping if device.type == "cpu" else _clone(mapping).to(device)
