"""What the paper's text claims in numbers, checked on our runs; and the percentages recomputed from its own tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tcil.experiments import paper
from tcil.experiments.collect import Study
from tcil.experiments.evidence import Evidence
from tcil.experiments.grids import Cell, Grid, Row
from tcil.experiments.schedules import LEARNERS, Edition


@dataclass(frozen=True)
class Answer:
    """What our runs say to a claim, whether it holds there, and by what rule of ours."""

    ours: str
    holds: bool | None
    rule: str


Ask = Callable[[Evidence, Edition], Answer | None]


def claims_grid(evidence: Evidence) -> Grid:
    """One row per claim and edition; claims that no run tells stay empty and say so."""
    known = paper.claims()
    asked = [
        (known[key]["text"], _shown(known[key]["values"]) or "in words only", CHECKS[key])
        for key in known
        if key in CHECKS
    ]
    asked += [(text, "assumed", ask) for text, ask in ASSUMED.items()]
    rows = []
    for text, printed, ask in asked:
        answers = [(edition.title, ask(evidence, edition)) for edition in evidence.editions]
        told = [(title, answer) for title, answer in answers if answer is not None]
        rows += [_row(text, printed, title, answer) for title, answer in told or [("", Answer("not run", None, ""))]]
    for key in sorted(key for key in known if key.startswith("reduction_")):
        printed = _shown(known[key]["values"])
        rows.append(_row(known[key]["text"], printed, "the paper's own table", _recomputed(key)))
    return Grid("Claims", ("claim", "paper", "where", "ours", "holds", "if"), tuple(rows), wordy=True)


def _row(text: str, printed: str, where: str, answer: Answer) -> Row:
    verdict = {True: "yes", False: "no", None: "-"}[answer.holds]
    return Row(text, tuple(Cell(words=words) for words in (printed, where, answer.ours, verdict, answer.rule)))


def _shown(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in values.items())


def _recomputed(key: str) -> Answer:
    """A printed reduction, worked out from the printed rows it compares."""
    claim = paper.claims()[key]
    start, end = (paper.find(**claim["compared"][side]) for side in ("from", "to"))
    assert start is not None
    assert end is not None
    before, after = start.figures[claim["compared"]["metric"]], end.figures[claim["compared"]["metric"]]
    assert before is not None
    assert after is not None
    reduction = 100 * (1 - after[0] / before[0])
    return Answer(f"{reduction:.1f} %", abs(reduction - claim["values"]["reduction"]) < 0.05, "as printed, rounded")


def _mean(study: Study | None, calibrator: str, key: str = "ece") -> float | None:
    """In percent, over seeds; None where a seed has none."""
    if study is None or calibrator not in study.titles():
        return None
    values = study.means(calibrator, key)
    return None if None in values else 100 * float(np.mean([v for v in values if v is not None]))


def _by_task(study: Study, calibrator: str, key: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A figure by task, mean over seeds."""
    rows = [[float("nan") if value is None else value for value in run.values(calibrator, key)] for run in study.runs]
    return np.asarray(np.mean(rows, axis=0), dtype=np.float64)


def _analyses(study: Study | None) -> list[dict[str, Any]]:
    return [run.analysis for run in study.runs if run.analysis] if study is not None else []


def _average(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _gaps(evidence: Evidence, edition: Edition, what: str, sign: int) -> tuple[float, float] | None:
    """The mean difference between old and new in the middle and at the end, in points."""
    analyses = _analyses(evidence.study(edition, "cifar100", "er"))
    if not analyses:
        return None
    n = len(analyses[0]["tasks"])
    found = []
    for place in ((n - 1) // 2, n - 1):
        gaps = (
            None if task[what]["old"] is None else 100 * sign * (task[what]["new"] - task[what]["old"])
            for task in (a["tasks"][place] for a in analyses)
            if what in task
        )
        found.append(_average(gaps))
    return (found[0], found[1]) if found[0] is not None and found[1] is not None else None


def _gap_claim(what: str, sign: int) -> Ask:
    def ask(evidence: Evidence, edition: Edition) -> Answer | None:
        gaps = _gaps(evidence, edition, what, sign)
        return (
            None
            if gaps is None
            else Answer(
                f"{gaps[0]:.1f} after the middle task, {gaps[1]:.1f} after the last", gaps[1] > gaps[0], "it grows"
            )
        )

    return ask


def _reserve(evidence: Evidence, edition: Edition) -> Answer | None:
    plain = _mean(evidence.study(edition, "cifar100", "er"), "vanilla", "accuracy")
    reserved = _mean(evidence.study(edition, "cifar100", "er", reserve=0.25), "vanilla", "accuracy")
    if plain is None or reserved is None:
        return None
    return Answer(f"{reserved:.2f} with the reserve, {plain:.2f} without", reserved < plain, "lower with it")


def _temperature_gap(evidence: Evidence, edition: Edition) -> Answer | None:
    study = evidence.study(edition, "cifar100", "er")
    if study is None:
        return None
    optimal, scaled = (_by_task(study, name, "temperature") for name in ("optimal-ts", "ts"))
    gaps = optimal - scaled
    shown = ", ".join(f"{gap:.2f}" for gap in gaps)
    return Answer(f"optimal T - TS's T by task: {shown}", bool((np.diff(gaps) > 0).all()), "more with every task")


def _by_heart(evidence: Evidence, edition: Edition) -> Answer | None:
    found = {}
    for learner in ("er", "der"):
        study = evidence.study(edition, "cifar100", learner)
        if study is not None:
            found[learner] = 100 * float(np.mean([run.tasks[-1]["memory"]["accuracy"] for run in study.runs]))
    shown = ", ".join(f"{k.upper()} {v:.1f} %" for k, v in found.items())
    return Answer(shown, min(found.values()) > 95, "above 95 %") if found else None


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
    shown = f"T = {np.mean(known):.2f} (0 where all are right: {right} of {len(known)} seeds) against {optimal:.2f}"
    return Answer(f"{shown}, the optimal one", max(known) < 0.5 * optimal, "below half of it with every seed")


def _limit(row: dict[str, Any] | None) -> float | None:
    """Where the temperature goes: 0 where all exemplars are right, although 1 is then kept in use."""
    if row is None:
        return None
    return 0.0 if row["result"]["verdict"] == "all_correct" else float(row["temperature"])


def _new_is_better(evidence: Evidence, edition: Edition) -> Answer | None:
    found = []
    for learner in ("er", "der"):
        study = evidence.study(edition, "cifar100", learner)
        if study is not None:
            by_task = np.mean(
                [run.tasks[-1]["calibrators"]["vanilla"]["by_task"]["accuracy"] for run in study.runs], axis=0
            )
            found.append((learner, 100 * by_task[:-1].mean(), 100 * by_task[-1]))
    shown = "; ".join(f"{k.upper()} old {old:.1f} %, new {new:.1f} %" for k, old, new in found)
    return Answer(shown, all(new > old for _, old, new in found), "new above old") if found else None


def _reduction(learner: str, dataset: str, against_vanilla: bool) -> Ask:
    def ask(evidence: Evidence, edition: Edition) -> Answer | None:
        study = evidence.study(edition, dataset, learner)
        names = ["vanilla-all-data"] if against_vanilla else ["ts", "ets", "irm", "perturb-ts"]
        study = study.having(names[0]) if study is not None else None
        ours = _mean(study, "t-cil")
        known = {name: value for name in names if (value := _mean(study, name)) is not None}
        if ours is None or not known:
            return None
        first = min(known, key=lambda name: known[name])
        reduction = 100 * (1 - ours / known[first])
        return Answer(f"{reduction:.1f} % ({first} {known[first]:.2f}, T-CIL {ours:.2f})", reduction > 0, "above 0")

    return ask


def _most(key: str) -> Ask:
    def ask(evidence: Evidence, edition: Edition) -> Answer | None:
        values = {k: _mean(evidence.study(edition, "cifar100", k), "vanilla", key) for k in LEARNERS}
        known = {k: v for k, v in values.items() if v is not None}
        if len(known) < len(LEARNERS):
            return None
        shown = ", ".join(f"{k.upper()} {v:.2f}" for k, v in known.items())
        return Answer(shown, max(known, key=lambda k: known[k]) == "der", "DER's is the highest")

    return ask


def _near_optimal(evidence: Evidence, edition: Edition) -> Answer | None:
    found = {}
    for learner in LEARNERS:
        study = evidence.study(edition, "cifar100", learner)
        ours, oracle = _mean(study, "t-cil"), _mean(study, "optimal-ts")
        if ours is not None and oracle is not None:
            found[learner] = (ours, oracle)
    shown = ", ".join(f"{k.upper()} {a:.1f} against {b:.1f}" for k, (a, b) in found.items())
    return (
        Answer(shown, all(a < 2 * b for a, b in found.values()), "below twice the oracle's with every learner")
        if found
        else None
    )


def _policies(evidence: Evidence, edition: Edition) -> Answer | None:
    study = evidence.study(edition, "cifar100", "er")
    names = {"t-cil": "T-CIL", **{f"t-cil[policy={p}]": p for p in ("random", "closest", "farthest")}}
    known = {title: value for name, title in names.items() if (value := _mean(study, name)) is not None}
    if len(known) < 4:
        return None
    shown = ", ".join(f"{k} {v:.2f}" for k, v in known.items())
    holds = all(known["T-CIL"] < value for title, value in known.items() if title != "T-CIL")
    return Answer(f"ECE: {shown}", holds, "T-CIL's is the lowest")


def _magnitude_gaps(evidence: Evidence, edition: Edition) -> Answer | None:
    analyses = _analyses(evidence.study(edition, "cifar100", "er"))
    if not analyses:
        return None
    gaps = {}
    for policy, title in {"paper": "T-CIL", "random": "random", "closest": "closest", "farthest": "farthest"}.items():
        by_task = [[task["epsilon"][policy]["gap"] for task in a["tasks"]] for a in analyses]
        if any(gap is None for run in by_task for gap in run):
            return None
        gaps[title] = np.mean(by_task, axis=0)
    ours = gaps.pop("T-CIL")
    holds = all(bool((np.diff(gap) > 0).all()) and ours[-1] < gap[-1] for gap in gaps.values())
    shown = "; ".join(f"{k} {', '.join(f'{v:.4f}' for v in gap)}" for k, gap in {"T-CIL": ours, **gaps}.items())
    return Answer(shown, holds, "the others grow with every task, and end above T-CIL")


def _memory(evidence: Evidence, edition: Edition) -> tuple[Study | None, Study | None]:
    small, large = (evidence.study(edition, "cifar100", "er", memory=m, validation=100) for m in (500, 2000))
    return small, large


def _small_memory(evidence: Evidence, edition: Edition) -> Answer | None:
    small, large = _memory(evidence, edition)
    ours, vanilla = _mean(small, "t-cil"), _mean(large, "vanilla")
    if small is None or large is None or ours is None or vanilla is None:
        return None
    sizes = small.settings["memory"], large.settings["memory"]
    shown = f"T-CIL with {sizes[0]}: {ours:.2f}; vanilla with {sizes[1]}: {vanilla:.2f}"
    return Answer(shown, ours < vanilla, "T-CIL's is lower")


def _smaller_is_worse(evidence: Evidence, edition: Edition) -> Answer | None:
    small, large = _memory(evidence, edition)
    values = [_mean(study, "vanilla", key) for study in (small, large) for key in ("accuracy", "ece")]
    a, b, c, d = values
    if a is None or b is None or c is None or d is None:
        return None
    shown = f"accuracy {a:.1f} against {c:.1f}, vanilla ECE {b:.1f} against {d:.1f}"
    return Answer(shown, a < c and b > d, "both, the least size against the largest")


def _cost(evidence: Evidence, edition: Edition) -> Answer | None:
    study = evidence.study(edition, "cifar100", "er")
    analyses = _analyses(study)
    if study is None or not analyses:
        return None
    sizes = np.array(analyses[0]["cost"]["memory"])
    seconds = np.array([a["cost"]["seconds"] for a in analyses]).mean(0)
    slope, start = np.polyfit(sizes, seconds, 1)
    misfit = float(np.abs(slope * sizes + start - seconds).max() / seconds.max())
    training = [
        run.environment.get("seconds", {}).get(f"task-{study.n_tasks - 1:02d}", {}).get("training")
        for run in study.runs
    ]
    share = f"; {100 * seconds[-1] / np.mean([t for t in training if t]):.2f} % of training" if any(training) else ""
    shown = f"T-CIL's time against the memory: a line to within {100 * misfit:.0f} %{share}"
    return Answer(shown, misfit < 0.15, "a line to within 15 %")


def _monotone(evidence: Evidence, edition: Edition) -> Answer | None:
    curves = [
        [t for t in task["curve"]["temperatures"] if t is not None]
        for a in _analyses(evidence.study(edition, "cifar100", "er"))
        for task in a["tasks"]
        if "curve" in task
    ]
    if not curves:
        return None
    rising = sum(bool(np.all(np.diff(curve) >= -1e-9)) for curve in curves)
    return Answer(
        f"T(eps) rises throughout in {rising} of {len(curves)} cases, up to four times the magnitude",
        rising == len(curves),
        "in all cases",
    )


def _grid_wins(evidence: Evidence, edition: Edition) -> Answer | None:
    wins, known = [], 0
    for dataset in ("cifar10", "cifar100", "tiny-imagenet"):
        for learner in LEARNERS:
            study = evidence.study(edition, dataset, learner)
            values = {name: _mean(study, name) for name in ("vanilla", "ts", "ets", "irm", "perturb-ts", "t-cil")}
            least = {name: value for name, value in values.items() if value is not None}
            if "t-cil" in least:
                known += 1
                wins += [learner.upper()] * (min(least, key=lambda name: least[name]) == "t-cil")
    shown = f"T-CIL has the lowest ECE in {len(wins)} of {known} settings"
    return Answer(shown, len(wins) == known, "in all that were run") if known else None


def _with_validation_size(calibrator: str, key: str) -> Ask:
    def ask(evidence: Evidence, edition: Edition) -> Answer | None:
        found = [evidence.study(edition, "cifar100", "er", validation=size) for size in (100, 300, 500, 700, 1000)]
        values = [(study.settings["validation"], _mean(study, calibrator, key)) for study in found if study is not None]
        known = [(size, value) for size, value in values if value is not None]
        if len(known) < 2:
            return None
        shown = ", ".join(f"{size}: {value:.2f}" for size, value in known)
        falls = all(late[1] < early[1] for early, late in itertools.pairwise(known))
        return Answer(shown, falls, "less with every size")

    return ask


def _reserve_like_eeil(evidence: Evidence, edition: Edition) -> Answer | None:
    er, eeil = (_mean(evidence.study(edition, "cifar100", name), "vanilla", "accuracy") for name in ("er", "eeil"))
    reserved = _mean(evidence.study(edition, "cifar100", "er", reserve=0.25), "vanilla", "accuracy")
    if er is None or eeil is None or reserved is None:
        return None
    shown = f"{er - reserved:+.2f} by not reserving, {eeil - er:+.2f} by EEIL"
    return Answer(shown, er - reserved > 0.5 * (eeil - er), "above half of EEIL's")


def _accuracy_hardly_changes(evidence: Evidence, edition: Edition) -> Answer | None:
    changes = []
    for learner in LEARNERS:
        study = evidence.study(edition, "cifar100", learner)
        study = study.having("vanilla-all-data") if study is not None else None
        plain, calibrated = _mean(study, "vanilla-all-data", "accuracy"), _mean(study, "t-cil", "accuracy")
        if plain is not None and calibrated is not None:
            changes.append((learner, calibrated - plain))
    shown = ", ".join(f"{learner.upper()} {change:+.2f}" for learner, change in changes)
    return Answer(f"{shown} points", all(abs(c) < 2 for _, c in changes), "within 2 points") if changes else None


def _improves(dataset: str, many_tasks: bool) -> Ask:
    """Whether T-CIL improves on vanilla for every learner but WA."""

    def ask(evidence: Evidence, edition: Edition) -> Answer | None:
        found = {}
        for learner in LEARNERS:
            study = evidence.study(edition, dataset, learner, **({"many_tasks": True} if many_tasks else {}))
            plain, ours = _mean(study, "vanilla"), _mean(study, "t-cil")
            if plain is not None and ours is not None:
                found[learner] = (plain, ours)
        if len(found) < len(LEARNERS):
            return None
        shown = ", ".join(f"{k.upper()} {a:.1f} to {b:.1f}" for k, (a, b) in found.items())
        holds = all((b < a) == (k != "wa") for k, (a, b) in found.items())
        return Answer(f"ECE {shown}", holds, "lower with every learner but WA")

    return ask


def _perturb_ts_fails(evidence: Evidence, edition: Edition) -> Answer | None:
    study = evidence.study(edition, "cifar10", "er")
    if study is None:
        return None
    rows = [run.row(task, "perturb-ts") for run in study.runs for task in range(study.n_tasks)]
    absent = sum(row is None for row in rows)
    return Answer(f"no answer after {absent} of {len(rows)} tasks", absent > 0, "after any")


# Claims by their key in paper.json. Those without a check describe the protocol, which the presets carry.
CHECKS: dict[str, Ask] = {
    "accuracy_hardly_changes": _accuracy_hardly_changes,
    "reserve_gain_is_like_eeil": _reserve_like_eeil,
    "t_cil_wins_the_grid": _grid_wins,
    "wa_on_tiny_is_the_exception": _improves("tiny-imagenet", False),
    "tasks20_wa_is_the_exception": _improves("cifar100", True),
    "perturb_ts_fails_on_cifar10": _perturb_ts_fails,
    "ece_falls_with_validation_size": _with_validation_size("t-cil", "ece"),
    "accuracy_falls_with_validation_size": _with_validation_size("t-cil", "accuracy"),
    "reserve_costs_accuracy": _reserve,
    "temperature_gap_grows": _temperature_gap,
    "exemplars_are_known_by_heart": _by_heart,
    "exemplars_make_temperature_low": _exemplar_temperature,
    "new_task_is_more_accurate": _new_is_better,
    "old_new_accuracy_gap": _gap_claim("accuracy", 1),
    "misprediction_gap": _gap_claim("misprediction", -1),
    "complexity": _cost,
    "reduction_cifar100": _reduction("er", "cifar100", False),
    "reduction_cifar10": _reduction("er", "cifar10", False),
    "reduction_tiny": _reduction("er", "tiny-imagenet", False),
    "reduction_der_cifar100": _reduction("der", "cifar100", True),
    "reduction_der_tiny": _reduction("der", "tiny-imagenet", True),
    "der_is_most_accurate": _most("accuracy"),
    "der_is_worst_calibrated": _most("ece"),
    "near_optimal_ts": _near_optimal,
    "only_the_papers_policy_works": _policies,
    "magnitude_differences": _magnitude_gaps,
    "memory_500_beats_2000": _small_memory,
    "smaller_memory_is_worse": _smaller_is_worse,
}
# What the paper assumes without saying it.
ASSUMED: dict[str, Ask] = {"the temperature of the perturbed new exemplars rises with the magnitude": _monotone}
