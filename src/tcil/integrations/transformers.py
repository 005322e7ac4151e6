"""Hugging Face transformers: models that take dicts and return `.logits`, and text whose classes arrive over time.

Token ids cannot be perturbed, so T-CIL and PACT are fitted on their embeddings, `inputs_embeds`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tcil.calibration.calibrators import Calibrator
from tcil.calibration.inputs.classifier import Classifier, as_taken
from tcil.calibration.inputs.features import check_rows, select_logits
from tcil.foundation import random_state
from tcil.foundation.arrays import (
    as_classes,
    as_labels,
    at_least_float32,
    classes_and_columns,
    gap_and_size,
    pick_columns,
)
from tcil.foundation.errors import invalid, warnings_of
from tcil.integrations.extras import missing_extra
from tcil.integrations.fitting import checked_calibrator, fit_after_task, named_by, require_memory, takes_logits

try:
    from transformers import PreTrainedModel
except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not belong to this torch
    raise missing_extra("transformers", error) from error

__all__ = ["EmbeddingClassifier", "fit", "predict_logits"]

AnyCalibrator = TypeVar("AnyCalibrator", bound=Calibrator)
Batches = Iterable[Mapping[str, Any]]  # as a data collator makes them, labels included
_LABELS = ("labels", "label")
_READ = ("input_ids", "attention_mask")  # what `embed` reads itself
# Differences of logits that rounding does not explain, relative to the largest logit: on a CPU in full precision, else.
_NOT_ROUNDING, _NOT_ROUNDING_HALF = 1e-3, 0.25


@dataclass
class _Argument:
    """An argument of the model with values for each token, such as `token_type_ids`, which travel as channels."""

    shape: torch.Size  # of the values of one token
    dtype: torch.dtype
    least: float = 0.0
    most: float = 0.0

    def channels(self, value: Tensor) -> Tensor:
        """The values as channels (N, L, C)."""
        if value.numel():
            self.least, self.most = min(self.least, float(value.min())), max(self.most, float(value.max()))
        return value.reshape(*value.shape[:2], -1).float()

    def value(self, channels: Tensor) -> Tensor:
        """The values again, without a gradient; noise of PerturbTS does not lead to ids that do not exist."""
        value = channels.detach().reshape(*channels.shape[:2], *self.shape)
        return (value if self.dtype.is_floating_point else value.round().clamp(self.least, self.most)).to(self.dtype)


class EmbeddingClassifier(nn.Module):
    """A text classifier as a function of its input embeddings, which T-CIL can perturb.

    The input is one floating-point tensor (N, L, C): the token embeddings, divided by their standard deviation over the
    vocabulary so that magnitudes are comparable with those of normalised images; further arguments of the model that
    have values for each token, such as `token_type_ids`; and the attention mask as the last channel. Only embeddings
    have a gradient, so neither these arguments nor masked tokens are perturbed.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A sequence classifier that takes `inputs_embeds` and `attention_mask`. It is shared, not copied.

    Examples
    --------
    >>> import torch
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> size = dict(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    >>> model = BertForSequenceClassification(BertConfig(**size, num_labels=3)).eval()
    >>> embedded = EmbeddingClassifier(model)
    >>> ids, mask = torch.tensor([[2, 5, 0], [7, 3, 1]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    >>> batch = {"input_ids": ids, "attention_mask": mask}
    >>> torch.allclose(embedded(embedded.embed(batch)), model(**batch).logits, atol=1e-6)
    True
    """

    scale: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not isinstance(model, PreTrainedModel):
            raise invalid("model", type(model).__name__, "a transformers model for sequence classification")
        self.model = model
        weight = model.get_input_embeddings().weight.detach().float()
        self.register_buffer("scale", weight.std().clamp(min=1e-12), persistent=False)
        self.training = model.training
        self._width = weight.shape[1]
        self._arguments: dict[str, _Argument] | None = None  # those of the first batch

    def embed(self, batch: Mapping[str, Any]) -> Tensor:
        """The inputs (N, L, C) of a batch of token ids.

        Parameters
        ----------
        batch : mapping
            With `input_ids` and, unless nothing is padded, `attention_mask`. Other arguments with values for each token
            are passed on to the model; all batches must have the same. Labels and other entries are left out.

        Returns
        -------
        Tensor
            Scaled embeddings, other arguments, and the mask as the last channel.
        """
        if "input_ids" not in batch:
            raise invalid("batch", f"the keys {sorted(batch)}", "input_ids among them")
        home = self.scale.device
        ids = torch.as_tensor(batch["input_ids"]).to(home)
        mask = torch.as_tensor(batch.get("attention_mask", torch.ones_like(ids))).to(home)
        passed = {name: value.to(home) for name, value in _others(batch).items() if value.shape[:2] == ids.shape}
        found = {name: (value.shape[2:], value.dtype) for name, value in passed.items()}
        if self._arguments is None:
            self._arguments = {name: _Argument(*kind) for name, kind in found.items()}
        if found != {name: (argument.shape, argument.dtype) for name, argument in self._arguments.items()}:
            same = f"those of the first batch, {sorted([*_READ, *self._arguments])}, of the same types"
            raise invalid("batch", f"the arguments {sorted([*_READ, *found])}", same)
        with torch.no_grad():
            vectors = self.model.get_input_embeddings()(ids).float() / self.scale
        more = [argument.channels(passed[name]) for name, argument in self._arguments.items()]
        return torch.cat([vectors, *more, mask.float()[..., None]], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        """The model's logits for these embeddings."""
        mask = (x[..., -1] > 0.5).long()
        arguments = self._arguments or {}
        vectors, *more = x[..., :-1].split([self._width, *(a.shape.numel() for a in arguments.values())], dim=-1)
        passed = {name: arguments[name].value(part) for name, part in zip(arguments, more, strict=True)}
        vectors = vectors * self.scale.to(x.dtype)
        return select_logits(self.model(inputs_embeds=vectors, attention_mask=mask, **passed))


def predict_logits(
    model: nn.Module,
    batches: Batches,
    *,
    classes: Iterable[int] | None = None,
    columns: Iterable[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits and labels of batches that are dicts of the model's arguments, in evaluation mode.

    Parameters
    ----------
    model : torch.nn.Module
        Called as `model(**batch)` without the labels. It and all random states are left unchanged.
    batches : iterable of mappings
        For instance a DataLoader with a data collator; labels under "labels" or "label".
    classes, columns : iterable of int, optional
        The label of each logit column, and which columns of a wider head these are, as in `tcil.predict_logits`.

    Returns
    -------
    logits : Tensor (N, K)
        On the CPU.
    labels : Tensor (N,)
        As they are in the batches.

    Examples
    --------
    >>> import torch
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> size = dict(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    >>> model = BertForSequenceClassification(BertConfig(**size, num_labels=3))
    >>> batch = {"input_ids": torch.tensor([[2, 5], [7, 3]]), "labels": torch.tensor([0, 2])}
    >>> logits, labels = predict_logits(model, [batch])
    >>> logits.shape, labels
    (torch.Size([2, 3]), tensor([0, 2]))
    """
    names, places = classes_and_columns(classes, columns)
    _refuse_single(batches, "batches")
    logits, labels = list[Tensor](), list[Tensor]()
    with random_state.preserved(batches), Classifier(model) as classifier, torch.no_grad():
        for batch in batches:
            inputs, own = _without_labels(batch, classifier.device)
            found = select_logits(classifier.model(**inputs))
            logits.append(at_least_float32(found).cpu())
            labels.append(own)
    if not logits:
        raise invalid("batches", "none", "at least one batch")
    together = torch.cat(logits)
    return (together if names is None else pick_columns(together, len(names), places)), torch.cat(labels)


def fit(
    calibrator: AnyCalibrator,
    model: nn.Module,
    memory: Batches | None,
    valid: Batches,
    new_classes: Iterable[int],
    *,
    classes: Sequence[int] | None = None,
    columns: Sequence[int] | None = None,
    imbalance: float | None = None,
) -> AnyCalibrator:
    """Fit a calibrator on a text classifier after a task, by `partial_fit`.

    T-CIL and PACT perturb the embeddings of the exemplars' tokens; all batches must be padded to one length. It is
    checked first that embeddings give the logits of the token ids: a decoder such as GPT-2 or Llama needs padding on
    the left, or none. Calibrators of logits run the model as it is.

    Parameters
    ----------
    calibrator : Calibrator
        For instance `tcil.PACT()` or `tcil.TCIL()`.
    model : transformers.PreTrainedModel
        The trained classifier. It is left unchanged.
    memory : iterable of mappings or None
        Batches of exemplars of all classes, with `input_ids`, `attention_mask`, `labels` and what else the model
        takes, such as `token_type_ids`. Not needed by calibrators of logits.
    valid : iterable of mappings
        Batches of held-out text of the new classes.
    new_classes : iterable of int
        The labels of the new task.
    classes : sequence of int, optional
        The labels of all classes so far, in the order of the logit columns. Default: 0 to the largest new class.
    columns : sequence of int, optional
        Their columns, where they are not the first ones.
    imbalance : float, optional
        For PACT: texts of a new class that training presented for each one of an old class. The first task, which has
        no old classes, does not need it.

    Returns
    -------
    Calibrator
        The calibrator, fitted; `calibrator.wrap(model)` takes the model's own arguments.
    """
    checked_calibrator(calibrator)
    new = as_classes(new_classes, "new_classes", ordered=False)
    names = tuple(range(max(new) + 1)) if classes is None else as_classes(classes, "classes")
    places = tuple(range(len(names))) if columns is None else as_classes(columns, "columns")
    if takes_logits(calibrator):
        logits, labels = predict_logits(model, valid, classes=names, columns=places)
        with warnings_of(named_by(new)):
            return calibrator.partial_fit(logits, labels, classes=names)
    require_memory(calibrator, memory)
    embedded = EmbeddingClassifier(model)
    fit_after_task(
        calibrator,
        embedded,
        memory=None if memory is None else _embedded(embedded, memory, "memory"),
        valid=_embedded(embedded, valid, "valid"),
        new_classes=new,
        classes=names,
        columns=places,
        imbalance=imbalance,
    )
    # From here on the calibrator is tied to the model itself, which takes token ids.
    calibrator._tie_to(model)
    return calibrator


def _embedded(classifier: EmbeddingClassifier, batches: Batches, argument: str) -> tuple[Tensor, Tensor]:
    _refuse_single(batches, argument)
    inputs, labels = list[Tensor](), list[Tensor]()
    padding_seen = False
    for batch in batches:
        given, own = _without_labels(batch, classifier.scale.device)
        embedded = classifier.embed(given)
        padded = not bool(embedded[..., -1].all())
        if not inputs or (padded and not padding_seen):
            _check_logits(classifier, given, embedded, argument)
        padding_seen = padding_seen or padded
        inputs.append(embedded)
        labels.append(own)
    if not inputs:
        raise invalid(argument, "no batches", "at least one batch")
    lengths = sorted({part.shape[1] for part in inputs})
    if len(lengths) > 1:
        given_lengths = f"batches of {lengths[0]} and {lengths[-1]} tokens"
        advice = "Pad all of them: tokenizer(..., padding='max_length', max_length=...)."
        raise invalid(argument, given_lengths, "one length for all", advice)
    return torch.cat(inputs), torch.cat(labels)


def _check_logits(classifier: EmbeddingClassifier, batch: dict[str, Tensor], inputs: Tensor, argument: str) -> None:
    """Raise if the embeddings of a batch give other logits than its token ids, on which the model is used."""
    with random_state.preserved(), Classifier(classifier), torch.no_grad():
        own = select_logits(classifier.model(**batch))
        found = classifier(as_taken(classifier, inputs))
    check_rows(own, inputs)
    gap, size = gap_and_size(found, own)
    full = own.device.type == "cpu" and own.dtype in (torch.float32, torch.float64)
    if gap <= (_NOT_ROUNDING if full else _NOT_ROUNDING_HALF) * size:
        return
    reader, side = "Decoders such as GPT-2 find the end of a text", "left"
    if not bool(inputs[:, 0, -1].all()):  # padded on the left
        reader, side = "Models such as RoBERTa count positions", "right"
    advice = (
        f"{reader} by the ids of padding, which embeddings do not have: pad on the {side} (tokenizer.padding_side ="
        f" {side!r}), or pass batches without padding."
    )
    left_out = [name for name, value in _others(batch).items() if value.shape[:2] != inputs.shape[:2]]
    if left_out:
        advice += f" Or the model needs {', '.join(left_out)}, without values for each token: it cannot be passed on."
    advice += " Calibrators of logits, such as tcil.TemperatureScaling(), need no embeddings."
    given = f"texts whose logits from inputs_embeds differ from those from input_ids by up to {gap:.3g}"
    raise invalid(argument, given, f"the same logits, which are up to {size:.3g}", advice)


def _others(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The arguments of the model in a batch besides token ids and mask, by name."""
    names = sorted(name for name, value in batch.items() if name not in (*_READ, *_LABELS) and value is not None)
    return {name: torch.as_tensor(batch[name]) for name in names}


def _refuse_single(batches: Any, argument: str) -> None:
    """Raise for one batch in place of several: iterating it would give its keys."""
    if isinstance(batches, Mapping):
        raise invalid(argument, "a single batch (a dict)", "an iterable of batches", "Pass a list of batches: [batch].")


def _without_labels(batch: Mapping[str, Any], device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    if not isinstance(batch, Mapping):
        raise invalid("batch", type(batch).__name__, "a dict of the model's arguments and labels")
    found = [name for name in _LABELS if name in batch]
    if len(found) != 1:
        raise invalid("batch", f"the keys {sorted(batch)}", "labels under 'labels' or 'label'")
    labels = as_labels(batch[found[0]], "batch labels")
    return {key: torch.as_tensor(value).to(device) for key, value in batch.items() if key != found[0]}, labels
