"""The state of a fitted calibrator, and what must hold of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tcil.calibration.calibrators.maps import CalibrationMap, copied
from tcil.calibration.inputs.features import FeatureSource
from tcil.calibration.inputs.weights import UsedWeights
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
