"""What was learned, in three plain sentences computed from the results; the same on the terminal and on the page.

Which calibrator is nearest to the oracle, what the noise floor is, and what one temperature hides about old and new
classes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tcil.experiments.reporting.collect import Study
from tcil.experiments.reporting.guessing import Guessing, guessing
from tcil.experiments.reporting.statistics import Spread, paired_difference
from tcil.experiments.runs.catalogue import ALL_DATA, AS_TRAINED, ORACLE
from tcil.experiments.runs.results import RANKED, Bins, CalibratorRow

LEVEL = 0.05  # points: a smaller difference rounds to 0.0
FEWEST = 20  # images of a group in a task below which its error says nothing
_GROUPS_NOT_KNOWN = (
    f"What one temperature hides is not known: not every task has an error, of {FEWEST} images or more, of images"
    " predicted as old and of images predicted as new classes."
)
_NO_ORACLE = "What one temperature hides is not known: the oracle was not run."
_GROUPS = ("old", "new")
HIDDEN = 1.0  # points that the error of old or of new classes must be above that of all images to be told


@dataclass(frozen=True)
class Level:
    """A calibrator's errors in percent, means over tasks by run.

    `later`, `old` and `new` are over the tasks with old classes alone, so that they can be compared: the errors of all
    images and of those predicted as old and as new classes. Those of groups are there where every such task has them,
    of enough images. `chance` is by how much the larger of them is above that of all images by chance alone: a group
    has fewer images, and so a higher noise floor.
    """

    name: str
    title: str
    ece: tuple[float, ...]
    later: tuple[float, ...] = ()
    old: tuple[float, ...] = ()
    new: tuple[float, ...] = ()
    chance: float = 0.0
    gap_old: float | None = None
    gap_new: float | None = None

    @property
    def mean(self) -> float:
        """The mean over runs."""
        return Spread.of(self.ece).mean

    @property
    def groups(self) -> tuple[float, float] | None:
        """The errors of images predicted as old and as new classes; None where they are not known."""
        return (Spread.of(self.old).mean, Spread.of(self.new).mean) if self.old and self.new else None

    @property
    def percent(self) -> str:
        """Its ECE in words."""
        return percent(self.ece)


@dataclass(frozen=True)
class Facts:
    """What the sentences on one study say: its calibrators by their error, the limits, and how many tasks there are."""

    calibrators: tuple[Level, ...]
    as_trained: Level | None
    oracle: Level | None
    floor: float | None
    tried: int
    n_tasks: int
    n_seeds: int
    guessing: Guessing | None = None

    @property
    def nearest(self) -> Level | None:
        """The calibrator with the lowest error; none where networks are no better than guessing."""
        levels = self.calibrators if self.guessing is None else ()
        return min(levels, key=lambda level: level.mean, default=None)


def percent(values: Sequence[float]) -> str:
    """Percentages, one for each run, as a mean with its deviation.

    >>> from tcil.experiments.reporting.findings import percent
    >>> percent([7.48]), percent([7.0, 8.0])
    ('7.5 %', '7.5 ± 0.5 %')
    """
    spread = Spread.of(values)
    return f"{spread.mean:.1f} %" if spread.n < 2 else f"{spread.mean:.1f} ± {spread.std:.1f} %"


def noise_floor(study: Study) -> list[float] | None:
    """The ECE that a perfectly calibrated model would show by chance, by task, in percent, mean over runs.

    Of the oracle's probabilities, which are as calibrated as one temperature makes them; else of any others.
    """
    for name in (ORACLE, AS_TRAINED, *study.titles()):
        by_run = [run.values(name, "noise_floor") for run in study.runs]
        known = [[100 * value for value in values if value is not None] for values in by_run]
        if all(len(values) == study.n_tasks for values in known):
            return [sum(values) / len(values) for values in zip(*known, strict=True)]
    return None


def facts(study: Study) -> Facts:
    """What the sentences on a study are made of."""
    ranked = [name for name, (_, block) in study.titles().items() if block == RANKED and name != ALL_DATA]
    calibrators = [name for name in ranked if name != AS_TRAINED]
    levels = [level for name in calibrators if (level := _level(study, name)) is not None]
    floor = noise_floor(study)
    return Facts(
        calibrators=tuple(levels),
        as_trained=_level(study, AS_TRAINED),
        oracle=_level(study, ORACLE),
        floor=None if floor is None else sum(floor) / len(floor),
        tried=len(calibrators),
        n_tasks=study.n_tasks,
        n_seeds=len(study.runs),
        guessing=guessing(study),
    )


def _level(study: Study, name: str) -> Level | None:
    """A calibrator's errors; None where some run or some task has no answer."""
    titles = study.titles()
    ece = _percents(study, name, "ece")
    if name not in titles or not ece:
        return None
    old, new = (() if _few(study, name, group) else _later(study, name, f"ece_predicted_{group}") for group in _GROUPS)
    gaps = (_gap(study, name, group) for group in _GROUPS)
    floors = {group: _chance(study, name, group) for group in ("all", *_GROUPS)}
    larger = "old" if sum(old) > sum(new) else "new"
    chance = max(0.0, floors[larger] - floors["all"])
    return Level(name, titles[name].title, ece, _later(study, name, "ece"), old, new, chance, *gaps)


def _chance(study: Study, name: str, group: str) -> float:
    """The ECE that calibrated confidences as those of a group would have by chance, mean over later tasks, in points.

    By the normal approximation in each bin; 0 where no diagram was stored.
    """
    found = []
    for row in _later_rows(study, name):
        bins = row.diagram(group)
        if bins is None or not sum(bins.count):
            continue
        parts = (math.sqrt(n * c * (1 - c)) for n, c in zip(bins.count, bins.confidence, strict=True) if n and c)
        found.append(100 * math.sqrt(2 / math.pi) * sum(parts) / sum(bins.count))
    return sum(found) / len(found) if found else 0.0


def _later(study: Study, name: str, metric: str) -> tuple[float, ...]:
    """The means of the runs over the tasks with old classes, if each has a value."""
    by_run = [run.values(name, metric)[1:] for run in study.runs]
    known = [[100 * value for value in values if value is not None] for values in by_run]
    whole = all(len(values) == study.n_tasks - 1 for values in known)
    return tuple(sum(values) / len(values) for values in known) if whole and study.n_tasks > 1 else ()


def _few(study: Study, name: str, group: str) -> bool:
    """Whether some task with old classes has hardly an image of a predicted group."""
    diagrams = [bins for row in _later_rows(study, name) if (bins := row.diagram(group)) is not None]
    return any(sum(bins.count) < FEWEST for bins in diagrams)


def _later_rows(study: Study, name: str) -> list[CalibratorRow]:
    """What a calibrator answered in all runs, after the tasks with old classes."""
    answers = [task.answer(name) for run in study.runs for task in run.tasks[1:]]
    return [row for row in answers if row is not None]


def _percents(study: Study, name: str, metric: str) -> tuple[float, ...]:
    """The means of the runs, if every task of each has a value where it could have one."""
    means = [100 * value for value in study.means(name, metric) if value is not None]
    return tuple(means) if len(means) == len(study.runs) and not study.fewer_tasks(name, metric) else ()


def _gap(study: Study, name: str, group: str) -> float | None:
    """Confidence minus accuracy of images of a predicted group, mean over later tasks and runs, in points."""
    diagrams = [row.diagram(group) for row in _later_rows(study, name)]
    gaps = [gap for bins in diagrams if bins is not None and (gap := _over_confidence(bins)) is not None]
    return sum(gaps) / len(gaps) if gaps else None


def _over_confidence(bins: Bins) -> float | None:
    total = sum(bins.count)
    sums = (n * ((c or 0.0) - (a or 0.0)) for n, c, a in zip(bins.count, bins.confidence, bins.accuracy, strict=True))
    return 100 * sum(sums) / total if total else None


def sentences(studies: Sequence[Study]) -> tuple[str, str, str]:
    """What was learned from one study, or from several, in three sentences.

    Parameters
    ----------
    studies : sequence of Study
        One or more; runs that differ in their seeds only are one study.

    Returns
    -------
    tuple of str
        On the calibrator nearest to the oracle, on the noise floor, and on old and new classes.
    """
    known = [facts(study) for study in studies]
    if len(known) == 1:
        return _nearest(known[0]), _floor(known[0]), _hidden(known[0])
    return _nearest_of_several(known), _floor_of_several(known), _hidden_of_several(known)


# One study ---------------------------------------------------------------------------------------------------


def _nearest(known: Facts) -> str:
    nearest, trained, oracle = known.nearest, known.as_trained, known.oracle
    over = f"averaged over {known.n_tasks} tasks" if known.n_tasks > 1 else "after the only task"
    if known.guessing is not None:
        without = f"; without calibration the ECE is {trained.percent} ({over})" if trained is not None else ""
        return f"No calibrator is named, because {known.guessing.told}{without}."
    if nearest is None:
        why = "No calibrator has an answer after every task" if known.tried else "No calibrator was fitted"
        if trained is None:
            return f"{why}, and the error of the network as trained is not known."
        beside = f", {_against(trained.mean - oracle.mean, oracle)}" if oracle is not None else ""
        return f"{why}: without calibration the ECE is {trained.percent}{beside} ({over})."
    if trained is not None and nearest.mean >= trained.mean - 1e-9:
        best = f"{nearest.title} has {nearest.percent}" if nearest.mean > trained.mean else f"{nearest.title} as well"
        beside = f", {_against(trained.mean - oracle.mean, oracle)}" if oracle is not None else ""
        return (
            f"No calibrator improves on the network as trained: its ECE is {trained.percent}{beside}"
            f" ({over}{_seeds(known)}); {best}."
        )
    without = f"; without calibration it is {trained.percent if trained is not None else _NOT_COMPARED}"
    if oracle is None:
        return (
            f"{nearest.title} has the lowest ECE, {nearest.percent} ({over}{_seeds(known)}){without}{_alike(known)};"
            " the oracle was not run."
        )
    difference = nearest.mean - oracle.mean
    if difference < -LEVEL:
        verb, why = "does better than the oracle", ", which minimises the log loss and not the ECE"
    else:
        verb, why = "is nearest to the oracle" if difference > LEVEL else "is level with the oracle", ""
    return (
        f"{nearest.title} {verb}: its ECE is {nearest.percent}, {_against(difference, oracle)}{why}"
        f" ({over}{_seeds(known)}){without}{_alike(known)}."
    )


def _against(difference: float, oracle: Level) -> str:
    """How far something is from the oracle."""
    if abs(difference) <= LEVEL:
        return f"that of {oracle.title} {oracle.percent}"
    side = "above" if difference > 0 else "below"
    return f"{abs(difference):.1f} points {side} the {oracle.percent} of {oracle.title}"


def _seeds(known: Facts) -> str:
    return ", one seed" if known.n_seeds == 1 else f", {known.n_seeds} seeds"


def _alike(known: Facts) -> str:
    """Calibrators that the seeds do not tell from the nearest: their paired difference may be zero."""
    nearest = known.nearest
    if nearest is None or known.n_seeds < 2:
        return ""
    others = sorted((level for level in known.calibrators if level is not nearest), key=lambda level: level.mean)
    alike = [level for level in others if not paired_difference(nearest.ece, level.ece).excludes_zero]
    if not alike:
        return ""
    shown = " and ".join(f"{level.title} ({level.percent})" for level in alike[:2])
    more = f" and {len(alike) - 2} more" if len(alike) > 2 else ""
    return f"; the seeds do not tell it apart from {shown}{more}"


def _floor(known: Facts) -> str:
    if known.floor is None:
        return "The noise floor is not known: no calibrator has an answer after every task."
    text = (
        f"The noise floor is {known.floor:.1f} %: the ECE that a perfectly calibrated model would show on these test"
        " images by chance"
    )
    levels = [(level, level.mean - known.floor) for level in (known.oracle, known.nearest) if level is not None]
    told = [f"{_name(level, known)} is {_off(points)} it" for level, points in levels]
    if len(levels) == 2 and all(points > LEVEL for _, points in levels):
        (_, oracle), (nearest, points) = levels
        told = [f"the oracle is {oracle:.1f} points above it and {nearest.title} {points:.1f} points"]
    elif known.oracle is not None and levels[0][1] < -LEVEL:
        told[0] += ", because it was fitted on these very images"
    return "; ".join([text, *told]) + "."


def _name(level: Level, known: Facts) -> str:
    return "the oracle" if level is known.oracle else level.title


def _off(points: float) -> str:
    if abs(points) <= LEVEL:
        return "at"
    return f"{abs(points):.1f} points {'above' if points > 0 else 'below'}"


def _hidden(known: Facts) -> str:
    if known.n_tasks < 2:
        return "With one task no class is old yet, so one temperature has no difference between old and new to hide."
    one = next((level for level in (known.oracle, known.as_trained) if level is not None and level.groups), None)
    if one is None or one.groups is None:
        return _GROUPS_NOT_KNOWN
    (old, new), every = one.groups, Spread.of(one.later).mean
    hides = max(old, new) - every - one.chance > HIDDEN
    head = "One temperature hides" + ("" if hides else " little of") + " the difference between old and new classes"
    best = "the best single temperature" if one.name == ORACLE else "the network as trained"
    signs = _sign(one.gap_old), _sign(one.gap_new)
    text = (
        f"{head}: over the tasks with old ones, with {best} the ECE is {percent(one.later)} on all images,"
        f" {'but ' if hides else ''}{old:.1f} % on those predicted as old classes{signs[0]}"
        f" and {new:.1f} % on those predicted as new{signs[1]}"
    )
    nearest = known.nearest
    if nearest is not None and nearest.groups is not None:
        text += f"; with {nearest.title} {nearest.groups[0]:.1f} % and {nearest.groups[1]:.1f} %"
    return f"{text}."


def _sign(gap: float | None) -> str:
    if gap is None or abs(gap) <= HIDDEN:
        return ""
    return " (over-confident)" if gap > 0 else " (under-confident)"


# Several studies ---------------------------------------------------------------------------------------------


def _nearest_of_several(known: Sequence[Facts]) -> str:
    guess = sum(one.guessing is not None for one in known)
    if guess == len(known):
        return f"No calibrator is named: in all of the {guess} studies some networks are no better than guessing."
    counted = _counted([one for one in known if one.guessing is None])
    return f"{counted} {_left_out(guess)}" if guess else counted


_NOT_COMPARED = "not known, since Vanilla was not run"


def _left_out(guess: int) -> str:
    studies = "1 study is" if guess == 1 else f"{guess} studies are"
    return f"{studies} not counted, because some of the networks are no better than guessing."


def _counted(known: Sequence[Facts]) -> str:
    """In how many studies each calibrator is the nearest."""
    answers = [one.nearest for one in known if one.nearest is not None]
    if not answers:
        return "No calibrator has an answer after every task in any of these studies."
    better = [level for one in known if (level := one.nearest) is not None and _improves(level, one)]
    if not better:
        return f"No calibrator improves on the networks as trained in any of the {len(known)} studies."
    won = Counter(level.title for level in better).most_common()
    won.sort(key=lambda pair: (-pair[1], _mean_of(pair[0], known)))
    told = [f"{title} in {count}" for title, count in won]
    alone = sum(one.as_trained is None and one.nearest is not None for one in known)
    if alone:
        told.append(f"in {alone} the ECE without calibration is {_NOT_COMPARED}")
    if len(better) < len(answers):
        told.append(f"in {len(answers) - len(better)} none improves on the network as trained")
    first = f"{won[0][0]} has the lowest ECE of all calibrators in {won[0][1]} of {len(known)} studies"
    counts = first + "".join(f", {words}" for words in told[1:])
    open_ = sum(bool(_alike(one)) for one in known)
    if open_:
        counts += f" (in {open_} of the {len(known)} studies the seeds do not tell the lowest from some other)"
    champion = won[0][0]
    both = [
        (level.mean, one.oracle.mean)
        for one in known
        for level in one.calibrators
        if level.title == champion and one.oracle is not None
    ]
    if not both:
        return f"{counts}; the oracle was not run."
    own, limit = (sum(column) / len(column) for column in zip(*both, strict=True))
    where = "averaged over them all" if len(both) == len(known) else f"averaged over the {len(both)} that have it"
    return f"{counts}; {where} its ECE is {own:.1f} %, that of the oracle {limit:.1f} %."


def _improves(level: Level, known: Facts) -> bool:
    return known.as_trained is None or level.mean < known.as_trained.mean - 1e-9


def _mean_of(title: str, known: Sequence[Facts]) -> float:
    """A calibrator's error over the studies that have it."""
    found = [level.mean for one in known for level in one.calibrators if level.title == title]
    return sum(found) / len(found)


def _floor_of_several(known: Sequence[Facts]) -> str:
    floors = [one.floor for one in known if one.floor is not None]
    if not floors:
        return "The noise floor is not known: no calibrator has an answer after every task."
    off = [one.oracle.mean - one.floor for one in known if one.oracle is not None and one.floor is not None]
    beside = f"; the oracle is {_range([abs(min(0.0, x)) for x in off], [max(0.0, x) for x in off])}" if off else ""
    return (
        f"The noise floor is {_from_to(floors)} %: the ECE that a perfectly calibrated model would show on these test"
        f" images by chance{beside}."
    )


def _range(below: Sequence[float], above: Sequence[float]) -> str:
    """How far from the floor, on one side or on both."""
    if max(below) <= LEVEL:
        return f"{_from_to(above)} points above it"
    if max(above) <= LEVEL:
        return f"{_from_to(below)} points below it"
    return f"between {max(below):.1f} points below it and {max(above):.1f} above it"


def _from_to(values: Sequence[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


def _hidden_of_several(known: Sequence[Facts]) -> str:
    levels = [
        (Spread.of(one.oracle.later).mean, *one.oracle.groups, one.oracle.chance)
        for one in known
        if one.oracle is not None and one.oracle.groups is not None
    ]
    if not levels:
        return _GROUPS_NOT_KNOWN if any(one.oracle is not None for one in known) else _NO_ORACLE
    hides = sum(max(old, new) - mean - chance > HIDDEN for mean, old, new, chance in levels)
    mean, old, new, _ = (sum(column) / len(column) for column in zip(*levels, strict=True))
    of_all = "" if len(levels) == len(known) else f" in which it is known (of {len(known)})"
    return (
        f"One temperature hides the difference between old and new classes in {hides} of {len(levels)} studies{of_all}:"
        f" over the tasks with old ones, with the best single temperature the ECE is {mean:.1f} % on all images,"
        f" {old:.1f} % on those predicted as old classes and {new:.1f} % on those predicted as new (averages over the"
        " studies)."
    )
