"""T goes with the spread of the logits, round six: the command `python -m research.pact sixth`.

Final worlds of `letters` (F8, F9, F10) and the runs of `tcil reproduce all --schedule small` without a record. Where
a run has no reserve, two test images of each class serve as one, beside the memory. In the tables "PACT" is the form
that ships, and "PACT, earlier" that of rounds one to four. Of the records of round five, `tables round-five`, "PACT" is
the candidate of that round (`methods.FIFTH`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from research.pact import measuring, small
from research.pact.tables import each_learner, harmful_large, harms, learners, mean
from research.pact.worlds import FIFTH, SIXTH, WORLDS

FAMILIES = ("no old data", "reserve", "oracle", "round five")
MEASURED = ("PACT", "PACT-R", "PACT, spread", "PACT-R, spread")
NAMES = {
    "PACT": "PACT, earlier", "PACT-R": "PACT-R, earlier", "PACT, spread": "PACT", "PACT-R, spread": "PACT-R",
    "PACT, spread, predictions too": "PACT, predictions too",
    "PACT, spread, without new classes": "PACT without new classes",
    "PACT, spread, without surrogate": "PACT without surrogate",
    "PACT, spread, without history": "PACT without history, late_spread_error 0.08",
}  # fmt: skip
FORMS = ("PACT", "PACT, earlier", "PACT-R", "PACT-R, earlier")
SHOWN = (
    "Vanilla", "TS", "T-CIL", "whole imbalance", "PACT, earlier", "PACT", "balanced TS", "BiC layer and T", "BCTS",
    "T and bias by the reserve alone", "PACT-R, earlier", "PACT-R", "Optimal TS", "Optimal group TS",
    "Optimal T and bias", "PACT without new classes", "PACT without surrogate",
    "PACT without history, late_spread_error 0.08",
)  # fmt: skip
GAIN = 0.1  # of pooled ECE with PACT, by the protocol's rule


def run(folders: Iterable[Path]) -> None:
    """Measure what has no record yet, and print the tables."""
    measuring.store("round-six", folders, FAMILIES, MEASURED)
    print("\n".join(tables(stored())))


def stored(name: str = "round-six") -> list[dict[str, Any]]:
    """What was measured, in this round or in the one before, under the names of the tables."""
    return [_renamed(record) for record in measuring.stored(name)]


def _renamed(record: dict[str, Any]) -> dict[str, Any]:
    def named(values: dict[str, Any]) -> dict[str, Any]:
        return {NAMES.get(name, name): value for name, value in values.items()}

    states = [
        {**state, "belief": named(state["belief"]), "harm": named(state["harm"])} if "harm" in state else state
        for state in record["states"]
    ]
    return {**record, "scores": named(record["scores"]), "states": states}


def tables(records: Sequence[dict[str, Any]]) -> list[str]:
    """Letters by learner, `small` run by run; then the goals and the rule, of both."""
    letters = [record for record in records if record["about"]["dataset"].startswith("letters")]
    others = sorted((record for record in records if record not in letters), key=small.place)
    large = [record for record in others if small.is_large(record)]
    many = [part for record in large if (part := small.with_many(record))]
    lines = list[str]()
    if letters:
        lines += [*by_learner(letters), "", *by_world(letters), "", *accuracies(letters), ""]
    if others:
        lines += [*by_run(others), ""]
    parts = {
        "`letters`": letters,
        "`small`, four new classes a task or more": large,
        f"of these, tasks with {small.MANY} kept images or more": many,
        "`small`, two new classes a task": [record for record in others if record not in large],
    }
    for title, own in parts.items():
        if own:
            lines += [*small.goals(title, own, FORMS[:1] + FORMS[2:3]), "", *harms(own, FORMS), ""]
    return lines + rule({title: own for title, own in list(parts.items())[:2] if own})


def by_learner(records: Sequence[dict[str, Any]]) -> list[str]:
    names = learners(records)
    lines = [
        "**`letters`: pooled ECE / ECE by predicted group, %**", "",
        "| method | all | " + " | ".join(name.upper() for name in names) + " |", "|" + "---|" * (len(names) + 2),
    ]  # fmt: skip
    for method in SHOWN:
        pooled = each_learner(records, lambda r: mean(r, method, "pooled"))  # noqa: B023
        group = each_learner(records, lambda r: mean(r, method, "group"))  # noqa: B023
        cells = " | ".join(f"{p:.2f} / {g:.2f}" for p, g in zip(pooled, group, strict=True))
        lines.append(f"| {method} | {cells} |")
    return lines


def accuracies(records: Sequence[dict[str, Any]]) -> list[str]:
    """Of methods that may change predictions."""
    names = learners(records)
    lines = [
        "| accuracy, % | all | " + " | ".join(name.upper() for name in names) + " |", "|" + "---|" * (len(names) + 2),
    ]  # fmt: skip
    for method in ("Vanilla", "BiC layer and T", "BCTS", "PACT, predictions too"):
        cells = each_learner(records, lambda r: mean(r, method, "accuracy"))  # noqa: B023
        lines.append(f"| {method} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    return lines


def by_world(records: Sequence[dict[str, Any]]) -> list[str]:
    """Pooled ECE less Optimal TS, means over learners."""
    parts = {w: [r for r in records if r["about"]["seed"] == WORLDS[w]["seed"]] for w in (*FIFTH, *SIXTH)}
    parts = {world: own for world, own in parts.items() if own}
    lines = ["| pooled ECE less Optimal TS | " + " | ".join(parts) + " |", "|" + "---|" * (len(parts) + 1)]
    for method in FORMS:
        cells = [
            each_learner(own, lambda r: mean(r, method, "pooled") - mean(r, "Optimal TS", "pooled"))[0]  # noqa: B023
            for own in parts.values()
        ]
        lines.append(f"| {method} | {' | '.join(f'{cell:+.2f}' for cell in cells)} |")
    return lines


def by_run(records: Sequence[dict[str, Any]]) -> list[str]:
    shown = [name for name in SHOWN if "without" not in name]
    lines = [
        "**`small`: pooled ECE / ECE by predicted group, %; mean over tasks with old classes**", "",
        "| data | learner | " + " | ".join(shown) + " | largest harm, PACT | PACT-R |", "|" + "---|" * (len(shown) + 4),
    ]  # fmt: skip
    for record in records:
        cells = [f"{mean([record], m, 'pooled'):.2f} / {mean([record], m, 'group'):.2f}" for m in shown]
        harm = [max(s["harm"][m][0] for s in record["states"] if "harm" in s) for m in ("PACT", "PACT-R")]
        learner = record["about"]["learner"].upper()
        lines.append(f"| {small.world(record)} | {learner} | {' | '.join(cells)} | {harm[0]:+.1f} | {harm[1]:+.1f} |")
    return lines


def rule(parts: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The protocol's rule, which decides between the two forms: the shipped one less the earlier one."""
    head = "| runs | form | pooled | by group | harm above 1 (earlier) | holds |"
    lines = ["**The rule**", "", head, "|" + "---|" * 6]
    for ours, other, gain in (("PACT", "PACT, earlier", GAIN), ("PACT-R", "PACT-R, earlier", 0.0)):
        total = [0, 0]
        for title, own in parts.items():
            pooled, group = (
                each_learner(own, lambda r, k=key: mean(r, ours, k) - mean(r, other, k))[0]  # type: ignore[misc]  # noqa: B023
                for key in ("pooled", "group")
            )
            harm = [harmful_large(own, name) for name in (ours, other)]
            total = [before + own for before, own in zip(total, harm, strict=True)]
            holds = pooled <= -gain and group <= 0
            lines.append(
                f"| {title} ({len(own)}) | {ours} | {pooled:+.2f} | {group:+.2f} | {harm[0]} ({harm[1]}) |"
                f" {'yes' if holds else 'no'} |"
            )
        lines.append(f"| both | {ours} | | | {total[0]} ({total[1]}) | {'yes' if total[0] <= total[1] else 'no'} |")
    passed = not any(line.endswith("| no |") for line in lines)
    return [*lines, "", f"The rule as a whole: {'passed' if passed else 'not passed'}."]
