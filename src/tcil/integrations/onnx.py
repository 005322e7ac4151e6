"""ONNX: a calibrated model as one file, compared with PyTorch before it is served."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from tcil.calibration.calibrators import CalibratedModel
from tcil.decisions.rules import DecidingModel
from tcil.foundation.arrays import Floats, whole_number
from tcil.foundation.errors import invalid
from tcil.foundation.records import Record
from tcil.integrations.extras import missing_extra

try:
    import onnx
    import onnxruntime
    import onnxscript  # noqa: F401  # torch.onnx.export needs it
except ImportError as error:
    raise missing_extra("onnx", error) from error

__all__ = ["OUTPUTS", "Verification", "export", "verify"]

OUTPUTS = ("probabilities", "log_probabilities", "label")
_TYPES = {torch.float32: "float32", torch.float64: "float64"}
_SIZES = (1e-3, 1.0, 1e3)  # by which random inputs are multiplied
_UNITS = 4.0  # of rounding
_TOLERANCE = {"float32": 1e-5, "float64": 1e-5}  # the network itself runs in float32 in both


@dataclass(frozen=True)
class Verification(Record):
    """How an exported model compares with the PyTorch model that it was made from.

    Attributes
    ----------
    largest_difference : float
        Between probabilities, over the rows whose rounding stays below the tolerance.
    same_labels : float
        The share of rows with the same prediction. Rows whose two best probabilities are closer than the tolerance
        are not counted.
    n_rows : int
        Rows compared: the example, random inputs and extreme ones, in batches of several sizes.
    tolerance : float
        What `largest_difference` may be at most.
    agrees : bool
        Whether all hold: the probabilities within the tolerance, those of rows with huge logits within their own
        rounding, and every prediction.

    Examples
    --------
    >>> from tcil.integrations.onnx import Verification
    >>> print(Verification(largest_difference=2e-8, same_labels=1.0, n_rows=73, tolerance=1e-5, agrees=True))
    Verification
      largest difference  2e-08
      same labels         1
      n rows              73
      tolerance           1e-05
      agrees              yes
    """

    largest_difference: float
    same_labels: float
    n_rows: int
    tolerance: float
    agrees: bool


class _Served(nn.Module):
    """What is exported: probabilities, log-probabilities and the label of the prediction."""

    labels: Tensor

    def __init__(self, calibrated: CalibratedModel) -> None:
        super().__init__()
        self.calibrated = calibrated
        self.register_buffer("labels", torch.tensor(calibrated.classes, dtype=torch.long))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_probs = self.calibrated(*inputs)
        return log_probs.exp(), log_probs, self.labels[log_probs.argmax(dim=1)]


def export(
    calibrated: CalibratedModel,
    path: str | Path,
    example: Tensor | Sequence[Tensor],
    *,
    input_names: Sequence[str] | None = None,
    opset: int = 18,
) -> Path:
    """Write a calibrated model as an ONNX file with a dynamic batch size.

    Outputs are named `probabilities` and `log_probabilities`, (batch, K), in the type that `wrap` was given, and
    `label`, (batch,), the label of the most probable class. The labels of all columns are in the metadata, under
    `classes`. Weights are in the file itself. Every calibrator can be exported, with `prior=` and `dtype=` of `wrap`.

    Parameters
    ----------
    calibrated : CalibratedModel
        What `calibrator.wrap(model)` gives. It is exported in evaluation mode, and left as it is.
    path : str or Path
        Where to write; usually ends in .onnx.
    example : Tensor or sequence of Tensor
        A batch of inputs, of two rows or more: their shapes, but for the first dimension, and types are kept. For a
        text model `(ids, mask)`, in the order of its arguments, with `input_names=["input_ids", "attention_mask"]`.
    input_names : sequence of str, optional
        Default: "input", or "input_0", "input_1" and so on.
    opset : int
        The version of the ONNX operators, 18 or more.

    Returns
    -------
    Path
        The file written.

    Examples
    --------
    >>> import torch, tcil, tempfile
    >>> from tcil.integrations import onnx
    >>> scaling = tcil.TemperatureScaling().fit(5 * torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 2]))
    >>> calibrated = scaling.wrap(torch.nn.Linear(4, 3), dtype=torch.float32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = onnx.export(calibrated, f"{folder}/model.onnx", torch.randn(2, 4))
    ...     onnx.verify(calibrated, path, torch.randn(2, 4)).agrees
    True
    """
    inputs = _checked(calibrated, example)
    names = _input_names(inputs, input_names)
    opset = whole_number(opset, "opset", 18)
    served = _Served(calibrated)
    batch = torch.export.Dim("batch", min=1)
    shapes = {"inputs": tuple({0: batch} for _ in inputs)}
    with _evaluated(served), _quiet():
        program = torch.onnx.export(
            served,
            inputs,
            dynamo=True,
            external_data=False,
            dynamic_shapes=shapes,
            input_names=names,
            output_names=list(OUTPUTS),
            opset_version=opset,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    told = {"classes": list(calibrated.classes), "calibration": type(calibrated.calibration).__name__}
    for key, value in told.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, json.dumps(value)
    path = Path(path)
    onnx.save(model, path)
    return path


def verify(
    calibrated: CalibratedModel,
    path: str | Path,
    example: Tensor | Sequence[Tensor],
    *,
    n_random: int = 64,
    seed: int = 0,
    tolerance: float | None = None,
) -> Verification:
    """Compare an exported model with the PyTorch model that it was made from.

    It runs ONNX Runtime on the CPU on the example, on random inputs of the example's mean and standard deviation times
    1/1000, 1 and 1000, on constants, and on batches of 1 and more rows. Integer inputs, such as token ids, are drawn
    from the values of the example.

    Parameters
    ----------
    calibrated : CalibratedModel
        What was exported.
    path : str or Path
        The file.
    example : Tensor or sequence of Tensor
        A batch of inputs.
    n_random : int
        Random rows of each size.
    seed : int
        For the random rows. No random state is touched.
    tolerance : float, optional
        What probabilities may differ by. Default: 1e-5, which the rounding of a network in float32 stays below as long
        as its logits over T are below 20. For larger ones, as of random inputs times 1000, their rounding is allowed.

    Returns
    -------
    Verification
        The differences. Nothing is raised: look at `agrees`.
    """
    inputs = _checked(calibrated, example)
    n_random = whole_number(n_random, "n_random", 1)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    if len(names) != len(inputs):
        raise invalid("example", f"{len(inputs)} inputs", f"{len(names)}, as {Path(path).name} has")
    missing = set(OUTPUTS) - {entry.name for entry in session.get_outputs()}
    if missing:
        raise invalid("path", f"a model without the outputs {sorted(missing)}", "one written by export")
    largest, within, alike, counted, rows, judged = 0.0, True, 0, 0, 0, 0
    served = _Served(calibrated)
    allowed = _TOLERANCE[_TYPES.get(calibrated.calibration.dtype, "float64")] if tolerance is None else tolerance
    with _evaluated(served), torch.no_grad():
        for batch in _batches(inputs, n_random, torch.Generator().manual_seed(seed)):
            ours, log_ours, label = served(*batch)
            fed = {name: part.numpy() for name, part in zip(names, batch, strict=True)}
            theirs, _, their_label = session.run(list(OUTPUTS), fed)
            expected = ours.cpu().double().numpy()
            gap = np.where(np.isfinite(theirs), np.abs(expected - theirs), np.inf).max(axis=1)
            rounding = _rounding(log_ours.cpu().double().numpy(), expected)
            judged += int((rounding <= allowed).sum())
            largest = max(largest, float(gap[rounding <= allowed].max(initial=0.0)))
            within = within and bool((gap <= np.maximum(rounding, allowed)).all())
            best = np.sort(expected, axis=1)
            clear = best[:, -1] - best[:, -2] > 2 * np.maximum(rounding, allowed)
            alike += int(((label.cpu().numpy() == their_label) & clear).sum())
            counted, rows = counted + int(clear.sum()), rows + len(expected)
    share = alike / counted if counted else 1.0
    return Verification(largest, share, rows, allowed, within and share == 1.0 and judged > 0)


def _rounding(log_probs: Floats, probs: Floats) -> Floats:
    """What the rounding of a network in float32 may change in the probabilities of each row.

    Some units of the last digit of its largest logit over T, where that changes a probability: none near 0 and 1.
    """
    largest = np.where(np.isfinite(log_probs), np.abs(log_probs), 0.0).max(axis=1, keepdims=True)
    shift = np.minimum(2 * _UNITS * np.finfo(np.float32).eps * largest, 50.0)
    rounding: Floats = (np.expm1(shift) * probs * (1 - probs)).max(axis=1)
    return rounding


def _checked(calibrated: Any, example: Any) -> tuple[Tensor, ...]:
    if not isinstance(calibrated, CalibratedModel):
        advice = "Export a model with a decision rule by torch.onnx.export(..., dynamo=True)."
        is_rule = isinstance(calibrated, DecidingModel)
        given, expected = type(calibrated).__name__, "what calibrator.wrap(model) gives"
        raise invalid("calibrated", given, expected, advice if is_rule else "")
    if isinstance(example, Mapping):
        given, names = ", ".join(map(str, example)), [str(name) for name in example]
        advice = f"Pass example=({given}) in the order of the model's arguments, and input_names={names} to export."
        raise invalid("example", "a dict", "a tensor or a tuple of tensors", advice)
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    if not inputs or not all(isinstance(part, Tensor) and part.ndim >= 1 for part in inputs):
        expected = "a batch of inputs: a tensor, or a tuple of tensors such as (ids, mask)"
        raise invalid("example", "something else than tensors", expected)
    if len({len(part) for part in inputs}) > 1 or len(inputs[0]) < 2:
        given = f"{' and '.join(str(len(part)) for part in inputs)} rows"
        raise invalid("example", given, "two rows or more, as many in each input")
    return tuple(part.detach().cpu() for part in inputs)


def _input_names(inputs: tuple[Tensor, ...], given: Sequence[str] | None) -> list[str]:
    if given is None:
        return ["input"] if len(inputs) == 1 else [f"input_{place}" for place in range(len(inputs))]
    if isinstance(given, str) or len(given) != len(inputs):
        raise invalid("input_names", repr(given), f"{len(inputs)} names")
    return list(given)


def _batches(inputs: tuple[Tensor, ...], n: int, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    """The example whole and as a single row, random rows, and extreme ones."""
    yield inputs
    yield tuple(part[:1] for part in inputs)
    for size in _SIZES:
        yield tuple(_drawn(part, n, size, generator) for part in inputs)
    if all(part.is_floating_point() for part in inputs):
        for value in (0.0, 1e4, -1e4):
            yield tuple(torch.full_like(part[:3], value) for part in inputs)


def _drawn(part: Tensor, n: int, size: float, generator: torch.Generator) -> Tensor:
    """Random rows like those of the example."""
    if not part.is_floating_point():
        flat = part.flatten()
        picks = torch.randint(len(flat), (n * part[0].numel(),), generator=generator)
        return flat[picks].reshape(n, *part.shape[1:])
    noise = torch.randn((n, *part.shape[1:]), generator=generator, dtype=torch.float64)
    usual = part.double()[torch.isfinite(part) & (part.abs() < 1e6)]
    centre, spread = (usual.mean(), usual.std()) if len(usual) > 1 else (0.0, 1.0)
    return (centre + size * spread * noise).to(part.dtype)


@contextlib.contextmanager
def _evaluated(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, and the modes as they were afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's notes on its own steps."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings(), contextlib.redirect_stdout(cast(Any, io.StringIO())):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
