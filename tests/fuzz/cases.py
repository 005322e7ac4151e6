"""How many cases each test draws, and what became of them.

In `make test` a few, always the same. With TCIL_FUZZ=1 (`make fuzz`) as many as the test says, fresh ones in every run;
what was refused and what answered is counted by entry, and written to the file that TCIL_FUZZ_COUNTS names.
"""

from __future__ import annotations

import collections
import json
import os
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings

FUZZING = bool(os.environ.get("TCIL_FUZZ"))
REFUSED, ANSWERED = "refused", "answered"
_PAUSE = 2.0  # seconds between two writes of the counts


def cases(test: int, fuzz: int, *, shrink: bool = True) -> settings:
    """The settings of a test that draws `test` cases in `make test` and `fuzz` cases in `make fuzz`.

    Without `shrink` a failing case is shown as it was drawn: where a case takes long, and is small anyway.
    """
    return settings(
        max_examples=fuzz if FUZZING else test,
        derandomize=not FUZZING,
        database=None,
        deadline=None,
        print_blob=FUZZING,
        phases=(Phase.explicit, Phase.generate, *([Phase.shrink] if shrink else [])),
        suppress_health_check=list(HealthCheck),
    )


class Counts:
    """Cases by entry and outcome."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._written = 0.0

    def note(self, entry: str, outcome: str) -> None:
        """Count one case."""
        self._counts[entry][outcome] += 1
        if time.monotonic() - self._written > _PAUSE:
            self.write()

    def write(self) -> None:
        """Leave the counts in their file, where one is named."""
        self._written = time.monotonic()
        if self._path is not None:
            record = {entry: dict(sorted(counts.items())) for entry, counts in sorted(self._counts.items())}
            self._path.write_text(json.dumps(record))


COUNTS = Counts(Path(os.environ["TCIL_FUZZ_COUNTS"]) if "TCIL_FUZZ_COUNTS" in os.environ else None)
