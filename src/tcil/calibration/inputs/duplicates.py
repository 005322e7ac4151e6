"""Images that are in two sets of tensors, of which one must not have been trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

from torch import Tensor

from tcil.calibration.inputs.examples import ExampleStream

_LOOKED_AT = 4096  # numbers of an image, evenly spread over it, by which most images are told apart quickly
Chosen = Callable[[Tensor], Tensor]  # which of some labels count


def count_shared(stream: ExampleStream, other: ExampleStream, chosen: Chosen) -> tuple[int, int]:
    """How many images of a stream are also in another, with the same label, and how many there are.

    Only images count whose labels are `chosen`. Both streams must hold tensors: others are not read for this.
    """
    own = [_digest(row, label, _LOOKED_AT) for row, label in _rows(stream, chosen)]
    alike = set(own) & {_digest(row, label, _LOOKED_AT) for row, label in _rows(other, chosen)}
    if not alike:
        return 0, len(own)
    whole = [
        {_digest(row, label) for row, label in _rows(rows, chosen) if _digest(row, label, _LOOKED_AT) in alike}
        for rows in (stream, other)
    ]
    both = whole[0] & whole[1]
    return sum(_digest(row, label) in both for row, label in _rows(stream, chosen)), len(own)


def _rows(stream: ExampleStream, chosen: Chosen) -> Iterator[tuple[Tensor, int]]:
    for inputs, labels in stream:
        for row, label, wanted in zip(inputs, labels.tolist(), chosen(labels.cpu()).tolist(), strict=True):
            if wanted:
                yield row, label


def _digest(row: Tensor, label: int, numbers: int | None = None) -> bytes:
    """The same for the same image in any type and layout; of some of its numbers only, if so many are asked for."""
    flat = row.detach().reshape(-1)
    step = 1 if numbers is None else max(1, len(flat) // numbers)
    some = flat[::step].cpu().float().contiguous().numpy().tobytes()
    return hashlib.blake2b(some + str((label, tuple(row.shape))).encode(), digest_size=16).digest()
