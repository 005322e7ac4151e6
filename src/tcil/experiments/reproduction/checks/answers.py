"""The answer of a check, its rule, and the registry of all checks by claim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tcil.experiments.reproduction.finished import FinishedRuns
from tcil.experiments.reproduction.schedules import Edition
from tcil.foundation.options import Option


class Agreement(Option):
    """Whether our runs agree with a claim."""

    YES = "yes", "all that the claim is about was run, and agrees"
    IN_PART = "in part", "what was run agrees, and something that the claim is about was not run"
    UNDECIDED = "undecided", "what was run does not tell"
    NO = "no", "what was run disagrees"
    NOT_RUN = "-", "not run"


@dataclass(frozen=True)
class Answer:
    """The result of our runs for a claim; `all_run` if everything that it is about was run, with `n` seeds."""

    ours: str
    holds: bool
    n: int
    all_run: bool = True
    decided: bool = True

    @property
    def agreement(self) -> Agreement:
        """Whether our runs agree with the claim."""
        if not self.decided:
            return Agreement.UNDECIDED
        if not self.holds:
            return Agreement.NO
        return Agreement.YES if self.all_run else Agreement.IN_PART


Ask = Callable[[FinishedRuns, Edition], Answer | None]


@dataclass(frozen=True)
class Check:
    """The rule by which a claim counts as holding, and the function that evaluates our runs (None: not run)."""

    rule: str
    ask: Ask


# By the claim's name in paper.json. Claims without a check are premises and the protocol, which is in the presets.
CHECKS: dict[str, Check] = {}


def check(claim: str, rule: str) -> Callable[[Ask], Ask]:
    """Decorator that registers a function as the check of a claim."""

    def register(ask: Ask) -> Ask:
        CHECKS[claim] = Check(rule, ask)
        return ask

    return register
