"""Exemplars perturbed along their adversarial directions, as used by T-CIL, PACT and the paper's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from tcil.calibration.exemplars import Exemplars
from tcil.calibration.inputs.examples import Batch
from tcil.calibration.perturbation import DirectionPolicy, TargetChooser
from tcil.foundation import ranks

GLANCE = 20  # number of new exemplars that are used to check magnitudes far from the root
_Directed: TypeAlias = tuple[Tensor, Tensor]  # images, and the direction of each


class PerturbedExemplars:
    """Exemplars with their directions for a policy, to be evaluated at any magnitude.

    A direction is the sign of the input gradient toward the target class, so that `magnitude` is the change of every
    input value. Rows are in T-CIL's order: new exemplars first, then old ones, each in the order of the memory.

    The new exemplars and their directions are kept in memory. Old exemplars are read again, and their directions
    computed again, in every pass, so that a loader is never held in memory as a whole. With `keep`, they are kept too,
    and so are the logits of all exemplars at every magnitude that was requested; this is faster for many magnitudes.

    Batches are shared among the ranks of `tcil.distributed.sharded()`, each of which gets all rows.

    Parameters
    ----------
    exemplars : Exemplars
        From `open_exemplars`; the network must still be borrowed.
    policy : DirectionPolicy
        The class toward which an exemplar is perturbed.
    seed : int
        Seed of the random policy.
    keep : bool
        Keep old exemplars, directions and logits in memory.

    Examples
    --------
    >>> import torch
    >>> from tcil.calibration.exemplars import open_exemplars
    >>> memory = torch.randn(8, 5), torch.arange(8) % 4
    >>> with open_exemplars(torch.nn.Linear(5, 4), memory, new_classes=[2, 3]) as exemplars:
    ...     perturbed = PerturbedExemplars(exemplars)
    ...     perturbed.logits(0.1).shape, perturbed.logits(0.1, new_only=True).shape
    (torch.Size([8, 4]), torch.Size([4, 4]))
    >>> perturbed.columns, perturbed.rows
    (tensor([2, 3, 2, 3, 0, 1, 0, 1]), tensor([2, 3, 6, 7, 0, 1, 4, 5]))
    """

    def __init__(
        self,
        exemplars: Exemplars,
        policy: DirectionPolicy = DirectionPolicy.PAPER,
        seed: int = 0,
        *,
        keep: bool = False,
    ) -> None:
        self.exemplars = exemplars
        self._ranks = ranks.current()
        self._choose = TargetChooser(policy, exemplars.means, exemplars.is_new, seed)
        self._new_lengths = list[int]()
        self._new = list(self._directed(exemplars.new_batches(), self._new_lengths))
        self._first_old = self._choose.mark()
        self._logits_at: dict[float, Tensor] | None = {} if keep else None
        self._old_lengths = list[int]()
        self._old = list(self._directed_old(self._old_lengths)) if keep else None

    @property
    def n_new(self) -> int:
        """The number of new exemplars, which are the first rows."""
        return len(self.exemplars.new_inputs)

    @property
    def rows(self) -> Tensor:
        """The index in the memory of each row."""
        new = self.exemplars.is_new[self.exemplars.columns]
        return torch.cat([new.nonzero(), (~new).nonzero()]).squeeze(1)

    @property
    def columns(self) -> Tensor:
        """The class of each row; the first `n_new` are those of new exemplars."""
        return self.exemplars.columns[self.rows]

    def logits(self, magnitude: float, *, new_only: bool = False) -> Tensor:
        """Logits over the classes seen, of all exemplars or of the new ones, perturbed by this magnitude."""
        kept = self._logits_at
        if kept is not None and magnitude in kept:
            return kept[magnitude][: self.n_new] if new_only else kept[magnitude]
        answers = self._answers(magnitude, self._logits, new_only)
        if kept is not None and not new_only:
            kept[magnitude] = answers
        return answers

    def glance(self, magnitude: float) -> tuple[Tensor, Tensor]:
        """Logits and columns of a few new exemplars, perturbed by this magnitude."""
        few = self._few
        if self._ranks.size > 1:  # the other ranks have most of the directions
            return self.logits(magnitude, new_only=True)[few], self.exemplars.new_columns[few]
        size = self.exemplars.stream.batch_size
        pairs = zip(self.exemplars.new_inputs[few].split(size), self._few_directions.split(size), strict=True)
        logits = torch.cat([self._pushed(*pair, magnitude, self._logits) for pair in pairs])
        return logits, self.exemplars.new_columns[few]

    def features(self, magnitude: float) -> Tensor:
        """Features of all exemplars, perturbed by this magnitude."""
        classifier = self.exemplars.classifier
        return self._answers(magnitude, lambda images: classifier.logits_and_features(images)[1].cpu(), new_only=False)

    def inputs(self, magnitude: float) -> Tensor:
        """All exemplars, perturbed by this magnitude, as the network gets them."""
        return self._answers(magnitude, Tensor.cpu, new_only=False)

    def _answers(self, magnitude: float, answer: Callable[[Tensor], Tensor], new_only: bool) -> Tensor:
        """The results of `answer` for perturbed exemplars, from all ranks."""
        answers = [self._pushed(*pair, magnitude, answer) for pair in self._new]
        if new_only:
            return self._ranks.gathered(answers, self._new_lengths)
        lengths = list(self._old_lengths)
        for pair in self._directed_old(lengths) if self._old is None else self._old:
            answers.append(self._pushed(*pair, magnitude, answer))
        return self._ranks.gathered(answers, [*self._new_lengths, *lengths])

    def _pushed(
        self, inputs: Tensor, directions: Tensor, magnitude: float, answer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        with torch.no_grad():
            return answer(self.exemplars.classifier.place(inputs) + magnitude * directions)

    def _logits(self, images: Tensor) -> Tensor:
        return self.exemplars.pick(self.exemplars.classifier.logits(images)).cpu()

    def _directed_old(self, lengths: list[int]) -> Iterator[_Directed]:
        self._choose.back_to(self._first_old)
        return self._directed(self.exemplars.old_batches(), lengths, len(self._new_lengths))

    def _directed(self, batches: Iterable[Batch], lengths: list[int], done: int = 0) -> Iterator[_Directed]:
        """This rank's batches with their directions; the length of every batch is appended to `lengths`."""
        for dealt in self._ranks.deal(batches, done):
            images, columns = dealt.batch
            lengths.append(len(columns))
            if dealt.here:
                yield images, self._direction(images, columns)
            else:
                self._choose.skip(columns)

    def _direction(self, images: Tensor, columns: Tensor) -> Tensor:
        """The negative sign of the gradient of the cross-entropy with the target class."""
        exemplars = self.exemplars

        def target(features: Tensor, masked: Tensor) -> Tensor:
            return self._choose(features, columns, masked)

        return -exemplars.classifier.input_gradient(images, target, exemplars.pick).sign()

    @property
    def _few(self) -> slice:
        return slice(None, None, max(1, self.n_new // GLANCE))

    @cached_property
    def _few_directions(self) -> Tensor:
        return torch.cat([directions for _, directions in self._new])[self._few]
