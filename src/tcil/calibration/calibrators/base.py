"""The base class of all calibrators: options, transform, predict_proba, wrap, partial_fit, save and load."""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, cast, overload

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tcil.calibration import storage
from tcil.calibration.calibrators.fitted import FittedState, History, check_map, is_own
from tcil.calibration.calibrators.maps import CalibrationMap, full_precision, on_device
from tcil.calibration.calibrators.saving import class_named, made_from, record_of
from tcil.calibration.calibrators.wrapped import CalibratedModel, returns_calibrated
from tcil.calibration.inputs.features import FeatureSource
from tcil.calibration.inputs.weights import UsedWeights, unwrap, weights_hash
from tcil.calibration.prior import Prior, PriorEstimate, PriorMethod, check_possible, estimate_prior, log_prior_of
from tcil.foundation.arrays import (
    ArrayLike,
    Floats,
    NotTensor,
    as_classes,
    as_logits,
    as_tensor,
    same_kind,
)
from tcil.foundation.errors import NotFittedError, WeightsMismatchError, invalid
from tcil.foundation.parameters import Parameterised

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # with a default: `Calibrator` alone is a Calibrator of any result

    Result = TypeVar("Result", default=Any)
else:
    from typing import TypeVar

    Result = TypeVar("Result")


@dataclass(eq=False, kw_only=True)
class Calibrator(Parameterised, ABC, Generic[Result]):
    """Base class of post-hoc calibrators: options at construction, data in `fit`, fitted attributes with an underscore.

    To write your own method, subclass it: set `map_type` to a `CalibrationMap` and `result_type` to a frozen dataclass,
    and end `fit` with `self._fitted(...)`. It then transforms, wraps, saves and loads like the built-in ones.

    Attributes
    ----------
    classes_ : tuple of int
        The label of each class, in the order of the columns of `predict_proba`.
    columns_ : tuple of int or None
        Their columns in the network's head, if `columns` was given to `fit`; None for the first ones.
    result_ : dataclass
        The result of `fit`, with its verdicts.
    history_ : dict or None
        State for `history=` of the next task's `fit`; None if the method does not use earlier tasks.

    Examples
    --------
    >>> import tcil
    >>> calibrator = tcil.TCIL(policy="random", batch_size=32)
    >>> calibrator
    TCIL(policy='random', batch_size=32)
    >>> calibrator.set_params(batch_size=64).get_params()["tolerance"]
    0.001
    >>> calibrator.clone()
    TCIL(policy='random')
    """

    map_type: ClassVar[type[CalibrationMap]]
    result_type: ClassVar[type[Any]]
    fit: ClassVar[Callable[..., Any]]
    _known: ClassVar[dict[str, dict[str, type[Calibrator]]]] = {}  # by name and module: classes that files may name

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Calibrator._known.setdefault(cls.__name__, {})[cls.__module__] = cls

    def __post_init__(self) -> None:
        self._state: FittedState | None = None

    # fitted values -------------------------------------------------------------------------------------------

    @property
    def classes_(self) -> tuple[int, ...]:
        """The label of each logit column."""
        return self._fit_state.classes

    @property
    def columns_(self) -> tuple[int, ...] | None:
        """The head's column of each class, if `columns` was given to `fit`; None for the first ones."""
        return self._fit_state.columns

    @property
    def result_(self) -> Result:
        """The frozen result of `fit`, with its verdicts."""
        return cast(Result, self._fit_state.result)

    @property
    def history_(self) -> History | None:
        """State for `history=` of the next task's `fit` (JSON); None if the method does not use earlier tasks."""
        return self._fit_state.history

    # use -----------------------------------------------------------------------------------------------------

    def partial_fit(self, *args: Any, **kwargs: Any) -> Self:
        """Fit after a task, using the state of earlier tasks. Keep one calibrator for all tasks.

        Equivalent to `fit(..., history=...)` with the history that this calibrator stores, which `save` and `load`
        include. For methods that do not use earlier tasks, it is the same as `fit`. `fit` without `history` starts
        over. PACT notices if the new classes are those of its last fit, as when a task was trained a little more:
        the fit then takes the place of the last one.

        Parameters
        ----------
        *args, **kwargs
            Arguments of `fit`, without `history`.

        Returns
        -------
        Self
            This calibrator, fitted. If the fit fails, it is left unchanged.

        Examples
        --------
        >>> import torch, tcil
        >>> calibrator = tcil.FirstTaskTemperatureScaling()
        >>> logits, labels = 5 * torch.eye(3)[torch.tensor([0, 1, 2, 0])], torch.tensor([0, 1, 2, 2])
        >>> first = calibrator.partial_fit(logits, labels).temperature_
        >>> calibrator.partial_fit(torch.randn(8, 6), torch.arange(8) % 6).temperature_ == first
        True
        """
        if "history" in kwargs:
            advice = "Use fit(..., history=...) to pass a history."
            raise invalid("history", "an argument of partial_fit", "none: the calibrator keeps its own", advice)
        signature = inspect.signature(self.fit)
        if "history" in signature.parameters:
            given = signature.bind_partial(*args, **kwargs)
            if isinstance(labels := given.arguments.get("new_classes"), Iterator):
                given.arguments["new_classes"] = tuple(labels)  # read twice: by `_earlier`, and by `fit`
                args, kwargs = given.args, given.kwargs
            kwargs["history"] = self._earlier(*args, **kwargs)
        return cast(Self, self.fit(*args, **kwargs))

    def _earlier(self, *args: Any, **kwargs: Any) -> History | None:
        """The history that `partial_fit` passes to `fit`, whose arguments these are."""
        state: FittedState | None = getattr(self, "_state", None)
        return None if state is None else state.history

    @overload
    def transform(self, logits: Tensor, features: ArrayLike | None = None, *, prior: Prior | None = None) -> Tensor: ...
    @overload
    def transform(
        self, logits: NotTensor, features: ArrayLike | None = None, *, prior: Prior | None = None
    ) -> Floats: ...
    def transform(
        self, logits: ArrayLike, features: ArrayLike | None = None, *, prior: Prior | None = None
    ) -> Tensor | Floats:
        """Calibrated log-probabilities.

        Parameters
        ----------
        logits : tensor or array (N, K)
            One column for each class in `classes_`.
        features : tensor or array (N, D), optional
            Required only by calibrators whose map has `needs_features`.
        prior : mapping, array or PriorEstimate, optional
            Class frequencies where the probabilities are used: a mapping by label, an array in the order of
            `classes_`, or the result of `estimate_prior`. Only ratios matter. Without it, the frequencies are assumed
            to be those that the calibrator is designed for: equal ones for T-CIL and PACT. With it, predictions may
            change.

        Returns
        -------
        tensor or array (N, K)
            In float64; a tensor if `logits` is a tensor, else a numpy array.
        """
        mapping, shift = self._mapping(), None
        if prior is not None:
            shift = log_prior_of(prior, self.classes_)
        z, extra = self._checked(logits, features)
        with torch.no_grad(), full_precision(z.device.type):
            here = on_device(mapping, z.device)
            if shift is None:
                return same_kind(here(z, extra), logits)
            check_possible(z, shift)
            return same_kind(here.at_prior(z, shift.to(z.device), extra), logits)

    def _checked(self, logits: ArrayLike, features: ArrayLike | None) -> tuple[Tensor, Tensor | None]:
        """Validated logits, and features if the map needs them."""
        mapping, extra = self._mapping(), None
        z = as_logits(logits, n_classes=len(self.classes_))
        if mapping.needs_features:
            if features is None:
                raise invalid("features", "None", f"the features (N, D) that {type(self).__name__} was fitted on")
            extra = as_tensor(features, "features").to(z.device)
            if len(extra) != len(z):
                raise invalid("features", f"{len(extra)} rows", f"{len(z)}, one for each row of logits")
        return z, extra

    @overload
    def predict_proba(
        self, logits: Tensor, features: ArrayLike | None = None, *, prior: Prior | None = None
    ) -> Tensor: ...
    @overload
    def predict_proba(
        self, logits: NotTensor, features: ArrayLike | None = None, *, prior: Prior | None = None
    ) -> Floats: ...
    def predict_proba(
        self, logits: ArrayLike, features: ArrayLike | None = None, *, prior: Prior | None = None
    ) -> Tensor | Floats:
        """Calibrated probabilities: the exponential of `transform`.

        Parameters
        ----------
        logits : tensor or array (N, K)
            One column for each class in `classes_`.
        features : tensor or array (N, D), optional
            Required only by calibrators whose map has `needs_features`.
        prior : mapping, array or PriorEstimate, optional
            Class frequencies where the probabilities are used: a mapping by label, an array in the order of
            `classes_`, or the result of `estimate_prior`. Only ratios matter. Without it, the frequencies are assumed
            to be those that the calibrator is designed for: equal ones for T-CIL and PACT. With it, predictions may
            change.

        Returns
        -------
        tensor or array (N, K)
            In float64; a tensor if `logits` is a tensor, else a numpy array.
        """
        log_probs = self.transform(logits, features, prior=prior)
        if isinstance(log_probs, Tensor):
            return log_probs.exp()
        return cast(Floats, torch.from_numpy(log_probs).exp().numpy())

    def estimate_prior(
        self,
        logits: ArrayLike,
        features: ArrayLike | None = None,
        *,
        method: PriorMethod | str = PriorMethod.EM,
        labelled: tuple[ArrayLike, ArrayLike] | None = None,
    ) -> PriorEstimate:
        """Estimate the class frequencies among unlabelled images, for use as `prior=`.

        Both methods assume that only the class frequencies have changed, not the images of each class. "em" maximises
        the likelihood of the frequencies under the calibrated probabilities of these images (Saerens et al. 2002), so
        its accuracy depends on the calibration. "bbse" counts predictions and corrects the counts by the confusion
        matrix on held-out images of all classes (Lipton et al. 2018); it needs these images, but no calibration.

        Parameters
        ----------
        logits : tensor or array (N, K)
            Logits of the unlabelled images. One column for each class in `classes_`.
        features : tensor or array (N, D), optional
            Required only by calibrators whose map has `needs_features`.
        method : {"em", "bbse"}, default "em"
            Estimation method (`tcil.options.PriorMethod`).
        labelled : pair (logits, labels), optional
            For "bbse": held-out images of all classes, in any frequencies. Exemplars are not suitable, since the
            network has memorised them.

        Returns
        -------
        tcil.results.PriorEstimate
            The frequencies and their standard errors.

        Examples
        --------
        >>> import torch, tcil
        >>> generator = torch.Generator().manual_seed(0)
        >>> labels = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), 2000, replacement=True, generator=generator)
        >>> logits = 2 * torch.eye(3)[labels] + torch.randn(2000, 3, generator=generator)
        >>> equal = torch.arange(600) % 3
        >>> held_out = 2 * torch.eye(3)[equal] + torch.randn(600, 3, generator=generator)
        >>> scaling = tcil.TemperatureScaling().fit(held_out, equal)
        >>> estimate = scaling.estimate_prior(logits)
        >>> abs(estimate.prior[0] - 0.7) < 3 * estimate.errors[0]
        True
        >>> probabilities = scaling.predict_proba(logits, prior=estimate)
        """
        chosen = PriorMethod.parse(method, "method")
        z, extra = self._checked(logits, features)
        if chosen is PriorMethod.BBSE:
            return estimate_prior(z, self.classes_, chosen, labelled)
        if labelled is not None:
            raise invalid("labelled", "data, which method='em' does not use", "None, or method='bbse'")
        with torch.no_grad(), full_precision(z.device.type):
            return estimate_prior(on_device(self._mapping(), z.device).believed(z, extra), self.classes_, chosen)

    def wrap(
        self,
        model: nn.Module,
        *,
        wider_head: bool = False,
        force: bool = False,
        prior: Prior | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> CalibratedModel:
        """Wrap the model as an `nn.Module` that returns calibrated log-probabilities, to save, export or serve.

        The result holds the plain network: wrappers (DataParallel, DDP, torch.compile) are removed, so that state-dict
        keys are those of the network. The network is shared, not copied: `wrap(model).eval()` also puts `model` in
        evaluation mode. Call `model.train()` before you resume training. Floating-point inputs are cast to the
        precision of the weights, as in `fit`.

        A model that is calibrated already, or a `Sequential` that ends in one, is refused: its probabilities would be
        calibrated twice. It is accepted if this calibrator was fitted on the calibrated model itself, as its weights
        show, or with `force=True`.

        A model whose head has only grown since `fit`, by columns or by further heads, is accepted. Its new classes have
        no calibrated probability: calling the wrapped model raises an error unless `wider_head=True`, which leaves
        these classes out.

        Parameters
        ----------
        model : torch.nn.Module
            The network that the calibrator was fitted on.
        wider_head : bool
            Leave out the classes by which the head has grown since `fit`.
        force : bool
            Accept weights other than those fitted on, and a model that is calibrated already.
        prior : mapping, array or PriorEstimate, optional
            Class frequencies where the model is used; see `transform`.
        dtype : torch.dtype, default torch.float64
            Type of the output. With torch.float32, for serving, the computation is in float32 too, except for IRM.
            Predictions stay the same, but the margin over the next class may be a rounding error of float32.

        Returns
        -------
        tcil.results.CalibratedModel
            A module that returns log-probabilities (N, K).
        """
        mapping, state = self._mapping(), self._fit_state
        if dtype not in (torch.float32, torch.float64):
            raise invalid("dtype", repr(dtype), "torch.float64 or torch.float32")
        shift = None if prior is None else log_prior_of(prior, state.classes)
        _check_module(model)
        if not force:
            self.check_model(model, skip="pass force=True")
        width = None if wider_head or force else (state.head_width or len(state.classes))
        return CalibratedModel(
            unwrap(model), mapping, state.classes, width, state.columns, state.source, log_prior=shift, dtype=dtype
        )

    def check_model(self, model: nn.Module, *, skip: str = "") -> None:
        """Raise if the calibrator was fitted on a model with other weights, or if the model is calibrated already.

        Parameters
        ----------
        model : torch.nn.Module
            The network that the calibrator is to be used with.
        skip : str
            How to skip the check, for the message.
        """
        self._check_uncalibrated(model, skip)
        self.check_weights(model, skip=skip)

    def check_weights(self, model: nn.Module, *, skip: str = "") -> None:
        """Raise `WeightsMismatchError` if the calibrator was fitted on a model with other weights.

        Only the weights that the logits of the fitted classes depend on are compared.

        Parameters
        ----------
        model : torch.nn.Module
            The network to compare.
        skip : str
            How to skip the check, for the message.
        """
        stored = self._fit_state.model_hash
        _check_module(model)
        if stored is not None and not self._has_weights_of(model):
            digest = stored.digest if isinstance(stored, UsedWeights) else stored
            advice = f"Fit again after every change of the weights{f', or {skip} to skip this check' if skip else ''}."
            if any(isinstance(module, _BatchNorm) for module in model.modules()):
                advice += " Batch norms change whenever the network is called in training mode."
            if returns_calibrated(model):
                advice = "It is calibrated already: pass the network that was wrapped."
            elif any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
                advice += " If it was converted to another dtype, wrap it first: calibrator.wrap(model).half()."
            raise WeightsMismatchError(
                f"model: its weights are not those that this {type(self).__name__} was fitted on (hash {digest}). "
                f"{advice}"
            )

    def _tie_to(self, model: nn.Module) -> None:
        """Check the weights of this model from now on: for bridges that fit on a part of it, such as its embeddings."""
        self._state = replace(self._fit_state, source=None, model_hash=weights_hash(model))

    def _has_weights_of(self, model: nn.Module) -> bool:
        """Whether the stored hash is that of the model's weights; False if none is stored."""
        stored, used = self._fit_state.model_hash, self._fit_state.used
        return stored.match(model, used) if isinstance(stored, UsedWeights) else weights_hash(model) == stored

    def _check_uncalibrated(self, model: nn.Module, skip: str) -> None:
        """Raise for a calibrated model, unless this calibrator was fitted on it."""
        if returns_calibrated(model) and not self._has_weights_of(model):
            twice = f" To calibrate twice, {skip}." if skip else ""
            raise invalid(
                "model",
                "a model that is calibrated already (the result of wrap), which would be calibrated twice",
                "the network that was wrapped",
                f"It is the attribute .model of what wrap returned.{twice}",
            )

    # disk ----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, model: nn.Module | None = None) -> Path:
        """Save to a JSON file; arrays of more than 65,536 numbers go to a safetensors file next to it.

        Files have checksums and are written atomically.

        Parameters
        ----------
        path : str or Path
            File name ending in .json. A leading `~` is not expanded. If it is a symbolic link, the link is replaced by
            the file, and the file that it pointed to is left unchanged.
        model : torch.nn.Module, optional
            Store the hash of its weights, for calibrators that were fitted on logits.

        Returns
        -------
        Path
            The file written.
        """
        model_hash = self._fit_state.model_hash
        if model is not None:
            self.check_weights(model)
            model_hash = model_hash or weights_hash(model)
        return storage.write(storage.as_path(path), *record_of(self, self._fit_state, model_hash))

    @classmethod
    def load(cls, path: str | Path, *, model: nn.Module | None = None, force: bool = False) -> Self:
        """Load a saved calibrator.

        `Calibrator.load` returns an object of the class named in the file. `load` of a subclass accepts only that
        class.

        Parameters
        ----------
        path : str or Path
            A file written by `save`.
        model : torch.nn.Module, optional
            Raise `WeightsMismatchError` if the calibrator was fitted on other weights than these.
        force : bool
            Skip the check of the weights.

        Returns
        -------
        Self
            The fitted calibrator, with its history.
        """
        path = storage.as_path(path)
        record, arrays = storage.read(path)
        kind = class_named(cls, Calibrator._known, record["calibrator"], record.get("module"), path)
        if not issubclass(kind, cls):
            raise invalid("path", f"{path}, a saved {kind.__name__}", f"a saved {cls.__name__}")
        calibrator = made_from(kind, record, arrays, path)
        if model is not None and not force:
            calibrator.check_weights(model, skip="pass force=True")
        return calibrator

    # for subclasses ------------------------------------------------------------------------------------------

    def _fitted(
        self,
        mapping: CalibrationMap,
        classes: Iterable[Any],
        result: Any,
        *,
        head_width: int | None = None,
        columns: tuple[int, ...] | None = None,
        source: FeatureSource | None = None,
        model_hash: UsedWeights | str | None = None,
        history: History | None = None,
    ) -> Self:
        """Store the results of `fit` in one step, so that a failed fit leaves the calibrator unchanged.

        This is how `fit` of your own calibrator ends.

        Parameters
        ----------
        mapping : CalibrationMap
            The fitted function, of the class `map_type`. Its buffers must be its entire state.
        classes : iterable of int
            The label of each logit column.
        result : object
            What `result_` returns, of the class `result_type`: a frozen dataclass of numbers, strings and tuples.
        head_width, columns, source, model_hash
            What is known of the network: `**tcil.extending.predict_features(...).seen`. Without it, `wrap` takes a
            network of any weights, and a map that needs features cannot be wrapped.
        history : dict, optional
            State for the next task, in plain JSON.

        Returns
        -------
        Self
            This calibrator, fitted.
        """
        names = as_classes(classes, "classes") if is_own(type(self)) else tuple(classes)
        if is_own(type(self)) and getattr(result, "temperature", 0.0) is not None:  # else the map is never used
            check_map(mapping, len(names))
        self._state = FittedState(mapping, names, result, head_width, columns, source, model_hash, history)
        return self

    @property
    def _fit_state(self) -> FittedState:
        state: FittedState | None = getattr(self, "_state", None)  # a subclass may not have called __post_init__
        if state is None:
            raise NotFittedError(f"{type(self).__name__} is not fitted yet: call fit(...) first")
        return state

    def _mapping(self) -> CalibrationMap:
        return self._fit_state.mapping


def load(path: str | Path, *, model: nn.Module | None = None, force: bool = False) -> Calibrator:
    """Load a saved calibrator of any class.

    Parameters
    ----------
    path : str or Path
        A file written by a calibrator's `save`.
    model : torch.nn.Module, optional
        Raise `WeightsMismatchError` if the calibrator was fitted on other weights than these.
    force : bool
        Skip the check of the weights.

    Returns
    -------
    tcil.extending.Calibrator
        The fitted calibrator, with its history.

    Examples
    --------
    >>> import tempfile, tcil
    >>> scaling = tcil.TemperatureScaling().fit([[2.0, 0.5], [0.1, 1.0], [0.7, 0.2]], [0, 1, 1])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = tcil.load(scaling.save(f"{folder}/calibrator.json"))
    >>> again.temperature_ == scaling.temperature_
    True
    """
    return Calibrator.load(path, model=model, force=force)


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise invalid("model", type(model).__name__, "a torch.nn.Module that returns logits")
