"""What explores and reproduces: the way to PACT, the paper's results. Run from the root, `python -m research.NAME`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
