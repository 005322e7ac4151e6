"""The memory after one clean pass: class means of the features, the new exemplars, the scale of the inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tcil.calibration.inputs.classifier import Classifier, told_of
from tcil.calibration.inputs.duplicates import digests_of
from tcil.calibration.inputs.examples import Batch, Examples, ExampleStream
from tcil.calibration.inputs.input_scale import InputScale
from tcil.calibration.perturbation import ClassMeans
from tcil.foundation import random_state, ranks
from tcil.foundation.arrays import (
    as_classes,
    check_own_unmasked,
    classes_and_columns,
    label_columns,
    pick_columns,
    widest,
    without_masked,
)
from tcil.foundation.errors import invalid, shortened
from tcil.foundation.records import Record

BATCH_SIZE = 64


@dataclass(frozen=True)
class LogitSpread(Record):
    """How far the logits of the exemplars are apart.

    Attributes
    ----------
    log : float
        The logarithm of the root mean square of all logits about the mean of their row.
    per_class : float
        The number of exemplars, divided by that of classes.
    """

    log: float
    per_class: float


@dataclass(frozen=True, eq=False)
class Exemplars:
    """Exemplars of all classes after one pass through the network, which is still borrowed.

    Columns are indices into `classes`. Only the images of new exemplars are kept. Those of old classes are read again
    when they are needed, so that a loader is never held in memory as a whole.

    Attributes
    ----------
    classifier : Classifier
        The borrowed network, with folded batch norms.
    stream : ExampleStream
        The memory itself.
    classes : tuple of int
        The label of each column.
    head_columns : tuple of int or None
        The logit columns of the classes; None if they are the first ones.
    is_new : Tensor
        Which columns are new, (K,).
    columns : Tensor
        The class of each exemplar, (N,), in the order of the memory.
    means, counts : Tensor
        Feature mean of each class, (K, D), and its number of exemplars, (K,).
    new_inputs, new_logits : Tensor
        The new exemplars and their logits, in the order of the memory.
    accuracy : float
        The share of exemplars that are classified correctly.
    spread : float
        The standard deviation of all inputs.
    logit_spread : LogitSpread or None
        How far the logits are apart; None if they do not differ.
    new_scale, old_scale : InputScale
        The range of the inputs of new and of old classes.
    digests : frozenset of bytes
        By which an image is found to be an exemplar.
    """

    classifier: Classifier
    stream: ExampleStream
    classes: tuple[int, ...]
    head_columns: tuple[int, ...] | None
    is_new: Tensor
    columns: Tensor
    means: Tensor
    counts: Tensor
    new_inputs: Tensor
    new_logits: Tensor
    accuracy: float
    spread: float
    logit_spread: LogitSpread | None
    new_scale: InputScale
    old_scale: InputScale
    digests: frozenset[bytes]

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def new_columns(self) -> Tensor:
        """The class of each new exemplar."""
        return self.columns[self.is_new[self.columns]]

    @property
    def new_labels(self) -> tuple[int, ...]:
        """The labels of the new classes."""
        return tuple(label for label, new in zip(self.classes, self.is_new.tolist(), strict=True) if new)

    @property
    def at_chance(self) -> bool:
        """Whether the accuracy on the exemplars, which are training data, is no better than chance."""
        chance = 1 / len(self.classes)
        return bool(self.accuracy <= chance + 2 * (chance * (1 - chance) / len(self)) ** 0.5)

    def pick(self, logits: Tensor) -> Tensor:
        """The logits of the classes seen; the head may have more columns."""
        return pick_columns(logits, len(self.classes), self.head_columns)

    def new_batches(self) -> Iterator[Batch]:
        """The new exemplars and their columns, in batches."""
        size = self.stream.batch_size
        return zip(self.new_inputs.split(size), self.new_columns.split(size), strict=True)

    def old_batches(self) -> Iterator[Batch]:
        """The exemplars of old classes and their columns, in batches, read from the memory again."""
        for inputs, labels in self.stream if not bool(self.is_new.all()) else ():
            columns = label_columns(labels, self.classes, "memory labels", len(self.classes), self.stream.doubt)
            old = ~self.is_new[columns]
            if bool(old.any()):
                yield inputs[old.to(inputs.device)], columns[old]

    def differ_in_scale(self, valid: InputScale) -> tuple[bool, str]:
        """Whether memory and validation inputs are on different scales, and a description of both."""
        new = self.new_scale.differs_from(valid, same_classes=True)
        old = self.old_scale.differs_from(valid, same_classes=False)
        memory = f"old classes in memory: {self.old_scale}" if old and not new else f"memory: {self.new_scale}"
        return new or old, f"{memory}; valid: {valid}"


@contextmanager
def open_exemplars(
    model: nn.Module,
    memory: Examples,
    new_classes: Iterable[Any],
    *,
    classes: Iterable[Any] | None = None,
    batch_size: int = BATCH_SIZE,
) -> Iterator[Exemplars]:
    """Context with the exemplars of a memory as T-CIL uses them; the model is restored on exit.

    The arguments are those of `TCIL` and `TCIL.fit`.

    >>> import torch
    >>> memory = torch.randn(8, 5), torch.arange(8) % 4
    >>> with open_exemplars(torch.nn.Linear(5, 4), memory, new_classes=[2, 3]) as exemplars:
    ...     exemplars.new_columns, exemplars.means.shape
    (tensor([2, 3, 2, 3]), torch.Size([4, 5]))
    """
    new = as_new_classes(new_classes)
    names, _ = classes_and_columns(classes, None)
    with random_state.preserved(memory):
        stream = ExampleStream(memory, "memory", batch_size=batch_size)
        if stream.labels is not None:
            check_coverage(stream.labels.unique(), names, new, stream.doubt)
        with Classifier(model) as classifier:
            yield read_exemplars(classifier, stream, names, None, new)


def read_exemplars(
    classifier: Classifier,
    stream: ExampleStream,
    names: tuple[int, ...] | None,
    places: tuple[int, ...] | None,
    new: tuple[int, ...],
) -> Exemplars:
    """The clean pass over the memory, shared among the ranks; `names` are the classes and `places` their columns."""
    seen = _CleanPass(classifier, stream, names, places, new)
    with torch.no_grad():
        for dealt in seen.ranks.deal(stream):
            seen.look(*dealt.batch)
            if dealt.here:
                seen.run(*dealt.batch, counted=dealt.own)
            seen.number(dealt.batch[1])
    return seen.exemplars()


class _CleanPass:
    """Collects what `Exemplars` needs from the batches of the memory."""

    def __init__(
        self,
        classifier: Classifier,
        stream: ExampleStream,
        names: tuple[int, ...] | None,
        places: tuple[int, ...] | None,
        new: tuple[int, ...],
    ) -> None:
        self.ranks = ranks.current()
        self._classifier, self._stream = classifier, stream
        self._names, self._places, self._new = names, places, new
        self._columns, self._new_inputs, self._new_logits = list[Tensor](), list[Tensor](), list[Tensor]()
        self._new_scale, self._old_scale, self._moments = InputScale(), InputScale(), _Moments()
        self._means, self._hits, self._width = ClassMeans(), 0, 0
        self._own_logits = list[Tensor]()  # of the batches that this rank counts
        self._digests = set[bytes]()

    def look(self, inputs: Tensor, labels: Tensor) -> None:
        """Record the new exemplars of a batch and the range of its inputs."""
        new = self._is_new(labels).to(inputs.device)
        self._new_inputs.append(self._stream.keep(inputs[new]))
        _check_shape(inputs, self._new_inputs[0])
        self._new_scale.add(self._new_inputs[-1])
        self._old_scale.add(inputs, ~new)
        self._moments.add(inputs)
        self._digests.update(digests_of(inputs))

    def run(self, inputs: Tensor, labels: Tensor, *, counted: bool) -> None:
        """Compute logits and features of a batch; `counted` on one rank only."""
        with told_of("memory", inputs):
            logits, features = self._classifier.logits_and_features(self._classifier.place(inputs))
        if not self._columns:  # the first batch, on which the head was found
            self._classifier.fold(inputs[:2])
        columns = self._columns_of(labels, logits.shape[1])
        if self._names is not None:
            logits = pick_columns(logits, len(self._names), self._places)
        check_own_unmasked(logits, columns, self._names, "memory labels")
        self._new_logits.append(logits[self._is_new(labels).to(logits.device)].cpu())
        self._width = features.shape[1]
        if counted:
            self._means.add(features, columns)
            self._hits += int((logits.argmax(dim=1).cpu() == columns).sum())
            self._own_logits.append(logits.cpu())

    def number(self, labels: Tensor) -> None:
        """Record the classes of a batch, once the head's width is known."""
        self._columns.append(self._columns_of(labels, self._classifier.width or 0))

    def exemplars(self) -> Exemplars:
        """The exemplars, combined over all ranks."""
        columns, means = torch.cat(self._columns), self._means
        means.share(self.ranks, int(columns.max()) + 1, self._width)
        present = means.counts.nonzero().squeeze(1)
        if self._names is not None:
            present = torch.tensor(self._names)[present]
        classes = check_coverage(present, self._names, self._new, self._stream.doubt)
        new_logits = self.ranks.gathered(self._new_logits, [len(inputs) for inputs in self._new_inputs])
        return Exemplars(
            classifier=self._classifier,
            stream=self._stream,
            classes=classes,
            head_columns=self._places,
            is_new=torch.tensor([label in set(self._new) for label in classes]),
            columns=columns,
            means=means.means(),
            counts=means.counts,
            new_inputs=torch.cat(self._new_inputs),
            new_logits=new_logits[:, : len(classes)],
            accuracy=int(self.ranks.total(torch.tensor(self._hits))) / int(means.counts.sum()),
            spread=self._moments.deviation,
            logit_spread=self._logit_spread(len(columns), len(classes)),
            new_scale=self._new_scale,
            old_scale=self._old_scale,
            digests=frozenset(self._digests),
        )

    def _logit_spread(self, n_exemplars: int, n_classes: int) -> LogitSpread | None:
        sums = torch.zeros(2, dtype=torch.float64)  # of squares, and their number
        for logits in self._own_logits:
            sums += centred_squares(logits[:, :n_classes])
        log = log_root_mean(self.ranks.total(sums))
        return None if log is None else LogitSpread(log, n_exemplars / n_classes)

    def _is_new(self, labels: Tensor) -> Tensor:
        return torch.isin(labels, torch.tensor(self._new))

    def _columns_of(self, labels: Tensor, width: int) -> Tensor:
        return label_columns(labels, self._names, "memory labels", width, self._stream.doubt)


def centred_squares(logits: Tensor) -> Tensor:
    """The sum of squares of logits about the mean of their row, and their number; masked ones do not count."""
    alive = logits != -torch.inf
    z, own = without_masked(logits.double()), alive.sum(dim=1, keepdim=True)
    z = (z - z.sum(dim=1, keepdim=True) / own) * alive
    return torch.stack([z.square().sum(), own.sum().double()])


def log_root_mean(sums: Tensor) -> float | None:
    """The log spread by what `centred_squares` gave, also summed over batches; None where logits do not differ."""
    squares, count = sums.tolist()
    return 0.5 * math.log(squares / count) if 0 < squares < math.inf else None


class _Moments:
    """Mean and standard deviation of numbers that are added in batches, by the formula of Chan et al. (1979)."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0  # squares are about the mean

    def add(self, values: Tensor) -> None:
        count = self._count + values.numel()
        mean = float(values.mean(dtype=widest(values.device)))
        apart = mean - self._mean
        self._squares += float((values - mean).square().sum(dtype=widest(values.device)))
        self._squares += apart**2 * self._count * values.numel() / count
        self._mean += apart * values.numel() / count
        self._count = count

    @property
    def deviation(self) -> float:
        return math.sqrt(self._squares / self._count)


def _check_shape(inputs: Tensor, first: Tensor) -> None:
    """Raise if exemplars have different shapes, since they are kept in one tensor."""
    if inputs.shape[1:] != first.shape[1:]:
        shapes = f"examples of the shapes {tuple(first.shape[1:])} and {tuple(inputs.shape[1:])}"
        raise invalid("memory inputs", shapes, "one shape for all", "Use a transform that gives all the same size.")


def as_new_classes(value: Any) -> tuple[int, ...]:
    """The labels of the newest task."""
    if value is None:
        raise invalid("new_classes", "None", "the labels of the newest task, such as range(90, 100)")
    return as_classes(value, "new_classes", ordered=False)


def check_coverage(
    present: Tensor, names: tuple[int, ...] | None, new: tuple[int, ...], doubt: str = ""
) -> tuple[int, ...]:
    """The label of each column; raises if a class has no exemplar, since it then has no feature mean.

    `doubt` is added to errors if the labels may have been taken from the wrong part of a batch.
    """
    available = set(present.tolist())
    wanted: Sequence[int] = range(max([*available, *new]) + 1) if names is None else names
    unknown = sorted((set(new) | available) - set(names)) if names is not None else []
    if unknown:
        where = "new_classes" if set(unknown) & set(new) else "memory labels"
        expected = f"labels among the {len(wanted)} in classes= or columns="
        raise invalid(where, f"the labels {shortened(unknown)}", expected, doubt)
    absent = sorted(set(new) - available)
    if absent:
        raise invalid(
            "new_classes",
            f"the labels {shortened(absent)} without an exemplar in memory",
            "exemplars of every class",
            f"Update the memory with the new task before calibrating. {doubt}",
        )
    missing = list(itertools.islice((label for label in wanted if label not in available), 9))
    if missing:
        how = (
            "Without classes=, the logit columns are the labels 0 to the largest one; otherwise pass classes=. If a"
            " fixed head has a column for every label, pass the labels seen so far as columns=."
            if names is None
            else "Leave it out of classes= if the model has not learned it."
        )
        raise invalid(
            "memory",
            f"no exemplar of the classes {shortened(missing)}",
            "at least one of every class",
            f"{how} {doubt}",
        )
    if len(wanted) < 2:
        raise invalid("memory", "exemplars of a single class", "at least two classes", doubt)
    return tuple(wanted)
