"""Random and hostile input for every public entry, 20,000 cases in all: what was refused, and what was answered.

    python -m benchmarks.fuzz --out docs/results/fuzz.json        (`make fuzz`)

Runs the tests under tests/fuzz, a file at a time, each in a process of its own, with as many cases as they say and with
fresh randomness. Counts are stored after each file: started again on the same commit, it goes on with those that are
missing; `--missing` also keeps what passed on an earlier commit, and names it. A case that fails is shown with what
reproduces it; put it down as an @example of its test.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from tcil import __version__
from tcil.foundation.files import replace_file

TESTS = sorted((ROOT / "tests" / "fuzz").glob("test_*.py"))
TOTAL, LEAST = 20_000, 1_000  # cases in all, and of each entry
SHOWN = 15.0  # seconds between two lines of progress


def commit() -> str:
    """The commit under test, with a mark where code was changed since."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "tests", "benchmarks")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("-dirty" if changed else "")


def run(test: Path) -> tuple[bool, dict[str, dict[str, int]], float, str]:
    """One file of tests: whether it passed, its counts by entry and outcome, its seconds and what it said."""
    began = shown = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts, said = Path(folder) / "counts.json", Path(folder) / "said.txt"
        environment = {**os.environ, "TCIL_FUZZ": "1", "TCIL_FUZZ_COUNTS": str(counts), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "--timeout=0", "-p", "no:cacheprovider", str(test)]
        with said.open("w") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - shown > SHOWN:
                    shown = time.monotonic()
                    print(f"  {test.stem}: {_line(_read(counts))}, {shown - began:.0f} s", flush=True)
        return process.returncode == 0, _read(counts), time.monotonic() - began, said.read_text()


def _read(counts: Path) -> dict[str, dict[str, int]]:
    try:
        found: dict[str, dict[str, int]] = json.loads(counts.read_text())
        return found
    except (OSError, ValueError):  # not there yet, or being written
        return {}


def _line(counts: dict[str, dict[str, int]]) -> str:
    return "; ".join(
        f"{entry}: " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        for entry, outcomes in counts.items()
    )


def summed(files: dict[str, Any]) -> dict[str, dict[str, int]]:
    """The counts of all files together, by entry."""
    entries: dict[str, dict[str, int]] = {}
    for record in files.values():
        for entry, outcomes in record["counts"].items():
            own = entries.setdefault(entry, {})
            for outcome, count in outcomes.items():
                own[outcome] = own.get(outcome, 0) + count
    return dict(sorted(entries.items()))


def main() -> int:
    """Run what is missing, store the counts, and say whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "fuzz.json")
    parser.add_argument("--only", nargs="*", default=[], help="files of tests by name, such as test_logits")
    parser.add_argument("--missing", action="store_true", help="only files that have not passed yet, on any commit")
    options = parser.parse_args()
    now = commit()
    record: dict[str, Any] = {"commit": now, "tcil": __version__, "files": {}}
    if options.out.is_file():
        before = json.loads(options.out.read_text())
        if options.missing or (before["commit"] == now and not now.endswith("-dirty")):
            known = {name: part for name, part in before["files"].items() if part["passed"]}
            record["files"] = {name: {"commit": before["commit"], **part} for name, part in known.items()}
    for test in TESTS:
        if test.stem in record["files"] or (options.only and test.stem not in options.only):
            continue
        passed, counts, seconds, said = run(test)
        print(f"{test.stem}: {'passed' if passed else 'FAILED'}; {_line(counts)}; {seconds:.0f} s", flush=True)
        if not passed:
            print(said)
        record["files"][test.stem] = {"commit": now, "passed": passed, "counts": counts, "seconds": round(seconds)}
        record["entries"] = summed(record["files"])
        record["cases"] = sum(sum(outcomes.values()) for outcomes in record["entries"].values())
        options.out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(options.out, (json.dumps(record, indent=1) + "\n").encode())
    entries = summed(record["files"])
    cases = sum(sum(outcomes.values()) for outcomes in entries.values())
    few = [entry for entry, outcomes in entries.items() if sum(outcomes.values()) < LEAST]
    failed = [name for name, part in record["files"].items() if not part["passed"]]
    print(f"{cases} cases: {_line(entries)}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    elif not options.only and (cases < TOTAL or few):
        print(f"too few cases: {cases} of {TOTAL}; below {LEAST}: {', '.join(few) or 'none'}")
    return 1 if failed or (not options.only and (cases < TOTAL or bool(few))) else 0


if __name__ == "__main__":
    raise SystemExit(main())
