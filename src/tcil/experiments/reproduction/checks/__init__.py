"""Checks of the claims in the paper's text on our runs, each with the rule by which the claim counts as holding.

A check answers for one edition of the paper's experiments: the result of our runs, the number of seeds (the same for
everything that is compared), and whether everything that the claim is about was run. The rules are ours; they are
printed next to the answers.
"""

# Imported because they register checks in CHECKS.
from tcil.experiments.reproduction.checks import comparisons, exemplars, memory_sizes, validation_cost  # noqa: F401
from tcil.experiments.reproduction.checks.answers import CHECKS, Agreement, Answer, Check

__all__ = ["CHECKS", "Agreement", "Answer", "Check"]
