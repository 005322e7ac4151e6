"""The fitted functions from logits to calibrated log-probabilities, as small modules that can be saved and exported.

A masked class (see `arrays`) has probability 0 and log-probability -inf in all of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from tcil.foundation.arrays import find_masked, places_in, recorded
from tcil.foundation.errors import invalid

NARROW = (torch.float16, torch.bfloat16)
_WIDE = (torch.float32, torch.float64)
_FAR = 30.0  # temperatures, below the largest logit of a row
_TEMPERATURES = (1e-100, 1e100)  # float32 logits range from 1e-45 to 3e38; far beyond, z / T is no longer finite


def _is_temperature(value: Tensor) -> bool:
    """Whether this is a valid fitted temperature."""
    return value.shape == () and value.dtype in _WIDE and _TEMPERATURES[0] <= float(value) <= _TEMPERATURES[1]


def _narrowed(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers in another type; raises if one of them underflows or overflows there."""
    moved = value.to(dtype)
    lost = ((moved == 0) & (value != 0)) | (torch.isinf(moved) & torch.isfinite(value))
    if bool(lost.any()):
        given = f"{dtype}, which cannot represent {name} {float(value[lost].flatten()[0]):.3g}"
        raise invalid("dtype", given, "torch.float64 for these logits")
    return moved


def _is_flags(value: Tensor, shape: tuple[int, ...]) -> bool:
    return value.dtype == torch.bool and value.shape == shape


def wide(logits: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, bool]:
    """The logits in float64, so that rounding changes no argmax (float32 on devices without it), -inf where masked.

    Masked classes are detected before a conversion to a narrower type, which may round the mask values. The second
    result is False if certainly no class is masked.
    """
    if dtype == torch.float32:
        z, masked = find_masked(logits if logits.dtype in _WIDE else logits.float())
        return (z if z.dtype == torch.float32 else _within_float32(z)), masked
    return find_masked(logits.float() if logits.device.type == "mps" else logits.double())


def _within_float32(z: Tensor) -> Tensor:
    """float64 logits in float32; a row that overflows there is shifted and clamped first, which keeps its softmax."""
    least = torch.finfo(torch.float32).min
    fits = (z == -torch.inf) | (z.abs() <= -least)
    if not recorded() and bool(fits.all()):
        return z.float()
    shifted = (z - z.amax(dim=1, keepdim=True)).clamp(min=least).masked_fill(z == -torch.inf, -torch.inf)
    return torch.where(fits.all(dim=1, keepdim=True), z, shifted).float()


def centred(z: Tensor, temperature: Tensor | float) -> Tensor:
    """The logits (N, K) about the mean of their row, over classes that are not masked.

    In the mean no logit counts as more than 30 temperatures below the largest one: it has no probability, and a mask
    that is not recognised as one would draw the mean away.

    >>> centred(torch.tensor([[1.0, 3.0, -torch.inf], [0.0, 0.0, -900.0]]), 1.0)
    tensor([[  -1.,    1.,  -inf],
            [  10.,   10., -890.]])
    """
    below = z - z.amax(dim=1, keepdim=True)
    alive = z != -torch.inf
    counted = torch.where(alive, below.clamp(min=-_FAR * temperature), 0.0)
    return below - counted.sum(dim=1, keepdim=True) / alive.sum(dim=1, keepdim=True).clamp(min=1)


def log_softmax_at(z: Tensor, temperature: Tensor, top: Tensor | None = None) -> Tensor:
    """log softmax(z / T); a row whose z / T overflows is shifted first, which does not change the result.

    `top` is the argmax of each row of z, where it is known.
    """
    scaled = z / temperature
    if recorded() or not _has_finite_maxima(scaled):
        fine = torch.isfinite(scaled.amax(dim=1, keepdim=True))
        scaled = torch.where(fine, scaled, (z - z.amax(dim=1, keepdim=True)) / temperature)
    return keep_argmax(torch.log_softmax(scaled, dim=1), z, top)


def _has_finite_maxima(values: Tensor) -> bool:
    """Whether the maximum of every row is finite, found by two operators; False too if their sum overflows."""
    if values.numel() == 0:
        return True
    return math.isfinite(float((values.detach() if values.requires_grad else values).amax(dim=1).sum()))


def keep_argmax(log_probs: Tensor, z: Tensor, top_of_z: Tensor | None = None) -> Tensor:
    """Give the class of the largest logit a minimal margin in rows where rounding made another class as probable."""
    if not recorded():
        most_probable = log_probs.argmax(dim=1)
        if torch.equal(most_probable, z.argmax(dim=1) if top_of_z is None else top_of_z):
            return log_probs
    top = z == z.amax(dim=1, keepdim=True)
    lead = log_probs.masked_fill(~top, torch.inf).amin(dim=1, keepdim=True)
    ahead = log_probs.masked_fill(top, -torch.inf).amax(dim=1, keepdim=True)
    caught_up = ahead >= lead
    margin = 8 * torch.finfo(log_probs.dtype).eps * (1 + ahead.abs())
    return torch.where(caught_up & top, ahead + margin, log_probs)


class CalibrationMap(nn.Module):
    """A fitted function from logits to log-probabilities. Subclass it to write your own method.

    Its buffers are its entire state; they are always float32 or wider.

    Attributes
    ----------
    needs_features : bool
        If True, `transform` requires features, and wrapped models provide them.
    dtype : torch.dtype
        Type of the computation: float64, or float32 in a model that was wrapped for serving.

    Examples
    --------
    >>> import torch
    >>> from tcil.extending import CalibrationMap
    >>> class Halving(CalibrationMap):
    ...     def forward(self, logits, features=None):
    ...         return torch.log_softmax(logits.double() / 2, dim=1)
    >>> Halving()(torch.tensor([[2.0, 0.0]])).exp()
    tensor([[0.7311, 0.2689]], dtype=torch.float64)
    """

    needs_features: ClassVar[bool] = False
    dtype: torch.dtype = torch.float64

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Calibrated log-probabilities, (N, K)."""
        raise TypeError(f"{type(self).__name__} does not define forward")

    def believed(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """The log-probabilities before predictions are restored, for maps that do so; else those of `forward`."""
        return cast(Tensor, self(logits, features))

    def at_prior(self, logits: Tensor, log_prior: Tensor, features: Tensor | None = None) -> Tensor:
        """Log-probabilities for other class frequencies, by Bayes' rule: log q + log prior, normalised."""
        return torch.log_softmax(self.believed(logits, features) + log_prior, dim=1)

    def sound(self, n_classes: int) -> bool:
        """Whether the arrays can be those of a fit on `n_classes` classes; checked when a file is loaded."""
        return all(bool(torch.isfinite(value).all()) for value in self.buffers())

    def extra_repr(self) -> str:
        """The numbers that define the map, for `print(model)`; arrays are left out."""
        named = [(name, value) for name, value in self.named_buffers() if not (value.ndim or value.is_meta)]
        single = {name: value for name, value in named if value.is_floating_point()}
        return ", ".join(f"{name}={float(value):.4g}" for name, value in single.items())

    def set_state(self, **state: Tensor) -> None:
        """Register the arrays that define the map."""
        for name, value in state.items():
            self.register_buffer(name, value)

    def answer_in(self, dtype: torch.dtype) -> None:
        """Compute in this type from now on, and convert the arrays to it."""
        for name, value in list(self.named_buffers()):
            if value.is_floating_point():
                self.register_buffer(name, _narrowed(name, value, dtype))
        self.dtype = dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CalibrationMap:
        """Follow `.to(device)`, but not `.half()`, which would change the temperature."""

        def keep_wide(value: Tensor) -> Tensor:
            try:
                moved = fn(value)
            except TypeError:  # float64 on a device without it
                moved = fn(value.float())
            return value.to(moved.device) if moved.dtype in NARROW else moved

        super()._apply(keep_wide, recurse)  # type: ignore[no-untyped-call]
        return self


class TemperatureMap(CalibrationMap):
    """log softmax(z / T).

    Parameters
    ----------
    temperature : tensor ()
        The temperature, in float64.

    Examples
    --------
    >>> import torch
    >>> from tcil.extending import TemperatureMap
    >>> TemperatureMap(torch.tensor(2.0).double())(torch.tensor([[2.0, 0.0]])).exp()
    tensor([[0.7311, 0.2689]], dtype=torch.float64)
    """

    temperature: Tensor

    def __init__(self, temperature: Tensor) -> None:
        super().__init__()
        self.set_state(temperature=temperature)

    def sound(self, n_classes: int) -> bool:
        """A positive temperature."""
        return super().sound(n_classes) and _is_temperature(self.temperature)

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Calibrated log-probabilities, (N, K)."""
        return log_softmax_at(wide(logits, self.dtype)[0], self.temperature)


class GroupTemperatureMap(CalibrationMap):
    """log softmax(z / T_g), where g says whether the predicted class is new."""

    temperatures: Tensor
    is_new: Tensor

    def __init__(self, temperatures: Tensor, is_new: Tensor) -> None:
        super().__init__()
        self.set_state(temperatures=temperatures, is_new=is_new)

    def sound(self, n_classes: int) -> bool:
        """Two positive temperatures, and a group for every class."""
        pair = self.temperatures.shape == (2,) and all(_is_temperature(value) for value in self.temperatures)
        return super().sound(n_classes) and pair and _is_flags(self.is_new, (n_classes,))

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Calibrated log-probabilities, (N, K)."""
        z, top = wide(logits, self.dtype)[0], logits.argmax(dim=1)
        # A recorded graph must not ask for the length, which would be fixed. By numbers it takes half as long.
        if not recorded() and len(top) == 1 and top.device.type == "cpu":
            temperature = self.temperatures[int(self.is_new[int(top)])]
        else:
            temperature = self.temperatures[self.is_new[top].long()][:, None]
        return log_softmax_at(z, temperature, top if z is logits else None)


class PriorAdjustedMap(CalibrationMap):
    """log q = log softmax(z / T + b [class is old]), with an option to keep the predictions of z.

    By default new classes have the temperature of the old ones. Where they have one of their own, `new_temperature`, z
    is taken about the mean of its row (`centred`), so that a number added to all logits of an image has no effect.

    With `keep`, the most probable class of z stays the most probable one, and its confidence is its probability under
    q. If another class is more probable, the other classes are mixed with the uniform distribution until none is. A
    confidence below 1 / K becomes 1 / K. K is the number of unmasked classes in the row.
    """

    temperature: Tensor
    bias: Tensor
    is_new: Tensor
    keep: Tensor
    new_temperature: Tensor

    def __init__(
        self, temperature: Tensor, bias: Tensor, is_new: Tensor, keep: Tensor, new_temperature: Tensor | None = None
    ) -> None:
        super().__init__()
        own = temperature.clone() if new_temperature is None else new_temperature
        self.set_state(temperature=temperature, bias=bias, is_new=is_new, keep=keep, new_temperature=own)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Models saved by earlier versions had one temperature.
        if (temperature := state_dict.get(f"{prefix}temperature")) is not None:
            state_dict.setdefault(f"{prefix}new_temperature", temperature)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def sound(self, n_classes: int) -> bool:
        """Positive temperatures, a finite bias."""
        flags = _is_flags(self.keep, ()) and _is_flags(self.is_new, (n_classes,))
        bias = self.bias.shape == () and self.bias.dtype in _WIDE
        temperatures = _is_temperature(self.temperature) and _is_temperature(self.new_temperature)
        return super().sound(n_classes) and flags and bias and temperatures

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Calibrated log-probabilities, (N, K)."""
        z, _ = wide(logits, self.dtype)
        return self._kept(torch.log_softmax(self._scaled(z), dim=1), z)

    def believed(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """The log of q, (N, K)."""
        return torch.log_softmax(self._scaled(wide(logits, self.dtype)[0]), dim=1)

    def at_prior(self, logits: Tensor, log_prior: Tensor, features: Tensor | None = None) -> Tensor:
        """Log-probabilities for other class frequencies.

        The bias of each class is shifted by its log prior. With `keep`, the most probable class is that of z / T with
        the same shift (T of old classes for all): the prediction of the network under these frequencies.
        """
        z, _ = wide(logits, self.dtype)
        return self._kept(torch.log_softmax(self._scaled(z) + log_prior, dim=1), z / self.temperature + log_prior)

    def _scaled(self, z: Tensor) -> Tensor:
        scaled = torch.addcmul(z / self.temperature, self.bias, ~self.is_new)
        if not recorded() and torch.equal(self.new_temperature, self.temperature):
            return scaled
        z = centred(z, self.temperature)
        further = z / self.new_temperature - z / self.temperature
        return scaled + torch.where(self.is_new & further.isfinite(), further, 0.0)

    def _kept(self, log_q: Tensor, z: Tensor) -> Tensor:
        """The log of q; if predictions are kept, the class of the largest z is the most probable one."""
        top, leading = z.argmax(dim=1, keepdim=True), log_q.argmax(dim=1, keepdim=True)
        if not recorded() and (torch.equal(leading, top) or not bool(self.keep)):
            return log_q
        overtaken = self.keep & (leading != top)
        alive = z != -torch.inf
        n = alive.sum(dim=1, keepdim=True).to(z.dtype)
        mine = torch.arange(log_q.shape[1], device=log_q.device) == top
        # Rows that need no change are replaced: a logarithm of zero there would make their gradients NaN.
        rows = torch.where(overtaken, log_q, (-n.log()).expand_as(log_q))
        # With these margins, rounding the probabilities to float32 does not change the prediction.
        confidence = torch.maximum(rows.gather(1, top).exp(), (1 + 2e-5) / n)
        rest = torch.softmax(rows.masked_fill(mine, -torch.inf), dim=1)
        most, uniform = rest.amax(dim=1, keepdim=True), alive / (n - 1).clamp(min=1)
        room = (1 - 1e-5) * confidence / (1 - confidence)
        mix = ((most - room) / (most - 1 / (n - 1).clamp(min=1)).clamp(min=1e-12)).clamp(0, 1)
        evened = torch.where(mine, confidence, (1 - confidence) * ((1 - mix) * rest + mix * uniform))
        return torch.where(overtaken & alive, torch.where(alive, evened, 1.0).log(), log_q)


class EnsembleMap(CalibrationMap):
    """log(w0 softmax(z / T) + w1 softmax(z) + w2 / K), where K is the number of unmasked classes in the row.

    With w = (0, 0, 1), the class of the largest logit leads by the rounding error of float64.
    """

    temperature: Tensor
    weights: Tensor

    def __init__(self, temperature: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.set_state(temperature=temperature, weights=weights)

    def sound(self, n_classes: int) -> bool:
        """A positive temperature, and three weights on the simplex."""
        weights = self.weights
        fine = weights.shape == (3,) and weights.dtype in _WIDE
        simplex = fine and bool((weights >= 0).all()) and abs(float(weights.sum()) - 1) < 1e-6
        return super().sound(n_classes) and simplex and _is_temperature(self.temperature)

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Calibrated log-probabilities, (N, K)."""
        z, masked = wide(logits, self.dtype)
        by_temperature, unscaled, uniform = self.weights.unbind()
        scaled = by_temperature * torch.softmax(z / self.temperature, dim=1)
        mixed = torch.addcmul(scaled, unscaled, torch.softmax(z, dim=1))
        if masked:
            alive = z != -torch.inf
            mixed = mixed + alive * (uniform / alive.to(z.dtype).sum(dim=1, keepdim=True))
        else:
            mixed = mixed + float(uniform) / z.shape[1]
        return keep_argmax((mixed / mixed.sum(dim=1, keepdim=True)).log(), z)


class IsotonicMap(CalibrationMap):
    """The log of iso(p) + 1e-9 p, normalised by row; iso is piecewise linear and constant outside its knots."""

    knots: Tensor
    values: Tensor

    def __init__(self, knots: Tensor, values: Tensor) -> None:
        super().__init__()
        self.set_state(knots=knots, values=values)

    def sound(self, n_classes: int) -> bool:
        """Increasing knots and non-decreasing values, both between 0 and 1."""
        both = (self.knots, self.values)
        fine = self.knots.shape == self.values.shape and self.knots.ndim == 1 and len(self.knots) >= 2
        fine = fine and all(part.dtype in _WIDE and bool(((part >= 0) & (part <= 1 + 1e-9)).all()) for part in both)
        rising = fine and bool((self.knots.diff() > 0).all()) and bool((self.values.diff() >= 0).all())
        return super().sound(n_classes) and rising

    def answer_in(self, dtype: torch.dtype) -> None:
        """Return this type. The computation stays in float64: knots may be closer than float32 can represent."""
        self.dtype = dtype

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Calibrated log-probabilities, (N, K)."""
        z, masked = wide(logits)
        probs = torch.softmax(z, dim=1)
        # The tie-break 1e-9 p keeps the argmax where iso is flat; next to iso(p) it is visible only in float64.
        steps = torch.add(interpolated(probs, self.knots, self.values), probs, alpha=1e-9)
        if masked:
            steps = steps.masked_fill(z == -torch.inf, 0.0)
        log_probs = (steps / steps.sum(dim=1, keepdim=True)).log().to(self.dtype)
        if self.dtype == torch.float64:
            return keep_argmax(log_probs, z)
        return keep_argmax(log_probs, logits if logits.dtype == self.dtype and not masked else _within_float32(z))


def interpolated(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """The piecewise linear function through the knots at x; constant outside them."""
    if x.device.type == "cpu" and not (x.requires_grad or recorded() or _is_transformed(x)):
        # One call instead of twelve operators, each of which takes longer to call than to compute for a single image.
        found = np.interp(x.numpy(), knots.numpy(), values.numpy())
        if math.isfinite(found.sum()):  # numpy's slopes overflow between knots that are closer than 1e-308
            return torch.from_numpy(found)
    return _interpolated(x, knots, values)


def _is_transformed(x: Tensor) -> bool:
    """Whether derivatives in forward mode or torch.func follow this tensor, which numpy would lose."""
    return forward_ad._current_level >= 0 or torch._C._functorch.is_functorch_wrapped_tensor(x)


def _interpolated(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """`interpolated` in operators that have gradients, can be exported and run on every device."""
    right = places_in(knots, x).clamp(1, knots.shape[0] - 1)
    x0, x1 = knots[right - 1], knots[right]
    y0, y1 = values[right - 1], values[right]
    return y0 + (y1 - y0) * ((x - x0) / (x1 - x0)).clamp(0.0, 1.0)


def copied(mapping: CalibrationMap) -> CalibrationMap:
    """A copy of the map with its own arrays."""
    return type(mapping)(**{name: value.clone() for name, value in mapping.named_buffers()})


def on_device(mapping: CalibrationMap, device: torch.device) -> CalibrationMap:
    """The map on the logits' device; the fitted one stays on the CPU."""
    return mapping if device.type == "cpu" else copied(mapping).to(device)


def full_precision(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Context that disables autocast: a calibration map never runs below float32."""
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else contextlib.nullcontext()
