"""Decoding of image files into one uint8 tensor, kept beside the pictures for the next time."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tcil.calibration.errors import invalid


def decode(paths: Sequence[Path], side: int, cache: Path) -> Tensor:
    """RGB images (N, 3, side, side); grey ones get three equal channels, other sizes are scaled and cut to the centre.

    The result is kept at `cache` together with a hash of the files' names, sizes and times, and read from there as long
    as nothing changed.
    """
    digest = hashlib.sha256(f"{side};".encode())
    for path in paths:
        stat = path.stat()
        digest.update(f"{path.name};{stat.st_size};{stat.st_mtime_ns};".encode())
    key = digest.hexdigest()
    if cache.exists():
        try:
            stored = load_file(cache)
            if bytes(stored["key"].tolist()).decode() == key:
                return stored["images"]
        except (SafetensorError, KeyError, UnicodeDecodeError):
            pass  # a damaged cache is made anew
    images = torch.empty(len(paths), 3, side, side, dtype=torch.uint8)
    for index, path in enumerate(paths):
        images[index] = torch.from_numpy(_read(path, side)).permute(2, 0, 1)
    partial = cache.with_name(f".{cache.name}.{secrets.token_hex(8)}.part")  # a name that nobody can foresee
    try:
        save_file({"images": images, "key": torch.tensor(list(key.encode()), dtype=torch.uint8)}, partial)
        os.replace(partial, cache)
    except OSError:
        partial.unlink(missing_ok=True)  # a read-only folder: decode again next time
    return images


def _read(path: Path, side: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    from PIL import Image

    try:
        with Image.open(path) as file:
            picture: Image.Image = file.convert("RGB")
            if picture.size != (side, side):
                scale = side / min(picture.size)
                size = tuple(max(side, round(length * scale)) for length in picture.size)
                picture = picture.resize((size[0], size[1]), Image.Resampling.BICUBIC)
                left, top = ((length - side) // 2 for length in picture.size)
                picture = picture.crop((left, top, left + side, top + side))
            return np.array(picture, dtype=np.uint8)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise invalid("data", f"{path}, which cannot be decoded ({error})", "an image file") from error
