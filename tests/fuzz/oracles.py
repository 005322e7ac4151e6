"""What every answer and every error must satisfy: one function for each invariant."""

from __future__ import annotations

import contextlib
import copy
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from typer.testing import Result

import tcil
from fuzz.cases import ANSWERED, COUNTS, REFUSED

Answer = TypeVar("Answer")
OURS = (ValueError, tcil.NotFittedError, tcil.NotReachableError, tcil.WeightsMismatchError)
_SHAPE = re.compile(r"(?P<argument>.+?): got (?P<given>.*); (expected .+|there is no such .+)", re.DOTALL)
_LONGEST = 3000
EXIT_CODES = {0, 1, 2, 75, 130}  # docs/scale-out.md, and Ctrl-C


# --- errors -----------------------------------------------------------------------------------------------------


def attempt(entry: str, call: Callable[[], Answer], arguments: Sequence[str]) -> Answer | None:
    """The answer of a call; None where it was refused by an error of ours that names one of the arguments.

    Any other error goes through, and so fails the test.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            answer = call()
        except OURS as error:
            clear(error, arguments)
            COUNTS.note(entry, REFUSED)
            return None
    COUNTS.note(entry, ANSWERED)
    return answer


def clear(error: Exception, arguments: Sequence[str]) -> None:
    """A message in our one shape, about an argument that the caller gave."""
    message = str(error)
    assert 0 < len(message) <= _LONGEST, f"a message of {len(message)} characters: {message[:300]!r}"
    if isinstance(error, ValueError):
        found = _SHAPE.match(message)
        assert found, f"no 'argument: got ...; expected ...' but {type(error).__name__}: {message!r}"
        named = found["argument"]
        assert any(named.startswith(argument) for argument in arguments), f"{named!r} is none of {arguments}"


def refused(answer: object) -> None:
    """What can have no right answer was refused."""
    assert answer is None, f"answered: {answer!r:.300}"


def answered(answer: Answer | None) -> Answer:
    """What is in order was not refused."""
    assert answer is not None, "a reasonable input was refused"
    return answer


# --- commands ---------------------------------------------------------------------------------------------------


def command(entry: str, outcome: Result) -> bool:
    """Whether a command was done: a documented exit code, and where it is not 0 one paragraph that says why."""
    failure = outcome.exception
    if failure is not None and not isinstance(failure, SystemExit):
        raise AssertionError(f"a traceback: {failure!r}") from failure
    assert outcome.exit_code in EXIT_CODES, f"exit code {outcome.exit_code}"
    assert "Traceback" not in outcome.output, outcome.output
    if outcome.exit_code == 0:
        COUNTS.note(entry, ANSWERED)
        return True
    said = (outcome.stderr or outcome.output).strip()  # without arguments, the help
    assert said, f"exit code {outcome.exit_code} without a word"
    assert len(said) <= 2 * _LONGEST, f"a message of {len(said)} characters: {said[:500]}"
    assert "\n\n" not in said, f"more than one paragraph: {said}"
    COUNTS.note(entry, REFUSED)
    return False


# --- numbers ----------------------------------------------------------------------------------------------------


def probabilities(probs: Any, rows: int, columns: int) -> np.ndarray:
    """Rows of finite numbers from 0 to 1 that sum to 1."""
    p = np.asarray(probs.detach().cpu() if isinstance(probs, Tensor) else probs, dtype=np.float64)
    assert p.shape == (rows, columns)
    assert np.isfinite(p).all(), p
    assert p.min() >= 0, p
    assert np.abs(p.sum(axis=1) - 1).max() < 1e-6, p.sum(axis=1)
    return p


def same_argmax(probs: np.ndarray, logits: np.ndarray) -> None:
    """The most probable class is the largest logit's, where one is the largest."""
    ordered = np.sort(logits, axis=1)
    alone = ordered[:, -1] > ordered[:, -2]
    moved = alone & (probs.argmax(axis=1) != logits.argmax(axis=1))
    assert not moved.any(), f"rows {np.flatnonzero(moved)}: {logits[moved]} became {probs[moved]}"


def sound_temperature(temperature: float) -> None:
    """Finite and positive, and so is its inverse: dividing by it gives numbers."""
    assert 0 < temperature < float("inf"), temperature
    assert np.isfinite(1 / temperature), temperature


def mean_nll(logits: np.ndarray, columns: np.ndarray, temperature: float = 1.0) -> float:
    """The mean negative log-likelihood of logits / T, computed the plain way."""
    z = logits / temperature
    z = z - z.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        return float((np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(z)), columns]).mean())


def nll_not_above_one(logits: np.ndarray, columns: np.ndarray, temperature: float) -> None:
    """On the set that it was fitted on, the temperature is no worse than none."""
    before, after = mean_nll(logits, columns), mean_nll(logits, columns, temperature)
    assert after <= before * (1 + 1e-9) + 1e-12, (temperature, before, after)


def near(first: Any, second: Any, relative: float = 1e-6, absolute: float = 1e-9) -> None:
    """The same numbers up to rounding, whatever the processor."""
    np.testing.assert_allclose(np.asarray(first), np.asarray(second), rtol=relative, atol=absolute)


# --- what is the user's -----------------------------------------------------------------------------------------


def _print(value: Any) -> Any:
    """Something to compare a user's object by; None for what has no content that could be changed."""
    if isinstance(value, Tensor):
        if value.is_meta or value.layout != torch.strided or value.is_quantized:
            return tuple(value.shape), value.dtype
        flat = value.detach().cpu().contiguous().reshape(-1)
        return tuple(value.shape), value.dtype, value.requires_grad, flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.shape, value.dtype, value.tobytes()
    if isinstance(value, (list, tuple)):
        return [_print(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): _print(entry) for key, entry in value.items()}
    if isinstance(value, nn.Module):
        flags = [
            (name, parameter.requires_grad, parameter.grad is None) for name, parameter in value.named_parameters()
        ]
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in value.modules()]
        return _print(dict(value.state_dict())), [module.training for module in value.modules()], flags, hooks
    return None


def _global_state() -> dict[str, Any]:
    """The process's random states and torch's switches."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - it is the old global one that must stay
    return {
        "torch random state": torch.get_rng_state().numpy().tobytes(),
        "numpy random state": (name, keys.tobytes(), rest),
        "python random state": random.getstate(),
        "torch switches": (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()),
    }


@contextlib.contextmanager
def nothing_changed(*things: Any) -> Iterator[None]:
    """Inside, neither these things nor any global state may change; also where an error ends it."""
    before, state = copy.deepcopy(_print(list(things))), _global_state()
    yield
    for what, value in _global_state().items():
        assert value == state[what], f"the {what} was changed"
    assert _print(list(things)) == before, "what the user handed over was changed"
