"""Records of runs as tables, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from research.pact.methods import EARLIER, METHODS, OURS
from research.pact.worlds import LEARNERS, WORLDS

HARM_FROM = 5000  # test images


def of_learner(records: Sequence[dict[str, Any]], learner: str) -> list[dict[str, Any]]:
    return [record for record in records if record["about"]["learner"] == learner]


def mean(records: Sequence[dict[str, Any]], name: str, key: str) -> float:
    """Over tasks, then runs."""
    return float(np.mean([np.mean([row[key] for row in record["scores"][name]]) for record in records]))


def each_learner(records: Sequence[dict[str, Any]], value: Callable[[list[dict[str, Any]]], float]) -> list[float]:
    """A number for every learner that has runs, and the mean of these first."""
    own = [value(of_learner(records, learner)) for learner in learners(records)]
    return [float(np.mean(own)), *own]


def learners(records: Sequence[dict[str, Any]]) -> list[str]:
    return [learner for learner in LEARNERS if of_learner(records, learner)]


def ratio_errors(records: Sequence[dict[str, Any]], name: str, which: int) -> list[float]:
    """(estimate - oracle) / claimed error, of log T (0) or b (1); the oracle has the contrast of the estimate."""
    return [
        (state["belief"][name][2 * which] - oracle_of(state, name)[which]) / state["belief"][name][2 * which + 1]
        for record in records
        for state in record["states"]
        if "belief" in state
    ]


def oracle_of(state: dict[str, Any], name: str) -> list[float]:
    """log T and b that fit the test set best, with the contrast that a form believes in."""
    contrast = state.get("contrast", {}).get(name)
    return list(state["oracle"] if contrast is None else contrast[1:])


def rms(values: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def summary(records: Sequence[dict[str, Any]], short: bool = False) -> list[str]:
    """The tables, in Markdown; methods and metrics that some record does not have are left out.

    Those of a page are `short`.
    """
    if not records:
        return ["(none yet)"]
    names, known = learners(records), set.intersection(*(set(record["scores"]) for record in records))
    measured = set.intersection(*(set(record["scores"]["Vanilla"][0]) for record in records))
    reserved = all(record["about"]["reserve"] for record in records)
    head = "| method | all | " + " | ".join(name.upper() for name in names) + " |"
    rule, lines = "|" + "---|" * (len(names) + 2), list[str]()

    def table(title: str, methods: Iterable[str], form: str, key: str) -> None:
        if key not in measured:
            return
        lines.extend([f"**{title}**", "", head, rule])
        for method in methods:
            if method in known:
                cells = each_learner(records, lambda r: mean(r, method, key))  # noqa: B023
                lines.append(f"| {method} | " + " | ".join(form.format(cell) for cell in cells) + " |")
        lines.append("")

    families = {name: family for name, (family, _) in METHODS.items()}
    if not reserved:
        families = {name: family for name, family in families.items() if "PACT-R" not in name and family != "reserve"}
    shown = [name for name, family in families.items() if "ablation" not in family]
    chosen = [name for name in shown if "too" not in name]
    moving = ["Vanilla", "BiC layer and T", "BCTS", "vector scaling", *(name for name in shown if "too" in name)]
    ablation = [name for name in families if name in OURS[1:] or "ablation" in families[name]]
    if short:
        lines.extend(["**Pooled ECE / ECE by predicted group, %**", "", head, rule])
        for method in (name for name in chosen if name in known):
            pooled = each_learner(records, lambda r: mean(r, method, "pooled"))  # noqa: B023
            group = each_learner(records, lambda r: mean(r, method, "group"))  # noqa: B023
            cells = " | ".join(f"{p:.2f} / {g:.2f}" for p, g in zip(pooled, group, strict=True))
            lines.append(f"| {method} | {cells} |")
        return lines
    table("Pooled ECE, %", shown, "{:.2f}", "pooled")
    table("ECE by predicted group, %", chosen, "{:.2f}", "group")
    table("Smooth ECE, %", chosen, "{:.2f}", "smooth")
    table("Debiased ECE, %", chosen, "{:.2f}", "debiased")
    table("NLL", shown, "{:.3f}", "nll")
    table("Brier score", chosen, "{:.4f}", "brier")
    table("AURC, %", chosen, "{:.2f}", "aurc")
    table("Accuracy, %", moving, "{:.2f}", "accuracy")
    table("Ablation: by group, %", ablation, "{:.2f}", "group")
    table("Ablation: pooled ECE, %", ablation, "{:.2f}", "pooled")
    ours = [name for name in OURS if name in known and name in families]
    lines += ["**Goals**", "", "| measure | method | all | " + " | ".join(name.upper() for name in names) + " |"]
    lines += ["|" + "---|" * (len(names) + 3)]

    def goal(title: str, form: str, value: Callable[[list[dict[str, Any]], str], float]) -> None:
        for m in ours:
            cells = each_learner(records, lambda r, m=m: value(r, m))  # type: ignore[misc]
            lines.append(f"| {title} | {m} | " + " | ".join(form.format(cell) for cell in cells) + " |")

    goal("pooled ECE less Optimal TS", "{:+.2f}", lambda r, m: mean(r, m, "pooled") - mean(r, "Optimal TS", "pooled"))
    goal(
        "by group / two oracle temperatures", "{:.2f}",
        lambda r, m: mean(r, m, "group") / mean(r, "Optimal group TS", "group"),
    )  # fmt: skip
    goal("NLL less Optimal TS", "{:+.4f}", lambda r, m: mean(r, m, "nll") - mean(r, "Optimal TS", "nll"))
    goal("RMS of error / claimed, log T", "{:.2f}", lambda r, m: rms(ratio_errors(r, m, 0)))
    goal("RMS of error / claimed, b", "{:.2f}", lambda r, m: rms(ratio_errors(r, m, 1)))
    return [
        *lines, "", *by_world(records, ours), "", *harms(records, ours), "",
        *intervals(records, known & set(families)),
    ]  # fmt: skip


def world_of(record: dict[str, Any]) -> tuple[int, str, int]:
    """What tells a world from others."""
    return record["about"]["seed"], record["about"]["dataset"], record["about"]["memory"]


def by_world(records: Sequence[dict[str, Any]], ours: Sequence[str]) -> list[str]:
    """The goals in each world, means over learners; and the range over worlds of each learner's RMS."""
    worlds = sorted({world_of(record) for record in records})
    names = {own["seed"]: world for world, own in WORLDS.items()}
    titles = [f"{names.get(seed, dataset)} (seed {seed})" for seed, dataset, _ in worlds]
    lines = ["| measure | method | " + " | ".join(titles) + " |", "|" + "---|" * (len(worlds) + 2)]
    parts = [[record for record in records if world_of(record) == world] for world in worlds]
    goals: dict[str, tuple[str, Callable[[list[dict[str, Any]], str], float]]] = {
        "pooled ECE less Optimal TS": ("{:+.2f}", lambda r, m: mean(r, m, "pooled") - mean(r, "Optimal TS", "pooled")),
        "by group / two oracle temperatures": (
            "{:.2f}", lambda r, m: mean(r, m, "group") / mean(r, "Optimal group TS", "group"),
        ),
        "NLL less Optimal TS": ("{:+.4f}", lambda r, m: mean(r, m, "nll") - mean(r, "Optimal TS", "nll")),
        "RMS of error / claimed, log T": ("{:.2f}", lambda r, m: rms(ratio_errors(r, m, 0))),
        "RMS of error / claimed, b": ("{:.2f}", lambda r, m: rms(ratio_errors(r, m, 1))),
    }  # fmt: skip
    for title, (form, value) in goals.items():
        for m in ours:
            cells = [form.format(each_learner(part, lambda r, m=m, v=value: v(r, m))[0]) for part in parts]  # type: ignore[misc]
            lines.append(f"| {title} | {m} | {' | '.join(cells)} |")
    if len(worlds) > 1:
        for m in ours:
            for which, name in enumerate(("log T", "b")):
                own = []
                for learner in learners(records):
                    each = [rms(ratio_errors(of_learner(part, learner), m, which)) for part in parts]
                    own.append(f"{learner.upper()} {min(each):.2f} to {max(each):.2f}")
                lines.append(f"- {m}, RMS of error / claimed in {name}, range over worlds: {', '.join(own)}")
    return ["**By world**", "", *lines]


def harms(records: Sequence[dict[str, Any]], ours: Sequence[str]) -> list[str]:
    """How often a method is worse than the best of vanilla, TS and T-CIL, and whether the verdict said so."""
    lines = []
    for m in ours:
        states = [s for record in records for s in record["states"] if "harm" in s]
        large = [s["harm"][m] for s in states if s["n_test"] >= HARM_FROM]
        sure = [value for value, low, _ in large if low > 0]
        over = {bound: sum(value > bound for value in sure) for bound in (1, 3)}
        fired = [s["belief"][m][4] > EARLIER.most_surprise for s in states]
        harmful = [s["harm"][m][0] > 1 and s["harm"][m][1] > 0 for s in states]
        told = sum(f and h for f, h in zip(fired, harmful, strict=True))
        false = sum(f and not h for f, h in zip(fired, harmful, strict=True))
        lines.append(
            f"- {m}: harm above 1 in {over[1]} and above 3 in {over[3]} of {len(large)} tasks with {HARM_FROM:,} test"
            f" images or more (largest {max((v for v, _, _ in large), default=0):+.1f}). Over all {len(states)} tasks"
            f" {sum(harmful)} are harmful: the verdict fires in {told} of them, and in {false} of the others."
        )
        worst = sorted(
            (
                (s["harm"][m], record["about"], number)
                for record in records
                for number, s in enumerate(record["states"], start=1)
                if "harm" in s and s["n_test"] >= HARM_FROM and s["harm"][m][0] > 1 and s["harm"][m][1] > 0
            ),
            key=lambda entry: -entry[0][0],
        )
        told_of = [
            f"{about['learner'].upper()} seed {about['seed']} task {number} {value:+.1f} ({low:+.1f} to {high:+.1f})"
            for (value, low, high), about, number in worst
        ]
        lines += [f"  - {'; '.join(told_of)}"] if told_of else []
    return lines


def intervals(records: Sequence[dict[str, Any]], known: set[str]) -> list[str]:
    """Paired differences, resampled over worlds; of fewer than six worlds their range."""
    lines, worlds = [], sorted({world_of(record) for record in records})
    pairs = (
        ("PACT", "Optimal TS"), ("PACT, T by the spread", "PACT"), ("PACT-R", "Optimal TS"), ("PACT-R", "PACT"),
        ("PACT-R, T by the spread", "PACT-R"), ("PACT-R", "balanced TS"), ("PACT-R", "BCTS"),
        ("PACT, T partly by the spread", "PACT"), ("PACT-R, T partly by the spread", "PACT-R"),
        ("PACT-R, Bennett", "PACT-R"),
    )  # fmt: skip
    for ours, other in pairs:
        if not {ours, other} <= known:
            continue
        own = []
        for world in worlds:
            here = [record for record in records if world_of(record) == world]
            own.append(float(np.mean([mean([r], ours, "pooled") - mean([r], other, "pooled") for r in here])))
        if len(own) < 6:
            spread = f"[{min(own):+.2f} to {max(own):+.2f} over {len(own)} worlds]"
        else:
            draws = np.random.default_rng(0).choice(own, size=(10000, len(own))).mean(axis=1)
            spread = "({:+.2f} to {:+.2f})".format(*np.quantile(draws, [0.025, 0.975]))
        lines.append(f"- {ours} less {other}, pooled ECE: {np.mean(own):+.2f} {spread}")
    return lines


CANDIDATES = {  # of round three, and what each is compared with
    "PACT, T by the spread": "PACT",
    "PACT, T partly by the spread": "PACT",
    "PACT-R, T by the spread": "PACT-R",
    "PACT-R, T partly by the spread": "PACT-R",
    "PACT-R, Bennett": "PACT-R",
}
WORST_LEARNER = 0.5


def candidates(records: Sequence[dict[str, Any]]) -> list[str]:
    """The protocol's test of each candidate, on the worlds of round three."""
    worlds = {"F3": 103, "F4": 104}
    parts = {name: [r for r in records if r["about"]["seed"] == seed] for name, seed in worlds.items()}
    both = [record for part in parts.values() for record in part]
    lines = [
        "| candidate | pooled, F3 | F4 | by group | harm above 1 (before) | worst learner | confirmed |",
        "|" + "---|" * 7,
    ]
    for ours, other in CANDIDATES.items():

        def less(part: Sequence[dict[str, Any]], key: str, ours: str = ours, other: str = other) -> list[float]:
            return each_learner(part, lambda r: mean(r, ours, key) - mean(r, other, key))

        pooled, group = [less(part, "pooled")[0] for part in parts.values()], less(both, "group")[0]
        harm = [harmful_large(both, name) for name in (ours, other)]
        named = zip(less(both, "pooled")[1:], learners(both), strict=True)
        worst, learner = max(named)
        passed = max(pooled) < 0 and group <= 0 and harm[0] <= harm[1] and worst <= WORST_LEARNER
        lines.append(
            f"| {ours} | {pooled[0]:+.2f} | {pooled[1]:+.2f} | {group:+.2f} | {harm[0]} ({harm[1]}) |"
            f" {learner.upper()} {worst:+.2f} | {'yes' if passed else 'no'} |"
        )
    return lines


def harmful_large(records: Sequence[dict[str, Any]], name: str) -> int:
    """Tasks with a large test set whose harm is above 1, with an interval above 0."""
    states = [s for record in records for s in record["states"] if "harm" in s and s["n_test"] >= HARM_FROM]
    return sum(s["harm"][name][0] > 1 and s["harm"][name][1] > 0 for s in states)
