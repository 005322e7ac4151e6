"""docs/results.md: `python -m research.overview`."""
