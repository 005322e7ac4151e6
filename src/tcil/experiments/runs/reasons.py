"""Why a calibrator has no answer after a task: a reason with what it tells, in words where people read it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import Formatter
from typing import Annotated, Self

from pydantic import BeforeValidator, model_validator

from tcil.experiments.runs.records import Amount, Share, StoredRecord
from tcil.foundation.options import Option


class NotApplicableReason(Option):
    """Why a calibrator has no answer after a task; names in braces are fields of `NoAnswer`."""

    NEEDS_IMAGES = "needs_images", "needs the network and its images"
    NEEDS_COUNTS = "needs_counts", "needs the numbers of training images"
    NEEDS_FIRST_TASK = "needs_first_task", "needs the first task"
    NEEDS_RESERVE = "needs_reserve", "needs --reserve"
    NO_OLD_TASK = "no_old_task", "there is no old task yet"
    NEEDS_VALIDATION = "needs_validation", "needs a validation set"
    NEEDS_MEMORY = "needs_memory", "needs the memory's logits"
    NOT_REACHABLE = (
        "not_reachable",
        "no noise up to {max_noise:g} brings accuracy to {target_accuracy:.3f}; the nearest was {accuracy:.3f} at noise"
        " {noise:.3g}",
    )
    OTHER = "other", "{words}"


class NoAnswer(StoredRecord):
    """A reason with what it tells: the accuracy level that PerturbTS missed, or a calibrator's own words.

    >>> NoAnswer(reason="needs_reserve").sentence
    'needs --reserve'
    """

    reason: Annotated[NotApplicableReason, BeforeValidator(lambda value: NotApplicableReason.parse(value, "reason"))]
    max_noise: Amount | None = None
    target_accuracy: Share | None = None
    accuracy: Share | None = None
    noise: Amount | None = None
    words: str | None = None

    @model_validator(mode="after")
    def _told(self) -> Self:
        if missing := [name for _, name, _ in self._parts() if name and getattr(self, name) is None]:
            raise ValueError(f"{missing[0]} is missing")
        return self

    def _parts(self) -> list[tuple[str, str | None, str]]:
        return [(text, name, form or "") for text, name, form, _ in Formatter().parse(self.reason.meaning)]

    @property
    def sentence(self) -> str:
        """The reason in words."""
        return "".join(text + self._said(name, form) for text, name, form in self._parts())

    def _said(self, name: str | None, form: str) -> str:
        return "" if name is None else format(getattr(self, name), form)

    @classmethod
    def of_sentence(cls, sentence: str) -> Self:
        """What version 1 wrote, read back."""
        for reason in NotApplicableReason:
            if reason.meaning == sentence:
                return cls(reason=reason)
        if found := re.fullmatch(_MISSED, sentence):
            most, target, nearest, noise = map(float, found.groups())
            missed = NotApplicableReason.NOT_REACHABLE
            return cls(reason=missed, max_noise=most, target_accuracy=target, accuracy=nearest, noise=noise)
        return cls(reason=NotApplicableReason.OTHER, words=sentence)


_MISSED = (
    r"(?:\w+ has no temperature \(n/a\): )?no noise up to ([\d.e+-]+) brings accuracy to ([\d.]+);"
    r" the nearest was ([\d.]+) at noise ([\d.e+-]+)"
)


def in_common(answers: Sequence[NoAnswer]) -> str:
    """Answers of one reason in one clause; where their numbers differ, the range.

    >>> missed = {"reason": "not_reachable", "max_noise": 100.0, "accuracy": 0.9, "noise": 0.0}
    >>> in_common([NoAnswer(**missed, target_accuracy=level) for level in (0.5, 0.25)])
    'no noise up to 100 brings accuracy to 0.250 to 0.500'
    """
    said = []
    for text, name, form in answers[0]._parts():
        values = {answer._said(name, form) for answer in answers}
        least, most = (choose(values, key=float) if form else next(iter(values)) for choose in (min, max))
        said.append(text + (least if least == most else f"{least} to {most}"))
    return "".join(said).partition(";")[0]
