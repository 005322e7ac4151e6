"""Named options: string enums in which every member has a one-line meaning."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from tcil.foundation.errors import unknown_name


class Option(StrEnum):
    """A string enum whose members have a one-line meaning.

    Attributes
    ----------
    meaning : str
        What the member stands for, in one line.

    Examples
    --------
    >>> from tcil.extending import Option
    >>> class Colour(Option):
    ...     RED = "red", "the colour of tomatoes"
    >>> Colour.parse("red", "colour").meaning
    'the colour of tomatoes'
    >>> Colour.parse("rad", "colour")
    Traceback (most recent call last):
    ValueError: colour: got 'rad'; expected one of red. Did you mean 'red'?
    """

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> Self:
        """Create a member from its value and its meaning."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    @classmethod
    def parse(cls, value: object, argument: str) -> Self:
        """The member with this value; the error names the argument and the nearest valid name."""
        if isinstance(value, str):
            try:
                return cls(value)
            except ValueError:
                pass
        raise unknown_name(argument, value, map(str, cls))


class Verdict(Option):
    """What a fit reports about its data.

    Attributes
    ----------
    meaning : str
        What the verdict says, in one line.

    Examples
    --------
    >>> from tcil.options import Verdict
    >>> Verdict.ALL_CORRECT.meaning
    'every sample is classified correctly: the likelihood only improves as T goes to 0, so T is left at 1'
    >>> Verdict("ok") is Verdict.OK
    True
    """

    OK = "ok", "the temperature is identified by the data"
    ALL_CORRECT = (
        "all_correct",
        "every sample is classified correctly: the likelihood only improves as T goes to 0, so T is left at 1",
    )
    ANTI_INFORMATIVE = (
        "anti_informative",
        "the true class scores no better than the average class: the likelihood only improves as T grows,"
        " so T is left at 1",
    )
    CONSTANT_LOGITS = (
        "constant_logits",
        "every row of logits is constant: no temperature changes anything, so T is left at 1",
    )
    DIVERGED = "diverged", "the SGD solver left the positive temperatures, so T is left at 1"
    AT_BOUND = "at_bound", "the best temperature lies outside the method's bounds; the bound is used"
    DEGENERATE_VALID = (
        "degenerate_valid",
        "the validation set identifies no temperature; the model is left as it is",
    )
    DEGENERATE_MEMORY = (
        "degenerate_memory",
        "the perturbed exemplars identify no temperature; the model is left as it is",
    )
    TARGET_ABOVE_RANGE = (
        "target_above_range",
        "even the largest magnitude gives a temperature below the target; the end of the bracket is used",
    )
    TARGET_BELOW_RANGE = (
        "target_below_range",
        "the unperturbed new exemplars already have a temperature at or above the target; magnitude 0 is used"
        " (is the validation set held out of training?)",
    )
    TARGET_JUMPED = (
        "target_jumped",
        "the temperature jumps over the target from one degenerate case to the other: too few new exemplars",
    )
    BELOW_TOLERANCE = (
        "below_tolerance",
        "the magnitude lies below the tolerance of the search: inputs on a small scale need a smaller tolerance",
    )
    BRACKET_WIDENED = (
        "bracket_widened",
        "the target lies beyond magnitude 1 and the inputs have a larger scale,"
        " so the search was extended to that scale",
    )
    UNCERTAIN_TARGET = (
        "uncertain_target",
        "the validation set leaves T uncertain by a factor of 2 or more (95 %): too few images, or too few errors",
    )
    VALID_IN_MEMORY = (
        "valid_in_memory",
        "some validation images are also in memory: they were trained on, so T will be too low",
    )
    RESERVE_IN_MEMORY = (
        "reserve_in_memory",
        "some images of the reserve are also in memory: they were trained on, and make the network look better than it"
        " is",
    )
    OLD_ROWS_IN_VALID = "old_rows_in_valid", "validation rows of old classes were found and not used"
    CLASSES_NOT_IN_VALID = "classes_not_in_valid", "some new class has no validation row"
    EXEMPLARS_AT_CHANCE = (
        "exemplars_at_chance",
        "the exemplars are classified no better than by chance: do classes= and columns= fit the head, and are inputs"
        " preprocessed as for the network?",
    )
    INPUT_SCALES_DIFFER = (
        "input_scales_differ",
        "memory and validation inputs are on different scales: did you normalise both the same way?",
    )
    SINGLE_EXEMPLAR = (
        "single_exemplar",
        "some class has only one exemplar, so its feature mean is that of a single image",
    )
    HALF_PRECISION_IMAGES = (
        "half_precision_images",
        "the images were in half precision; they were converted to float32 before perturbing",
    )
    NOT_REACHABLE = (
        "not_reachable",
        "no noise lowers the accuracy to some level: the method has no result here (n/a)",
    )
    IMBALANCE_BELOW_ONE = (
        "imbalance_below_one",
        "old classes had more than twice as many training images as new ones: is imbalance the wrong way round?",
    )
    NOT_IDENTIFIED = "not_identified", "the data identify no temperature; the model is left as it is"
    REMEMBERED = "remembered", "this task's data identify no temperature; the state of earlier tasks is used"
    OUT_OF_DEPTH = (
        "out_of_depth",
        "the pieces of evidence contradict each other by more than their errors: do not trust these confidences without"
        " a check on held-out data of old classes",
    )
    UNIFORM = (
        "uniform",
        "the ensemble puts all its weight on the uniform distribution: the prediction leads by a rounding error only,"
        " which is lost below float64",
    )
    SPREAD_NOT_MATCHED = (
        "spread_not_matched",
        "no spread of features drawn for the new classes has the temperature of their validation set, so those drawn"
        " for old classes may have the wrong one: do not trust these confidences without a check on held-out data",
    )
    EMPTY_GROUP = "empty_group", "no sample is predicted into this group, so its T is left at 1"
