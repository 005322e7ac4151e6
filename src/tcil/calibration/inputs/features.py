"""Finds the head of a user's network: the module that returns the logits, and the features it reads."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from tcil.foundation.arrays import check_finite, gap_and_size, looks_like_probabilities, mask_out
from tcil.foundation.errors import invalid
from tcil.foundation.threads import in_this_thread

# How to get features: the name of a module, a function x -> features, or such a function with its head.
FeatureSpec: TypeAlias = str | Callable[[Tensor], Tensor] | tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Any]]

Keywords: TypeAlias = dict[str, Any]  # keyword arguments of a module's call

_HALF = {torch.bfloat16, torch.float16}
_MASKED = -1e3  # a column with the same value in all rows, at most this, is masked, besides those of `mask_out`
_FEWEST = 3
_GIVE_A_PAIR = "Pass features=(extract, head), two functions with head(extract(x)) equal to the model's logits."
_LOGITS_ONLY = (
    "Wrap the model in a small nn.Module whose forward returns the logits only: one of the outputs, or, for heads of"
    " different classes, torch.cat(outputs, dim=1)."
)


def select_logits(output: Any) -> Tensor:
    """The logits in a model's output: a tensor, a dict with "logits", or an object with `.logits`.

    A list or tuple of matrices is assumed to be the heads of several tasks and concatenated; `watch` checks this.
    """
    logits = _logits_part(output)
    if _is_heads(logits):
        logits = torch.cat(tuple(logits), dim=1)
    if not isinstance(logits, Tensor):
        raise invalid(
            "model",
            f"an output of type {type(output).__name__}",
            "logits as a tensor, in a dict under 'logits', as an attribute .logits, or as a list of the heads' logits",
            _LOGITS_ONLY,
        )
    if logits.layout != torch.strided or logits.is_nested:
        given = "a nested tensor" if logits.is_nested else f"a sparse tensor ({logits.layout})"
        raise invalid("model", f"{given} as its output", "logits as a dense tensor", "Return logits.to_dense().")
    if logits.ndim != 2 or not logits.is_floating_point():
        raise invalid("model", f"an output of shape {tuple(logits.shape)}, {logits.dtype}", "logits (samples, classes)")
    return logits


def _logits_part(output: Any) -> Any:
    """The part of the output with the logits: a tensor, or a list of the heads' logits."""
    if isinstance(output, Tensor):  # first, since it is the most common case and the fastest check
        return output
    if isinstance(output, Mapping):
        if "logits" not in output:
            raise invalid(
                "model",
                f"a dict output with the keys {sorted(map(str, output))}",
                "one with the key 'logits'",
            )
        return output["logits"]
    return output.logits if hasattr(output, "logits") else output


def _is_heads(output: Any) -> bool:
    """Whether this is a list or tuple of score matrices with the same number of rows."""
    return (
        isinstance(output, (list, tuple))
        and len(output) > 0
        and all(isinstance(part, Tensor) and part.ndim == 2 and part.is_floating_point() for part in output)
        and len({len(part) for part in output}) == 1
    )


def check_kind(logits: Tensor) -> None:
    """Raise if a model returns probabilities instead of logits."""
    if looks_like_probabilities(logits.detach()):
        raise invalid(
            "model", "outputs that are non-negative and sum to 1", "logits", "Remove the softmax from the model."
        )


def check_rows(logits: Tensor, inputs: Tensor) -> None:
    """Raise unless there is one row of logits for each input, finite except for masked classes (-inf)."""
    if len(logits) != len(inputs):
        raise invalid("model", f"{len(logits)} rows of logits for {len(inputs)} inputs", "one row for each input")
    if bool((torch.isnan(logits) | (logits == torch.inf)).any()):
        raise invalid("model", "NaN or infinity among its logits", "finite logits, or -inf for a masked class")
    check_finite(logits, "model")


@dataclass(frozen=True)
class FeatureSource:
    """How to get logits and features from one forward pass.

    Features are either the input of the modules `heads` (by name; "" is the model itself), or the output of the module
    `body`, or the result of a function `extract` (with `head` for the logits, if given). If a module is called several
    times in one pass, `call` is the index of the call to use. `parts` are the innermost modules that together return
    the logits, with their numbers of columns, and `grows` is the list of modules to which further heads would be added.
    """

    heads: tuple[str, ...] = ()
    body: str | None = None
    call: int = 0
    extract: Callable[..., Tensor] | None = None
    head: Callable[[Tensor], Any] | None = None
    parts: tuple[tuple[str, int], ...] = ()
    grows: str | None = None

    def storable(self) -> FeatureSource | None:
        """The source as names, which can be saved and copied; None for user functions."""
        return None if self.extract is not None else self

    def run(self, model: nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Logits and features of one batch."""
        if self.extract is not None:
            features = self.extract(*inputs, **options)
            logits = model(*inputs, **options) if self.head is None else self.head(features)
            return select_logits(logits), features
        seen: list[Any] = []

        def note_input(_: nn.Module, args: tuple[Any, ...], kwargs: Keywords) -> None:
            seen.append(_feature_argument(args, kwargs, len(inputs[0]) if inputs else None))

        def note_output(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen.append(output)

        if self.body is not None:
            handle = model.get_submodule(self.body).register_forward_hook(in_this_thread(note_output))
        else:
            note = in_this_thread(note_input)
            handle = model.get_submodule(self.heads[0]).register_forward_pre_hook(note, with_kwargs=True)
        try:
            logits = select_logits(model(*inputs, **options))
        finally:
            handle.remove()
        return logits, seen[self.call]


@dataclass
class _Call:
    """One call of a module during the probing pass, whose output could be (part of) the logits."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Keywords
    output: Tensor
    number: int
    autocast: torch.autocast  # as it was when the module ran

    @property
    def features(self) -> Tensor | None:
        return _feature_argument(self.args, self.kwargs, len(self.output))

    def emits(self, logits: Tensor, same: Callable[[Tensor, Tensor], bool]) -> bool:
        """Whether the output begins with these logits and is computed by this module, not just passed through."""
        width = logits.shape[1]
        if self.features is None or self.output.shape[1] < width or not same(self.output[:, :width], logits):
            return False
        return not self._passes_on(self.features)

    def _passes_on(self, features: Tensor) -> bool:
        """Whether the module passes its input on: dropout, for instance, or a log-softmax or a scale."""
        if features.shape != self.output.shape:
            return False
        learned = sum(parameter.numel() for parameter in self.module.parameters())
        return _equal(features, self.output) or (learned <= 1 and _related(features, self.output))

    def rerun(self, features: Tensor) -> Tensor:
        original = self.features
        features = features if original is None else features.to(original.dtype)
        args = [features if value is original else value for value in self.args]
        kwargs = {key: features if value is original else value for key, value in self.kwargs.items()}
        with self.autocast:
            return select_logits(self.module(*args, **kwargs))


@dataclass(frozen=True)
class _Head:
    """The calls that together return the logits; `exactly`, or up to a scale and a shift of each row."""

    calls: list[_Call]
    exactly: bool = True

    def __bool__(self) -> bool:
        return bool(self.calls)

    def __str__(self) -> str:
        return "the head " + ", ".join(repr(call.name) if call.name else "(the model itself)" for call in self.calls)

    @property
    def features(self) -> Tensor:
        return cast(Tensor, self.calls[0].features)

    def rerun(self, features: Tensor) -> Tensor:
        return torch.cat([call.rerun(features) for call in self.calls], dim=1)


def _growing(model: nn.Module, heads: Sequence[str], called: Container[str]) -> str | None:
    """The list of modules to which further heads would be added, if the heads are the last ones in it that ran."""
    homes = {name.rpartition(".")[0] for name in heads}
    home = homes.pop()
    if homes or not home or not isinstance(model.get_submodule(home), (nn.ModuleList, nn.ModuleDict)):
        return None
    return None if any(name in called for name in later_heads(model, home, heads)) else home


def later_heads(model: nn.Module, home: str, heads: Sequence[str]) -> list[str]:
    """The modules of the list `home` that come after the last of these heads."""
    names = [f"{home}.{name}" for name, _ in model.get_submodule(home).named_children()]
    return names[1 + max(names.index(name) for name in heads) :]


def _feature_argument(args: tuple[Any, ...], kwargs: Keywords, rows: int | None) -> Tensor | None:
    """The argument with the features: the first tensor with one row for each input."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim > 0]
    return next((value for value in tensors if rows is None or len(value) == rows), None)


def find_source(model: nn.Module, spec: FeatureSpec | None, x: Tensor) -> tuple[FeatureSource, Tensor, Tensor]:
    """Run one batch with hooks on every module; return the source, and the batch's logits and features."""
    seen = watch(model, x, spec if isinstance(spec, str) else None)
    head, logits = seen.head, seen.logits
    if isinstance(spec, tuple):
        features = _extracted(spec[0], x)
        _verify(logits, lambda: select_logits(spec[1](features)), "features", "the given head", _GIVE_A_PAIR)
        return FeatureSource(extract=spec[0], head=spec[1]), logits, features
    advice = f"Leave features= out: the model reads them in {head}." if spec is not None and head else _GIVE_A_PAIR
    if not head:
        layers = f"{spec!r}, but " if isinstance(spec, str) else "a function, but " if spec is not None else ""
        expected = "a module whose output is the logits, up to a scale, a log-softmax or a mask"
        if float(logits.detach().min()) <= _MASKED:
            advice = f"If the model masks classes, let it use -inf. {advice}"
        raise invalid("features", f"{layers}no module of the model that emits the logits", expected, advice)
    if isinstance(spec, str):
        named = _emitters([call for call in reversed(seen.calls) if call.name == spec], logits)
        if named:
            head, seen = named, replace(seen, head=named)
        elif seen.outputs and all(isinstance(output, Tensor) for output in seen.outputs):
            number = next(
                (i for i, f in enumerate(seen.outputs) if not _mismatch(logits, partial(head.rerun, f), head.exactly)),
                0,
            )
            features = seen.outputs[number]
            _verify(logits, partial(head.rerun, features), f"features={spec!r}", str(head), advice, head.exactly)
            return replace(seen.source(model), body=spec, call=number), logits, features
        else:
            raise invalid(
                f"features={spec!r}",
                "a module that neither emits the logits nor feeds the module that does",
                "the classification layer, or the module whose output it reads",
                advice,
            )
    elif spec is not None:
        features = _extracted(spec, x)
        _verify(logits, lambda: head.rerun(features), "features", str(head), advice, head.exactly)
        return FeatureSource(extract=spec, head=head.rerun if head.exactly else None), logits, features
    features = head.features
    _verify(logits, lambda: head.rerun(features), "features", str(head), advice, head.exactly)
    return seen.source(model), logits, features


@dataclass(frozen=True)
class _Seen:
    """The record of a watched pass: calls that returned one row of scores per input, innermost first, and the logits.

    `outputs` are those of the named module; `called` are all modules that ran.
    """

    calls: list[_Call]
    outputs: list[Any]
    called: Container[str]
    logits: Tensor
    head: _Head

    def source(self, model: nn.Module) -> FeatureSource:
        """The modules that return the logits, by name."""
        parts = _side_by_side(self.calls, self.logits) or self.head.calls
        widths = tuple((call.name, call.output.shape[1]) for call in parts)
        grows = _growing(model, [call.name for call in parts], self.called)
        names = tuple(call.name for call in self.head.calls)
        return FeatureSource(names, call=self.head.calls[0].number, parts=widths, grows=grows)


def watch(model: nn.Module, x: Tensor, named: str | None = None) -> _Seen:
    """Run one batch with hooks on every module; raises if the output cannot be identified as logits."""
    calls: list[_Call] = []
    outputs: list[Any] = []
    counts: Counter[str] = Counter()

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Keywords, output: Any) -> None:
            if name == named:
                outputs.append(output)
            counts[name] += 1
            if isinstance(output, Mapping):
                output = output.get("logits")
            elif not isinstance(output, Tensor):
                output = getattr(output, "logits", output)
            if _is_heads(output):
                output = torch.cat(tuple(output), dim=1)
            if isinstance(output, Tensor) and output.ndim == 2 and len(output) == len(x):
                calls.append(_Call(name, module, args, kwargs, output, counts[name] - 1, _autocast_now(output)))

        return hook

    handles = []
    try:
        for name, module in model.named_modules():
            with contextlib.suppress(RuntimeError):  # TorchScript modules do not accept hooks and are skipped
                handles.append(module.register_forward_hook(in_this_thread(note(name)), with_kwargs=True))
        output = model(x)
    finally:
        for handle in handles:
            handle.remove()
    logits = select_logits(output)
    check_rows(logits, x)
    check_kind(logits)
    # A model is its own head only when it is a single layer; otherwise its input is the image, not features.
    inside = [call for call in calls if call.module is not model or not any(True for _ in model.children())]
    _check_heads(model, _logits_part(output), inside)
    return _Seen(inside, outputs, counts, logits, _emitters(inside, logits))


def _autocast_now(value: Tensor) -> torch.autocast:
    kind = value.device.type
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))


def _check_heads(model: nn.Module, outputs: Any, calls: list[_Call]) -> None:
    """Raise if several outputs may be something else than the heads of several tasks, such as features.

    Heads read the same features. In a tuple, which could also be (logits, projection), they must also be alike:
    children of the same list of modules, or of the same name except for a number.
    """
    if isinstance(outputs, Tensor) or len(outputs) < 2:
        return
    heads: list[_Call] = []
    for part in outputs:
        same = [call for call in calls if call.output is part] or [call for call in calls if _equal(call.output, part)]
        heads += [call for call in same if call.features is not None][:1]
    alike = len({id(call) for call in heads}) == len(outputs)
    for call in heads:
        features, first = cast(Tensor, call.features), cast(Tensor, heads[0].features)
        alike = alike and (features is first or _equal(features, first))
        alike = alike and (isinstance(outputs, list) or _family(model, call.name) == _family(model, heads[0].name))
    if not alike:
        shapes = ", ".join(str(tuple(part.shape)) for part in outputs)
        raise invalid(
            "model",
            f"an output of type {type(outputs).__name__} with {len(outputs)} matrices of the shapes {shapes}",
            "logits as one tensor, or a list of the logits of heads that read the same features",
            _LOGITS_ONLY,
        )


def _family(model: nn.Module, name: str) -> str:
    home = name.rpartition(".")[0]
    in_list = home and isinstance(model.get_submodule(home), (nn.ModuleList, nn.ModuleDict))
    return home if in_list else re.sub(r"\d+", "", name)


def _emitters(calls: list[_Call], logits: Tensor) -> _Head:
    """The innermost call that returns the logits, or the calls whose concatenated outputs are the logits.

    If there is none, a log-softmax, a scale or a mask may follow the head: then a call whose output is the logits up to
    these.
    """
    for call in calls:
        if call.emits(logits, _equal):
            return _Head([call])
    heads = _side_by_side(calls, logits)
    if heads:
        return _Head(heads)
    for call in calls:
        if call.emits(logits, _related):
            return _Head([call], exactly=False)
    by_features: dict[int, list[_Call]] = {}
    for call in calls:
        if not any(True for _ in call.module.children()):
            by_features.setdefault(id(call.features), []).append(call)
    for readers in by_features.values():
        if readers[0].features is not None and _related(torch.cat([call.output for call in readers], dim=1), logits):
            return _Head(readers, exactly=False)
    return _Head([])


def _side_by_side(calls: list[_Call], logits: Tensor) -> list[_Call]:
    """The innermost calls that read the same features and whose concatenated outputs are the logits."""
    heads: list[_Call] = []
    column = 0
    for call in calls:
        part = logits[:, column : column + call.output.shape[1]]
        whole = part.shape == call.output.shape and call.emits(part, _equal)
        if whole and (not heads or call.features is heads[0].features):
            heads.append(call)
            column += part.shape[1]
            if column == logits.shape[1]:
                return heads
    return []


def _extracted(extract: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    features = extract(x)
    if not isinstance(features, Tensor) or features.ndim < 2 or len(features) != len(x):
        given = f"shape {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise invalid("features", f"a function that returns {given}", f"features ({len(x)}, ...) for {len(x)} inputs")
    return features


def _verify(
    logits: Tensor, rerun: Callable[[], Tensor], argument: str, head: str, advice: str, exactly: bool = True
) -> None:
    """Raise unless re-running the head on the features gives the logits."""
    problem = _mismatch(logits, rerun, exactly)
    if problem:
        raise invalid(
            argument,
            f"features on which re-running {head} {problem}",
            "features that the head turns into the logits",
            advice,
        )


def _mismatch(logits: Tensor, rerun: Callable[[], Tensor], exactly: bool) -> str:
    """How the head's output differs from the logits; empty if it does not."""
    try:
        again = rerun()
        if again.shape[1] < logits.shape[1]:
            return f"gives {again.shape[1]} of {logits.shape[1]} logits"
        again = again[:, : logits.shape[1]]
        if not exactly:
            return "" if _related(again, logits) else "differs from the logits by more than a scale and a shift"
        fine = 2e-2 if {again.dtype, logits.dtype} & _HALF else 1e-4
        gap, size = gap_and_size(mask_out(again), mask_out(logits))
        return f"differs from the logits by up to {gap:.3g}" if not gap <= fine * (1.0 + size) else ""
    except (RuntimeError, TypeError, ValueError) as error:
        return f"fails: {str(error).splitlines()[0]}"


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    kind = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return torch.equal(a.detach().to(kind), b.detach().to(kind))


def _related(a: Tensor, b: Tensor) -> bool:
    """Whether b = s a + one number per row, with a single s > 0, up to rounding; masked columns of b are ignored.

    This holds for log-probabilities and scaled logits.
    """
    if a.shape != b.shape:
        return False
    half = bool({a.dtype, b.dtype} & _HALF)
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    masked = ((b == b[:1]).all(dim=0) & (b[0] <= _MASKED)) | (mask_out(b) == -torch.inf).all(dim=0)
    a, b = a[:, ~masked], b[:, ~masked]
    if a.numel() - len(a) < _FEWEST:  # too few numbers: they may be related by chance
        return False
    rounding = (2e-2 if half else 1e-6) * float(b.abs().max())
    a, b = a - a.mean(dim=1, keepdim=True), b - b.mean(dim=1, keepdim=True)
    scale = float((a * b).sum() / a.square().sum())
    return scale > 0 and float((b - scale * a).abs().max()) <= rounding + 1e-4 * float(b.abs().max())


def submodule(model: nn.Module, name: str) -> nn.Module:
    """A module by name; the error names the nearest ones."""
    names = [other for other, _ in model.named_modules() if other]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names[-3:]
        raise invalid("features", repr(name), "the name of a module of the model", f"Nearest: {', '.join(near)}.")
    return model.get_submodule(name)
