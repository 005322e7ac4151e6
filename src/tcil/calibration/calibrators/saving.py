"""The record that a calibrator is saved as, and what must hold of a record that it is made from again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from tcil.calibration import storage
from tcil.calibration.calibrators.fitted import FittedState, check_sound, is_of_tcil, is_own
from tcil.calibration.calibrators.maps import CalibrationMap
from tcil.calibration.inputs.features import FeatureSource
from tcil.calibration.inputs.weights import UsedWeights
from tcil.foundation.arrays import as_classes
from tcil.foundation.errors import invalid
from tcil.foundation.parameters import Parameterised

if TYPE_CHECKING:
    from tcil.calibration.calibrators.base import Calibrator

Kind = TypeVar("Kind", bound="Calibrator")


def record_of(
    calibrator: Calibrator, state: FittedState, model_hash: UsedWeights | str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `save` writes: a record in plain JSON, and arrays."""
    kind, source = type(calibrator), state.source
    check_sound(kind, state)
    record = {
        "calibrator": kind.__name__,
        "module": kind.__module__,
        "options": _plain_options(calibrator),
        "classes": list(state.classes),
        "head_width": state.head_width,
        "columns": state.columns,
        "features": None if source is None else [list(source.heads), source.body, source.call],
        "model_hash": storage.encode(model_hash),
        "result": storage.encode(state.result),
        "history": state.history,
    }
    arrays = {name: value.cpu() for name, value in state.mapping.named_buffers()}
    if is_own(kind):
        _check_loadable(kind, state.mapping, record, arrays)
    return record, arrays


def made_from(kind: type[Kind], record: Mapping[str, Any], arrays: Mapping[str, Tensor], path: Path) -> Kind:
    """The fitted calibrator of a record; raises for options and a state that none can have."""
    if is_own(kind):
        _check_options(kind, record["options"], path)
    with storage.damage_named(path):
        calibrator = kind(**record["options"])
        calibrator._state = _restored(kind, record, arrays)
    return calibrator


def class_named(
    cls: type[Calibrator],
    registry: Mapping[str, Mapping[str, type[Calibrator]]],
    name: object,
    module: object,
    path: Path,
) -> type[Calibrator]:
    """The class that a file names, for `load` of a class. Nothing is imported: it must be in the registry.

    Of several with this name it is that of the same module. Files of earlier versions name no module: a class of
    tcil is then meant rather than one of the user's own.
    """
    known = registry.get(name, {}) if isinstance(name, str) else {}
    if cls in known.values():
        return cls
    module = module if isinstance(module, str) else None
    own = module is not None and not is_of_tcil(module)
    kinds = [kind for kind in known.values() if is_own(kind) == own] or ([] if own else list(known.values()))
    if module is not None and module in known:
        kinds = [known[module]]
    if len(kinds) > 1:
        homes = ", ".join(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds))
        advice = "Call load on the class itself."
        raise invalid("path", f"{path}, a saved {name!r}", f"a name that only one class has, not {homes}", advice)
    if not kinds:
        names = ", ".join(sorted(registry))
        advice = f"Import the module that defines it first{f' ({module!r:.80})' if own else ''}."
        raise invalid("path", f"{path}, a saved {name!r:.80}", f"one of {names}", advice)
    return kinds[0]


def _plain_options(calibrator: Calibrator) -> Mapping[str, Any]:
    values = calibrator.get_params().items()
    return {name: str(v) if isinstance(v, torch.device) else storage.encode(v) for name, v in values}


def _restored(kind: type[Calibrator], record: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> FittedState:
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


def _check_loadable(
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
        _restored(kind, read, arrays)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        expected = f"a fit that {name}.map_type and {name}.result_type can be made from"
        raise invalid("calibrator", f"a {name} whose file could not be loaded ({error})", expected) from None


def _check_options(kind: type[Calibrator], options: Mapping[str, Any], path: Path) -> None:
    """Raise if a file has options that the class does not have, or has no more."""
    if kind.get_params is not Parameterised.get_params:  # options of its own kind, such as scikit-learn's
        return
    known = [field.name for field in fields(kind)]
    if unknown := [name for name in options if name not in known]:
        given = f"{path}, a saved {kind.__name__} with the options {', '.join(unknown)}"
        expected = f"those of the class as it is now ({', '.join(known) or 'none'})"
        raise invalid("path", given, expected, "Has the class changed since?")
