"""The state of a fitted calibrator, which is checked when it is saved and when it is restored from a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from tcil.calibration import storage
from tcil.calibration.calibrators.maps import CalibrationMap
from tcil.calibration.inputs.features import FeatureSource
from tcil.calibration.inputs.weights import UsedWeights
from tcil.foundation.arrays import as_classes
from tcil.foundation.errors import invalid

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
