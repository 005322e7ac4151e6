"""What a decision rule promises, on what grounds, and the named choices of the rules."""

from __future__ import annotations

from tcil.foundation.options import Option

OLD, NEW, ALL = "old", "new", "all"  # groups of images, by their true or predicted class


class PromiseKind(Option):
    """The grounds of a promise.

    Attributes
    ----------
    meaning : str
        One line for each member.

    Examples
    --------
    >>> from tcil.decisions import PromiseKind
    >>> PromiseKind.MODEL_BASED.meaning
    'holds if the probabilities are calibrated; no labelled images back it'
    """

    FINITE_SAMPLE = "finite_sample", "a theorem for this many images, whatever the network and the distribution"
    MODEL_BASED = "model_based", "holds if the probabilities are calibrated; no labelled images back it"
    NONE = "none", "no promise is made"


class DecisionVerdict(Option):
    """What `fit` found in the images.

    Attributes
    ----------
    meaning : str
        One line for each member.

    Examples
    --------
    >>> from tcil.decisions import DecisionVerdict
    >>> DecisionVerdict.TOO_FEW_IMAGES.meaning
    'no rule can promise this with so few images; see begins_at'
    """

    OK = "ok", "the promise is made"
    NONE_FOUND = "none_found", "too many errors among these images: no threshold keeps the promise"
    TOO_FEW_IMAGES = "too_few_images", "no rule can promise this with so few images; see begins_at"
    ALL_CORRECT = (
        "all_correct",
        "every image of a group is classified correctly: if the network was trained on them, the promise is void",
    )


class ThresholdGroups(Option):
    """Whether predicted-old and predicted-new images share a threshold.

    Attributes
    ----------
    meaning : str
        One line for each member.

    Examples
    --------
    >>> from tcil.decisions import ThresholdGroups
    >>> ThresholdGroups("predicted") is ThresholdGroups.PREDICTED
    True
    """

    POOLED = "pooled", "one threshold, and one promise for all images that are accepted"
    PREDICTED = "predicted", "a threshold and a promise for images predicted as old, others for those predicted as new"


class Search(Option):
    """How several candidate thresholds are tested, so that the promise holds for the one that is chosen.

    Attributes
    ----------
    meaning : str
        One line for each member.

    Examples
    --------
    >>> from tcil.decisions import Search
    >>> [str(search) for search in Search]
    ['holm', 'sequence']
    """

    HOLM = "holm", "tests every candidate, each at a share of the allowed error (Holm 1979)"
    SEQUENCE = "sequence", "tests candidates in order, each at the whole allowed error, until the first fails"


class Design(Option):
    """How the images of a group were drawn.

    Attributes
    ----------
    meaning : str
        One line for each member.

    Examples
    --------
    >>> from tcil.decisions import Design
    >>> Design("stratified").meaning
    'the same number of images of every class; test images have classes in equal shares within a group'
    """

    INDEPENDENT = "independent", "independent draws from the group's own distribution, classes as they come"
    STRATIFIED = (
        "stratified",
        "the same number of images of every class; test images have classes in equal shares within a group",
    )


class SetScore(Option):
    """The conformal score of a label: the larger, the worse it fits the image.

    Attributes
    ----------
    meaning : str
        One line for each member.

    Examples
    --------
    >>> from tcil.decisions import SetScore
    >>> SetScore.LAC.meaning
    'one minus the probability of the label: smallest sets on average (Sadinle et al. 2019)'
    """

    LAC = "lac", "one minus the probability of the label: smallest sets on average (Sadinle et al. 2019)"
    APS = "aps", "the probability of all labels up to this one, the likeliest first (Romano et al. 2020)"
    RAPS = "raps", "APS with a penalty on low ranks: no long tails (Angelopoulos et al. 2021)"


class SetGroups(Option):
    """For which images the coverage of prediction sets is promised.

    Attributes
    ----------
    meaning : str
        One line for each member.

    Examples
    --------
    >>> from tcil.decisions import SetGroups
    >>> SetGroups.GROUP.meaning
    'images of old classes and images of new classes, each on their own, so under any mixture of the two'
    """

    MARGINAL = "marginal", "all images together, in the mixture that the calibration images have"
    GROUP = (
        "group",
        "images of old classes and images of new classes, each on their own, so under any mixture of the two",
    )
    CLASS = "class", "the images of every class on their own"
    NEW = "new", "images of new classes only: needs no image of an old class, and promises nothing for these"
