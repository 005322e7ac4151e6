"""Two forms of PACT on runs that nobody had looked at: `python -m research.pact sixth` and `eighth`.

The runs are final worlds of `letters`, and those of `tcil reproduce all --schedule small` and `compact` without a
record. Where a run has no reserve, two test images of each class serve as one, beside the memory. In the tables of a
round "PACT" is the form that it tested, beside the one before. Of the records of round five, `tables round-five`,
"PACT" is the candidate of that round (`methods.FIFTH`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from research.pact import measuring, small
from research.pact.tables import each_learner, harmful_large, harms, learners, mean
from research.pact.worlds import EIGHTH, FIFTH, SEVENTH, SIXTH, WORLDS

BASES = ("Vanilla", "TS", "T-CIL", "whole imbalance")
WITH_RESERVE = ("balanced TS", "BiC layer and T", "BCTS", "T and bias by the reserve alone")
ORACLES = ("Optimal TS", "Optimal group TS", "Optimal T and bias")


@dataclass(frozen=True)
class Limits:
    """How much the new form may be above the other, by the protocol's rule: pooled ECE and ECE by group, in points."""

    pooled: float
    group: float


@dataclass(frozen=True)
class Round:
    """What a round compared.

    Attributes
    ----------
    folder : str
        Where its records are, under docs/results/pact.
    worlds : tuple of str
        Its worlds of `letters`.
    families : tuple of str
        The families of methods that were measured.
    form, earlier : str
        The form it tested and the one before, as `methods` calls them.
    before : str
        The latter in the tables, after "PACT, ".
    rule : dict
        The limits by part and form.
    parts : tuple of str
        Parts of PACT that are left out, as `methods` calls them.
    together : bool
        Whether the rule counts the harmful tasks of PACT and PACT-R together.
    """

    folder: str
    worlds: tuple[str, ...]
    families: tuple[str, ...]
    form: str
    earlier: str
    before: str
    rule: dict[tuple[str, str], Limits]
    parts: tuple[str, ...] = ("without new classes", "without surrogate", "without history")
    together: bool = False

    @property
    def measured(self) -> tuple[str, ...]:
        """The forms whose belief and harm are recorded."""
        names = [f"{kind}{form}" for form in (self.earlier, self.form) for kind in ("PACT", "PACT-R")]
        return tuple(names)

    @property
    def names(self) -> dict[str, str]:
        """The titles of the tables, by the names of `methods`."""
        titles = {f"PACT{self.form}, {part}": f"PACT {part}" for part in self.parts}
        for kind in ("PACT", "PACT-R"):
            titles |= {f"{kind}{self.earlier}": f"{kind}, {self.before}", f"{kind}{self.form}": kind}
            titles[f"{kind}{self.form}, predictions too"] = f"{kind}, predictions too"
        return titles

    @property
    def forms(self) -> tuple[str, ...]:
        """The four forms in the tables."""
        return "PACT", f"PACT, {self.before}", "PACT-R", f"PACT-R, {self.before}"

    @property
    def shown(self) -> tuple[str, ...]:
        """The rows of the large table."""
        new, old, new_r, old_r = self.forms
        parts = tuple(f"PACT {part}" for part in self.parts)
        return *BASES, old, new, *WITH_RESERVE, old_r, new_r, *ORACLES, *parts


LETTERS, LARGE = "`letters`", "`small`, four new classes per task or more"
_LOWER, _NOT_HIGHER = Limits(-0.1, 0.0), Limits(0.0, 0.0)
SIX = Round(
    "round-six", (*FIFTH, *SIXTH), ("no old data", "reserve", "oracle", "round five"), ", spread", "", "earlier",
    {(part, form): limits for part in (LETTERS, LARGE) for form, limits in (("PACT", _LOWER), ("PACT-R", _NOT_HIGHER))},
)  # fmt: skip
SEVEN = Round(
    "round-seven", SEVENTH, ("no old data", "reserve", "oracle", "round five", "round seven"), ", contrast", ", spread",
    "round six",
    {
        (LETTERS, "PACT"): Limits(0.1, -0.1), (LETTERS, "PACT-R"): Limits(0.1, 0.0),
        (LARGE, "PACT"): Limits(0.2, float("inf")), (LARGE, "PACT-R"): Limits(0.2, float("inf")),
    },
    ("without new classes", "without surrogate", "without label shift", "without history"),
)  # fmt: skip
EIGHT = replace(
    SEVEN, folder="round-eight", worlds=EIGHTH, families=(*SEVEN.families[:-1], "round eight"), form=", centred",
    together=True,
)  # fmt: skip
ROUNDS = {"sixth": SIX, "eighth": EIGHT}  # the form that round seven tested is gone


def run(one: Round, folders: Iterable[Path]) -> None:
    """Measure what has no record yet, and print the tables."""
    measuring.store(one.folder, folders, measuring.of_families(one.families), one.measured)
    print("\n".join(tables(one, stored(one))))


def stored(one: Round, folder: str | None = None) -> list[dict[str, Any]]:
    """What was measured in a round, or in another folder, under the names of the tables."""
    return [_renamed(one, record) for record in measuring.stored(folder or one.folder)]


def _renamed(one: Round, record: dict[str, Any]) -> dict[str, Any]:
    names = one.names

    def named(values: dict[str, Any]) -> dict[str, Any]:
        # Another form that was called PACT is not in the tables.
        return {names.get(name, name): own for name, own in values.items() if name in names or name not in one.forms}

    states = [
        {**state, **{key: named(state[key]) for key in ("belief", "harm", "contrast") if key in state}}
        for state in record["states"]
    ]
    return {**record, "scores": named(record["scores"]), "states": states}


def tables(one: Round, records: Sequence[dict[str, Any]]) -> list[str]:
    """Letters by learner, `small` run by run; then the goals and the rule, of both."""
    letters = [record for record in records if record["about"]["dataset"].startswith("letters")]
    others = sorted((record for record in records if record not in letters), key=small.place)
    large = [record for record in others if small.is_large(record)]
    many = [part for record in large if (part := small.with_many(record))]
    lines = list[str]()
    if letters:
        lines += [*by_learner(one, letters), "", *by_world(one, letters), "", *accuracies(letters), ""]
    if others:
        lines += [*by_run(one, others), ""]
    parts = {
        LETTERS: letters,
        LARGE: large,
        f"of these, tasks with {small.MANY} kept images or more": many,
        "`small`, two new classes per task": [record for record in others if record not in large],
    }
    for title, own in parts.items():
        if own:
            lines += [*small.goals(title, own, one.forms[::2]), "", *harms(own, one.forms), ""]
    return lines + rule(one, {title: own for title, own in list(parts.items())[:2] if own})


def one_temperature() -> list[str]:
    """The form of round six on every run that was final since: F8 to F16, and `small`."""
    worlds = (*SIXTH, *SEVENTH, *EIGHTH)
    one = replace(SIX, worlds=worlds)
    records = [record for tested in (SIX, SEVEN, EIGHT) for record in stored(one, tested.folder)]
    letters = [record for record in records if record["about"]["dataset"].startswith("letters")]
    others = sorted((record for record in records if record not in letters), key=small.place)
    forms = one.forms[::2]
    # F8 to F10 took part in the decision to ship this form.
    seeds = {WORLDS[world]["seed"] for world in worlds[len(SIXTH) :]}
    since = [record for record in letters if record["about"]["seed"] in seeds]
    return [
        *by_learner(one, letters), "", *by_world(one, letters), "", *accuracies(letters), "",
        *small.goals(LETTERS, letters, forms), "", *harms(letters, forms), "",
        *small.goals(f"{LETTERS}, {SEVENTH[0]} to {worlds[-1]} alone", since, forms), "", *harms(since, forms), "",
        *by_run(one, others), "", *small.goals("`small`", others, forms), "", *harms(others, forms),
    ]  # fmt: skip


def by_learner(one: Round, records: Sequence[dict[str, Any]]) -> list[str]:
    names = learners(records)
    lines = [
        "**`letters`: pooled ECE / ECE by predicted group, %**", "",
        "| method | all | " + " | ".join(name.upper() for name in names) + " |", "|" + "---|" * (len(names) + 2),
    ]  # fmt: skip
    for method in one.shown:
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


def by_world(one: Round, records: Sequence[dict[str, Any]]) -> list[str]:
    """Pooled ECE less Optimal TS, means over learners."""
    parts = {w: [r for r in records if r["about"]["seed"] == WORLDS[w]["seed"]] for w in one.worlds}
    parts = {world: own for world, own in parts.items() if own}
    lines = ["| pooled ECE less Optimal TS | " + " | ".join(parts) + " |", "|" + "---|" * (len(parts) + 1)]
    for method in one.forms:
        cells = [
            each_learner(own, lambda r: mean(r, method, "pooled") - mean(r, "Optimal TS", "pooled"))[0]  # noqa: B023
            for own in parts.values()
        ]
        lines.append(f"| {method} | {' | '.join(f'{cell:+.2f}' for cell in cells)} |")
    return lines


def by_run(one: Round, records: Sequence[dict[str, Any]]) -> list[str]:
    shown = [name for name in one.shown if "without" not in name]
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


def rule(one: Round, parts: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The protocol's rule, which decides between the two forms: the new one less the one before."""
    head = f"| runs | form | pooled (at most) | by group (at most) | harm above 1 ({one.before}) | holds |"
    lines = ["**The rule**", "", head, "|" + "---|" * 6]
    total = [0, 0]
    for ours, other in (one.forms[:2], one.forms[2:]):
        total = total if one.together else [0, 0]
        for title, own in parts.items():
            pooled, group = (
                each_learner(own, lambda r, k=key: mean(r, ours, k) - mean(r, other, k))[0]  # type: ignore[misc]  # noqa: B023
                for key in ("pooled", "group")
            )
            harm = [harmful_large(own, name) for name in (ours, other)]
            total = [before + own for before, own in zip(total, harm, strict=True)]
            limits = one.rule[title, ours]
            holds = pooled <= limits.pooled and group <= limits.group
            cells = f"{pooled:+.2f} ({limits.pooled:+g}) | {group:+.2f} ({limits.group:+g})"
            told = "yes" if holds else "no"
            lines.append(f"| {title} ({len(own)}) | {ours} | {cells} | {harm[0]} ({harm[1]}) | {told} |")
        if not one.together or ours == one.forms[2]:
            who, holds = "PACT and PACT-R" if one.together else ours, total[0] <= total[1]
            lines.append(f"| both | {who} | | | {total[0]} ({total[1]}) | {'yes' if holds else 'no'} |")
    passed = not any(line.endswith("| no |") for line in lines)
    return [*lines, "", f"The rule as a whole: {'passed' if passed else 'not passed'}."]
