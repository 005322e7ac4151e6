"""Results as tables: per task and mean, in percent."""

from __future__ import annotations

from typing import Any

from rich.table import Table

COLUMNS = {
    "accuracy": "Acc",
    "ece": "ECE",
    "aece": "AECE",
    "ece_predicted_old": "ECE old",
    "ece_predicted_new": "ECE new",
    "noise_floor": "floor",
}


def percent(value: float | None) -> str:
    """A fraction in percent, or a dash."""
    return "-" if value is None else f"{100 * value:.2f}"


def mean(results: dict[str, Any], name: str, key: str) -> float | None:
    """The mean over tasks; None where the calibrator has no answer on some task."""
    rows = [task["calibrators"].get(name) for task in results["tasks"]]
    if any(row is None or "not_applicable" in row for row in rows):
        return None
    values = [row[key] for row in rows if row[key] is not None]
    return sum(values) / len(values) if values else None


def titles(results: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Calibrators of a run: name to (title, block), without those that have no answer on any task."""
    found: dict[str, tuple[str, str]] = {}
    for task in results["tasks"]:
        for name, row in task["calibrators"].items():
            if "not_applicable" not in row or row["block"] == "ranked":
                found.setdefault(name, (row["title"], row["block"]))
    return found


def summary(results: dict[str, Any], title: str) -> Table:
    """Means over tasks for every calibrator; the oracle and what needs old-task data stand apart."""
    table = Table(title=title)
    table.add_column("mean over tasks, %")
    for name in COLUMNS.values():
        table.add_column(name, justify="right")
    block = "ranked"
    for name, (label, own) in titles(results).items():
        if own != block:
            table.add_section()
            block = own
        cells = [percent(mean(results, name, key)) for key in COLUMNS]
        table.add_row(label, *(cells if cells[0] != "-" else ["n/a"] * len(cells)))
    return table


def by_task(results: dict[str, Any], key: str) -> Table:
    """One figure by task, and its mean, for every calibrator."""
    table = Table(title=f"{COLUMNS.get(key, key)} by task, %")
    table.add_column("after task")
    for task in results["tasks"]:
        table.add_column(str(task["task"]), justify="right")
    table.add_column("mean", justify="right")
    for name, (label, _) in titles(results).items():
        cells = []
        for task in results["tasks"]:
            row = task["calibrators"].get(name, {})
            cells.append("n/a" if "not_applicable" in row or not row else percent(row[key]))
        average = mean(results, name, key)
        table.add_row(label, *cells, "n/a" if average is None else percent(average))
    return table
