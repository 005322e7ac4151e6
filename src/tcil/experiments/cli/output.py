"""Where the commands print."""

from __future__ import annotations

from tcil.experiments.process.screen import Screen

console = Screen()
