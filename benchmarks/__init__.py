"""What measures: speed, growth with size, faults, hostile input. Run from the root, `python -m benchmarks.NAME`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
