"""How a calibrator looks: the same colour and mark in every picture, legible on light and on dark pages."""

from __future__ import annotations

import zlib

from tcil.experiments.runs.catalogue import ALL_DATA, CATALOGUE

INK = "#1c2430"  # text and the oracle; the page turns it into a light colour in dark mode
COLOURS = {
    ALL_DATA: "#a08b73", "vanilla": "#7d8590", "ts": "#2f7fd1", "ets": "#0e9aa7", "irm": "#3a9b3a",
    "perturb-ts": "#a06a4c", "t-cil": "#d9363e", "pact": "#e07b00", "first-task-ts": "#9a6fd0",
    "exemplar-ts": "#b8901a", "optimal-ts": INK, "optimal-group-ts": "#667384", "reserve-ts": "#0b8a72",
    "reserve-group-ts": "#7a9e00", "pact-r": "#b35806",
}  # fmt: skip
OTHERS = ("#c2559d", "#5b6ee1", "#8a7d00", "#00879e", "#b0563a", "#6d8f3c")  # of calibrators that are not ours
GROUPS = {"all": INK, "old": "#2f7fd1", "new": "#e07b00"}
# Marks as paths in a box from -1 to 1, as Vega takes them; the legend draws the same.
SHAPES = {
    "circle": "M0,-.8A.8,.8,0,1,1,0,.8A.8,.8,0,1,1,0,-.8Z",
    "square": "M-.7,-.7H.7V.7H-.7Z",
    "diamond": "M0,-1L.85,0L0,1L-.85,0Z",
    "up": "M0,-.9L.9,.75H-.9Z",
    "down": "M0,.9L.9,-.75H-.9Z",
    "cross": "M-.3,-.9H.3V-.3H.9V.3H.3V.9H-.3V.3H-.9V-.3H-.3Z",
    "star": "M0,-1L.25,-.35L.95,-.31L.4,.13L.59,.81L0,.42L-.59,.81L-.4,.13L-.95,-.31L-.25,-.35Z",
    "left": "M-.9,0L.75,.9V-.9Z",
    "right": "M.9,0L-.75,.9V-.9Z",
}
_ORDER = (ALL_DATA, *CATALOGUE)


def colour(name: str) -> str:
    """The colour of a calibrator; one that is not ours, or has other options, gets one of a few by its name.

    >>> from tcil.experiments.reporting.palette import colour
    >>> colour("t-cil"), colour("t-cil") == colour("t-cil[policy=random]")
    ('#d9363e', False)
    """
    return COLOURS[name] if name in COLOURS else OTHERS[zlib.crc32(name.encode()) % len(OTHERS)]


def shape(name: str) -> str:
    """The mark of a calibrator, as the name of one of `SHAPES`."""
    place = _ORDER.index(name) if name in _ORDER else zlib.crc32(name.encode())
    return list(SHAPES)[place % len(SHAPES)]
