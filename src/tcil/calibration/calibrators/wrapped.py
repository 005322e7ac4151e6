"""A network followed by its calibration, as one module: the result of `wrap`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from tcil.calibration.calibrators.maps import CalibrationMap, copied, full_precision
from tcil.calibration.inputs.classifier import as_taken
from tcil.calibration.inputs.features import FeatureSource, select_logits
from tcil.calibration.inputs.weights import unwrap
from tcil.foundation.arrays import at_least_float32, pick_columns
from tcil.foundation.errors import invalid, warn


class CalibratedModel(nn.Module):
    """A network followed by its calibration: returns log-probabilities over `classes`.

    Created by `calibrator.wrap(model)`. The network is shared, not copied.

    Attributes
    ----------
    model : torch.nn.Module
        The network.
    calibration : tcil.extending.CalibrationMap
        The fitted function from logits to log-probabilities.
    classes : tuple of int
        The label of each output column.

    Examples
    --------
    >>> import torch, tcil
    >>> network = torch.nn.Linear(4, 3)
    >>> scaling = tcil.TemperatureScaling().fit(5 * torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 2]))
    >>> calibrated = scaling.wrap(network)
    >>> log_probs = calibrated(torch.randn(2, 4))
    >>> log_probs.shape, log_probs.exp().sum(dim=1).allclose(torch.ones(2).double())
    (torch.Size([2, 3]), True)
    """

    def __init__(
        self,
        model: nn.Module,
        mapping: CalibrationMap,
        classes: tuple[int, ...],
        head_width: int | None,
        columns: tuple[int, ...] | None,
        source: FeatureSource | None,
        *,
        log_prior: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        if mapping.needs_features and source is None:
            advice = (
                "End its fit with _fitted(..., **tcil.extending.predict_features(model, data).seen), without a function"
            )
            advice += " as features=, which cannot be stored."
            raise invalid(
                "calibrator", "one that does not know its features", "where the network's features are", advice
            )
        self.model = model
        self.calibration = copied(mapping)
        self._at_prior = log_prior is not None
        if log_prior is not None:
            self.calibration.set_state(log_prior=log_prior.clone())
        if dtype != self.calibration.dtype:
            self.calibration.answer_in(dtype)
        home = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
        self.calibration.to(home)
        self.classes = classes
        self._head_width, self._columns = head_width, columns
        self._in_order = columns is None or columns == tuple(range(len(columns)))
        self._source = source
        self._first_weight = _first_weight(model)
        self._told_of_training = False
        self.training = self.calibration.training = model.training

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """Calibrated log-probabilities (N, K) in the dtype given to `wrap`; arguments are passed to the network."""
        model, calibration = self.model, self.calibration  # once, since attribute access of modules is slow
        inputs = args if x is None else (x, *args)
        # As in fit, the first tensor is the input and is cast to the precision of the weights.
        given = x if isinstance(x, Tensor) else _first_tensor(*inputs, *kwargs.values())
        if given is not None and given.dtype != self._weights_dtype():
            taken = as_taken(model, given)
            inputs = tuple(taken if value is given else value for value in inputs)
            kwargs = {key: taken if value is given else value for key, value in kwargs.items()}
        features = None
        if calibration.needs_features and self._source is not None:
            logits, features = self._source.run(model, *inputs, **kwargs)
            features = at_least_float32(features.flatten(1))
        else:
            logits = select_logits(model(*inputs, **kwargs))
        width, n_classes = logits.shape[1], len(self.classes)
        if width < n_classes or (self._head_width is not None and width != self._head_width):
            advice = "Fit a new calibrator after a new task, or use wrap(model, wider_head=True) to slice the head."
            if width < n_classes:
                advice = "Pass the network that it was fitted on, or fit a new calibrator."
            expected = f"{self._head_width or n_classes}, as the calibrator was fitted on"
            raise invalid("model", f"{width} logits", expected, advice)
        if self.training and not self._told_of_training:
            self._tell_of_training()
        picked = logits if self._in_order and width == n_classes else pick_columns(logits, n_classes, self._columns)
        if not torch.is_autocast_enabled(logits.device.type):
            return self._calibrated(calibration, picked, features)
        with full_precision(logits.device.type):
            return self._calibrated(calibration, picked, features)

    def _calibrated(self, calibration: CalibrationMap, logits: Tensor, features: Tensor | None) -> Tensor:
        if self._at_prior:
            answer = calibration.at_prior(logits, cast(Tensor, calibration.log_prior), features)
        else:
            answer = cast(Tensor, calibration(logits, features))
        return answer.float() if calibration.dtype == torch.float32 != answer.dtype else answer

    def _tell_of_training(self) -> None:
        """Warn once if a layer answers in another way than it did when the calibrator was fitted."""
        self._told_of_training = True
        changing = next(
            (m for m in self.model.modules() if m.training and isinstance(m, (_BatchNorm, _DropoutNd))), None
        )
        if changing is not None:
            warn(
                f"model: it is in training mode, in which {type(changing).__name__} answers in another way than in fit"
                " (and a batch norm changes with every call). Call .eval() on the calibrated model before you use it."
            )

    def _weights_dtype(self) -> torch.dtype | None:
        """The current type of the network's first weight; None if there is none."""
        if self._first_weight is None:
            return None
        module, name = self._first_weight
        weight = getattr(module, name, None)
        return weight.dtype if isinstance(weight, Tensor) else None


def tell_of_calibrated(model: nn.Module) -> None:
    """Warn of a fit on a model that is calibrated already."""
    if returns_calibrated(model):
        warn(
            "model: it is calibrated already (the result of wrap), so that the fit is one of its calibrated answers."
            " Pass the network that was wrapped, the attribute .model, unless you mean to calibrate twice."
        )


def returns_calibrated(model: nn.Module) -> bool:
    """Whether what the model returns is what `wrap` made: it is its result, or a sequence that ends in one.

    Other modules may have a calibrated model inside (a teacher, for instance) and return something else.
    """
    model = unwrap(model)
    if isinstance(model, nn.Sequential) and len(model):
        return returns_calibrated(model[-1])
    return isinstance(model, CalibratedModel)


def _first_weight(model: nn.Module) -> tuple[nn.Module, str] | None:
    """The module and name of the first floating-point parameter; searched once, because each search takes long."""
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            if value.is_floating_point():
                return module, name
    return None


def _first_tensor(*values: object) -> Tensor | None:
    return next((value for value in values if isinstance(value, Tensor)), None)
