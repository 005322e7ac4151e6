"""What the paper's text claims in numbers, checked on our runs; and the percentages recomputed from its own tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tcil.experiments import paper
from tcil.experiments.collect import Study
from tcil.experiments.grids import Cell, Grid, Row
from tcil.experiments.schedules import Edition

LEARNERS = ("er", "eeil", "wa", "der")


@dataclass(frozen=True)
class Answer:
    """What our runs say to a claim, and whether it holds there."""

    ours: str
    holds: bool | None


Ask = Callable[[Any, Edition], Answer | None]


def claims_grid(evidence: Any) -> Grid:
    """One row per claim and edition; claims that no run tells stay empty and say so."""
    rows = []
    for key, claim in paper.claims().items():
        if key not in CHECKS:
            continue
        printed = _shown(claim["values"]) or "in words only"
        answers = [(edition, CHECKS[key](evidence, edition)) for edition in evidence.editions]
        known = [(edition, answer) for edition, answer in answers if answer is not None]
        for edition, answer in known:
            rows.append(_row(claim["text"], printed, edition.title, answer))
        if not known:
            rows.append(_row(claim["text"], printed, "", Answer("not run", None)))
    for key in sorted(k for k in paper.claims() if k.startswith("reduction_")):
        rows.append(
            _row(
                paper.claims()[key]["text"],
                _shown(paper.claims()[key]["values"]),
                "the paper's own table",
                _recomputed(key),
            )
        )
    return Grid("Claims", ("claim", "paper", "where", "ours", "holds"), tuple(rows), wordy=True)


def _row(text: str, printed: str, where: str, answer: Answer) -> Row:
    verdict = {True: "yes", False: "no", None: "-"}[answer.holds]
    return Row(text, tuple(Cell(words=words) for words in (printed, where, answer.ours, verdict)))


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
    return Answer(f"{reduction:.1f} %", abs(reduction - claim["values"]["reduction"]) < 0.05)


def _mean(study: Study | None, calibrator: str, key: str = "ece") -> float | None:
    """In percent, over seeds; None where a seed has none."""
    if study is None or calibrator not in study.titles():
        return None
    values = study.means(calibrator, key)
    return None if None in values else 100 * float(np.mean([v for v in values if v is not None]))


def _analyses(study: Study | None) -> list[dict[str, Any]]:
    return [run.analysis for run in study.runs if run.analysis] if study is not None else []


def _average(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _gaps(evidence: Any, edition: Edition, what: str, sign: int) -> tuple[float, float] | None:
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
    def ask(evidence: Any, edition: Edition) -> Answer | None:
        gaps = _gaps(evidence, edition, what, sign)
        return (
            None
            if gaps is None
            else Answer(f"{gaps[0]:.1f} after the middle task, {gaps[1]:.1f} after the last", gaps[1] > gaps[0])
        )

    return ask


def _reserve(evidence: Any, edition: Edition) -> Answer | None:
    plain = _mean(evidence.study(edition, "cifar100", "er"), "vanilla", "accuracy")
    reserved = _mean(evidence.study(edition, "cifar100", "er", reserve=0.25), "vanilla", "accuracy")
    if plain is None or reserved is None:
        return None
    return Answer(f"{reserved:.2f} with the reserve, {plain:.2f} without", reserved < plain)


def _temperature_gap(evidence: Any, edition: Edition) -> Answer | None:
    study = evidence.study(edition, "cifar100", "er")
    if study is None:
        return None
    gaps = np.array([
        [o - t for o, t in zip(run.values("optimal-ts", "temperature"), run.values("ts", "temperature"), strict=True)]
        for run in study.runs
    ]).mean(0)  # fmt: skip
    shown = ", ".join(f"{gap:.2f}" for gap in gaps)
    return Answer(f"optimal T - TS's T by task: {shown}", bool(gaps[-1] > gaps[0]))


def _by_heart(evidence: Any, edition: Edition) -> Answer | None:
    found = {}
    for learner in ("er", "der"):
        study = evidence.study(edition, "cifar100", learner)
        if study is not None:
            found[learner] = 100 * float(np.mean([run.tasks[-1]["memory"]["accuracy"] for run in study.runs]))
    shown = ", ".join(f"{k.upper()} {v:.1f} %" for k, v in found.items())
    return Answer(shown, min(found.values()) > 95) if found else None


def _exemplar_temperature(evidence: Any, edition: Edition) -> Answer | None:
    study = evidence.study(edition, "cifar100", "er")
    if study is None:
        return None
    limits = [_limit(run.row(-1, "exemplar-ts")) for run in study.runs]
    known = [limit for limit in limits if limit is not None]
    optimal = _average(run.values("optimal-ts", "temperature")[-1] for run in study.runs)
    if not known or optimal is None:
        return None
    return Answer(
        f"T = {np.mean(known):.2f} (all right: T -> 0) against the optimal {optimal:.2f}", max(known) < 0.5 * optimal
    )


def _limit(row: dict[str, Any] | None) -> float | None:
    """Where the temperature goes: 0 where all exemplars are right, although 1 is then kept in use."""
    if row is None:
        return None
    return 0.0 if row["result"]["verdict"] == "all-correct" else float(row["temperature"])


def _new_is_better(evidence: Any, edition: Edition) -> Answer | None:
    found = []
    for learner in ("er", "der"):
        study = evidence.study(edition, "cifar100", learner)
        if study is not None:
            by_task = np.mean(
                [run.tasks[-1]["calibrators"]["vanilla"]["by_task"]["accuracy"] for run in study.runs], axis=0
            )
            found.append((learner, 100 * by_task[:-1].mean(), 100 * by_task[-1]))
    shown = "; ".join(f"{k.upper()} old {old:.1f} %, new {new:.1f} %" for k, old, new in found)
    return Answer(shown, all(new > old for _, old, new in found)) if found else None


def _reduction(learner: str, dataset: str, against_vanilla: bool) -> Ask:
    def ask(evidence: Any, edition: Edition) -> Answer | None:
        study = evidence.study(edition, dataset, learner)
        ours = _mean(study, "t-cil")
        names = ["vanilla-all-data"] if against_vanilla else ["ts", "ets", "irm", "perturb-ts"]
        known = {name: value for name in names if (value := _mean(study, name)) is not None}
        if ours is None or not known:
            return None
        first = min(known, key=lambda name: known[name])
        reduction = 100 * (1 - ours / known[first])
        return Answer(f"{reduction:.1f} % ({first} {known[first]:.2f}, T-CIL {ours:.2f})", reduction > 0)

    return ask


def _most(key: str) -> Ask:
    def ask(evidence: Any, edition: Edition) -> Answer | None:
        values = {k: _mean(evidence.study(edition, "cifar100", k), "vanilla", key) for k in LEARNERS}
        known = {k: v for k, v in values.items() if v is not None}
        if len(known) < len(LEARNERS):
            return None
        shown = ", ".join(f"{k.upper()} {v:.2f}" for k, v in known.items())
        return Answer(shown, max(known, key=lambda k: known[k]) == "der")

    return ask


def _near_optimal(evidence: Any, edition: Edition) -> Answer | None:
    found = {}
    for learner in LEARNERS:
        study = evidence.study(edition, "cifar100", learner)
        ours, oracle = _mean(study, "t-cil"), _mean(study, "optimal-ts")
        if ours is not None and oracle is not None:
            found[learner] = (ours, oracle)
    shown = ", ".join(f"{k.upper()} {a:.1f} against {b:.1f}" for k, (a, b) in found.items())
    return Answer(shown, all(a < 2 * b for a, b in found.values())) if found else None


def _policies(evidence: Any, edition: Edition) -> Answer | None:
    study = evidence.study(edition, "cifar100", "er")
    names = {"t-cil": "T-CIL", **{f"t-cil[policy={p}]": p for p in ("random", "closest", "farthest")}}
    known = {title: value for name, title in names.items() if (value := _mean(study, name)) is not None}
    if len(known) < 4:
        return None
    shown = ", ".join(f"{k} {v:.2f}" for k, v in known.items())
    return Answer(shown, all(known["T-CIL"] < v for k, v in known.items() if k != "T-CIL"))


def _magnitude_gaps(evidence: Any, edition: Edition) -> Answer | None:
    analyses = _analyses(evidence.study(edition, "cifar100", "er"))
    if not analyses:
        return None
    last = {}
    for policy in ("paper", "random", "closest", "farthest"):
        value = _average(a["tasks"][-1]["epsilon"][policy]["gap"] for a in analyses)
        if value is None:
            return None
        last[policy] = value
    shown = ", ".join(f"{k} {v:.4f}" for k, v in last.items())
    return Answer(f"after the last task: {shown}", all(last["paper"] < v for k, v in last.items() if k != "paper"))


def _memory(evidence: Any, edition: Edition) -> tuple[Study | None, Study | None]:
    small, large = (evidence.study(edition, "cifar100", "er", memory=m, validation=100) for m in (500, 2000))
    return small, large


def _small_memory(evidence: Any, edition: Edition) -> Answer | None:
    small, large = _memory(evidence, edition)
    ours, vanilla = _mean(small, "t-cil"), _mean(large, "vanilla")
    if small is None or large is None or ours is None or vanilla is None:
        return None
    sizes = small.settings["memory"], large.settings["memory"]
    return Answer(f"T-CIL with {sizes[0]}: {ours:.2f}; vanilla with {sizes[1]}: {vanilla:.2f}", ours < vanilla)


def _smaller_is_worse(evidence: Any, edition: Edition) -> Answer | None:
    small, large = _memory(evidence, edition)
    values = [_mean(study, "vanilla", key) for study in (small, large) for key in ("accuracy", "ece")]
    a, b, c, d = values
    if a is None or b is None or c is None or d is None:
        return None
    return Answer(f"accuracy {a:.1f} against {c:.1f}, vanilla ECE {b:.1f} against {d:.1f}", a < c and b > d)


def _cost(evidence: Any, edition: Edition) -> Answer | None:
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
    return Answer(f"T-CIL's time against the memory: a line to within {100 * misfit:.0f} %{share}", misfit < 0.15)


def _monotone(evidence: Any, edition: Edition) -> Answer | None:
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
    )


CHECKS: dict[str, Ask] = {
    "reserve_costs_accuracy": _reserve,
    "temperature_gap_grows": _temperature_gap,
    "exemplars_are_known_by_heart": _by_heart,
    "exemplars_make_temperature_low": _exemplar_temperature,
    "new_task_is_more_accurate": _new_is_better,
    "old_new_accuracy_gap": _gap_claim("accuracy", 1),
    "misprediction_gap": _gap_claim("misprediction", -1),
    "magnitude_search": _monotone,
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
