"""How each claim of the paper's text is checked on our runs, and by what rule it counts as holding.

A check answers for one edition of the paper's experiments: what our runs say, over how many seeds (the same for all
that is compared), and whether all that the claim is about was run. Rules are ours; they are printed beside the answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from tcil.experiments import paper
from tcil.experiments.collect import Study, same_seeds
from tcil.experiments.evidence import Evidence
from tcil.experiments.schedules import LEARNERS, Edition
from tcil.experiments.statistics import paired_difference
from tcil.experiments.tables import BASELINES


@dataclass(frozen=True)
class Answer:
    """What our runs say to a claim; `complete` where all that it is about was run, with `n` seeds."""

    ours: str
    holds: bool
    n: int
    complete: bool = True
    decided: bool = True

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if not self.decided:
            return "undecided"
        return "no" if not self.holds else "yes" if self.complete else "in part"


VERDICTS = {
    "yes": "all that the claim is about was run, and agrees",
    "in part": "what was run agrees, and something that the claim is about was not run",
    "undecided": "what was run does not tell",
    "no": "what was run disagrees",
    "-": "not run",
}


Ask = Callable[[Evidence, Edition], Answer | None]


@dataclass(frozen=True)
class Check:
    """The rule by which a claim counts as holding, and the function that asks our runs (None: not run)."""

    rule: str
    ask: Ask


# By the claim's key in paper.json. Claims without a check are premises and the protocol, which the presets carry.
CHECKS: dict[str, Check] = {}


def _check(claim: str, rule: str) -> Callable[[Ask], Ask]:
    def register(ask: Ask) -> Ask:
        CHECKS[claim] = Check(rule, ask)
        return ask

    return register


# what the checks share ---------------------------------------------------------------------------------------

BOTH = ("cifar100", "tiny-imagenet")
EVERY = ("cifar10", *BOTH)


def _mean(study: Study, calibrator: str, key: str = "ece") -> float | None:
    """In percent, over tasks and seeds; None where a seed has none."""
    values = study.means(calibrator, key)
    return None if None in values else 100 * float(np.mean([v for v in values if v is not None]))


def _figure(study: Study, calibrator: str, key: str = "ece") -> float:
    """The same where an answer is expected; nan, which no rule holds for, where a seed has none."""
    value = _mean(study, calibrator, key)
    return float("nan") if value is None else value


def _by_task(study: Study, calibrator: str, key: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A figure by task, mean over seeds."""
    rows = [[float("nan") if value is None else value for value in run.values(calibrator, key)] for run in study.runs]
    return np.asarray(np.mean(rows, axis=0), dtype=np.float64)


def _known(
    evidence: Evidence, edition: Edition, datasets: Sequence[str], learners: Sequence[str] = LEARNERS, **variation: Any
) -> dict[tuple[str, str], Study]:
    """The studies that were run, by dataset and learner, all with the same seeds."""
    found = {
        (dataset, learner): study
        for dataset, learner in itertools.product(datasets, learners)
        if (study := evidence.study(edition, dataset, learner, **variation)) is not None
    }
    studies = same_seeds(list(found.values()))
    return dict(zip(found, studies, strict=True)) if studies else {}


def _n(studies: Sequence[Study]) -> int:
    return min(len(study.runs) for study in studies)


def _where(dataset: str, learner: str) -> str:
    return f"{learner.upper()} on {paper.DATASETS[dataset]}"


def _analyses(evidence: Evidence, edition: Edition) -> list[dict[str, Any]]:
    """What `tcil.experiments.analysis` left of ER on CIFAR-100, by seed."""
    study = evidence.study(edition, "cifar100", "er")
    return [run.analysis for run in study.runs if run.analysis] if study is not None else []


def _average(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


# accuracy, and what a validation set costs -------------------------------------------------------------------


@_check("accuracy_hardly_changes", "within 2 points with every learner and dataset")
def _accuracy_hardly_changes(evidence: Evidence, edition: Edition) -> Answer | None:
    changes, studies = {}, []
    for place, study in _known(evidence, edition, EVERY).items():
        own = study.having("vanilla-all-data")
        plain, calibrated = (_mean(own, name, "accuracy") if own else None for name in ("vanilla-all-data", "t-cil"))
        if own is not None and plain is not None and calibrated is not None:
            changes[place] = calibrated - plain
            studies.append(own)
    if not changes:
        return None
    shown = ", ".join(f"{_where(*place)} {change:+.2f}" for place, change in changes.items())
    holds = all(abs(change) < 2 for change in changes.values())
    return Answer(f"{shown} points", holds, _n(studies), len(changes) == len(EVERY) * len(LEARNERS))


@_check("reserve_costs_accuracy", "lower with the reserve")
def _reserve(evidence: Evidence, edition: Edition) -> Answer | None:
    found = [evidence.study(edition, "cifar100", "er", **more) for more in ({}, {"reserve": 0.25})]
    studies = same_seeds([study for study in found if study is not None])
    if len(studies) < 2:
        return None
    plain, reserved = (_figure(study, "vanilla", "accuracy") for study in studies)
    return Answer(f"{reserved:.2f} % with the reserve, {plain:.2f} % without", reserved < plain, _n(studies))


@_check("reserve_gain_is_like_eeil", "at least half of EEIL's gain, at most twice")
def _reserve_like_eeil(evidence: Evidence, edition: Edition) -> Answer | None:
    wanted: list[tuple[str, dict[str, Any]]] = [("er", {}), ("er", {"reserve": 0.25}), ("eeil", {})]
    found = [evidence.study(edition, "cifar100", learner, **more) for learner, more in wanted]
    studies = same_seeds([study for study in found if study is not None])
    if len(studies) < 3:
        return None
    plain, reserved, eeil = (_figure(study, "vanilla", "accuracy") for study in studies)
    gain, theirs = plain - reserved, eeil - plain
    shown = f"{gain:+.2f} points by not reserving, {theirs:+.2f} by EEIL"
    return Answer(shown, 0.5 * theirs <= gain <= 2 * theirs, _n(studies))


def _falls_with_validation_size(key: str, least_is_enough: bool) -> Ask:
    """Whether T-CIL's figure falls with every larger validation set; and whether the least one beats TS with it."""

    def ask(evidence: Evidence, edition: Edition) -> Answer | None:
        found = [evidence.study(edition, "cifar100", "er", validation=size) for size in paper.VALIDATION_SIZES]
        studies = same_seeds([study for study in found if study is not None])
        if len(studies) < 2:
            return None
        values = [_figure(study, "t-cil", key) for study in studies]
        shown = ", ".join(f"{s.settings['validation']}: {v:.2f}" for s, v in zip(studies, values, strict=True))
        holds = all(late < early for early, late in itertools.pairwise(values))
        if least_is_enough:
            baseline = _figure(studies[0], "ts", key)
            shown += f"; TS with the least {baseline:.2f}"
            holds = holds and values[0] < baseline
        return Answer(shown, holds, _n(studies), len(studies) == len(paper.VALIDATION_SIZES))

    return ask


_check("ece_falls_with_validation_size", "less with every larger size, and below TS with the least")(
    _falls_with_validation_size("ece", least_is_enough=True)
)
_check("accuracy_falls_with_validation_size", "less with every larger size")(
    _falls_with_validation_size("accuracy", least_is_enough=False)
)


# what exemplars and the new task's data tell -----------------------------------------------------------------


@_check("temperature_gap_grows", "rank correlation of gap and task at least 0.9 on every dataset")
def _temperature_gap(evidence: Evidence, edition: Edition) -> Answer | None:
    studies = _known(evidence, edition, BOTH, ("er",))
    if not studies:
        return None
    shown, holds = [], True
    for (dataset, _), study in studies.items():
        gaps = _by_task(study, "optimal-ts", "temperature") - _by_task(study, "ts", "temperature")
        rank = float(stats.spearmanr(np.arange(len(gaps)), gaps).statistic)
        shown.append(f"{paper.DATASETS[dataset]}: {', '.join(f'{gap:.2f}' for gap in gaps)} (rank {rank:.2f})")
        holds = holds and rank >= 0.9
    return Answer(
        f"optimal T less TS's T by task; {'; '.join(shown)}", holds, _n(list(studies.values())), len(studies) == 2
    )


@_check("exemplars_are_known_by_heart", "above 95 % with both")
def _by_heart(evidence: Evidence, edition: Edition) -> Answer | None:
    studies = _known(evidence, edition, ("cifar100",), ("er", "der"))
    right = {
        learner: 100 * float(np.mean([run.tasks[-1]["memory"]["accuracy"] for run in study.runs]))
        for (_, learner), study in studies.items()
    }
    if not right:
        return None
    shown = ", ".join(f"{learner.upper()} {value:.1f} %" for learner, value in right.items())
    return Answer(shown, min(right.values()) > 95, _n(list(studies.values())), len(right) == 2)


@_check("exemplars_make_temperature_low", "below half of the optimal one with every seed")
def _exemplar_temperature(evidence: Evidence, edition: Edition) -> Answer | None:
    study = evidence.study(edition, "cifar100", "er")
    if study is None:
        return None
    limits = [_limit(run.row(-1, "exemplar-ts")) for run in study.runs]
    known = [limit for limit in limits if limit is not None]
    optimal = _average(run.values("optimal-ts", "temperature")[-1] for run in study.runs)
    if not known or optimal is None:
        return None
    right = sum(limit == 0 for limit in known)
    shown = (
        f"T = {np.mean(known):.2f} (0 where all are right: {right} of {len(known)} seeds), the optimal {optimal:.2f}"
    )
    return Answer(shown, max(known) < 0.5 * optimal, len(known))


def _limit(row: dict[str, Any] | None) -> float | None:
    """Where the temperature goes: 0 where all exemplars are right, although 1 is then kept in use."""
    if row is None:
        return None
    return 0.0 if row["result"]["verdict"] == "all_correct" else float(row["temperature"])


@_check("new_task_is_more_accurate", "the new task above the mean of the old ones with both")
def _new_is_better(evidence: Evidence, edition: Edition) -> Answer | None:
    studies = _known(evidence, edition, ("cifar100",), ("er", "der"))
    found = []
    for (_, learner), study in studies.items():
        rows = [run.tasks[-1]["calibrators"]["vanilla"]["by_task"]["accuracy"] for run in study.runs]
        by_task = np.mean(rows, axis=0)
        found.append((learner, 100 * by_task[:-1].mean(), 100 * by_task[-1]))
    shown = "; ".join(f"{learner.upper()} old {old:.1f} %, new {new:.1f} %" for learner, old, new in found)
    holds = all(new > old for _, old, new in found)
    return Answer(shown, holds, _n(list(studies.values())), len(found) == 2) if found else None


def _gaps(analyses: Sequence[dict[str, Any]], what: str, sign: int) -> tuple[float, float] | None:
    """The mean difference between old and new in the middle and at the end, in points."""
    n = len(analyses[0]["tasks"]) if analyses else 0
    found = []
    for place in ((n - 1) // 2, n - 1) if n else ():
        gaps = (
            None if task[what]["old"] is None else 100 * sign * (task[what]["new"] - task[what]["old"])
            for task in (a["tasks"][place] for a in analyses)
            if what in task
        )
        found.append(_average(gaps))
    return (found[0], found[1]) if len(found) == 2 and found[0] is not None and found[1] is not None else None


@_check("old_new_accuracy_gap", "it grows from the middle task to the last")
def _accuracy_gap(evidence: Evidence, edition: Edition) -> Answer | None:
    analyses = _analyses(evidence, edition)
    gaps = _gaps(analyses, "accuracy", 1)
    if gaps is None:
        return None
    shown = f"{gaps[0]:.1f} points after the middle task, {gaps[1]:.1f} after the last"
    return Answer(shown, gaps[1] > gaps[0], len(analyses))


@_check("misprediction_gap", "it grows, and by a factor within twice or half of the accuracy gap's")
def _misprediction_gap(evidence: Evidence, edition: Edition) -> Answer | None:
    analyses = _analyses(evidence, edition)
    gaps, accuracy = _gaps(analyses, "misprediction", -1), _gaps(analyses, "accuracy", 1)
    if gaps is None or accuracy is None:
        return None
    ours, theirs = gaps[1] / gaps[0], accuracy[1] / accuracy[0]
    shown = f"{gaps[0]:.1f} points after the middle task, {gaps[1]:.1f} after the last: times {ours:.2f}"
    holds = gaps[1] > gaps[0] and 0.5 <= ours / theirs <= 2
    return Answer(f"{shown} (accuracy gap times {theirs:.2f})", holds, len(analyses))


@_check("magnitude_raises_temperature", "T rises throughout, after every task, up to four times T-CIL's magnitude")
def _monotone(evidence: Evidence, edition: Edition) -> Answer | None:
    analyses = _analyses(evidence, edition)
    curves = [
        [t for t in task["curve"]["temperatures"] if t is not None]
        for a in analyses
        for task in a["tasks"]
        if "curve" in task
    ]
    if not curves:
        return None
    rising = sum(bool(np.all(np.diff(curve) >= -1e-9)) for curve in curves)
    return Answer(f"T rises throughout in {rising} of {len(curves)} cases", rising == len(curves), len(analyses))


@_check("complexity", "time grows as the memory to a power of at most 1.2, and is below 5 % of training")
def _cost(evidence: Evidence, edition: Edition) -> Answer | None:
    study = evidence.study(edition, "cifar100", "er")
    analysed = [run for run in study.runs if run.analysis] if study is not None else []
    last = f"task-{study.n_tasks - 1:02d}" if study is not None else ""
    training = [run.environment.get("seconds", {}).get(last, {}).get("training") for run in analysed]
    costs = [run.analysis["cost"] for run in analysed if run.analysis]
    if not costs or None in training:
        return None
    seconds = np.mean([cost["seconds"] for cost in costs], axis=0)
    power = float(np.polyfit(np.log(costs[0]["memory"]), np.log(seconds), 1)[0])
    share = 100 * float(seconds[-1] / np.mean(training))
    shown = f"T-CIL's time grows as the memory to the power {power:.2f}; {share:.2f} % of training"
    return Answer(shown, power <= 1.2 and share < 5, len(costs))


# T-CIL against baselines and the oracle ----------------------------------------------------------------------


@_check("baselines_help", "on every dataset one of TS, ETS, IRM and PerturbTS below vanilla")
def _baselines_help(evidence: Evidence, edition: Edition) -> Answer | None:
    shown, holds, studies = [], True, _known(evidence, edition, EVERY, ("er",))
    for (dataset, _), study in studies.items():
        plain = _figure(study, study.vanilla)
        errors = {name: value for name in BASELINES if (value := _mean(study, name)) is not None}
        own = ", ".join(f"{study.titles()[name][0]} {value:.1f}" for name, value in errors.items())
        shown.append(f"{paper.DATASETS[dataset]}: vanilla {plain:.1f}, {own}")
        holds = holds and min(errors.values()) < plain
    return Answer("; ".join(shown), holds, _n(list(studies.values())), len(studies) == 3) if studies else None


def _reduction(key: str, learner: str, dataset: str, against_vanilla: bool) -> Ask:
    def ask(evidence: Evidence, edition: Edition) -> Answer | None:
        printed = float(paper.claims()[key]["values"]["reduction"])
        names = ["vanilla-all-data"] if against_vanilla else list(BASELINES)
        study = evidence.study(edition, dataset, learner)
        study = study.having(names[0]) if study is not None else None
        if study is None:
            return None
        errors = {name: _mean(study, name) for name in names}
        known = {name: error for name, error in errors.items() if error is not None}
        ours, titles = _figure(study, "t-cil"), study.titles()
        first = min(known, key=lambda name: known[name])
        reduction = 100 * (1 - ours / known[first])
        silent = [titles[name][0] for name in names if name in titles and name not in known]
        shown = f"{reduction:.1f} % ({titles[first][0]} {known[first]:.2f}, T-CIL {ours:.2f}"
        shown += f"; {', '.join(silent)} has no answer)" if silent else ")"
        return Answer(shown, reduction >= printed, len(study.runs))

    return ask


for _key, _of, _on, _against in (
    ("reduction_cifar100", "er", "cifar100", False),
    ("reduction_cifar10", "er", "cifar10", False),
    ("reduction_tiny", "er", "tiny-imagenet", False),
    ("reduction_der_cifar100", "der", "cifar100", True),
    ("reduction_der_tiny", "der", "tiny-imagenet", True),
):
    _check(_key, "at least as many percent")(_reduction(_key, _of, _on, _against))


def _most(key: str) -> Ask:
    def ask(evidence: Evidence, edition: Edition) -> Answer | None:
        shown, holds, used = [], True, []
        for dataset in BOTH:
            studies = _known(evidence, edition, (dataset,))
            if len(studies) < len(LEARNERS):
                continue
            used += list(studies.values())
            name = "vanilla-all-data" if {s.vanilla for s in used} == {"vanilla-all-data"} else "vanilla"
            values = {learner: _figure(study, name, key) for (_, learner), study in studies.items()}
            own = ", ".join(f"{learner.upper()} {value:.2f}" for learner, value in values.items())
            shown.append(f"{paper.DATASETS[dataset]}: {own}")
            holds = holds and max(values, key=lambda learner: values[learner]) == "der"
        return Answer("; ".join(shown), holds, _n(used), len(shown) == len(BOTH)) if used else None

    return ask


_check("der_is_most_accurate", "the highest on both datasets")(_most("accuracy"))
_check("der_is_worst_calibrated", "the highest vanilla ECE on both datasets")(_most("ece"))


def _improves(datasets: Sequence[str], exceptions: Sequence[tuple[str, str]], **variation: Any) -> Ask:
    """Whether T-CIL improves on vanilla for every learner and dataset but the exceptions, where it does not."""

    def ask(evidence: Evidence, edition: Edition) -> Answer | None:
        studies = _known(evidence, edition, datasets, **variation)
        shown, holds = [], True
        for place, study in studies.items():
            plain, ours = _figure(study, study.vanilla), _figure(study, "t-cil")
            shown.append(f"{_where(*place)} {plain:.1f} to {ours:.1f}")
            holds = holds and (ours < plain) == (place not in exceptions)
        complete = len(studies) == len(datasets) * len(LEARNERS)
        return Answer(f"ECE: {', '.join(shown)}", holds, _n(list(studies.values())), complete) if studies else None

    return ask


_check("wa_on_tiny_is_the_exception", "lower than vanilla with all but WA on Tiny-ImageNet, and higher there")(
    _improves(EVERY, [("tiny-imagenet", "wa")])
)
_check("tasks20_wa_is_the_exception", "lower than vanilla with all but WA, and higher there")(
    _improves(BOTH, [(dataset, "wa") for dataset in BOTH], many_tasks=True)
)


@_check("t_cil_wins_the_grid", "the lowest with every learner and dataset but EEIL and WA on Tiny-ImageNet")
def _grid_wins(evidence: Evidence, edition: Edition) -> Answer | None:
    studies = _known(evidence, edition, EVERY)
    lost, silent = [], 0
    for place, study in studies.items():
        errors = {name: _mean(study, name) for name in (study.vanilla, *BASELINES, "t-cil")}
        known = {name: error for name, error in errors.items() if error is not None}
        silent += errors["perturb-ts"] is None
        if min(known, key=lambda name: known[name]) != "t-cil":
            lost.append(place)
    if not studies:
        return None
    shown = f"T-CIL has the lowest ECE in {len(studies) - len(lost)} of {len(studies)} settings"
    shown += f" ({', '.join(_where(*place) for place in lost)} excepted)" if lost else ""
    shown += f"; PerturbTS has no answer in {silent}" if silent else ""
    holds = set(lost) <= {("tiny-imagenet", "eeil"), ("tiny-imagenet", "wa")}
    return Answer(shown, holds, _n(list(studies.values())), len(studies) == len(EVERY) * len(LEARNERS))


@_check(
    "perturb_ts_is_inconsistent",
    "the highest of the baselines with some learner on CIFAR-100, the lowest with EEIL and WA on Tiny-ImageNet",
)
def _perturb_ts_is_inconsistent(evidence: Evidence, edition: Edition) -> Answer | None:
    found: dict[tuple[str, str], tuple[float, float, float]] = {}
    studies = _known(evidence, edition, BOTH)
    for place, study in studies.items():
        others = [_figure(study, name) for name in (study.vanilla, *BASELINES) if name != "perturb-ts"]
        own = _mean(study, "perturb-ts")
        if own is not None:
            found[place] = own, min(others), max(others)
    if not studies:
        return None
    silent = [_where(*place) for place in studies if place not in found]
    told = [f"{_where(*k)} {own:.1f} (others {a:.1f} to {b:.1f})" for k, (own, a, b) in found.items()]
    told += [f"no answer with {', '.join(silent)}"] if silent else []
    high = any(own > most for (dataset, _), (own, _, most) in found.items() if dataset == "cifar100")
    low = all(found[k][0] < found[k][1] for k in (("tiny-imagenet", "eeil"), ("tiny-imagenet", "wa")) if k in found)
    every = all(("cifar100", learner) in found for learner in LEARNERS)  # else one without an answer may be the one
    complete = len(found) == len(BOTH) * len(LEARNERS)
    return Answer("; ".join(told), high and low, _n(list(studies.values())), complete, high or every or not low)


@_check("perturb_ts_fails_on_cifar10", "no answer after at least half of the tasks")
def _perturb_ts_fails(evidence: Evidence, edition: Edition) -> Answer | None:
    study = evidence.study(edition, "cifar10", "er")
    if study is None:
        return None
    rows = [run.row(task, "perturb-ts") for run in study.runs for task in range(study.n_tasks)]
    absent = sum(row is None for row in rows)
    return Answer(f"no answer after {absent} of {len(rows)} tasks", 2 * absent >= len(rows), len(study.runs))


@_check("near_optimal_ts", "below twice the oracle's after every task with every learner")
def _near_optimal(evidence: Evidence, edition: Edition) -> Answer | None:
    shown, worst, studies = [], 0.0, _known(evidence, edition, BOTH)
    for place, study in studies.items():
        ours, oracle = (_by_task(study, name, "ece") for name in ("t-cil", "optimal-ts"))
        ratios = ours / oracle
        worst = max(worst, float(ratios.max()))
        own = f"{100 * ours.mean():.1f} against {100 * oracle.mean():.1f}"
        shown.append(f"{_where(*place)} {own}, at worst {ratios.max():.1f} times (task {ratios.argmax()})")
    complete = len(studies) == len(BOTH) * len(LEARNERS)
    return Answer("; ".join(shown), worst < 2, _n(list(studies.values())), complete) if studies else None


@_check("optimal_ts_is_best", "no calibrator without test labels has a lower mean ECE with any learner or dataset")
def _optimal_is_best(evidence: Evidence, edition: Edition) -> Answer | None:
    studies = _known(evidence, edition, BOTH)
    below = []
    for place, study in studies.items():
        oracle = _figure(study, "optimal-ts")
        for name, (title, block) in study.titles().items():
            error = _mean(study, name) if block == "ranked" else None
            if error is not None and error < oracle:
                below.append(f"{_where(*place)}: {title} {error:.2f} below {oracle:.2f}")
    if not studies:
        return None
    complete = len(studies) == len(BOTH) * len(LEARNERS)
    return Answer("; ".join(below) or "none is below it", not below, _n(list(studies.values())), complete)


@_check("only_the_papers_policy_works", "T-CIL's is the lowest, the others within a quarter of the best baseline's")
def _policies(evidence: Evidence, edition: Edition) -> Answer | None:
    study = evidence.study(edition, "cifar100", "er")
    if study is None:
        return None
    names = {"t-cil" if policy == "paper" else f"t-cil[policy={policy}]": t for policy, t in paper.POLICIES.items()}
    known = {title: value for name, title in names.items() if (value := _mean(study, name)) is not None}
    if len(known) < len(names):
        return None
    baselines = {name: value for name in BASELINES if (value := _mean(study, name)) is not None}
    first = min(baselines, key=lambda name: baselines[name])
    shown = ", ".join(f"{title} {value:.2f}" for title, value in known.items())
    ours = known.pop("T-CIL")
    alike = all(abs(value / baselines[first] - 1) <= 0.25 for value in known.values())
    return Answer(
        f"ECE: {shown}; {study.titles()[first][0]} {baselines[first]:.2f}",
        all(ours < value for value in known.values()) and alike,
        len(study.runs),
    )


@_check("magnitude_differences", "the others grow with every task, and T-CIL's is below theirs from the second task on")
def _magnitude_gaps(evidence: Evidence, edition: Edition) -> Answer | None:
    analyses = _analyses(evidence, edition)
    gaps = {}
    for policy, title in paper.POLICIES.items():
        by_task = [[task["epsilon"][policy]["gap"] for task in a["tasks"]] for a in analyses]
        if not analyses or any(gap is None for run in by_task for gap in run):
            return None
        gaps[title] = np.mean(by_task, axis=0)
    shown = "; ".join(f"{title} {', '.join(f'{v:.4f}' for v in gap)}" for title, gap in gaps.items())
    ours = gaps.pop("T-CIL")
    holds = all(bool((np.diff(gap) > 0).all()) and bool((ours[1:] < gap[1:]).all()) for gap in gaps.values())
    return Answer(shown, holds, len(analyses))


# sizes of the memory -----------------------------------------------------------------------------------------


def _memories(evidence: Evidence, edition: Edition, dataset: str) -> list[Study]:
    """The studies with the sizes that were run, from the smallest, with the same seeds."""
    sizes = paper.MEMORY_SIZES[dataset]
    found = [evidence.study(edition, dataset, "er", memory=size, validation=100) for size in sizes]
    return same_seeds([study for study in found if study is not None])


def _validated_on(studies: Sequence[Study]) -> str:
    """The size of the validation set, which is the least one of the paper and so is told beside T-CIL's error."""
    return f" ({studies[0].settings['validation']} images for validation)"


@_check("memory_sizes", "lower at every size; undecided where a paired 95 % interval includes zero")
def _lower_at_every_size(evidence: Evidence, edition: Edition) -> Answer | None:
    shown, certain, used, lower = [], True, [], True
    for dataset in BOTH:
        for study in _memories(evidence, edition, dataset):
            ours, plain = (
                [float("nan") if v is None else v for v in study.means(name, "ece")] for name in ("t-cil", "vanilla")
            )
            difference = paired_difference(plain, ours)
            shown.append(f"{study.settings['memory']}: {100 * np.mean(ours):.1f} against {100 * np.mean(plain):.1f}")
            certain = certain and difference.excludes_zero
            lower = lower and difference.mean < 0
            used.append(study)
    if not used:
        return None
    complete = len(used) == sum(len(paper.MEMORY_SIZES[dataset]) for dataset in BOTH)
    told = f"T-CIL against vanilla, memory {'; '.join(shown)}{_validated_on(used)}"
    return Answer(told, lower, _n(used), complete, decided=certain)


@_check("memory_500_beats_2000", "T-CIL's ECE with the smallest memory below vanilla's with the largest")
def _small_memory(evidence: Evidence, edition: Edition) -> Answer | None:
    studies = _memories(evidence, edition, "cifar100")
    if len(studies) < 2:
        return None
    ours, vanilla = _figure(studies[0], "t-cil"), _figure(studies[-1], "vanilla")
    sizes = [study.settings["memory"] for study in studies]
    shown = f"T-CIL with {sizes[0]}: {ours:.2f}; vanilla with {sizes[-1]}: {vanilla:.2f}{_validated_on(studies)}"
    return Answer(shown, ours < vanilla, _n(studies), len(studies) == len(paper.MEMORY_SIZES["cifar100"]))


@_check("smaller_memory_is_worse", "with every smaller size less accuracy, and a higher ECE of vanilla and of T-CIL")
def _smaller_is_worse(evidence: Evidence, edition: Edition) -> Answer | None:
    shown, holds, used = [], True, []
    for dataset in BOTH:
        studies = _memories(evidence, edition, dataset)
        if len(studies) < 2:
            continue
        used += studies
        sizes = ", ".join(str(study.settings["memory"]) for study in studies)
        parts = []
        for calibrator, key, title in (
            ("vanilla", "accuracy", "accuracy"), ("vanilla", "ece", "vanilla ECE"), ("t-cil", "ece", "T-CIL's ECE"),
        ):  # fmt: skip
            values = [_figure(study, calibrator, key) for study in studies]
            parts.append(f"{title} {', '.join(f'{value:.1f}' for value in values)}")
            steps = np.diff(values) * (1 if key == "accuracy" else -1)
            holds = holds and bool((steps > 0).all())
        shown.append(f"memory {sizes}: {'; '.join(parts)}{_validated_on(studies)}")
    complete = len(used) == sum(len(paper.MEMORY_SIZES[dataset]) for dataset in BOTH)
    return Answer("; ".join(shown), holds, _n(used), complete) if used else None
