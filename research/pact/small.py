"""PACT and PACT-R at the paper's size, round four: the command `python -m research.pact small`.

The runs are those of `tcil reproduce all --schedule small`. Most have no reserve: there two test images of each class
serve as one, beside the memory. ER and WA on CIFAR-100, seed 1, were measured in round two (`cifar100`) and had been
looked at; they are in the tables for comparison and take no part in the judgement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from research.pact import measuring
from research.pact.methods import FAMILIES
from research.pact.tables import each_learner, harmful_large, harms, learners, mean, ratio_errors, rms

SHIPPED = ("PACT", "PACT-R")
OURS = (*SHIPPED, "PACT, wider", "PACT-R, wider")
SHOWN = (
    "Vanilla",
    "TS",
    "T-CIL",
    "PACT",
    "PACT-R",
    "T and bias by the reserve alone",
    "balanced TS",
    "BiC layer and T",
    "Optimal TS",
    "Optimal group TS",
)
TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny-imagenet": "Tiny-ImageNet"}
MANY = 50  # kept images from which PACT-R's stricter goals hold
FEW_NEW = 4  # new classes of a task below which a world is reported apart


def run(folders: Iterable[Path]) -> None:
    """Measure what has no record yet, and print the tables."""
    measuring.store("small", folders, measuring.of_families((*FAMILIES, "round four")), OURS)
    print("\n".join(tables(stored())))


def stored() -> list[dict[str, Any]]:
    """What was measured, and the runs of round two that no later record replaces."""
    records = measuring.stored("small")
    names = {record["about"]["run"] for record in records}
    earlier = [record for record in measuring.stored("cifar100") if record["about"]["run"] not in names]
    for record in earlier:
        record["about"]["looked at"] = True
    return sorted([*earlier, *records], key=place)


def place(record: dict[str, Any]) -> tuple[Any, ...]:
    about = record["about"]
    order = list(TITLES), ["er", "eeil", "wa", "der"]
    return (
        order[0].index(about["dataset"]),
        about["tasks"],
        about["reserve"],
        about["seed"],
        order[1].index(about["learner"]),
    )


def world(record: dict[str, Any]) -> str:
    """A run's data in words."""
    about = record["about"]
    words = f"{TITLES[about['dataset']]}, {about['tasks']} tasks, seed {about['seed']}"
    if len(record["states"]) < about["tasks"]:
        words += f", first {len(record['states'])} tasks"
    if about.get("network") == "resnet32":  # the schedule `compact`; earlier records do not say their network
        words += ", ResNet-32"
    return words + (", reserve in the memory" if about["reserve"] else "") + (" *" if "looked at" in about else "")


def is_large(record: dict[str, Any]) -> bool:
    """Whether its tasks have so many new classes that it is not reported apart."""
    return bool(record["about"]["classes"] / record["about"]["tasks"] >= FEW_NEW)


def with_many(record: dict[str, Any]) -> dict[str, Any] | None:
    """The run with nothing but tasks of so many kept images that PACT-R's stricter goals hold; None if it has none."""
    after_first = [state for state in record["states"] if "harm" in state]
    chosen = [i for i, state in enumerate(after_first) if state["n_reserve"] >= MANY]
    scores = {name: [rows[i] for i in chosen] for name, rows in record["scores"].items()}
    states = [state if state.get("n_reserve", 0) >= MANY else {} for state in record["states"]]  # in their places
    return {**record, "scores": scores, "states": states} if chosen else None


def tables(records: Sequence[dict[str, Any]]) -> list[str]:
    """Every run; then the goals, over runs that had not been looked at, by learner."""
    if not records:
        return ["(none yet)"]
    lines = ["**Pooled ECE / ECE by predicted group, %; mean over tasks with old classes**", ""]
    lines += [
        "| data | learner | " + " | ".join(SHOWN) + " | largest harm, PACT | PACT-R |",
        "|" + "---|" * (len(SHOWN) + 4),
    ]
    for record in records:
        cells = [f"{mean([record], m, 'pooled'):.2f} / {mean([record], m, 'group'):.2f}" for m in SHOWN]
        harm = [max(s["harm"][m][0] for s in record["states"] if "harm" in s) for m in ("PACT", "PACT-R")]
        learner = record["about"]["learner"].upper()
        lines.append(f"| {world(record)} | {learner} | {' | '.join(cells)} | {harm[0]:+.1f} | {harm[1]:+.1f} |")
    lines += ["", "\\* measured in round two, looked at before this round", ""]
    fresh = [record for record in records if "looked at" not in record["about"]]
    large = [record for record in fresh if is_large(record)]
    many = [part for record in large if (part := with_many(record))]
    parts = {
        "four new classes per task or more": large,
        f"of these, tasks with {MANY} kept images or more": many,
        "two new classes per task": [r for r in fresh if r not in large],
    }
    for title, own in parts.items():
        if own:
            lines += [*goals(title, own), ""]
    if large:
        lines += [*harms(large, SHIPPED), "", *candidate(large)]
    return lines


def measures(records: Sequence[dict[str, Any]], method: str) -> list[list[float]]:
    """What the goals are about, of all learners and of each."""
    return [
        each_learner(records, lambda r: mean(r, method, "pooled") - mean(r, "Optimal TS", "pooled")),
        each_learner(records, lambda r: mean(r, method, "group") / mean(r, "Optimal group TS", "group")),
        each_learner(records, lambda r: mean(r, method, "nll") - mean(r, "Optimal TS", "nll")),
        each_learner(records, lambda r: rms(ratio_errors(r, method, 0))),
        each_learner(records, lambda r: rms(ratio_errors(r, method, 1))),
    ]


def goals(title: str, records: Sequence[dict[str, Any]], methods: Sequence[str] = SHIPPED) -> list[str]:
    """The goals of round one, by learner, runs of a learner counting equally."""
    names = learners(records)
    columns = [column for method in methods for column in measures(records, method)]
    heads = " | ".join(f"{method}: pooled | by group | NLL | RMS log T | b" for method in methods)
    lines = [f"**Goals: {title}**", "", f"| learner | runs | {heads} |", "|" + "---|" * (2 + 5 * len(methods))]
    for i, name in enumerate(["all", *names]):
        runs = sum(name in ("all", record["about"]["learner"]) for record in records)
        forms = ("{:+.2f}", "{:.2f}", "{:+.3f}", "{:.2f}", "{:.2f}") * len(methods)
        cells = [form.format(column[i]) for form, column in zip(forms, columns, strict=True)]
        lines.append(f"| {name if name == 'all' else name.upper()} | {runs} | {' | '.join(cells)} |")
    return lines


def candidate(records: Sequence[dict[str, Any]]) -> list[str]:
    """The test of round four: the means over learners, and tasks with harm above 1."""
    lines = [
        "**The candidate**",
        "",
        "| method | pooled | by group | NLL | RMS log T | b | harm above 1 |",
        "|" + "---|" * 7,
    ]
    for method in OURS:
        pooled, group, nll, of_t, of_b = (column[0] for column in measures(records, method))
        harm = harmful_large(records, method)
        lines.append(f"| {method} | {pooled:+.2f} | {group:.2f} | {nll:+.4f} | {of_t:.2f} | {of_b:.2f} | {harm} |")
    return lines
