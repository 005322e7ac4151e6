"""Open the folder of a training that is there, to calibrate or to measure its networks again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tcil.experiments.config.settings import stored_settings
from tcil.experiments.runs.run import Run
from tcil.experiments.runs.store import RunFolder, check_format
from tcil.foundation.errors import invalid


def open_run(
    folder: Path, *, data: Path | None = None, trust: bool = False, tell: Callable[[str], None] = lambda text: None
) -> Run:
    """The run in a folder, as far as it went. Code that its settings name is imported only with `trust`."""
    store = RunFolder(folder)
    check_format(store.read_environment(), folder)
    stored = store.read_settings()
    if stored is None or stored.imported:
        raise invalid("run", f"{folder}, without the settings of a training", "a folder that 'tcil run' made")
    settings = stored_settings(stored.record(), folder / "settings.json", trust=trust, tell=tell)
    results = store.read_results()
    return Run(settings, folder, data=data, until=None if results is None else results.until)
