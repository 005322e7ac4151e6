"""One forward pass over labelled data: the logits that every calibrator and metric then share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tcil.calibration import random_state, ranks
from tcil.calibration.arrays import classes_and_columns, label_columns, pick_columns, whole_number
from tcil.calibration.classifier import Classifier
from tcil.calibration.errors import invalid
from tcil.calibration.examples import EVALUATION_TRANSFORM, MAX_BATCHES, Examples, ExampleStream, Unpack


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
) -> tuple[Any, Any]:
    """Logits (N, K) and labels (N,) of `data`, in evaluation mode, the model left as it was.

    `data` is a pair of tensors or arrays, a Dataset (anything with a length and examples by index) or a DataLoader.
    Integer inputs, such as token ids, reach the model as they are. `unpack` says where a batch has its inputs and
    labels: two keys, two positions or a function. A loader without a length is refused after `max_batches`.

    `classes[i]` is the label of logit column i; a wider head is cut to its first `len(classes)` columns, or to
    `columns`: where a fixed head has a column for every label, pass the labels seen so far as `columns`. Labels are
    returned as they are. Arrays give arrays, everything else gives tensors on the CPU. All random states are left as
    they were.

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
    label_columns(labels, names, "data labels", logits.shape[1])
    return (logits.numpy(), labels.numpy()) if stream.given_as_numpy else (logits, labels)


def stream_logits(
    classifier: Classifier, stream: ExampleStream, change: Callable[[Tensor], Tensor] = lambda inputs: inputs
) -> tuple[Tensor, Tensor]:
    """All logits and labels of a stream, whose inputs may be changed on the way."""
    together, logits, labels = ranks.current(), [], []
    with torch.no_grad():
        for number, (inputs, own) in enumerate(stream):
            changed = change(inputs)  # for every batch, since it may draw
            if number == 0 or together.owns(number):
                logits.append(_logits(classifier, changed, stream.argument).cpu())
            labels.append(own)
    return together.gathered(logits, [len(own) for own in labels]), torch.cat(labels)


def _logits(classifier: Classifier, inputs: Tensor, argument: str) -> Tensor:
    try:
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
