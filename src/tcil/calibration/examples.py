"""Labelled examples as users hold them: tensors, arrays, a Dataset or a DataLoader, read a batch at a time."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from tcil.calibration.arrays import as_labels, as_tensor
from tcil.calibration.errors import invalid

# What turns a loader's batch into (inputs, labels): a function, or the two keys of a dict batch.
Unpack: TypeAlias = Callable[[Any], tuple[Any, Any]] | tuple[str, str]
Examples: TypeAlias = Any  # a pair of tensors or arrays, a Dataset, or any re-iterable loader of batches
Batch: TypeAlias = tuple[Tensor, Tensor]

_DICT_KEYS = (
    ("x", "y"),
    ("image", "label"),
    ("images", "labels"),
    ("pixel_values", "labels"),
    ("input", "target"),
    ("inputs", "targets"),
)
_ROWS = 256
_KINDS = "a pair (inputs, labels) of tensors or arrays, a Dataset, or a DataLoader"


class ExampleStream:
    """Checked batches of (inputs in float32 or wider, integer labels), the same in every pass.

    A pair of tensors is checked whole at once. A loader is checked batch by batch as it streams: only one batch is
    held, and a second pass must bring exactly the batches of the first, else the gradients of one image would meet
    the pixels of another.
    """

    def __init__(self, data: Examples, argument: str, *, batch_size: int, unpack: Unpack | None = None) -> None:
        self.argument = argument
        self.half_precision = False
        self._unpack = unpack
        self._first_pass: list[int] | None = None
        self._pair: Batch | None = None
        self._batch_size = batch_size
        self.given_as_numpy = False
        if isinstance(data, (tuple, list)) and len(data) == 2 and _is_array(data[0]) and _is_array(data[1]):
            self.given_as_numpy = isinstance(data[0], np.ndarray)
            self._pair = self._checked(*data)
        else:
            self._loader = self._as_loader(data, batch_size)
            self._peek()

    @property
    def labels(self) -> Tensor | None:
        """All labels, where they are known before a pass."""
        return None if self._pair is None else self._pair[1]

    def __iter__(self) -> Iterator[Batch]:
        if self._pair is not None:
            inputs, labels = self._pair
            yield from zip(inputs.split(self._batch_size), labels.split(self._batch_size), strict=True)
            return
        prints: list[int] = []
        for batch in self._loader:
            inputs, labels = self._checked(*self._unpacked(batch))
            prints.append(_fingerprint(inputs, labels))
            if self._first_pass is not None and prints != self._first_pass[: len(prints)]:
                raise self._unstable()
            yield inputs, labels
        if not prints:
            raise invalid(self.argument, "a loader that gave no batch", "at least one example")
        if self._first_pass is not None and len(prints) != len(self._first_pass):
            raise self._unstable()
        self._first_pass = prints

    def _as_loader(self, data: Examples, batch_size: int) -> Any:
        if data is None or isinstance(data, (Tensor, np.ndarray, str, bytes, dict)):
            raise invalid(self.argument, type(data).__name__, _KINDS)
        if isinstance(data, Dataset):
            # A generator of its own, or making an iterator would draw from the global one.
            return DataLoader(data, batch_size=batch_size, generator=torch.Generator())
        if isinstance(data, DataLoader) and isinstance(data.sampler, RandomSampler):
            raise self._unstable("a DataLoader with shuffle=True")
        if isinstance(data, DataLoader):
            self._refuse_dropped(data)
        if isinstance(data, (tuple, list)) and len(data) == 2 and not _is_batch(data[0]):
            kinds = " and ".join(type(part).__name__ for part in data)
            raise invalid(self.argument, f"a pair of {kinds}", _KINDS)
        if not hasattr(data, "__iter__"):
            raise invalid(self.argument, type(data).__name__, _KINDS)
        if iter(data) is data:
            raise invalid(
                self.argument,
                f"a one-shot {type(data).__name__}",
                "a loader that can be read twice",
                "Pass the DataLoader itself, not iter(loader) or a generator.",
            )
        return data

    def _refuse_dropped(self, loader: DataLoader[Any]) -> None:
        """A loader that leaves out its last examples is not the whole set."""
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
            raise invalid(self.argument, given, "all of them", "Use drop_last=False.")

    def _peek(self) -> None:
        """Read the first batch twice: what can be refused is refused before the model runs."""
        prints: list[int] = []
        for _ in range(2):
            batch = next(iter(self._loader), None)
            if batch is None:
                if not prints:
                    raise invalid(self.argument, "no examples", "at least one example")
                raise self._unstable()
            prints.append(_fingerprint(*self._checked(*self._unpacked(batch))))
        if prints[0] != prints[1]:
            raise self._unstable()

    def _unpacked(self, batch: Any) -> tuple[Any, Any]:
        if callable(self._unpack):
            pair = self._unpack(batch)
            if not _is_pair(pair):
                raise invalid("unpack", f"a function returning {type(pair).__name__}", "one returning (inputs, labels)")
            return cast("tuple[Any, Any]", tuple(pair))
        if isinstance(batch, Mapping):
            choices = _DICT_KEYS if self._unpack is None else (self._unpack,)
            for x, y in choices:
                if x in batch and y in batch:
                    return batch[x], batch[y]
            raise invalid(
                self.argument,
                f"batches that are dicts with the keys {sorted(map(str, batch))}",
                f"one of the key pairs {', '.join(map(str, choices))}",
                "Say which keys hold inputs and labels: unpack=('my_image_key', 'my_label_key').",
            )
        if isinstance(batch, (tuple, list)) and len(batch) >= 2:
            return batch[0], batch[1]
        raise invalid(
            self.argument,
            f"batches of type {type(batch).__name__}",
            "tuples (inputs, labels) or dicts",
            "Pass unpack=function to turn a batch into (inputs, labels).",
        )

    def _checked(self, inputs: object, labels: object) -> Batch:
        x = as_tensor(inputs, f"{self.argument} inputs")
        y = as_labels(labels, f"{self.argument} labels")
        if x.ndim == 0 or len(x) == 0:
            raise invalid(f"{self.argument} inputs", f"shape {tuple(x.shape)}", "at least one example")
        if len(x) != len(y):
            raise invalid(self.argument, f"{len(x)} inputs and {len(y)} labels", "as many labels as inputs")
        if not x.is_floating_point():
            raise invalid(
                f"{self.argument} inputs",
                f"dtype {x.dtype}",
                "floating-point inputs as the network takes them (normalised)",
                "Apply the evaluation transform first, for instance (x.float() / 255 - mean) / std.",
            )
        if x.dtype in (torch.float16, torch.bfloat16):
            self.half_precision = True
            x = x.float()
        # A few rows at a time: the test needs as much memory as what it is given.
        bad = sum(int((~torch.isfinite(rows)).flatten(1).any(dim=1).sum()) for rows in x.unsqueeze(-1).split(_ROWS))
        if bad:
            raise invalid(f"{self.argument} inputs", f"NaN or infinity in {bad} of {len(x)} examples", "finite numbers")
        if len(y) and int(y.min()) < 0:
            raise invalid(f"{self.argument} labels", f"the label {int(y.min())}", "labels of 0 or more")
        return x, y

    def _unstable(self, given: str = "a loader whose second pass differs from its first") -> ValueError:
        return invalid(
            self.argument,
            given,
            "the same examples in the same order in every pass",
            "Use shuffle=False and the evaluation transform (no random crops or flips).",
        )


def _is_array(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _is_batch(value: object) -> bool:
    return _is_pair(value) or isinstance(value, Mapping)


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) >= 2


def _fingerprint(inputs: Tensor, labels: Tensor) -> int:
    """A checksum of the batch's very bytes: small enough to keep for every batch of a pass."""
    flat = inputs.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(labels.numpy().tobytes(), zlib.crc32(flat.numpy().data))
