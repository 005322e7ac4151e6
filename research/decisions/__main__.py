"""Studies of decision rules.

    python -m research.decisions redraws            # do promises hold? letters, 1,000 draws of each; about 20 minutes
    python -m research.decisions attacks            # exact bounds and worlds made to break promises; a few minutes
    python -m research.decisions sizes RUNS...      # where promises begin, and what a reserve costs in accuracy
    TCIL_DATA=DIR python -m research.decisions value   # what calibrators buy on the authors' checkpoints
    python -m research.decisions value RUNS...      # the same on finished runs of tcil run --reserve
    python -m research.decisions figures            # the pictures of docs/decisions.md

Results go to docs/results/decisions/. Networks are trained once and kept in --cache.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from research import official
from research.decisions import attacks, figures, sizes, studies, value


def main() -> None:
    """Run one of the studies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["redraws", "attacks", "sizes", "value", "figures"])
    parser.add_argument("runs", nargs="*", type=Path, help="run folders, or folders that hold some")
    parser.add_argument("--cache", type=Path, default=Path("runs/decisions"), help="where networks and logits are kept")
    parser.add_argument("--redraws", type=int, default=1000)
    parser.add_argument("--checkpoints", nargs="+", type=int, default=[2, 4, 6, 8], choices=[2, 4, 6, 8])
    given = parser.parse_args()
    given.cache.mkdir(parents=True, exist_ok=True)
    if given.part == "redraws":
        studies.run(given.cache, given.redraws)
    elif given.part == "attacks":
        attacks.run()
    elif given.part == "sizes":
        sizes.run(given.runs)
    elif given.part == "figures":
        figures.run(given.cache)
    elif given.runs:
        value.run_on_runs(given.runs)
    else:
        folder = official.data_folder()
        if folder is None:
            raise SystemExit("TCIL_DATA must name a folder with cifar-100-python/ and official-er-cifar100/")
        value.run_on_checkpoints(given.cache, folder, given.checkpoints)


if __name__ == "__main__":
    main()
