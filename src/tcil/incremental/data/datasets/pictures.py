"""Decode image files into one uint8 tensor, with a cache file next to the images."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tcil.foundation.files import read_regular, replacing
from tcil.incremental.data.datasets.files import unreadable

if TYPE_CHECKING:
    from PIL import Image


# Raster formats that Pillow reads itself; for others, such as EPS, it starts external programs.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF", "PPM")
BICUBIC = "BICUBIC"  # default resampling method; others of Pillow's are possible, such as "BOX"
_MOST_PIXELS = 10**8  # of a scaled image, before its middle is taken
_DEEP = 257  # 65535 / 255


def decode(paths: Sequence[Path], side: int, cache: Path, scaling: str = BICUBIC) -> Tensor:
    """RGB images (N, 3, side, side); grey images get three equal channels, other sizes are scaled and centre-cropped.

    The result is cached at `cache` with a hash of the files' contents in order and of the decoded images, and used as
    long as the hash matches. File names and times are not used, since they can change without the content and the
    content without them.
    """
    kept = _kept(paths, side, cache, scaling)
    if kept is not None:
        return kept
    images = torch.empty(len(paths), 3, side, side, dtype=torch.uint8)
    digest = _digest(side, scaling)
    for index, path in enumerate(paths):
        content = _content(path)
        digest.update(hashlib.sha256(content).digest())
        images[index] = torch.from_numpy(_read(content, path, side, scaling)).permute(2, 0, 1)
    key = torch.tensor(list(_sealed(digest, images)), dtype=torch.uint8)
    with suppress(OSError, SafetensorError), replacing(cache) as partial:  # read-only, or full: decode again next time
        save_file({"images": images, "key": key}, partial)
    return images


def _digest(side: int, scaling: str) -> hashlib._Hash:
    """The start of the hash that identifies a decoding result."""
    return hashlib.sha256(f"pictures 2;{side};{'' if scaling == BICUBIC else scaling + ';'}".encode())


def _sealed(digest: hashlib._Hash, images: Tensor) -> bytes:
    """The hash of the files with that of the images decoded from them, which finds damage.

    `seal_tensors` holds several copies of what it seals, and the images may fill most of the memory.
    """
    digest.update(hashlib.sha256(images.numpy().data).digest())
    return digest.digest()


def _kept(paths: Sequence[Path], side: int, cache: Path, scaling: str) -> Tensor | None:
    """The cached images, if they were decoded from the same contents; a damaged cache is ignored."""
    if not cache.exists():
        return None
    if not cache.is_file():
        raise unreadable(f"{cache}, which is not a file", "a cache file, or nothing at this path", "Move it away.")
    try:
        stored = load_file(cache)
        images, key = stored["images"], stored["key"]
    except (SafetensorError, KeyError):
        return None
    if images.shape != (len(paths), 3, side, side) or images.dtype != torch.uint8:
        return None
    digest = _digest(side, scaling)
    for path in paths:
        digest.update(hashlib.sha256(_content(path)).digest())
    return images if key.tolist() == list(_sealed(digest, images)) else None


def _content(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise _undecoded(path, error.strerror) from error


def _read(content: bytes, path: Path, side: int, scaling: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as file:
            picture = _in_eight_bits(file).convert("RGB")
            if picture.size != (side, side):
                scale = side / min(picture.size)
                size = tuple(max(side, round(length * scale)) for length in picture.size)
                if size[0] * size[1] > _MOST_PIXELS:  # a long strip of few pixels
                    raise ValueError(f"it is {picture.size[0]} x {picture.size[1]} pixels, too long a strip")
                picture = picture.resize((size[0], size[1]), Image.Resampling[scaling])
                left, top = ((length - side) // 2 for length in picture.size)
                picture = picture.crop((left, top, left + side, top + side))
            return np.array(picture, dtype=np.uint8)
    except UnidentifiedImageError as error:
        raise _undecoded(path, f"not one of {', '.join(FORMATS)}") from error
    except Exception as error:  # a damaged file fails in many ways
        raise _undecoded(path, error) from error


def _in_eight_bits(picture: Image.Image) -> Image.Image:
    """The picture in 8 bits. Pillow would clip 16-bit values at 255; values of unknown range raise an error."""
    from PIL import Image

    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format == "PNG"):
        deep = np.asarray(picture).astype(np.uint32)
        return Image.fromarray(((deep + _DEEP // 2) // _DEEP).astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise ValueError("its pixels are floating-point or 32-bit numbers; save it with 8 or 16 bits")
    return picture


def _undecoded(path: Path, reason: object) -> ValueError:
    named = str(path).encode(errors="backslashreplace").decode()
    return unreadable(f"{named}, which cannot be decoded ({reason})", "an image file")
