"""How each claim of the paper's text is checked on our runs, and by what rule it counts as holding.

A check answers for one edition of the paper's experiments: what our runs say, over how many seeds (the same for all
that is compared), and whether all that the claim is about was run. Rules are ours; they are printed beside the answers.
"""

# Imported for what they register in CHECKS.
from tcil.experiments.reproduction.checks import comparisons, exemplars, memory_sizes, validation_cost  # noqa: F401
from tcil.experiments.reproduction.checks.answers import CHECKS, Agreement, Answer, Check

__all__ = ["CHECKS", "Agreement", "Answer", "Check"]
