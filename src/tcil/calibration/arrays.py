"""Checked conversions of what users pass: logits, probabilities, labels, weights, class lists."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tcil.calibration.errors import invalid

ArrayLike: TypeAlias = Tensor | npt.NDArray[Any] | Sequence[Any]
Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

# Softmax rows sum to 1 to within this even in half precision; several rows of logits never do by chance.
_SUM_TOLERANCE = 5e-3


def as_tensor(value: object, argument: str) -> Tensor:
    """Tensor, numpy array or nested list as a tensor, without copying where possible."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (str, bytes)) or value is None:
        raise invalid(argument, type(value).__name__, "a tensor or a numpy array")
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise invalid(argument, f"{type(value).__name__} ({error})", "a tensor or a numpy array") from None
    if array.dtype == object or array.dtype.kind not in "fiub":
        raise invalid(
            argument, f"{type(value).__name__} of dtype {array.dtype}", "a tensor or a numpy array of numbers"
        )
    array = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    array = array if array.flags.writeable else array.copy()  # torch warns about read-only memory
    return torch.from_numpy(np.ascontiguousarray(array)) if array.ndim else torch.tensor(array.item())


def same_kind(result: Tensor, given: object) -> Any:
    """`result` as a tensor where a tensor was given, else as a numpy array."""
    return result if isinstance(given, Tensor) else result.detach().cpu().numpy()


def looks_like_probabilities(rows: Tensor) -> bool:
    """Whether every row is non-negative and sums to 1; one row alone may do so by chance."""
    if len(rows) < 2 or bool((rows < 0).any()):
        return False
    sums = rows.sum(dim=1, dtype=torch.float64 if rows.device.type != "mps" else torch.float32)
    return bool(((sums - 1).abs() < _SUM_TOLERANCE).all())


def as_logits(value: object, argument: str = "logits", n_classes: int | None = None) -> Tensor:
    """Logits (N, K), at least float32, finite, and not probabilities: those are refused, never guessed back."""
    logits = as_tensor(value, argument)
    if logits.ndim != 2 or logits.shape[0] == 0:
        raise invalid(argument, f"shape {tuple(logits.shape)}", "a non-empty matrix (samples, classes)")
    if logits.shape[1] < 2:
        raise invalid(argument, f"{logits.shape[1]} column", "at least two classes", "A single score has no softmax.")
    if n_classes is not None and logits.shape[1] != n_classes:
        raise invalid(
            argument,
            f"{logits.shape[1]} columns",
            f"{n_classes}, one for each class in classes_",
            "After a new task, fit a new calibrator; slice a wider head to the classes seen.",
        )
    logits = at_least_float32(logits)
    if not bool(torch.isfinite(logits).all()):
        bad = int((~torch.isfinite(logits)).any(dim=1).sum())
        raise invalid(argument, f"NaN or infinity in {bad} of {len(logits)} rows", "finite numbers")
    if looks_like_probabilities(logits):
        raise invalid(
            argument,
            "rows that are non-negative and sum to 1",
            "logits, not probabilities",
            "Pass the network's outputs before softmax (log-probabilities will do as well).",
        )
    return logits


def at_least_float32(values: Tensor) -> Tensor:
    """Post-processing never runs below float32."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def as_labels(value: object, argument: str = "labels", length: int | None = None) -> Tensor:
    """Integer labels (N,), on the CPU."""
    labels = as_tensor(value, argument)
    if labels.ndim != 1:
        column = labels.ndim == 2 and labels.shape[1] == 1
        raise invalid(
            argument,
            f"shape {tuple(labels.shape)}",
            "one class label per sample, shape (N,)",
            "Pass labels.squeeze(1)."
            if column
            else "Multi-label targets are not supported; for one-hot rows pass labels.argmax(1).",
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise invalid(argument, f"dtype {labels.dtype}", "integer class labels", "Convert them with labels.long().")
    if length is not None and len(labels) != length:
        raise invalid(argument, f"{len(labels)} labels", f"{length}, one for each sample")
    return labels.cpu().long()


def as_classes(value: Iterable[Any], argument: str) -> tuple[int, ...]:
    """A list of distinct class labels, in the given order."""
    if isinstance(value, (Tensor, np.ndarray)):
        value = value.tolist()
    try:
        given = list(value)
    except TypeError:
        raise invalid(argument, repr(value), "a list of class labels, such as range(90, 100)") from None
    classes = []
    for entry in given:
        try:
            classes.append(operator.index(entry))
        except TypeError:
            raise invalid(argument, f"the entry {entry!r}", "integer class labels") from None
    if not classes:
        raise invalid(argument, "no class at all", "at least one class label")
    if len(set(classes)) != len(classes):
        twice = sorted({c for c in classes if classes.count(c) > 1})
        raise invalid(argument, f"repeated labels {twice[:5]}", "each class label once")
    return tuple(classes)


def label_columns(labels: Tensor, classes: Sequence[int] | None, argument: str, n_columns: int) -> Tensor:
    """The logit column of each label; without `classes`, columns are the labels 0..n_columns-1."""
    if classes is None:
        if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= n_columns):
            odd = labels[(labels < 0) | (labels >= n_columns)][0].item()
            raise invalid(
                argument,
                f"the label {odd}",
                f"labels from 0 to {n_columns - 1}, one for each of the {n_columns} logit columns",
                "If the columns stand for other labels, name them with classes=[...].",
            )
        return labels
    table = torch.as_tensor(classes, dtype=torch.long)
    ordered, order = table.sort()
    place = torch.searchsorted(ordered, labels).clamp(max=len(table) - 1)
    unknown = ordered[place] != labels
    if bool(unknown.any()):
        raise invalid(argument, f"the label {labels[unknown][0].item()}", f"labels in classes={_short(classes)}", "")
    return order[place]


def logits_and_columns(
    logits: ArrayLike, labels: ArrayLike, classes: Iterable[Any] | None
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Checked logits on the CPU, the column of each label, and the label of each column."""
    z = as_logits(logits).cpu()
    names = tuple(range(z.shape[1])) if classes is None else as_classes(classes, "classes")
    if len(names) != z.shape[1]:
        raise invalid("classes", f"{len(names)} labels", f"{z.shape[1]}, one for each logit column")
    columns = label_columns(as_labels(labels, length=len(z)), None if classes is None else names, "labels", z.shape[1])
    return z, columns, names


def whole_number(value: Any, argument: str, least: int) -> int:
    """A whole number (numpy's too) of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise invalid(argument, repr(value), f"a whole number of {least} or more")
    return number


def classes_and_columns(
    classes: Iterable[Any] | None, columns: Iterable[Any] | None
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """The labels of the classes, and which logit columns are theirs (None: the first ones).

    Columns without classes are those of a head with a column for every label: there the two are the same.
    """
    names = None if classes is None else as_classes(classes, "classes")
    if columns is None:
        return names, None
    places = as_classes(columns, "columns")
    wrong = f"{len(places)} columns, {_short(places)}"
    if min(places) < 0:
        raise invalid("columns", wrong, "column numbers of 0 or more")
    if names is not None and len(places) != len(names):
        raise invalid("columns", wrong, f"{len(names)}, one for each class in classes")
    return (places if names is None else names), places


def pick_columns(logits: Tensor, n_classes: int, columns: Sequence[int] | None, argument: str = "classes") -> Tensor:
    """The logits of the classes, out of a head that may be wider."""
    needed = n_classes if columns is None else max(columns) + 1
    if needed > logits.shape[1]:
        what = "columns" if columns is not None else argument
        given = f"column {max(columns)}" if columns is not None else f"{n_classes} labels"
        raise invalid(what, given, f"at most {logits.shape[1]} logit columns, as the model has")
    if columns is None:
        return logits[:, :n_classes]
    return logits.index_select(1, torch.tensor(columns, device=logits.device))


def as_probabilities(value: object, argument: str = "probs") -> Floats:
    """Probability rows (N, K) as float64 numpy; logits are refused."""
    probs = as_tensor(value, argument)
    if probs.ndim != 2 or probs.shape[0] == 0 or probs.shape[1] < 2:
        raise invalid(argument, f"shape {tuple(probs.shape)}", "a non-empty matrix (samples, classes)")
    rows: Floats = probs.cpu().double().numpy()
    if not np.isfinite(rows).all():
        bad = int((~np.isfinite(rows)).any(axis=1).sum())
        raise invalid(argument, f"NaN or infinity in {bad} of {len(rows)} rows", "finite probabilities")
    sums = rows.sum(axis=1)
    if rows.min() < -1e-6 or np.abs(sums - 1).max() > _SUM_TOLERANCE:
        worst = int(np.abs(sums - 1).argmax())
        raise invalid(
            argument,
            f"values from {rows.min():.3g} to {rows.max():.3g}, row {worst} summing to {sums[worst]:.4g}",
            "probabilities: non-negative rows that sum to 1",
            "For logits take torch.softmax(logits, 1); for a calibrator use predict_proba(logits).",
        )
    return rows


def as_weights(value: object, length: int) -> Floats:
    """Non-negative sample weights with mean 1; all ones when none are given."""
    if value is None:
        return np.ones(length)
    weights: Floats = as_tensor(value, "sample_weight").cpu().double().numpy()
    if weights.shape != (length,):
        raise invalid("sample_weight", f"shape {weights.shape}", f"({length},), one weight for each sample")
    if not np.isfinite(weights).all() or weights.min() < 0 or weights.sum() <= 0:
        raise invalid("sample_weight", "negative, infinite or all-zero weights", "non-negative weights, not all zero")
    normalised: Floats = weights * (length / weights.sum())
    return normalised


def _short(classes: Sequence[int]) -> str:
    shown = ", ".join(map(str, classes[:6]))
    return f"[{shown}{', ...' if len(classes) > 6 else ''}]"
