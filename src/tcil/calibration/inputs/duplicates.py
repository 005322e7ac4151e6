"""Images that are in two sets, of which one must not have been trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from torch import Tensor


def digests_of(inputs: Tensor) -> list[bytes]:
    """A digest of each image: the same for the same image in any type and layout, on any device.

    >>> import torch
    >>> images = torch.eye(2).reshape(2, 1, 2)
    >>> digests_of(images) == digests_of(images.double()), digests_of(images)[0] == digests_of(images)[1]
    (True, False)
    """
    rows = inputs.detach().cpu().float().contiguous()
    shape = str(tuple(rows.shape[1:])).encode()
    found = list[bytes]()
    for row in rows.numpy():
        digest = hashlib.blake2b(shape, digest_size=16)
        digest.update(row.data)
        found.append(digest.digest())
    return found


def count_shared(own: Iterable[bytes], chosen: Tensor, others: Collection[bytes]) -> tuple[int, int]:
    """How many of the `chosen` images are among others, and how many are chosen.

    >>> import torch
    >>> count_shared([b"a", b"b", b"c"], torch.tensor([True, True, False]), {b"b", b"c"})
    (1, 2)
    """
    rows = [digest for digest, wanted in zip(own, chosen.tolist(), strict=True) if wanted]
    return sum(digest in others for digest in rows), len(rows)
