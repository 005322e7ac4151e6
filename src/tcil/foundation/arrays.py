"""Conversion and validation of user input: logits, probabilities, labels, weights, class lists.

Masked classes. Users mask a class in a row of logits with -inf or with a large negative number. A class counts as
masked if one of these holds:

- its logit is -inf;
- its logit is a usual mask value (-1e4, -1e5 and so on by powers of ten, or the most negative number of float16, each
  also as rounded by narrower types) and at least 50 times as large in absolute value as every other logit of the row;
- its logit is within 2 % of a usual mask value, as after `logits - 1e4` or a log-softmax, and at least 49 times as
  large as the logits of all other classes, of which there are two or more;
- its logit lies below -1e30, as the most negative numbers of the wider types do, and is at least 1e20 times as large.

The logits of ordinary networks meet none of these conditions, and logits on any other scale are left unchanged.
`mask_out` replaces every masked logit by -inf; its class then has probability 0 and is ignored.

A class that was masked with another number, such as -5e4, cannot be told from a class with a low score, so its logit
is used as it is. `warn_of_other_masks` warns of sets of logits that look like this.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tcil.foundation.errors import invalid, shortened, warn

NotTensor: TypeAlias = npt.NDArray[Any] | Sequence[Any]  # input for which results are numpy arrays
ArrayLike: TypeAlias = Tensor | NotTensor
Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

# Softmax rows sum to 1 within this tolerance even in half precision; several rows of logits never do by chance.
_SUM_TOLERANCE = 5e-3

_INT64 = torch.iinfo(torch.int64)
_LARGEST_LOGIT = 1e300  # the difference of two larger ones may overflow float64
_MOST_CLASSES = 1 << 24
_LEAST_WEIGHT = 1e-200  # relative to the largest

# Usual mask values above -1e30; each also as rounded to float32 and bfloat16 (float16 represents its own exactly).
_USUAL_MASKS = torch.tensor(
    [*(float(f"-1e{power}") for power in range(4, 31)), torch.finfo(torch.float16).min],
    dtype=torch.float64,
    device="cpu",  # even if torch.set_default_device was called
)
# Numbers, not a tensor: torch.export rejects tensors that do not belong to the model.
_MASK_VALUES = tuple(
    torch.cat([_USUAL_MASKS, _USUAL_MASKS.float().double(), _USUAL_MASKS.bfloat16().double()]).unique().tolist()
)
_MASKS_BEGIN = -9e3  # larger than all of them
_FAR_BELOW, _WRITTEN, _UNWRITTEN = -1e30, 50.0, 1e20
_NEAR = 0.02  # relative distance to a usual mask value that a logit added to it explains
_OTHER_MASK, _FEWEST_MASKED = -1e3, 10  # of a set of logits for a warning


_NUMBER_NAMES = "Map names of classes to whole numbers first, such as {'cat': 0, 'dog': 1}."


def as_tensor(value: object, argument: str) -> Tensor:
    """Convert a tensor, numpy array or nested list of real numbers to a tensor, without copying if possible."""
    if torch.get_default_device().type == "meta":
        given, advice = "'meta', which holds no numbers", "Call torch.set_default_device('cpu') before you calibrate."
        raise invalid("torch.set_default_device", given, "a device on which results can be computed", advice)
    if isinstance(value, Tensor):
        return _plain(value, argument).detach()
    if isinstance(value, (str, bytes)) or value is None:
        advice = "" if value is None else _NUMBER_NAMES
        raise invalid(argument, type(value).__name__, "a tensor or a numpy array", advice)
    refuse_hidden(value, argument)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise invalid(argument, f"{type(value).__name__} ({error})", "a tensor or a numpy array") from None
    if array.dtype == object or array.dtype.kind not in "fiub":
        named = array.dtype.kind in "US" or (array.size and isinstance(array.flat[0], str))
        given, advice = f"{type(value).__name__} of dtype {array.dtype}", _NUMBER_NAMES if named else ""
        raise invalid(argument, given, "a tensor or a numpy array of numbers", advice)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:  # torch has nothing wider
        with np.errstate(over="ignore"):
            array = array.astype(np.float64)
    elif array.dtype.kind in "iu" and array.dtype.isnative:
        # C has two names for the same type; torch accepts only one of them.
        array = array.view(f"{array.dtype.kind}{array.dtype.itemsize}")
    array = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    # torch warns about read-only memory and does not accept negative strides, which a contiguous row may have.
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(np.ascontiguousarray(array) if array.ndim else array.copy())


def _plain(value: Tensor, argument: str) -> Tensor:
    """The tensor, if it is dense, real and not on the meta device."""
    given = None
    if value.is_nested or value.layout != torch.strided:
        given = "a nested tensor" if value.is_nested else f"a sparse tensor ({value.layout})"
    elif value.is_meta:
        given = "a tensor on the meta device, which holds no numbers"
    elif value.is_quantized or value.is_complex():
        given = f"dtype {value.dtype}"
    if given is not None:
        raise invalid(
            argument, given, "a dense tensor of real numbers", "Try Tensor.to_dense(), .real or .dequantize()."
        )
    return value


def refuse_hidden(value: object, argument: str) -> None:
    """Raise if a masked array has masked entries, since numpy would drop its mask."""
    parts = value if isinstance(value, (list, tuple)) else (value,)
    if any(isinstance(part, np.ma.MaskedArray) and np.ma.getmaskarray(part).any() for part in parts):
        raise invalid(
            argument,
            "a masked array with masked entries",
            "an array without masked entries",
            "Drop the masked rows, or fill them with values (-inf for the logit of a masked class).",
        )


def recorded() -> bool:
    """Whether a graph is recorded, which cannot branch on values: no work may be skipped for those of the example."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def mask_out(logits: Tensor) -> Tensor:
    """The logits (N, K) with -inf for every masked class; the same tensor if none is masked."""
    return find_masked(logits)[0]


def find_masked(logits: Tensor) -> tuple[Tensor, bool]:
    """The logits as by `mask_out`, and False if certainly no class is masked."""
    if not recorded():
        seen = logits.detach() if logits.requires_grad else logits
        least = float(seen.min()) if seen.numel() else 0.0
        if not least <= _MASKS_BEGIN:
            return logits, math.isnan(least)
    values = torch.tensor(_MASK_VALUES, dtype=logits.dtype, device=logits.device)
    place = places_in(values, logits)
    above, below = values[place.clamp(max=len(values) - 1)], values[(place - 1).clamp(min=0)]
    written, far = above == logits, logits <= _FAR_BELOW
    near = ((above - logits).abs() <= -_NEAR * above) | ((logits - below).abs() <= -_NEAR * below)
    sizes = logits.abs()
    others = sizes.masked_fill(written | far, 0.0).amax(dim=1, keepdim=True)
    masked = (written & (-logits >= _WRITTEN * others)) | (far & (-logits >= _UNWRITTEN * others))
    # A row of only such numbers has no other logit to compare them with.
    masked = masked & ~(written | far).all(dim=1, keepdim=True)
    apart = near | far
    others = sizes.masked_fill(apart, 0.0).amax(dim=1, keepdim=True)
    several = (~apart).sum(dim=1, keepdim=True) >= 2  # the scores of two classes may be this far apart by chance
    masked = masked | (near & several & (-logits >= (1 - _NEAR) * _WRITTEN * others))
    return logits.masked_fill(masked, -torch.inf), True


def warn_of_other_masks(logits: Tensor, argument: str, classes: Sequence[int] | None = None) -> None:
    """Warn if some logits (N, K) look like those of classes that were masked with a number `mask_out` does not know.

    They are close to one another and at least 50 times as large in absolute value as all other logits of the set. The
    logits of a network on a large scale have values in between.
    """
    if logits.numel() == 0:
        return
    finite = without_masked(logits.detach())
    least = float(finite.min())
    if not _LARGEST_LOGIT >= -least >= -_OTHER_MASK:
        return
    low = finite <= least * (1 - 2 * _NEAR) / (1 + 2 * _NEAR)
    others = finite.masked_fill(low, 0.0).abs().max()
    if int(low.sum()) < _FEWEST_MASKED or float(others) * _WRITTEN > -least or bool(low.all(dim=1).any()):
        return
    columns = low.any(dim=0).nonzero().squeeze(1).tolist()
    names = columns if classes is None else [classes[column] for column in columns]
    warn(
        f"{argument}: the logits of the classes {shortened(names, 6)} are about {least:.3g} in"
        f" {int(low.any(dim=1).sum())} of {len(logits)} rows, far below all others, and are used as they are. If these"
        " classes are masked, use -inf: logits.masked_fill(mask, -torch.inf).",
    )


def places_in(table: Tensor, values: Tensor) -> Tensor:
    """`torch.searchsorted` that can be exported: the number of entries of an increasing table below each value.

    ONNX has no such operator, so an exported graph uses `halving_search`.

    >>> places_in(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([[0.5, 2.0], [3.0, 9.0]]))
    tensor([[0, 1],
            [2, 3]])
    """
    if not recorded():
        return torch.searchsorted(table, values.contiguous())
    return halving_search(table, values)


def halving_search(table: Tensor, values: Tensor) -> Tensor:
    """`torch.searchsorted` by comparisons and indexing, in as many steps as the table's length has bits.

    >>> halving_search(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([[0.5, 2.0], [3.0, 9.0]]))
    tensor([[0, 1],
            [2, 3]])
    """
    size = len(table)
    bits = size.bit_length()  # enough for the positions 0 to size
    padded = torch.cat([table, table.new_full(((1 << bits) - 1 - size,), torch.inf)])
    place = torch.zeros_like(values, dtype=torch.long)
    for step in (1 << bit for bit in reversed(range(bits))):
        place = place + step * (padded[place + (step - 1)] < values).long()
    return place


def without_masked(logits: Tensor) -> Tensor:
    """Logits with -inf replaced by 0, for sums in which masked classes have weight 0 (0 times infinity is NaN)."""
    if logits.numel() == 0 or not bool(logits.min() == -torch.inf):
        return logits
    return logits.masked_fill(logits == -torch.inf, 0.0)


def check_finite(logits: Tensor, argument: str) -> None:
    """Raise unless every logit is finite or -inf and every row has an unmasked class."""
    if bool(torch.isfinite(logits).all()):
        return
    bad = int((torch.isnan(logits) | (logits == torch.inf)).any(dim=1).sum())
    if bad:
        expected = "finite numbers, or -inf for a masked class"
        raise invalid(argument, f"NaN or infinity in {bad} of {len(logits)} rows", expected)
    empty = (logits == -torch.inf).all(dim=1)
    if bool(empty.any()):
        row = int(empty.nonzero()[0])
        raise invalid(argument, f"row {row} with every class masked (-inf)", "at least one unmasked class in each row")


def check_own_unmasked(
    logits: Tensor, columns: Tensor, classes: Sequence[int] | None, argument: str = "labels"
) -> None:
    """Raise if the true class of a row is masked: its likelihood would be 0 at every temperature."""
    true_logits = logits.gather(1, columns[:, None].to(logits.device)).squeeze(1)
    wrong = (true_logits == -torch.inf).nonzero().squeeze(1)
    if len(wrong):
        row = int(wrong[0])
        column = int(columns[row])
        label = column if classes is None else classes[column]
        raise invalid(
            argument,
            f"the label {label} in row {row}, whose logit is masked there ({len(wrong)} such rows)",
            "labels of classes that are not masked in their row",
            "Drop these rows, or do not mask their classes.",
        )


def gap_and_size(one: Tensor, other: Tensor) -> tuple[float, float]:
    """The largest difference of two tensors and the largest entry of the second, over unmasked entries."""
    a, b = at_least_float32(one.detach()), at_least_float32(other.detach())
    if not torch.equal(a == -torch.inf, b == -torch.inf):
        return float("inf"), 0.0
    a, b = without_masked(a), without_masked(b)
    return float((a - b).abs().max()), float(b.abs().max())


def same_kind(result: Tensor, given: object) -> Tensor | Floats:
    """`result` as a tensor if a tensor was given, else as a numpy array."""
    return result if isinstance(given, Tensor) else cast(Floats, result.detach().cpu().numpy())


def widest(device: torch.device) -> torch.dtype:
    """The most precise number that a device has: MPS has no double precision."""
    return torch.float32 if device.type == "mps" else torch.float64


def looks_like_probabilities(rows: Tensor) -> bool:
    """Whether every row is non-negative and sums to 1; one row alone may do so by chance."""
    if len(rows) < 2 or bool((rows < 0).any()):
        return False
    sums = rows.sum(dim=1, dtype=widest(rows.device))
    return bool(((sums - 1).abs() < _SUM_TOLERANCE).all())


def as_logits(value: object, argument: str = "logits", n_classes: int | None = None) -> Tensor:
    """Validated logits (N, K), at least float32, -inf where masked. Probabilities raise an error."""
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
            "After a new task, fit a new calibrator. If the head is wider, slice it to the classes seen.",
        )
    logits = mask_out(at_least_float32(logits))
    check_finite(logits, argument)
    least, most = (float(end) for end in without_masked(logits).aminmax())
    if max(-least, most) > _LARGEST_LOGIT:
        expected = f"absolute values of at most {_LARGEST_LOGIT:g}"
        raise invalid(argument, f"numbers from {least:.3g} to {most:.3g}", expected)
    if looks_like_probabilities(logits):
        raise invalid(
            argument,
            "rows that are non-negative and sum to 1",
            "logits, not probabilities",
            "Pass the network's outputs before softmax (log-probabilities also work).",
        )
    return logits


def at_least_float32(values: Tensor) -> Tensor:
    """At least float32, the least precision of post-processing; integers become float64, which represents more."""
    if values.dtype in (torch.float32, torch.float64):
        return values
    return values.float() if values.is_floating_point() or values.device.type == "mps" else values.double()


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
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise invalid(argument, f"dtype {labels.dtype}", "integer class labels", "Convert them with labels.long().")
    if length is not None and len(labels) != length:
        raise invalid(argument, f"{len(labels)} labels", f"{length}, one for each sample")
    whole = labels.cpu().long()
    if labels.dtype == torch.uint64 and bool((whole < 0).any()):
        raise invalid(argument, f"the label {int(whole.min()) + 2**64}", f"labels up to {_INT64.max}")
    return whole


def as_classes(value: Iterable[Any], argument: str, *, ordered: bool = True) -> tuple[int, ...]:
    """Distinct class labels, in the given order. A set is accepted unless the order matters (`ordered`)."""
    if isinstance(value, (Tensor, np.ndarray)):
        refuse_hidden(value, argument)
        value = (_plain(value, argument) if isinstance(value, Tensor) else value).tolist()
    if isinstance(value, (str, bytes, bytearray, Mapping)):
        raise invalid(argument, f"{type(value).__name__} {value!r:.60}", "a list of labels, such as range(90, 100)")
    if ordered and isinstance(value, AbstractSet):
        raise invalid(
            argument,
            f"{type(value).__name__}, which has no order",
            "a list of class labels in the order of the logit columns",
            f"If that is ascending, pass sorted({argument}).",
        )
    try:
        given = list(itertools.islice(value, _MOST_CLASSES + 1))
    except TypeError:
        raise invalid(argument, repr(value), "a list of class labels, such as range(90, 100)") from None
    if len(given) > _MOST_CLASSES:
        raise invalid(argument, f"more than {_MOST_CLASSES} labels", "a list of class labels, such as range(90, 100)")
    classes = [_class_label(entry, argument) for entry in given]
    if not classes:
        raise invalid(argument, "no class labels", "at least one class label")
    if len(set(classes)) != len(classes):
        twice = sorted(label for label, count in Counter(classes).items() if count > 1)
        raise invalid(argument, f"repeated labels {shortened(twice)}", "each class label once")
    return tuple(classes)


def _class_label(entry: Any, argument: str) -> int:
    try:
        label = operator.index(entry)
    except TypeError:
        advice = _NUMBER_NAMES if isinstance(entry, str) else ""
        raise invalid(argument, f"the entry {entry!r}", "integer class labels", advice) from None
    if isinstance(entry, (bool, np.bool_)) or (isinstance(entry, Tensor) and entry.dtype == torch.bool):
        raise invalid(argument, f"the entry {entry!r}", "integer class labels, not True or False")
    if not _INT64.min <= label <= _INT64.max:
        raise invalid(argument, f"an entry of {label.bit_length()} bits", "integer class labels within int64")
    return label


def label_columns(
    labels: Tensor, classes: Sequence[int] | None, argument: str, n_columns: int, doubt: str = ""
) -> Tensor:
    """The logit column of each label; without `classes`, columns are the labels 0..n_columns-1.

    `doubt` is added to error messages: it says where the labels were taken from, if that may be the wrong place.
    """
    if classes is None:
        if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= n_columns):
            odd = labels[(labels < 0) | (labels >= n_columns)][0].item()
            raise invalid(
                argument,
                f"the label {odd}",
                f"labels from 0 to {n_columns - 1}, one for each of the {n_columns} logit columns",
                f"If the columns have other labels, pass them as classes=[...]. {doubt}",
            )
        return labels
    table = torch.as_tensor(classes, dtype=torch.long)
    ordered, order = table.sort()
    place = torch.searchsorted(ordered, labels).clamp(max=len(table) - 1)
    unknown = ordered[place] != labels
    if bool(unknown.any()):
        raise invalid(
            argument, f"the label {labels[unknown][0].item()}", f"labels in classes={shortened(classes, 6)}", doubt
        )
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
    check_own_unmasked(z, columns, names)
    warn_of_other_masks(z, "logits", names)
    return z, columns, names


def whole_number(value: Any, argument: str, least: int, most: int = _INT64.max) -> int:
    """A whole number (Python or numpy) from `least` to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, (bool, np.bool_)) or number < least:
        raise invalid(argument, repr(value), f"a whole number of {least} or more")
    if number > most:
        raise invalid(argument, f"a number of {number.bit_length()} bits", f"a whole number from {least} to {most}")
    return number


def classes_and_columns(
    classes: Iterable[Any] | None, columns: Iterable[Any] | None
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """The labels of the classes and their logit columns (None: the first ones).

    `columns` without `classes` means a head with one column per label, where columns and labels are the same.
    """
    names = None if classes is None else as_classes(classes, "classes")
    if columns is None:
        return names, None
    places = as_classes(columns, "columns")
    wrong = f"{len(places)} columns, {shortened(places)}"
    if min(places) < 0:
        raise invalid("columns", wrong, "column numbers of 0 or more")
    if names is not None and len(places) != len(names):
        raise invalid("columns", wrong, f"{len(names)}, one for each class in classes")
    return (places if names is None else names), places


def pick_columns(logits: Tensor, n_classes: int, columns: Sequence[int] | None) -> Tensor:
    """The logits of the classes; the head may have more columns."""
    needed = n_classes if columns is None else max(columns) + 1
    if needed > logits.shape[1]:
        what = "columns" if columns is not None else "classes"
        given = f"column {max(columns)}" if columns is not None else f"{n_classes} labels"
        expected = f"columns from 0 to {logits.shape[1] - 1}" if columns is not None else f"at most {logits.shape[1]}"
        raise invalid(what, given, f"{expected}, as the model has {logits.shape[1]} logit columns")
    if columns is None:
        return logits[:, :n_classes]
    return logits.index_select(1, torch.tensor(columns, device=logits.device))


def as_probabilities(value: object, argument: str = "probs") -> Floats:
    """Validated probabilities (N, K) as a float64 numpy array. Logits raise an error."""
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
            "For logits, use torch.softmax(logits, 1); for a calibrator, use predict_proba(logits).",
        )
    # Rounding may leave -1e-7 or 1.0000001, which logarithms and bins cannot handle.
    return rows.clip(0.0, 1.0) if rows.min() < 0 or rows.max() > 1 else rows


def as_weights(value: object, length: int) -> Floats:
    """Non-negative sample weights with mean 1; all ones if `value` is None."""
    if value is None:
        return np.ones(length)
    weights: Floats = as_tensor(value, "sample_weight").cpu().double().numpy()
    if weights.shape != (length,):
        raise invalid("sample_weight", f"shape {weights.shape}", f"({length},), one weight for each sample")
    if not np.isfinite(weights).all() or weights.min() < 0 or weights.max() <= 0:
        raise invalid("sample_weight", "negative, infinite or all-zero weights", "non-negative weights, not all zero")
    least, most = weights[weights > 0].min(), weights.max()
    if least < most * _LEAST_WEIGHT:
        given = f"weights from {least:.3g} to {most:.3g}"
        raise invalid("sample_weight", given, "positive weights within a factor of 1e200", "Set the least to 0.")
    if not 1e-200 < most < 1e200:
        weights = np.ldexp(weights, -int(np.frexp(most)[1]))  # a power of two, so that sums stay within float64
    normalised: Floats = weights * (length / weights.sum())
    return normalised
