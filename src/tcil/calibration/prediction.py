"""One forward pass over labelled data, whose logits calibrators and metrics can share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy.typing as npt
import torch
from torch import Tensor, nn

from tcil.calibration.inputs.classifier import Classifier, told_of
from tcil.calibration.inputs.examples import EVALUATION_TRANSFORM, MAX_BATCHES, Examples, ExampleStream, Unpack
from tcil.calibration.inputs.features import FeatureSpec
from tcil.calibration.inputs.weights import SeenModel, UsedWeights
from tcil.foundation import random_state, ranks
from tcil.foundation.arrays import Ints, classes_and_columns, label_columns, pick_columns, whole_number
from tcil.foundation.errors import invalid


class FittedClasses(Protocol):
    """A fitted calibrator, as far as it says which columns of a head it was fitted on."""

    @property
    def classes_(self) -> tuple[int, ...]:
        """The label of each class."""
        ...

    @property
    def columns_(self) -> tuple[int, ...] | None:
        """Their columns in the head; None for the first ones."""
        ...

    def check_model(self, model: nn.Module, *, skip: str = "") -> None:
        """Raise for another network, and for one that is calibrated already."""
        ...


@overload
def predict_logits(
    model: nn.Module,
    data: tuple[npt.NDArray[Any], npt.NDArray[Any]],
    *,
    classes: Iterable[Any] | None = None,
    columns: Iterable[Any] | None = None,
    calibrator: FittedClasses | None = None,
    batch_size: int = 256,
    device: str | torch.device | None = None,
    unpack: Unpack | None = None,
    max_batches: int = MAX_BATCHES,
) -> tuple[npt.NDArray[Any], Ints]: ...
@overload
def predict_logits(
    model: nn.Module,
    data: Examples,
    *,
    classes: Iterable[Any] | None = None,
    columns: Iterable[Any] | None = None,
    calibrator: FittedClasses | None = None,
    batch_size: int = 256,
    device: str | torch.device | None = None,
    unpack: Unpack | None = None,
    max_batches: int = MAX_BATCHES,
) -> tuple[Tensor, Tensor]: ...
def predict_logits(
    model: nn.Module,
    data: Examples,
    *,
    classes: Iterable[Any] | None = None,
    columns: Iterable[Any] | None = None,
    calibrator: FittedClasses | None = None,
    batch_size: int = 256,
    device: str | torch.device | None = None,
    unpack: Unpack | None = None,
    max_batches: int = MAX_BATCHES,
) -> tuple[Tensor | npt.NDArray[Any], Tensor | Ints]:
    """Compute the logits of `data` in evaluation mode. The model and all random states are left unchanged.

    A calibrated model, the result of a calibrator's `wrap`, gives its calibrated log-probabilities. Do not pass them to
    `predict_proba` of the same calibrator, which would calibrate them a second time: take their exponential.

    Parameters
    ----------
    model : torch.nn.Module
        The network, which returns logits.
    data : pair of tensors or arrays, Dataset or DataLoader
        Inputs and labels. A Dataset is any object with a length and indexing. Integer inputs, such as token ids, are
        passed to the model unchanged.
    classes : iterable of int, optional
        The label of each logit column; of a wider head, the first `len(classes)` columns are used.
    columns : iterable of int, optional
        The logit columns of the classes, for a wider head. If a fixed head has a column for every label, pass the
        labels seen so far.
    calibrator : fitted calibrator, optional
        Takes the classes and columns on which it was fitted, in place of `classes` and `columns`, and checks that the
        model is the network that it was fitted on, with the same weights (a hash of them, for each call).
    batch_size : int
        Rows per forward pass; not used for loaders, which have their own batches.
    device : str or torch.device, optional
        Where the model runs. Default: where its parameters are.
    unpack : two keys, two positions or a function, optional
        How to get inputs and labels from a batch.
    max_batches : int
        Maximum number of batches of a loader without a length; more raise an error.

    Returns
    -------
    logits : tensor or array (N, K)
        Arrays for a pair of arrays, else tensors on the CPU.
    labels : tensor or array (N,)
        The labels in `data`.

    Examples
    --------
    >>> import torch, tcil
    >>> logits, labels = tcil.predict_logits(torch.nn.Linear(4, 3), (torch.randn(10, 4), torch.arange(10) % 3))
    >>> logits.shape, labels.shape
    (torch.Size([10, 3]), torch.Size([10]))
    """
    if calibrator is not None:
        if classes is not None or columns is not None:
            given = f"a calibrator beside {'classes' if classes is not None else 'columns'}"
            raise invalid("calibrator", given, "one of the two")
        if not hasattr(type(calibrator), "columns_"):
            raise invalid("calibrator", type(calibrator).__name__, "a fitted calibrator")
        classes, columns = calibrator.classes_, calibrator.columns_
        calibrator.check_model(model, skip="pass its classes_ and columns_ as classes= and columns=")
    names, places = classes_and_columns(classes, columns)
    batch_size = whole_number(batch_size, "batch_size", 1)
    with random_state.preserved(data):
        stream = ExampleStream(
            data, "data", batch_size=batch_size, unpack=unpack, max_batches=max_batches, integers=True
        )
        with Classifier(model, device=device) as classifier:
            logits, labels = stream_logits(classifier, stream)
    if names is not None:
        logits = pick_columns(logits, len(names), places)
    label_columns(labels, names, "data labels", logits.shape[1], stream.doubt)
    return (logits.numpy(), labels.numpy()) if stream.given_as_numpy else (logits, labels)


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """Logits and features of labelled data from one pass, for `fit` of your own calibrator.

    Attributes
    ----------
    logits, features : tensor (N, K), (N, D)
        What the network returns for the classes, and what its last layer reads.
    label_columns : tensor (N,)
        The logit column of each label.
    classes : tuple of int
        The label of each logit column.
    seen : dict
        What `Calibrator._fitted` stores of the network: pass it as keywords, `**rows.seen`. The calibrator can then be
        wrapped and checks the weights, like those of tcil; not if `features` is a function, which no file can name.

    Examples
    --------
    >>> import torch
    >>> from tcil.extending import predict_features
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> rows = predict_features(network, (torch.randn(10, 4), torch.arange(10) % 3))
    >>> rows.logits.shape, rows.features.shape, rows.classes, rows.seen["head_width"]
    (torch.Size([10, 3]), torch.Size([10, 8]), (0, 1, 2), 3)
    """

    logits: Tensor
    features: Tensor
    label_columns: Tensor
    classes: tuple[int, ...]
    seen: SeenModel


def predict_features(
    model: nn.Module,
    data: Examples,
    *,
    classes: Iterable[Any] | None = None,
    columns: Iterable[Any] | None = None,
    features: FeatureSpec | None = None,
    batch_size: int = 256,
    device: str | torch.device | None = None,
    unpack: Unpack | None = None,
    max_batches: int = MAX_BATCHES,
) -> FeatureRows:
    """Compute logits and features of `data` in evaluation mode. The model and all random states are left unchanged.

    Parameters
    ----------
    model : torch.nn.Module
        The network, which returns logits.
    data : pair of tensors or arrays, Dataset or DataLoader
        Inputs and labels.
    classes, columns : iterable of int, optional
        The label of each logit column, and the columns of a wider head, as for `tcil.predict_logits`.
    features : str or callable, optional
        Where the features come from: a module name, a function, or a pair (extract, head). Default: the input of the
        module that returns the logits.
    batch_size : int
        Rows per forward pass; not used for loaders.
    device : str or torch.device, optional
        Where the model runs. Default: where its parameters are.
    unpack : two keys, two positions or a function, optional
        How to get inputs and labels from a batch.
    max_batches : int
        Maximum number of batches of a loader without a length.

    Returns
    -------
    FeatureRows
        Tensors on the CPU, and what a fitted calibrator stores of the network.

    Examples
    --------
    >>> import torch
    >>> from tcil.extending import predict_features
    >>> rows = predict_features(torch.nn.Linear(4, 3), (torch.randn(10, 4), torch.arange(10) % 3))
    >>> rows.features.shape
    torch.Size([10, 4])
    """
    names, places = classes_and_columns(classes, columns)
    batch_size = whole_number(batch_size, "batch_size", 1)
    logits, kept, labels = list[Tensor](), list[Tensor](), list[Tensor]()
    with random_state.preserved(data):
        stream = ExampleStream(
            data, "data", batch_size=batch_size, unpack=unpack, max_batches=max_batches, integers=True
        )
        with Classifier(model, features=features, device=device) as classifier, torch.no_grad():
            for inputs, batch_labels in stream:
                with told_of("data", inputs):
                    one = classifier.logits_and_features(classifier.place(inputs))
                logits.append(one[0].cpu())
                kept.append(one[1].cpu())
                labels.append(batch_labels)
            source, width = classifier.source.storable(), classifier.width
    together = torch.cat(logits)
    if names is not None:
        together = pick_columns(together, len(names), places)
    names = names or tuple(range(together.shape[1]))
    true = label_columns(torch.cat(labels), names, "data labels", len(names), stream.doubt)
    used = UsedWeights.of(model, source, places or range(len(names)))
    seen = SeenModel(head_width=width, columns=places, source=source, model_hash=used)
    return FeatureRows(together, torch.cat(kept), true, names, seen)


def stream_logits(
    classifier: Classifier, stream: ExampleStream, change: Callable[[Tensor], Tensor] = lambda inputs: inputs
) -> tuple[Tensor, Tensor]:
    """All logits and labels of a stream; `change` is applied to its inputs."""
    together, logits, labels = ranks.current(), [], []
    with torch.no_grad():
        for dealt in together.deal(stream):
            inputs, batch_labels = dealt.batch
            changed = change(inputs)  # for every batch, since it may draw random numbers
            if dealt.here:
                logits.append(_logits(classifier, changed, stream.argument).cpu())
            labels.append(batch_labels)
    return together.gathered(logits, [len(batch_labels) for batch_labels in labels]), torch.cat(labels)


def _logits(classifier: Classifier, inputs: Tensor, argument: str) -> Tensor:
    try:
        with told_of(argument, inputs):
            return classifier.logits(classifier.place(inputs))
    except RuntimeError as error:
        if inputs.is_floating_point() or isinstance(error, torch.OutOfMemoryError):
            raise
        raise invalid(
            f"{argument} inputs",
            f"dtype {inputs.dtype}, with which the model fails ({str(error).splitlines()[0]})",
            "inputs as the network takes them",
            f"For images, {EVALUATION_TRANSFORM}; embeddings take token ids as int64.",
        ) from error
