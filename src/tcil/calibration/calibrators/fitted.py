"""The state of a fitted calibrator, which is checked when it is saved and when it is restored from a record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from tcil.calibration import storage
from tcil.calibration.calibrators.maps import CalibrationMap, copied
from tcil.calibration.inputs.features import FeatureSource
from tcil.calibration.inputs.weights import UsedWeights
from tcil.foundation.arrays import as_classes
from tcil.foundation.errors import invalid
from tcil.foundation.parameters import Parameterised

if TYPE_CHECKING:
    from tcil.calibration.calibrators.base import Calibrator

History = dict[str, Any]  # plain JSON, in a format of each method; stored by `save`


@dataclass(frozen=True)
class FittedState:
    """The state that `fit` stores in a calibrator and `save` in a file."""

    mapping: CalibrationMap
    classes: tuple[int, ...]
    result: Any
    head_width: int | None = None
    columns: tuple[int, ...] | None = None
    source: FeatureSource | None = None
    model_hash: UsedWeights | str | None = None
    history: History | None = None

    @property
    def used(self) -> Sequence[int]:
        """The logit columns of the classes."""
        return self.columns or range(len(self.classes))


def restored(kind: type[Calibrator], record: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> FittedState:
    """The fitted state in a record; raises if no fit could have produced it."""
    state = FittedState(
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
        raise ValueError("a history that is not a record")
    check_sound(kind, state)
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


def is_of_tcil(module: str) -> bool:
    """Whether a module belongs to this package."""
    return module.partition(".")[0] == "tcil"


def is_own(kind: type[Calibrator]) -> bool:
    """Whether a calibrator is defined outside this package."""
    return not is_of_tcil(kind.__module__)


def check_map(mapping: CalibrationMap, n_classes: int) -> None:
    """Raise unless a map can be made again from its buffers, as `wrap` and `load` do, and gives log-probabilities."""
    name = type(mapping).__name__
    if not isinstance(mapping, CalibrationMap):
        raise invalid("mapping", name, "a tcil.extending.CalibrationMap")
    if parameters := [key for key, _ in mapping.named_parameters()]:
        given = f"{name} with the parameters {', '.join(parameters)}"
        raise invalid("mapping", given, "buffers alone, as set_state registers them")
    try:
        again = copied(mapping)
    except TypeError as error:
        expected = "one whose __init__ takes the arrays of set_state, by their names, and nothing else"
        raise invalid("mapping", f"{name}, which cannot be made from its buffers ({error})", expected) from None
    if mapping.needs_features:  # whose width only the map knows
        return
    home = next((value.device for value in mapping.buffers()), torch.device("cpu"))
    probe = torch.linspace(-3.0, 3.0, 4 * n_classes).sin().reshape(4, n_classes).to(home)
    lent = probe.clone()
    with torch.no_grad():
        given, anew = mapping(lent), again(probe.clone())
    if not torch.equal(lent, probe):
        raise invalid(
            "mapping", f"{name}, which changes the logits that it is given", "one that leaves them as they are"
        )
    if not (isinstance(given, Tensor) and given.shape == probe.shape):
        shown = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise invalid(
            "mapping", f"{name}, which returns {shown}", f"log-probabilities, {tuple(probe.shape)} for this batch"
        )
    if not bool(((given.double().exp().sum(dim=1) - 1).abs() < 1e-3).all()):
        raise invalid("mapping", f"{name}, whose probabilities do not sum to 1", "log-probabilities, as of log_softmax")
    if not torch.allclose(given, anew, rtol=0, atol=1e-9):
        expected = "a map whose buffers are its entire state, since wrap and load make it from them"
        raise invalid("mapping", f"{name}, which gives other probabilities when made from its buffers", expected)


def check_loadable(
    kind: type[Calibrator], mapping: CalibrationMap, record: Mapping[str, Any], arrays: Mapping[str, Tensor]
) -> None:
    """Raise if a file with this record could not be loaded, or not as the same function."""
    name = kind.__name__
    for attribute in ("map_type", "result_type"):
        if not hasattr(kind, attribute):
            raise invalid(f"{name}.{attribute}", "nothing", "a class, set in the body of the calibrator")
    if type(mapping) is not kind.map_type:
        given = f"{kind.map_type.__name__}, where the fitted map is a {type(mapping).__name__}"
        raise invalid(f"{name}.map_type", given, "the class of the map, since load makes it from that")
    for part in ("options", "result", "history"):
        try:
            json.dumps(record[part], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise invalid(part, str(error), "plain numbers, strings, lists and dictionaries, which JSON has") from None
    try:
        read = json.loads(json.dumps(dict(record)))
        kind(**read["options"])
        restored(kind, read, arrays)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        expected = f"a fit that {name}.map_type and {name}.result_type can be made from"
        raise invalid("calibrator", f"a {name} whose file could not be loaded ({error})", expected) from None


def check_options(kind: type[Calibrator], options: Mapping[str, Any], path: Path) -> None:
    """Raise if a file has options that the class does not have, or has no more."""
    if kind.get_params is not Parameterised.get_params:  # options of its own kind, such as scikit-learn's
        return
    known = [field.name for field in fields(kind)]
    if unknown := [name for name in options if name not in known]:
        given = f"{path}, a saved {kind.__name__} with the options {', '.join(unknown)}"
        expected = f"those of the class as it is now ({', '.join(known) or 'none'})"
        raise invalid("path", given, expected, "Has the class changed since?")


def check_sound(kind: type[Calibrator], state: FittedState) -> None:
    """Raise if the arrays cannot be those of a fit, or differ from the numbers in the result."""
    mapping, result = state.mapping, state.result
    if getattr(result, "temperature", 0.0) is None:  # no temperature: the map is never used
        return
    if not mapping.sound(len(state.classes)):
        shown = {name: value.tolist() for name, value in mapping.named_buffers() if value.numel() < 10}
        raise invalid("calibrator", f"arrays that no {kind.__name__} has ({shown})", "those of a successful fit")
    for name, value in mapping.named_buffers():
        reported = getattr(result, name, None)
        numbers = reported if isinstance(reported, tuple) else (reported,)
        if not all(isinstance(number, (int, float)) for number in numbers):
            continue
        if torch.tensor(reported, dtype=value.dtype).tolist() != value.tolist():
            given = f"{name} {value.tolist()} in its map and {reported} in its result"
            raise invalid("calibrator", given, "the same in both")
