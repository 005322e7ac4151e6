"""One forward pass over labelled data, whose logits calibrators and metrics can share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import numpy.typing as npt
import torch
from torch import Tensor, nn

from tcil.calibration.inputs.classifier import Classifier, told_of
from tcil.calibration.inputs.examples import EVALUATION_TRANSFORM, MAX_BATCHES, Examples, ExampleStream, Unpack
from tcil.foundation import random_state, ranks
from tcil.foundation.arrays import Ints, classes_and_columns, label_columns, pick_columns, whole_number
from tcil.foundation.errors import invalid


@overload
def predict_logits(
    model: nn.Module,
    data: tuple[npt.NDArray[Any], npt.NDArray[Any]],
    *,
    classes: Iterable[Any] | None = None,
    columns: Iterable[Any] | None = None,
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
