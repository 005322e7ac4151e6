"""Logits and features in what a user's network computes: who emits the logits, and what does it read?"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from tcil.calibration.arrays import looks_like_probabilities
from tcil.calibration.errors import invalid

# Where features come from: a module's name, a function x -> features, or that function with its head.
FeatureSpec: TypeAlias = str | Callable[[Tensor], Tensor] | tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Any]]

_NAME_FEATURES = (
    "Name the classification layer (features='fc'), the module whose output it reads (features='backbone'), or pass"
    " features=(extract, head) with head(extract(x)) equal to the logits."
)


def select_logits(output: Any) -> Tensor:
    """The logits in what a model returns: a tensor, a dict with "logits", or an object with `.logits`."""
    logits = output
    if isinstance(output, Mapping):
        if "logits" not in output:
            raise invalid(
                "model",
                f"a dict output with the keys {sorted(map(str, output))}",
                "one with the key 'logits'",
            )
        logits = output["logits"]
    elif not isinstance(output, Tensor) and hasattr(output, "logits"):
        logits = output.logits
    if not isinstance(logits, Tensor):
        raise invalid(
            "model",
            f"an output of type {type(output).__name__}",
            "logits as a tensor, in a dict under 'logits', or as an attribute .logits",
            "Wrap the model in a small nn.Module that returns the logits only.",
        )
    if logits.ndim != 2 or not logits.is_floating_point():
        raise invalid("model", f"an output of shape {tuple(logits.shape)}, {logits.dtype}", "logits (samples, classes)")
    return logits


def check_kind(logits: Tensor) -> None:
    """Refuse probabilities where logits are due."""
    if looks_like_probabilities(logits.detach()):
        raise invalid(
            "model", "outputs that are non-negative and sum to 1", "logits", "Take the softmax off the model."
        )


def check_rows(logits: Tensor, inputs: Tensor) -> None:
    """One finite row of logits for each input."""
    if len(logits) != len(inputs):
        raise invalid("model", f"{len(logits)} rows of logits for {len(inputs)} inputs", "one row for each input")
    if not bool(torch.isfinite(logits).all()):
        raise invalid("model", "NaN or infinity among its logits", "finite logits")


@dataclass(frozen=True)
class FeatureSource:
    """How to get logits and features from one forward pass.

    Either the input of the modules `heads` (by name; "" is the model itself), or the output of the module `body`,
    or a function `extract` followed by `head`. A module may be called several times in one pass: `call` says which
    of its calls counts.
    """

    heads: tuple[str, ...] = ()
    body: str | None = None
    call: int = 0
    extract: Callable[..., Tensor] | None = None
    head: Callable[[Tensor], Any] | None = None

    def storable(self) -> FeatureSource | None:
        """The source as names, which can be saved and copied; None for the user's own functions."""
        return None if self.extract is not None else self

    def run(self, model: nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Logits and features of one batch."""
        if self.extract is not None and self.head is not None:
            features = self.extract(*inputs, **options)
            return select_logits(self.head(features)), features
        seen: list[Any] = []

        def note_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(_feature_argument(args, kwargs, len(inputs[0]) if inputs else None))

        def note_output(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen.append(output)

        if self.body is not None:
            handle = model.get_submodule(self.body).register_forward_hook(note_output)
        else:
            handle = model.get_submodule(self.heads[0]).register_forward_pre_hook(note_input, with_kwargs=True)
        try:
            logits = select_logits(model(*inputs, **options))
        finally:
            handle.remove()
        return logits, seen[self.call]


@dataclass
class _Call:
    """One module's call during the probing pass, where its output could be (part of) the logits."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    number: int

    @property
    def features(self) -> Tensor | None:
        return _feature_argument(self.args, self.kwargs, len(self.output))

    def emits(self, logits: Tensor) -> bool:
        """Whether the output begins with these logits and is not merely passed through."""
        width = logits.shape[1]
        if self.features is None or self.output.shape[1] < width or not _equal(self.output[:, :width], logits):
            return False
        return not (self.features.shape == self.output.shape and _equal(self.features, self.output))

    def rerun(self, features: Tensor) -> Tensor:
        own = self.features
        args = [features if value is own else value for value in self.args]
        kwargs = {key: features if value is own else value for key, value in self.kwargs.items()}
        return select_logits(self.module(*args, **kwargs))


def _feature_argument(args: tuple[Any, ...], kwargs: dict[str, Any], rows: int | None) -> Tensor | None:
    """The argument that holds features: the first tensor with one row for each input."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim > 0]
    return next((value for value in tensors if rows is None or len(value) == rows), None)


def find_source(model: nn.Module, spec: FeatureSpec | None, x: Tensor) -> tuple[FeatureSource, Tensor, Tensor]:
    """Run one batch, watching every module; return the source with this batch's logits and features."""
    if isinstance(spec, tuple):
        source = FeatureSource(extract=spec[0], head=spec[1])
        logits = select_logits(model(x))
        features = _extracted(spec[0], x)
        _verify(logits, lambda: select_logits(spec[1](features)), "features", "the given head")
        return source, logits, features
    calls, body_outputs, logits = _watch(model, x, spec if isinstance(spec, str) else None)
    heads = _emitters([call for call in calls if _can_be_head(call, model)], logits)
    if isinstance(spec, str):
        named = [call for call in calls if call.name == spec and call.emits(logits)]
        if named:
            heads = named[-1:]
        elif heads and body_outputs and all(isinstance(output, Tensor) for output in body_outputs):
            number = next(
                (i for i, f in enumerate(body_outputs) if not _mismatch(logits, partial(_rerun, heads, f))), 0
            )
            features = body_outputs[number]
            _verify(logits, partial(_rerun, heads, features), f"features={spec!r}", _names(heads))
            return FeatureSource(body=spec, call=number), logits, features
        else:
            raise invalid(
                f"features={spec!r}",
                "a module that neither emits the logits nor feeds the module that does",
                "the classification layer, or the module whose output it reads",
                "If forward() changes the logits after the last layer, pass features=(extract, head).",
            )
    elif callable(spec):
        if not heads:
            raise invalid(
                "features",
                "a function, but no module of the model emits the logits",
                "a pair (extract, head)",
            )
        extract = spec
        features = _extracted(extract, x)
        _verify(logits, lambda: _rerun(heads, features), "features", _names(heads))
        return FeatureSource(extract=extract, head=lambda f: _rerun(heads, f)), logits, features
    if not heads:
        raise invalid(
            "features",
            "no module of the model that emits the logits",
            "a findable feature layer",
            _NAME_FEATURES,
        )
    features = cast(Tensor, heads[0].features)
    _verify(logits, lambda: _rerun(heads, features), "features", _names(heads))
    return FeatureSource(heads=tuple(call.name for call in heads), call=heads[0].number), logits, features


def _watch(model: nn.Module, x: Tensor, named: str | None) -> tuple[list[_Call], list[Any], Tensor]:
    """All module calls, innermost first, that put out one row of scores per input; and the named module's outputs."""
    calls: list[_Call] = []
    outputs: list[Any] = []
    counts: Counter[str] = Counter()

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if name == named:
                outputs.append(output)
            counts[name] += 1
            if isinstance(output, Mapping):
                output = output.get("logits")
            elif not isinstance(output, Tensor):
                output = getattr(output, "logits", None)
            if isinstance(output, Tensor) and output.ndim == 2 and len(output) == len(x):
                calls.append(_Call(name, module, args, kwargs, output, counts[name] - 1))

        return hook

    handles = [m.register_forward_hook(note(name), with_kwargs=True) for name, m in model.named_modules()]
    try:
        logits = select_logits(model(x))
    finally:
        for handle in handles:
            handle.remove()
    check_rows(logits, x)
    check_kind(logits)
    return calls, outputs, logits


def _can_be_head(call: _Call, model: nn.Module) -> bool:
    """A model is its own head only when it is a single layer; otherwise its input is the image, not features."""
    return call.module is not model or not any(True for _ in model.children())


def _emitters(calls: list[_Call], logits: Tensor) -> list[_Call]:
    """The innermost call that emits the logits, or the calls whose outputs side by side are the logits."""
    for call in calls:
        if call.emits(logits):
            return [call]
    heads: list[_Call] = []
    column = 0
    for call in calls:
        width = call.output.shape[1]
        part = logits[:, column : column + width]
        fits = part.shape == call.output.shape and call.features is not None and _equal(call.output, part)
        if fits and (not heads or call.features is heads[0].features):
            heads.append(call)
            column += width
            if column == logits.shape[1]:
                return heads
    return []


def _rerun(heads: list[_Call], features: Tensor) -> Tensor:
    return torch.cat([call.rerun(features) for call in heads], dim=1)


def _extracted(extract: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    features = extract(x)
    if not isinstance(features, Tensor) or features.ndim < 2 or len(features) != len(x):
        given = f"shape {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise invalid("features", f"a function returning {given}", f"features ({len(x)}, ...) for {len(x)} inputs")
    return features


def _verify(logits: Tensor, rerun: Callable[[], Tensor], argument: str, head: str) -> None:
    """Re-running the head on the features must give the logits, else they are not its features."""
    problem = _mismatch(logits, rerun)
    if problem:
        raise invalid(
            argument,
            f"features on which re-running {head} {problem}",
            "features that the head turns into the logits",
            _NAME_FEATURES,
        )


def _mismatch(logits: Tensor, rerun: Callable[[], Tensor]) -> str:
    """How the head's answer differs from the logits; empty where it does not."""
    try:
        again = rerun()
        problem = "" if again.shape[1] >= logits.shape[1] else f"gives {again.shape[1]} of {logits.shape[1]} logits"
        if not problem:
            again = again[:, : logits.shape[1]].float()
            gap = (again - logits.float()).abs().max().item()
            scale = 1.0 + logits.float().abs().max().item()
            fine = 2e-2 if logits.dtype in (torch.bfloat16, torch.float16) else 1e-4
            problem = f"differs from the logits by up to {gap:.3g}" if not gap <= fine * scale else ""
    except (RuntimeError, TypeError, ValueError) as error:
        problem = f"fails: {str(error).splitlines()[0]}"
    return problem


def _names(heads: list[_Call]) -> str:
    return "the head " + ", ".join(repr(call.name) if call.name else "(the model itself)" for call in heads)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.detach().float(), b.detach().float())


def submodule(model: nn.Module, name: str) -> nn.Module:
    """A module by name; the error names the nearest ones."""
    names = [known for known, _ in model.named_modules() if known]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names[-3:]
        raise invalid("features", repr(name), "the name of a module of the model", f"Nearest: {', '.join(near)}.")
    return model.get_submodule(name)
