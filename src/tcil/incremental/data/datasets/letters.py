"""Letters drawn at load time from the fonts that matplotlib ships, in any number of images and without files.

The images are the same on every machine. FreeType is only used to read the outlines, unhinted and in font units, which
are integers; its rasteriser, which differs between versions, is not used. Everything else is integer arithmetic, or
elementwise float64 arithmetic with +, -, * and / only, rounded to a byte at the end. Random numbers are the raw words
of PCG64, whose stability numpy guarantees.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tcil.foundation.arrays import whole_number
from tcil.foundation.errors import invalid
from tcil.incremental.data.datasets.files import require
from tcil.incremental.data.images import Dataset, ImageSet

if TYPE_CHECKING:
    from matplotlib.ft2font import FT2Font

FACES = (
    "DejaVuSans", "DejaVuSans-Oblique", "DejaVuSans-Bold", "DejaVuSans-BoldOblique",
    "DejaVuSansMono", "DejaVuSansMono-Oblique", "DejaVuSansMono-Bold", "DejaVuSansMono-BoldOblique",
    "DejaVuSerif", "DejaVuSerif-Italic", "DejaVuSerif-Bold", "DejaVuSerif-BoldItalic",
    "STIXGeneral", "STIXGeneralItalic", "STIXGeneralBol", "STIXGeneralBolIta",
)  # fmt: skip
CHARACTERS = "ABCDEFGHJKLMNPQRSTUV"  # capitals without I and O, which are too similar to J and Q
# No two of these look alike: chosen by the rule in `python -m research.letters look-alikes`.
LARGE_CHARACTERS = "ABCIJKLMNQTUVWXYZdfghjmry2457ΞΦΨДЖЦЧЩЪЭЯ"

# Standard deviation of the noise, in grey levels. Set by `python -m research.letters difficulty`, by a rule that uses
# uncalibrated networks only.
NOISE = 72

SIDE = 16  # pixels of an image
MOST = 100_000  # maximum number of training or test images of a class
EM = 14.5  # pixels; capitals are about two thirds as high
ROTATION = 0.18  # the tangent of half the largest angle, which is 20 degrees
SHEAR, SHIFT = 0.25, 1.5  # at most; shifts in pixels
SCALE, CONTRAST = (0.8, 1.2), (0.3, 0.7)  # from, to; contrast as a share of the range from black to white

# SHA-256 of the shapes, the same with matplotlib 3.8.0 (FreeType 2.6.1) and 3.11.2 (FreeType 2.14.3).
PINNED_WITH = ("3.8.0", "3.11.2")
PINNED = {
    CHARACTERS: "51c07ecad20356c9495e24a3090eaf61b8cf36c1ea9713d255bdcfad709ac982",
    LARGE_CHARACTERS: "421a886db1edfb1835d6204e43bfb58bf27a99cb2c9e0356ecec31eb00a19820",
}

_FINE, _STEP, _CANVAS = 8, 2, 24  # samples of a pixel, samples between two points of a shape, pixels of its canvas
_CENTRE = (_CANVAS * _FINE - _FINE) // _STEP // 2  # the point of a shape that is its middle
_DRAWS, _BYTES = 8, 4  # random words for the shape of an image, random bytes for the noise of a pixel
_SPREAD = math.sqrt(_BYTES * (256**2 - 1) / 12)  # standard deviation of the sum of these bytes
_TRAIN, _TEST = 0, 1
_AT_ONCE = 500  # images, to stay within the processor's caches

Floats = NDArray[np.float64]


def load(
    folder: Path | None = None,
    *,
    train_per_class: int = 220,
    test_per_class: int = 200,
    data_seed: int = 0,
    characters: str = CHARACTERS,
    noise: float = NOISE,
) -> Dataset:
    """Twenty capital letters as 16x16 grey images.

    Parameters
    ----------
    folder : Path, optional
        Ignored; accepted because all dataset readers take a folder.
    train_per_class, test_per_class : int
        Number of images per class. A larger set begins with the images of a smaller one.
    data_seed : int
        Seed of the images. Training and test images come from independent streams.
    characters : str
        The classes: any distinct characters that the fonts contain.
    noise : float
        Standard deviation of the noise, in grey levels.

    Returns
    -------
    Dataset
        The images in memory, ordered by class.

    Examples
    --------
    >>> from tcil.incremental.data.datasets import letters
    >>> tiny = letters.load(train_per_class=3, test_per_class=2, characters="AB")
    >>> tiny.train.images.shape, tiny.class_names
    (torch.Size([6, 1, 16, 16]), ('A', 'B'))
    """
    counts = {
        _TRAIN: whole_number(train_per_class, "train_per_class", 1, MOST),
        _TEST: whole_number(test_per_class, "test_per_class", 1, MOST),
    }
    seed = whole_number(data_seed, "data_seed", 0)
    if not characters or len(set(characters)) < len(characters):
        raise invalid("characters", repr(characters), "distinct characters, at least one")
    if not 0 <= noise < math.inf:
        raise invalid("noise", f"{noise}", "a finite number of grey levels, 0 or more")
    _note_other_glyphs(characters)
    parts = {part: _part(characters, part, count, seed, noise) for part, count in counts.items()}
    mean, std = _moments(parts[_TRAIN].images)
    name = "letters-large" if characters == LARGE_CHARACTERS else "letters"
    return Dataset(
        name, parts[_TRAIN], parts[_TEST], tuple(characters), mean=(mean,), std=(std,), padding=0, flip=False
    )


def load_large(
    folder: Path | None = None, *, train_per_class: int = 220, test_per_class: int = 250, data_seed: int = 0
) -> Dataset:
    """Forty letters and digits that do not look alike, for 10 tasks; otherwise like `load`."""
    return load(
        train_per_class=train_per_class,
        test_per_class=test_per_class,
        data_seed=data_seed,
        characters=LARGE_CHARACTERS,
    )


# Images ------------------------------------------------------------------------------------------------------


def _part(characters: str, part: int, count: int, seed: int, noise: float) -> ImageSet:
    images = np.concatenate([_images(character, part, count, seed, noise) for character in characters])
    labels = torch.arange(len(characters)).repeat_interleave(count)
    return ImageSet(torch.from_numpy(images[:, None]), labels)


def _images(character: str, part: int, count: int, seed: int, noise: float) -> NDArray[np.uint8]:
    """Images of one character, (count, 16, 16). Each image uses the same number of words of the character's stream."""
    words = np.random.PCG64(np.random.SeedSequence([seed, part, ord(character)]))
    shapes = np.stack([shape(character, face) for face in FACES])
    per_image = _DRAWS + SIDE * SIDE * _BYTES // 8
    images = np.empty((count, SIDE, SIDE), np.uint8)
    for start in range(0, count, _AT_ONCE):
        some = images[start : start + _AT_ONCE]
        drawn = words.random_raw(len(some) * per_image).reshape(len(some), per_image)
        grey = _noisy(_warped(shapes, drawn[:, : _DRAWS - 1]), drawn[:, _DRAWS - 1 :], noise)
        some[:] = np.floor(np.clip(grey, 0, 255) + 0.5)
    return images


def _warped(shapes: NDArray[np.uint16], drawn: NDArray[np.uint64]) -> Floats:
    """Coverage of every pixel from 0 to 1, after a random rotation, shear, scale and shift of a random face."""
    face = (drawn[:, 0] % np.uint64(len(shapes))).astype(np.int64)[:, None, None]
    angle, shear, across, down = (
        largest * (2 * _unit(drawn[:, 1 + i]) - 1) for i, largest in enumerate((ROTATION, SHEAR, SHIFT, SHIFT))
    )
    scale = _between(SCALE, drawn[:, 5])
    cosine, sine = (1 - angle * angle) / (1 + angle * angle), 2 * angle / (1 + angle * angle)
    pixels = np.arange(SIDE) - (SIDE - 1) / 2
    x, y = pixels[None, None, :] - across, pixels[None, :, None] - down
    x, y = (cosine * x + sine * y) / scale, (cosine * y - sine * x) / scale
    # The position of each pixel in the shape, between four of its points. The border of a shape is empty.
    last, per_pixel = shapes.shape[-1] - 1, _FINE / _STEP
    right = np.clip((x + shear * y) * per_pixel + _CENTRE, 0, last - 1e-6)
    below = np.clip(y * per_pixel + _CENTRE, 0, last - 1e-6)
    column, row = right.astype(np.int64), below.astype(np.int64)
    right, below = right - column, below - row
    corner = (face * shapes.shape[1] + row) * shapes.shape[2] + column
    top, bottom = (
        shapes.take(corner + below_it) * (1 - right) + shapes.take(corner + below_it + 1) * right
        for below_it in (0, shapes.shape[2])
    )
    covered: Floats = (top * (1 - below) + bottom * below) / (_FINE * _FINE)
    return covered


def _noisy(covered: Floats, drawn: NDArray[np.uint64], noise: float) -> Floats:
    """Unrounded grey levels: a random contrast around middle grey, plus approximately Gaussian noise."""
    contrast = _between(CONTRAST, drawn[:, 0])
    some_bytes = np.ascontiguousarray(drawn[:, 1:]).astype("<u8").view(np.uint8).reshape(*covered.shape, _BYTES)
    sums = some_bytes.sum(axis=-1, dtype=np.int64) - 255 * _BYTES / 2
    grey: Floats = 255 * (0.5 + contrast * (covered - 0.5)) + noise / _SPREAD * sums
    return grey


def _unit(words: NDArray[np.uint64]) -> Floats:
    """Numbers from 0 to 1, one per image."""
    unit: Floats = ((words >> np.uint64(11)) / 2.0**53)[:, None, None]
    return unit


def _between(limits: tuple[float, float], words: NDArray[np.uint64]) -> Floats:
    return limits[0] + (limits[1] - limits[0]) * _unit(words)


def _moments(images: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation of pixels from 0 to 1, computed by sums of integers."""
    counts = np.bincount(images.numpy().ravel(), minlength=256).tolist()
    total = sum(counts)
    mean = sum(level * count for level, count in enumerate(counts)) / total
    square = sum(level * level * count for level, count in enumerate(counts)) / total
    return mean / 255, max(math.sqrt(max(square - mean * mean, 0.0)) / 255, 1e-3)


# Glyphs ------------------------------------------------------------------------------------------------------


@cache
def shape(character: str, face: str) -> NDArray[np.uint16]:
    """The sampled glyph from which images are drawn."""
    points = coverage(outline(character, face) * EM)
    points.setflags(write=False)
    return points


def outline(character: str, face: str) -> Floats:
    """The outline of a glyph as straight lines, (lines, 2 ends, x and y), around its centre, in units of the em."""
    font = _font(face)
    if not font.get_char_index(ord(character)):
        raise invalid("characters", repr(character), f"characters of all fonts; {face} does not have this one")
    font.load_char(ord(character), flags=_no_hinting())
    ends = _line_ends(*font.get_path())
    if not len(ends):
        raise invalid("characters", repr(character), "visible characters")
    around: Floats = (ends - (ends.min(axis=(0, 1)) + ends.max(axis=(0, 1))) / 2) / font.units_per_EM
    return around


def coverage(ends: Floats) -> NDArray[np.uint16]:
    """The coverage of an outline (in pixels) on a canvas of 24 x 24 pixels, at four points per pixel in each direction.

    The value at a point is the covered area of the pixel around it, from 0 to 64.
    """
    ink = _ink(ends * _FINE, _CANVAS * _FINE)
    sums = np.pad(ink.cumsum(0, dtype=np.int32).cumsum(1, dtype=np.int32), ((1, 0), (1, 0)))
    boxes = sums[_FINE:, _FINE:] - sums[:-_FINE, _FINE:] - sums[_FINE:, :-_FINE] + sums[:-_FINE, :-_FINE]
    points: NDArray[np.uint16] = boxes[::_STEP, ::_STEP].astype(np.uint16)
    return points


def checksum(characters: str) -> str:
    """SHA-256 of the shapes of these characters in all faces."""
    digest = hashlib.sha256()
    for character in characters:
        for face in FACES:
            digest.update(shape(character, face).astype("<u2").tobytes())
    return digest.hexdigest()


def _note_other_glyphs(characters: str) -> None:
    """Warn if the glyphs differ: the dataset is then another one, and results differ slightly from documented ones."""
    if characters in PINNED and checksum(characters) != PINNED[characters]:
        import matplotlib

        warnings.warn(
            f"letters: the fonts of matplotlib {matplotlib.__version__} differ from those of "
            f"{' and '.join(PINNED_WITH)}. Images and results will differ slightly from documented ones.",
            stacklevel=3,
        )


@cache
def _font(face: str) -> FT2Font:
    """One of matplotlib's fonts, at the size at which outlines are in font units."""
    import matplotlib
    from matplotlib.ft2font import FT2Font

    path = require(
        Path(matplotlib.get_data_path()) / "fonts/ttf" / f"{face}.ttf", "Reinstall matplotlib with its fonts."
    )
    font = FT2Font(str(path))
    font.set_size(font.units_per_EM, 72)
    return font


@cache
def _no_hinting() -> Any:
    from matplotlib import ft2font

    flags = getattr(ft2font, "LoadFlags", None)  # since matplotlib 3.10
    return flags.NO_HINTING if flags else ft2font.LOAD_NO_HINTING  # type: ignore[attr-defined]


def _line_ends(vertices: Floats, codes: NDArray[np.integer]) -> Floats:
    """The outline as straight lines, (lines, 2 ends, x and y); each TrueType parabola becomes eight lines."""
    move, line, curve = 1, 2, 3
    lines: list[list[float]] = []
    curves: list[list[float]] = []
    points, kinds = vertices.tolist(), codes.tolist()
    here = start = [0.0, 0.0]
    index = 0
    while index < len(kinds):
        point = points[index]
        if kinds[index] == move:
            here = start = point
        elif kinds[index] == line:
            lines.append(here + point)
            here = point
        elif kinds[index] == curve:
            index += 1
            curves.append(here + point + points[index])
            here = points[index]
        else:  # the contour is closed
            lines.append(here + start)
            here = start
        index += 1
    first, control, last = np.array(curves).reshape(-1, 3, 1, 2).swapaxes(0, 1)
    steps = np.arange(9)[:, None] / 8
    on_them = (1 - steps) ** 2 * first + 2 * steps * (1 - steps) * control + steps**2 * last
    pieces = np.stack([on_them[:, :-1], on_them[:, 1:]], axis=2).reshape(-1, 2, 2)
    ends: Floats = np.concatenate([np.array(lines).reshape(-1, 2, 2), pieces])
    return ends


def _ink(ends: Floats, side: int) -> NDArray[np.bool_]:
    """Which of side x side samples lie inside the outline (winding number other than 0); y points up in fonts."""
    ends = ends[ends[:, 0, 1] != ends[:, 1, 1]]
    (x0, y0), (x1, y1) = ((ends[:, end, 0, None], ends[:, end, 1, None]) for end in (0, 1))
    rows = side / 2 - 0.5 - np.arange(side)
    crossed = (np.minimum(y0, y1) <= rows) & (rows < np.maximum(y0, y1))
    crossing = x0 + (rows - y0) * ((x1 - x0) / (y1 - y0))
    line, row = np.nonzero(crossed)
    column = np.clip(np.ceil(crossing[line, row] + side / 2 - 0.5), 0, side).astype(np.int64)
    winding = np.zeros((side, side + 1), np.int8)
    np.add.at(winding, (row, column), np.where(y1 > y0, 1, -1).astype(np.int8)[line, 0])
    inside: NDArray[np.bool_] = winding.cumsum(axis=1, dtype=np.int8)[:, :side] != 0
    return inside
