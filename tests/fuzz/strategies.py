"""What users may hand over, in order and hostile.

Numbers come from a drawn seed, which is faster than drawing each; scores lie on a grid of multiples of 2^-10, so that a
shift or another width of the numbers is exact and cannot turn a tie, a bin's edge or the largest class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

MASKS = (-np.inf, float(np.finfo(np.float64).min), float(np.finfo(np.float32).min), -1e92, -1e30)
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**63, -(2**70), 0.5, float("nan"), float("inf"), 1e308, 1e-320]),
    st.sampled_from(["", "x", "[/b]", "[red]", "nan", "-1", "../../x", "math:sqrt", "a:b:c", "\x00", "ü\u202e"]),
    st.sampled_from([[], {}, [[]], [None], {"a": 1}, [1, "x"], {"tasks": {}}]),
)


@dataclass(frozen=True, eq=False)
class LogitSet:
    """Logits (N, K) in float64 and the column of each label."""

    logits: np.ndarray
    labels: np.ndarray

    @property
    def width(self) -> int:
        """How many classes."""
        return self.logits.shape[1]


@st.composite
def logit_sets(draw: st.DrawFn, least_rows: int = 1, least_classes: int = 2) -> LogitSet:
    """Scores that know their labels more or less, on any sensible scale, with ties at times."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = draw(st.integers(least_rows, 30))
    classes = draw(st.integers(least_classes, 6))
    signal = draw(st.sampled_from([2, 0, 6]))
    ties = draw(st.booleans())
    scale = 2.0 ** draw(st.integers(-4, 4))
    steps = 1 if ties else 2**10
    labels = rng.integers(0, classes, rows)
    logits = rng.integers(-3 * steps, 3 * steps + 1, (rows, classes)) / steps
    logits[np.arange(rows), labels] += signal * rng.integers(0, 2, rows)
    return LogitSet(logits * scale, labels)


def _read_only(values: np.ndarray) -> np.ndarray:
    copy = values.copy()
    copy.flags.writeable = False
    return copy


# The same matrix in whatever holds it; all of these are usual.
CONTAINERS: dict[str, Callable[[np.ndarray], Any]] = {
    "tensor": lambda z: torch.from_numpy(z.copy()),
    "array": lambda z: z.copy(),
    "list": lambda z: z.tolist(),
    "tuple": lambda z: tuple(map(tuple, z.tolist())),
    "rows": lambda z: list(z.copy()),
    "read-only": _read_only,
    "fortran": np.asfortranarray,
    "big-endian": lambda z: z.astype(">f8"),
    "strided": lambda z: np.repeat(z, 2, axis=0)[::2],
    "transposed": lambda z: torch.from_numpy(z.T.copy()).T,
    "parameter": lambda z: torch.from_numpy(z.copy()).requires_grad_(),
    "float32": lambda z: z.astype(np.float32),
    "float32 tensor": lambda z: torch.from_numpy(z.astype(np.float32)),
}
LABEL_CONTAINERS: dict[str, Callable[[np.ndarray], Any]] = {
    "tensor": lambda y: torch.from_numpy(y.copy()),
    "array": lambda y: y.copy(),
    "list": lambda y: y.tolist(),
    "int8": lambda y: y.astype(np.int8),
    "uint8": lambda y: torch.from_numpy(y.astype(np.uint8)),
    "int32": lambda y: y.astype(np.int32),
    "uint64": lambda y: y.astype(np.uint64),
    "big-endian": lambda y: y.astype(">i8"),
}
CLASS_CONTAINERS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array": np.asarray,
    "tensor": torch.tensor,
    "generator": lambda c: (label for label in c),
}


# --- matrices that are out of order ----------------------------------------------------------------------------


def _spoiled(value: float) -> Callable[[np.ndarray], Any]:
    def spoil(z: np.ndarray) -> np.ndarray:
        z = z.copy()
        z.flat[z.size // 2] = value
        return z

    return spoil


def softmax(z: np.ndarray) -> np.ndarray:
    powers = np.exp(z - z.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


# No answer to these could be right.
UNUSABLE: dict[str, Callable[[np.ndarray], Any]] = {
    "NaN": _spoiled(np.nan),
    "infinity": _spoiled(np.inf),
    "NaN tensor": lambda z: torch.from_numpy(_spoiled(np.nan)(z)),
    "complex": lambda z: z + 1j,
    "complex tensor": lambda z: torch.from_numpy(z + 1j),
    "masked array": lambda z: np.ma.array(z, mask=np.arange(z.size).reshape(z.shape) == z.size // 2),
    "objects": lambda z: z.astype(object),
    "words": lambda z: z.astype(str),
    "text": lambda z: "logits",
    "bytes": lambda z: b"logits",
    "None": lambda z: None,
    "number": lambda z: 3.0,
    "flat": lambda z: z.ravel(),
    "deep": lambda z: z[None],
    "empty": lambda z: z[:0],
    "no columns": lambda z: z[:, :0],
    "one column": lambda z: z[:, :1],
    "ragged": lambda z: [*z.tolist(), [1.0]],
    "dict": lambda z: {"logits": z},
    "set": lambda z: set(map(tuple, z.tolist())),
    "function": lambda z: lambda: z,
    "meta": lambda z: torch.from_numpy(z).to("meta"),
    "dates": lambda z: z.astype("datetime64[s]"),
    "record": lambda z: np.zeros(len(z), dtype=[("a", "f8"), ("b", "f8")]),
}
# These may be read or refused; where they are read, the answer must be sound.
ODD: dict[str, Callable[[np.ndarray], Any]] = {
    "half": lambda z: torch.from_numpy(z).half(),
    "bfloat16": lambda z: torch.from_numpy(z).bfloat16(),
    "whole numbers": lambda z: np.rint(z).astype(np.int64),
    "bytes of numbers": lambda z: np.abs(np.rint(z)).astype(np.uint8),
    "flags": lambda z: z > 0,
    "long double": lambda z: z.astype(np.longdouble),
    "sparse": lambda z: torch.from_numpy(z).to_sparse(),
    "sparse rows": lambda z: torch.from_numpy(z).to_sparse_csr(),
    "quantised": lambda z: torch.quantize_per_tensor(torch.from_numpy(z).float(), 0.5, 0, torch.qint8),
    "nothing masked": lambda z: np.ma.array(z),
    "matrix": np.matrix,
    "constant": np.zeros_like,
    "constant rows": lambda z: np.repeat(z[:, :1], z.shape[1], axis=1),
    "log-probabilities": lambda z: np.log(softmax(z)),
    "all masked": lambda z: np.full_like(z, -np.inf),
    "one class left": lambda z: np.where(np.arange(z.shape[1]) == 0, z, -np.inf),
    "masked here and there": lambda z: np.where((np.arange(z.size) % 3).reshape(z.shape) == 0, -np.inf, z),
    "masked by 1e4": lambda z: np.where(np.arange(z.shape[1]) == 0, -1e4, z),
    "masked by 1e4 below": lambda z: np.where(np.arange(z.shape[1]) == 0, z - 1e4, z),
    "masked by 5e4 below": lambda z: np.where(np.arange(z.shape[1]) == 0, z - 5e4, z),
    "largest": lambda z: np.sign(z) * np.finfo(np.float64).max,
    "huge": lambda z: z * 1e300,
    "huge float32": lambda z: (z * 1e36).astype(np.float32),
    "tiny": lambda z: z * 1e-310,
    "far": lambda z: z + 1e15,
    "one large": _spoiled(1e300),
    "one small": _spoiled(-1e300),
    "one row": lambda z: z[:1],
}
BAD_LABELS: dict[str, Callable[[np.ndarray], Any]] = {
    "floats": lambda y: y.astype(np.float64),
    "flags": lambda y: y > 0,
    "one too many": lambda y: np.append(y, 0),
    "one too few": lambda y: y[:-1],
    "column": lambda y: y[:, None],
    "one-hot": lambda y: np.eye(8)[y],
    "negative": lambda y: np.append(y[:-1], -1),
    "ignored": lambda y: np.append(y[:-1], -100),
    "beyond": lambda y: np.append(y[:-1], 99),
    "huge": lambda y: np.append(y[:-1], 2**62),
    "beyond 64 bits": lambda y: [*y.tolist()[:-1], 2**70],
    "unsigned": lambda y: np.append(y[:-1].astype(np.uint64), np.uint64(2**63 + 1)),
    "names": lambda y: [str(label) for label in y],
    "complex": lambda y: y + 0j,
    "masked": lambda y: np.ma.array(y, mask=np.arange(len(y)) == 0),
    "None": lambda y: None,
    "number": lambda y: 1,
    "objects": lambda y: np.array([None] * len(y)),
    "meta": lambda y: torch.from_numpy(y).to("meta"),
    "nested": lambda y: [y.tolist(), y.tolist()],
}
# Given in place of the list of K classes.
BAD_CLASSES: dict[str, Callable[[int], Any]] = {
    "set": lambda k: set(range(k)),
    "frozen set": lambda k: frozenset(range(k)),
    "too many": lambda k: list(range(k + 1)),
    "too few": lambda k: list(range(k - 1)),
    "repeated": lambda k: [0] * k,
    "none": lambda k: [],
    "names": lambda k: [f"class {i}" for i in range(k)],
    "text": lambda k: "abcdef"[:k],
    "number": lambda k: k,
    "floats": lambda k: [float(i) for i in range(k)],
    "float array": lambda k: np.arange(k) + 0.5,
    "matrix": lambda k: np.arange(k)[:, None],
    "objects": lambda k: [None] * k,
    "others": lambda k: list(range(100, 100 + k)),
}
