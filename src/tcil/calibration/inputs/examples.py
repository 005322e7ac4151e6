"""Labelled examples from tensors, arrays, a Dataset or a DataLoader, read batch by batch."""

from __future__ import annotations

import contextlib
import operator
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from tcil.foundation.arrays import as_labels, as_tensor, whole_number
from tcil.foundation.errors import invalid
from tcil.foundation.memory import available_memory

# How to get (inputs, labels) from a batch: a function, two keys of a dict, or two positions in a tuple.
Unpack: TypeAlias = Callable[[Any], tuple[Any, Any]] | tuple[str, str] | tuple[int, int]
# A pair of tensors or arrays, any object with a length and indexing, or any loader that can be iterated repeatedly.
Examples: TypeAlias = Any
Batch: TypeAlias = tuple[Tensor, Tensor]

MAX_BATCHES = 10_000  # of a loader without a length
_MOST_KEPT = 1 << 33  # bytes of its inputs that are kept in memory
_LOOK_EVERY = 1 << 26  # bytes of kept inputs between two looks at the memory that is left
_INPUT_KEYS = ("x", "image", "images", "img", "imgs", "pixel_values", "input", "inputs", "input_ids")
_LABEL_KEYS = ("y", "label", "labels", "target", "targets", "fine_label")
_ROWS = 256
_KINDS = "a pair (inputs, labels) of tensors or arrays, a Dataset, or a DataLoader"
EVALUATION_TRANSFORM = (
    "apply the evaluation transform first, for instance (x.float() / 255 - mean) / std, or only x.float() if the model"
    " normalises"
)


class ExampleStream:
    """Validated batches of (inputs in float32 or wider, integer labels), the same in every pass.

    A pair of tensors is checked at once. A loader is checked batch by batch, and only one batch is in memory at a time.
    Every pass must give exactly the batches of the first one; otherwise the gradients of one image would be applied to
    the pixels of another. A loader without a length raises an error after `max_batches`, or if more than 8 GiB of its
    inputs would be kept; any loader, if what is kept fills the memory of the machine. Integer inputs, such as token
    ids, are accepted only if no gradient is needed (`integers`).

    `doubt` is advice for errors about the labels: if a batch has three or more parts, the second may not be the label.
    """

    def __init__(
        self,
        data: Examples,
        argument: str,
        *,
        batch_size: int,
        unpack: Unpack | None = None,
        max_batches: int = MAX_BATCHES,
        integers: bool = False,
    ) -> None:
        self.argument = argument
        self.half_precision = False
        self.doubt = ""
        self._kept = 0  # bytes of inputs in this pass
        self.given_as_numpy = False
        self._unpack = _checked_unpack(unpack)
        self._most = whole_number(max_batches, "max_batches", 1)
        self._integers = integers
        self._first_pass: list[int] | None = None
        self._pair: Batch | None = None
        self.batch_size = batch_size
        self._split: Callable[[Any], tuple[Any, Any]] = self.unpacked
        if isinstance(data, (tuple, list)) and len(data) == 2 and _is_array(data[0]) and _is_array(data[1]):
            self.given_as_numpy = isinstance(data[0], np.ndarray)
            self._pair = self._checked(*data)
        else:
            try:
                self._loader = self._as_loader(data)
                self._first_print = self._peek()
                if unpack is None and _is_two_lists(data):  # few enough to read all of them now
                    deque(self, maxlen=0)
            except ValueError as error:
                if unpack is None and _is_two_lists(data):
                    raise self._two_lists(len(data[0])) from error
                raise

    @property
    def labels(self) -> Tensor | None:
        """All labels, if they are available before a pass."""
        return None if self._pair is None else self._pair[1]

    def __iter__(self) -> Iterator[Batch]:
        if self._pair is not None:
            inputs, labels = self._pair
            yield from zip(inputs.split(self.batch_size), labels.split(self.batch_size), strict=True)
            return
        prints: list[int] = []
        complete = self._first_pass is not None
        first_prints = self._first_pass or [self._first_print]
        self._kept = 0
        most = max(self._most, _length(self._loader))
        for number, batch in enumerate(self._loader):
            if number == most:
                raise self._endless(f"{self._most} batches", "pass a larger max_batches, or give it a __len__")
            inputs, labels = self._read(batch)
            prints.append(_fingerprint(inputs, labels))
            expected = first_prints[number : number + 1]
            if expected != prints[number:] and (expected or complete):
                raise self._unstable()
            yield inputs, labels.clone()  # the loader may reuse its buffers; kept inputs are copies
        if len(prints) < len(first_prints):
            raise self._unstable()
        self._first_pass = prints

    def keep(self, inputs: Tensor) -> Tensor:
        """Inputs that are kept until the end of the pass; raises before they fill the memory."""
        if self._pair is not None:
            return inputs
        before, self._kept = self._kept, self._kept + inputs.nbytes
        if self._kept > _MOST_KEPT and not _length(self._loader):
            raise self._endless(f"{_MOST_KEPT / 2**30:g} GiB of inputs to keep", "give it a __len__")
        if inputs.device.type == "cpu" and self._kept // _LOOK_EVERY > before // _LOOK_EVERY:
            available = available_memory()
            if available is not None and available < self._kept:  # they are joined in a second copy
                raise self._too_large(available)
        return inputs

    def _as_loader(self, data: Examples) -> Iterable[Any]:
        if data is None or isinstance(data, (Tensor, np.ndarray, str, bytes, Mapping, type)):
            raise invalid(self.argument, type(data).__name__, _KINDS)
        if isinstance(data, Dataset):
            if not isinstance(data, IterableDataset) and not hasattr(data, "__len__"):
                raise invalid(self.argument, f"{type(data).__name__} without a __len__", _KINDS)
            return self._batched(data)
        if isinstance(data, DataLoader):
            if isinstance(data.sampler, RandomSampler):
                raise self._unstable("a DataLoader with shuffle=True")
            self._refuse_dropped(data)
            return data
        if isinstance(data, (tuple, list)):
            self._refuse_parts(data)
        if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            empty = False
            with contextlib.suppress(Exception):  # a length of the user's own that fails is not one of 0
                empty = len(data) == 0
            if empty:
                raise self._nothing()
            try:
                first = data[0]
            except (LookupError, TypeError):  # not indexed by numbers
                first = None
            if first is not None and self._is_example(first):
                return self._batched(data)
            if first is not None and not hasattr(data, "__iter__"):
                return DataLoader(data, batch_size=None, generator=torch.Generator())
        if not hasattr(data, "__iter__"):
            raise invalid(self.argument, type(data).__name__, _KINDS)
        if (passed := iter(data)) is data or passed is iter(data):
            raise invalid(
                self.argument,
                f"a one-shot {type(data).__name__}",
                "a loader that can be read twice",
                "Pass the DataLoader itself, not iter(loader) or a generator.",
            )
        return cast("Iterable[Any]", data)

    def _batched(self, examples: Any) -> DataLoader[Any]:
        """Batches of single examples."""
        collate = None
        if not callable(self._unpack):  # the user's function expects batches
            collate, self._split = self._collated, _as_it_is
        # Without its own generator, creating an iterator would draw from the global one.
        return DataLoader(examples, batch_size=self.batch_size, generator=torch.Generator(), collate_fn=collate)

    def _collated(self, examples: list[Any]) -> Batch:
        """A batch from single examples; other parts than inputs and label are dropped."""
        inputs, labels = zip(*(self.unpacked(example) for example in examples), strict=True)
        if isinstance(inputs[0], Mapping) or (_are_arrays(inputs[0]) and len({p.shape for p in inputs[0]}) > 1):
            raise self._several(inputs[0])
        return self._stacked(inputs, "inputs"), self._stacked(labels, "labels")

    def _stacked(self, values: Iterable[Any], part: str) -> Tensor:
        name = f"{self.argument} {part}"
        tensors = [value if isinstance(value, Tensor) else as_tensor(value, name) for value in values]
        shapes = list(dict.fromkeys(tensor.shape for tensor in tensors))
        if len(shapes) > 1:
            raise invalid(
                name,
                f"examples of the shapes {' and '.join(str(tuple(shape)) for shape in shapes[:2])}",
                "one shape for all",
                "Use a transform that gives all examples the same size, or pass a DataLoader with a collate_fn.",
            )
        return torch.stack(tensors)

    def _is_example(self, item: Any) -> bool:
        """Whether this is a single example and not a batch: its label is a single number."""
        if not callable(self._unpack):
            return _is_scalar(self.unpacked(item)[1])
        try:
            pair = self._unpack(item)
        except Exception:  # the user's function expects batches
            return True
        return _is_pair(pair) and _is_scalar(pair[1])

    def _refuse_parts(self, data: tuple[Any, ...] | list[Any]) -> None:
        """Raise for tuples and lists that were probably meant as (inputs, labels) but are not."""
        if len(data) == 2 and _is_array(data[1]) and (
            isinstance(data[0], Mapping) or _are_several(data[0], data[1])
        ):  # fmt: skip
            raise self._several(data[0])
        if len(data) == 2 and not _is_batch(data[0]):
            kinds = " and ".join(type(part).__name__ for part in data)
            raise invalid(self.argument, f"a pair of {kinds}", _KINDS)
        if len(data) > 2 and isinstance(data, tuple) and all(map(_is_array, data)) and not callable(self._unpack):
            raise invalid(self.argument, f"a tuple of {len(data)} arrays", _KINDS, "Pass inputs and labels only.")

    def _refuse_dropped(self, loader: DataLoader[Any]) -> None:
        """Raise if a loader drops its last examples."""
        batches: Any = loader.batch_sampler
        if not (loader.drop_last or getattr(batches, "drop_last", False)):
            return
        size = getattr(batches, "batch_size", None) or loader.batch_size or 1
        try:
            sampler: Any = getattr(batches, "sampler", loader.sampler)
            lost = str(len(sampler) % size)
        except TypeError:
            lost = "few"
        if lost != "0":
            given = f"a DataLoader that drops its last {lost} examples"
            raise invalid(self.argument, given, "a loader of all examples", "Use drop_last=False.")

    def _peek(self) -> int:
        """Read the first batch twice, so that most errors are raised before the model runs."""
        prints: list[int] = []
        for _ in range(2):
            batch = next(iter(self._loader), None)
            if batch is None:
                raise self._unstable() if prints else self._nothing()
            prints.append(_fingerprint(*self._read(batch)))
        if prints[0] != prints[1]:
            raise self._unstable()
        return prints[0]

    def _read(self, batch: Any) -> Batch:
        inputs, labels = self._split(batch)
        if _is_scalar(labels):
            raise invalid(
                self.argument,
                "single examples instead of batches",
                "batches of inputs (N, ...) and labels (N,)",
                "Pass DataLoader(dataset, batch_size=64).",
            )
        return self._checked(inputs, labels)

    def unpacked(self, batch: Any) -> tuple[Any, Any]:
        """Inputs and labels of a batch, or of a single example."""
        if callable(self._unpack):
            pair = self._unpack(batch)
            if not _is_pair(pair):
                given = f"a function that returns {type(pair).__name__}"
                raise invalid("unpack", given, "a function that returns (inputs, labels)")
            return cast("tuple[Any, Any]", tuple(pair))
        if self._unpack is not None:
            return self._picked(batch, *self._unpack)
        if isinstance(batch, Mapping):
            return self._by_usual_keys(batch)
        if isinstance(batch, (tuple, list)) and len(batch) >= 2:
            self._refuse_order(batch)
            if len(batch) > 2:
                self.doubt = (
                    f"The labels were taken from the second of {len(batch)} parts of each batch; if they are elsewhere,"
                    " pass their position, for instance unpack=(0, 2)."
                )
            return batch[0], batch[1]
        raise invalid(
            self.argument,
            f"batches of type {type(batch).__name__}",
            "tuples (inputs, labels) or dicts",
            "Pass unpack=function, a function that returns (inputs, labels) of a batch.",
        )

    def _picked(self, batch: Any, inputs: str | int, labels: str | int) -> tuple[Any, Any]:
        """The parts of a batch that `unpack` selects by key or by position."""
        given = repr((inputs, labels))
        if isinstance(batch, Mapping):
            if inputs in batch and labels in batch:
                return batch[inputs], batch[labels]
            raise invalid(
                "unpack", given, f"two of the keys {sorted(map(str, batch))} in the batches of {self.argument}"
            )
        if isinstance(batch, (tuple, list)):
            if all(isinstance(place, int) and -len(batch) <= place < len(batch) for place in (inputs, labels)):
                return batch[cast(int, inputs)], batch[cast(int, labels)]
            expected = f"two positions from 0 to {len(batch) - 1} in the batches of {self.argument}, which are tuples"
            raise invalid("unpack", given, expected)
        expected = f"a function for the batches of {self.argument}, which are of type {type(batch).__name__}"
        raise invalid("unpack", given, expected)

    def _by_usual_keys(self, batch: Mapping[Any, Any]) -> tuple[Any, Any]:
        inputs, labels = ([key for key in keys if key in batch] for keys in (_INPUT_KEYS, _LABEL_KEYS))
        if len(inputs) == len(labels) == 1:
            return batch[inputs[0]], batch[labels[0]]
        several = inputs and labels
        raise invalid(
            self.argument,
            f"batches that are dicts with the keys {sorted(map(str, batch))}",
            f"a single pair of ({' or '.join(inputs)}) and ({' or '.join(labels)})"
            if several
            else f"inputs under one of {', '.join(_INPUT_KEYS)} and labels under one of {', '.join(_LABEL_KEYS)}",
            f"Pass the keys of inputs and labels: unpack=({inputs[-1]!r}, {labels[0]!r})."
            if several
            else "Pass the keys of inputs and labels: unpack=('my_image_key', 'my_label_key').",
        )

    def _refuse_order(self, parts: tuple[Any, ...] | list[Any]) -> None:
        """Raise for (index, inputs, labels), as in PyCIL's datasets, and for (labels, inputs)."""
        first = _layout(parts[0])
        if first is None or first[1] or first[0] > 1:
            return
        second, third = _layout(parts[1]), _layout(parts[2]) if len(parts) > 2 else None
        if second is None or second[0] <= first[0]:
            return
        if third == first:
            order, advice = "(index, inputs, labels)", "unpack=(1, 2)"
        elif second[1]:
            order, advice = "(labels, inputs)", "unpack=(1, 0)"
        else:
            return
        given = f"batches of {len(parts)} parts that look like {order}"
        raise invalid(self.argument, given, "(inputs, labels) first", f"Pass their positions: {advice}.")

    def _checked(self, inputs: object, labels: object) -> Batch:
        if isinstance(inputs, Mapping) or _are_several(inputs, labels):
            raise self._several(inputs)
        x = as_tensor(inputs, f"{self.argument} inputs")
        y = as_labels(labels, f"{self.argument} labels")
        if x.ndim == 0 or len(x) == 0:
            raise invalid(f"{self.argument} inputs", f"shape {tuple(x.shape)}", "at least one example", self._optional)
        if len(x) != len(y):
            raise invalid(self.argument, f"{len(x)} inputs and {len(y)} labels", "as many labels as inputs")
        if not x.is_floating_point() and (x.is_complex() or not self._integers):
            raise self._not_floating(x.dtype)
        if x.dtype in (torch.float16, torch.bfloat16):
            self.half_precision = True
            x = x.float()
        # A few rows at a time, since the check needs as much memory as its input.
        rows = x.unsqueeze(-1).split(_ROWS) if x.is_floating_point() else ()
        bad = sum(int((~torch.isfinite(some)).flatten(1).any(dim=1).sum()) for some in rows)
        if bad:
            raise invalid(f"{self.argument} inputs", f"NaN or infinity in {bad} of {len(x)} examples", "finite numbers")
        if len(y) and int(y.min()) < 0:
            raise invalid(f"{self.argument} labels", f"the label {int(y.min())}", "labels of 0 or more")
        return x, y

    def _several(self, inputs: Any) -> ValueError:
        advice = "Wrap a model that takes several inputs in a module that takes one tensor."
        given = f"a {type(inputs).__name__}" + ("" if isinstance(inputs, Mapping) else f" of {len(inputs)} tensors")
        return invalid(f"{self.argument} inputs", given, "one tensor of inputs", advice)

    def _not_floating(self, dtype: torch.dtype) -> ValueError:
        advice = f"For images, {EVALUATION_TRANSFORM}."
        if not dtype.is_complex and dtype is not torch.uint8:
            advice = (
                "Token ids and other integers cannot be perturbed. For a model of transformers, call"
                " tcil.integrations.transformers.fit, which perturbs their embeddings; for others, calibrate the logits"
                f" (predict_logits, then TemperatureScaling). {advice}"
            )
        expected = "floating-point inputs as the network takes them (normalised)"
        return invalid(f"{self.argument} inputs", f"dtype {dtype}", expected, advice)

    def _nothing(self) -> ValueError:
        return invalid(self.argument, "no examples", "at least one example", self._optional)

    @property
    def _optional(self) -> str:
        """Advice for what may be left out."""
        return "Pass reserve=None until there are some." if self.argument == "reserve" else ""

    def _two_lists(self, length: int) -> ValueError:
        given = f"a pair of lists of {length} entries each, which is read as two examples"
        advice = (
            "Pass (np.asarray(inputs), np.asarray(labels)), or for tensors (torch.stack(inputs), torch.tensor(labels))."
        )
        return invalid(self.argument, given, _KINDS, advice)

    def _endless(self, size: str, advice: str) -> ValueError:
        given = f"a loader of more than {size} without a length"
        return invalid(self.argument, given, "a loader that ends", f"If it is not endless, {advice}.")

    def _too_large(self, available: int) -> ValueError:
        read, left = (f"{size / 2**30:.3g} GiB" for size in (self._kept, available))
        given = f"a loader with {read} of inputs of new classes so far, and {left} of memory left for their second copy"
        advice = "Pass fewer or smaller examples; a few dozen of a class are usual. Does the loader end?"
        return invalid(self.argument, given, "examples of new classes that fit into memory twice", advice)

    def _unstable(self, given: str = "a loader whose second pass differs from its first") -> ValueError:
        return invalid(
            self.argument,
            given,
            "the same examples in the same order in every pass",
            "Use shuffle=False and the evaluation transform (no random crops or flips).",
        )


def _checked_unpack(unpack: Any) -> Unpack | None:
    """Two keys, two positions or a function; raises for anything else before a batch is read."""
    if unpack is None or callable(unpack):
        return cast("Unpack | None", unpack)
    if isinstance(unpack, (tuple, list)) and len(unpack) == 2:
        first, second = unpack
        if isinstance(first, str) and isinstance(second, str) and first != second:
            return first, second
        if _is_position(first) and _is_position(second) and first != second:
            return operator.index(first), operator.index(second)
    raise invalid(
        "unpack",
        repr(unpack),
        "two keys such as ('image', 'label'), two positions such as (1, 2), or a function of a batch",
    )


def _is_position(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _length(loader: object) -> int:
    """The length of a loader; 0 if it has none."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except Exception:  # it may be the user's own; without a length, batches are counted
        return 0


def _layout(part: object) -> tuple[int, bool] | None:
    """Number of dimensions, and whether the numbers are floating-point; None if it is not an array of numbers."""
    try:
        tensor = part if isinstance(part, Tensor) else as_tensor(part, "part")
    except ValueError:
        return None
    return tensor.ndim, tensor.is_floating_point()


def _is_scalar(value: object) -> bool:
    """Whether this is a scalar (strings count too; as labels they raise an error later)."""
    return np.isscalar(value) or (_is_array(value) and cast(Tensor, value).ndim == 0)


def _is_array(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _is_batch(value: object) -> bool:
    return _is_pair(value) or isinstance(value, Mapping)


def _are_arrays(value: object) -> bool:
    """Whether this is a tuple or list of arrays with a dimension or more."""
    return isinstance(value, (tuple, list)) and len(value) >= 2 and all(_is_array(p) and p.ndim for p in value)


def _are_several(inputs: object, labels: object) -> bool:
    """Whether the inputs of a batch are several arrays with a row for each label, not a list of its images."""
    parts, rows = cast(Sequence[Tensor], inputs), _length(labels)
    return _are_arrays(inputs) and len(parts) != rows and all(len(part) == rows for part in parts)


def _is_two_lists(data: object) -> bool:
    """Whether this was probably meant as (inputs, labels): two lists of the same length, the second one of scalars."""
    if not (
        isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, (tuple, list)) for part in data)
    ):
        return False
    inputs, labels = data
    return len(inputs) == len(labels) > 2 and all(map(_is_scalar, labels))


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) >= 2


def _fingerprint(inputs: Tensor, labels: Tensor) -> int:
    """A checksum of the bytes of a batch, small enough to keep for every batch of a pass."""
    flat = inputs.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(labels.numpy().tobytes(), zlib.crc32(flat.numpy().data))
