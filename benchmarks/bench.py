"""All benchmarks, one table, kept per commit.

    make bench                                  (under 15 minutes; TCIL_DATA=DIR for the authors' checkpoint)
    python -m benchmarks.bench --history 5      the last tables side by side; runs nothing

writes docs/results/bench/DATE-COMMIT.json (machine, commit, every figure with its goal) and that table into
docs/speed.md. A commit marked `+` had changes that were not committed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import ROOT, ledger

KEPT, PAGE = ROOT / "docs/results/bench", ROOT / "docs/speed.md"
BEGIN, END = "<!-- the last make bench -->", "<!-- end -->"
# Threads are part of what training chooses; everything else is measured on one.
BENCHMARKS = {"calibration": "1", "evaluation": "1", "training": None, "parallel": "1", "scaling": "1"}


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def commit() -> str:
    """The commit that is measured; results of earlier benchmarks do not count as changes."""
    changed = git("status", "--porcelain", "--", "src", "benchmarks", "research", "Makefile", "constraints.txt")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def run(name: str, threads: str | None) -> list[ledger.Figure]:
    """One benchmark in a process of its own."""
    settings = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    settings.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        settings["OMP_NUM_THREADS"] = threads
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(path)]
        subprocess.run(command, cwd=ROOT, env=settings, check=True)
        return [ledger.Figure(**record) for record in json.loads(path.read_text())]


def measure() -> None:
    started = time.perf_counter()
    record: dict[str, Any] = {"commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}"}
    record["machine"] = ledger.machine()
    figures = [figure for name, threads in BENCHMARKS.items() for figure in run(name, threads)]
    record["minutes"] = round((time.perf_counter() - started) / 60, 1)
    record["processor_minutes"] = round((os.times().children_user + os.times().children_system) / 60, 1)
    record["figures"] = [{**asdict(figure), "goal": figure.goal, "met": figure.met} for figure in figures]
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{record['date'].replace(' ', '-').replace(':', '')}-{record['commit'].rstrip('+')}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), record))
    console = Console(width=120)
    console.print(ledger.table(f"commit {record['commit']}, {record['minutes']} minutes", figures))
    console.print(f"{path.relative_to(ROOT)}: {record['machine']}", highlight=False, soft_wrap=True)


def with_table(page: str, record: dict[str, Any]) -> str:
    """The page with this record's table in place of the one it has."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    machine = record["machine"]
    lines = [
        f"Commit {record['commit']}, {record['date']} UTC, {machine['processor']}, {machine['cores']} cores, load"
        f" {machine['load']}, torch {machine['torch']}; {record['minutes']} minutes in all.",
        "",
        "| what | measured | goal | |",
        "|---|---:|---:|---|",
    ]
    for figure in record["figures"]:
        mark = {True: "reached", False: "**missed**", None: ""}[figure["met"]]
        lines.append(f"| {figure['what']} | {figure['value']:.3g} | {figure['goal']} | {mark} |")
    lines += ["", "What they are made of:", ""]
    for figure in record["figures"]:
        if figure["details"]:
            told = ", ".join(f"{name} {value}" for name, value in figure["details"].items())
            lines.append(f"- {figure['key']}: {told}")
    return f"{head}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{tail}"


def history(count: int, folder: Path = KEPT) -> Table:
    """The last kept tables beside each other, the newest on the right."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))[-count:]]
    table = Table(title="benchmarks by commit")
    table.add_column("what")
    table.add_column("goal", justify="right")
    for record in records:
        table.add_column(f"{record['commit']}\n{record['date']}\nload {record['machine']['load']}", justify="right")
    rows: dict[str, dict[str, Any]] = {}
    for record in records:
        rows |= {figure["key"]: figure for figure in record["figures"]}
    for key, figure in rows.items():
        cells = []
        for record in records:
            (*_, own) = [None, *(one for one in record["figures"] if one["key"] == key)]
            cells.append("" if own is None else f"{own['value']:.3g}" + (" !" if own["met"] is False else ""))
        table.add_row(figure["what"], figure["goal"], *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history", type=int, metavar="N", help="print the last N tables, measure nothing")
    count = parser.parse_args().history
    if count is None:
        measure()
    else:
        Console().print(history(count))


if __name__ == "__main__":
    main()
