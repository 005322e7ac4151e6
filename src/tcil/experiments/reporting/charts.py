"""Charts that answer to the pointer: Vega-Lite specifications, their static SVG, and the scripts that draw them.

A chart is one specification and the data of its panels. `vl_convert` makes the static SVG of it, for readers without
scripts and for print, and carries the scripts that draw the same in a browser. Nothing of it needs a network.
Names and titles are data, never part of an expression.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import vl_convert
from markupsafe import Markup

from tcil.experiments.reporting.grids import Grid
from tcil.experiments.reporting.palette import INK, SHAPES

Spec = dict[str, Any]
Rows = list[Spec]

GRID, AXIS, FLOOR = "#e3e8ee", "#8b96a5", "#c9d0d9"  # the page has a dark counterpart of each, and of INK
CONFIG: Spec = {
    "background": None,
    "aria": False,  # the figure has words of its own
    "font": "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": INK,
        "titleColor": INK,
        "titleFontWeight": "normal",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "gridColor": GRID,
        "domainColor": AXIS,
        "tickColor": AXIS,
    },
}


@dataclass(frozen=True)
class Legend:
    """A line of the legend. With a key, it switches on and off what has this key; without one, it only explains."""

    label: str
    colour: str
    shape: str = ""
    key: str | None = None
    dashed: bool = False
    line: bool = True
    on: bool = True

    @property
    def swatch(self) -> Markup:
        """What the mark looks like, as in the picture: a line, a mark or, with neither, an area."""
        if not self.line and not self.shape:
            inside = Markup('<rect x="2" y="2" width="20" height="10" fill="{}"/>').format(self.colour)
        else:
            dash = Markup(' stroke-dasharray="5 3"') if self.dashed else ""
            line = Markup('<path d="M0 7H24" stroke="{}" stroke-width="2"{}/>').format(self.colour, dash)
            mark = Markup('<path transform="translate(12 7) scale(4.5)" d="{}" fill="{}"/>').format(
                SHAPES.get(self.shape, ""), self.colour
            )
            inside = (line if self.line else Markup("")) + (mark if self.shape else Markup(""))
        frame = Markup('<svg class="swatch" width="24" height="14" viewBox="0 0 24 14" aria-hidden="true">{}</svg>')
        return frame.format(inside)


@dataclass(frozen=True)
class Control:
    """What a reader chooses one of: a slider for numbers, buttons for words. `name` is the parameter that it sets."""

    name: str
    label: str
    options: tuple[tuple[str | int, str], ...]
    chosen: str | int
    slider: bool = False


@dataclass(frozen=True)
class Panel:
    """One drawing of the chart's specification. With a key, the legend switches it; `told` stands above by choice."""

    datasets: Mapping[str, Rows]
    title: str = ""
    key: str | None = None
    told: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Chart:
    """A figure with its caption, its text alternative, its choices, and of curves the values drawn."""

    spec: Spec
    panels: tuple[Panel, ...]
    caption: str
    words: str
    legend: tuple[Legend, ...] = ()
    controls: tuple[Control, ...] = ()
    values: Grid | None = None
    fixed: bool = False  # panels keep their width, and stand side by side

    def about(self, where: str) -> Chart:
        """The same, saying of what runs it is."""
        values = self.values and replace(self.values, title=f"{self.values.title}; {where}")
        return replace(self, caption=f"{self.caption} {where}.", words=f"{where}. {self.words}", values=values)

    @property
    def shown(self) -> list[str]:
        """The keys that are switched on at first."""
        return [line.key for line in self.legend if line.key is not None and line.on]

    def is_on(self, panel: Panel) -> bool:
        """Whether the panel is there at first."""
        return panel.key is None or panel.key in self.shown

    def told(self, panel: Panel) -> str:
        """What stands above a panel at first."""
        return panel.told.get(" ".join(str(control.chosen) for control in self.controls), "")

    def full(self, panel: Panel) -> Spec:
        """The specification of a panel with its data, and with the choices of the beginning."""
        return copy.deepcopy(self._start()) | {"datasets": dict(panel.datasets)}

    def _start(self) -> Spec:
        params = [{"name": control.name, "value": control.chosen} for control in self.controls]
        return self.spec | {"params": [{"name": "shown", "value": self.shown}, *params, *self.spec.get("params", ())]}

    def content(self) -> Spec:
        """What the page's script draws from."""
        return {
            "spec": self._start(),
            "fixed": self.fixed,
            "controls": [control.name for control in self.controls],
            "panels": [
                {"datasets": _packed(panel.datasets), "key": panel.key, "told": dict(panel.told)}
                for panel in self.panels
            ],
        }


def _packed(datasets: Mapping[str, Rows]) -> Spec:
    """Rows without the names of their fields, which stand once."""
    packed = {}
    for name, rows in datasets.items():
        fields = list(dict.fromkeys(field for row in rows for field in row))
        packed[name] = {"fields": fields, "rows": [[row.get(field) for field in fields] for row in rows]}
    return packed


def layered(layers: Sequence[Spec], width: int, height: int, **more: Any) -> Spec:
    """A specification whose width follows the page's."""
    fit = {"autosize": {"type": "fit", "contains": "padding"}}
    return {"width": width, "height": height, **fit, "layer": list(layers), **more}


def chosen(*controls: str) -> Spec:
    """A transformation that leaves the rows that are switched on and chosen."""
    tests = ["indexof(shown, datum.key) >= 0", *(f"datum.{name} == {name}" for name in controls)]
    return {"filter": " && ".join(tests)}


def coloured(lines: Sequence[Legend]) -> Spec:
    """The colours of the legend's keys, as an encoding; the legend itself is the page's."""
    keyed = [line for line in lines if line.key is not None]
    scale = {"domain": [line.key for line in keyed], "range": [line.colour for line in keyed]}
    return {"field": "key", "type": "nominal", "scale": scale, "legend": None}


def marked(lines: Sequence[Legend]) -> Spec:
    """The marks of the legend's keys, as an encoding."""
    keyed = [line for line in lines if line.key is not None]
    shapes = [SHAPES.get(line.shape, SHAPES["circle"]) for line in keyed]
    scale = {"domain": [line.key for line in keyed], "range": shapes}
    return {"field": "key", "type": "nominal", "scale": scale, "legend": None}


def touched(data: str, encoding: Spec, mark: Spec, transform: Sequence[Spec] = ()) -> Spec:
    """A layer that is seen only below the pointer; its rows have a `tip`, which the page shows."""
    hover = {"name": "hover", "select": {"type": "point", "on": "pointerover", "clear": "pointerout"}}
    seen = {"condition": {"param": "hover", "empty": False, "value": 0.12}, "value": 0}
    return {
        "data": {"name": data},
        **({"transform": list(transform)} if transform else {}),
        "params": [hover],
        "mark": {"fill": AXIS, "stroke": None, "tooltip": {"content": "data"}, **mark},
        "encoding": {**encoding, "opacity": seen},
    }


def tip(title: str, rows: Sequence[tuple[str | None, str | None, str, str]]) -> Spec:
    """What is said below the pointer: for each line its key and its group (None: always), a name and a value."""
    return {"title": title, "rows": [list(row) for row in rows]}


def static_svg(chart: Chart, panel: Panel) -> str:
    """The panel as it is at first; the same for the same data."""
    return _settled(vl_convert.vegalite_to_svg(chart.full(panel), config=CONFIG))


def standalone_svg(chart: Chart) -> str:
    """The first panel as a file of its own: on white, and with its legend inside."""
    spec = chart.full(chart.panels[0])
    for layer in spec.get("layer", ()):
        for channel in ("color", "shape"):
            if layer["encoding"].get(channel, {}).get("field") == "key":
                layer["encoding"][channel]["legend"] = {"title": None, "orient": "bottom", "values": chart.shown}
    return _settled(vl_convert.vegalite_to_svg(spec, config={**CONFIG, "background": "white"}))


def _settled(svg: str) -> str:
    """An SVG whose ids do not depend on what this process has drawn before."""
    names: dict[str, str] = {}
    for name in re.findall(r'\bid="([^"]+)"', svg):
        names.setdefault(name, f"i{len(names)}")
    for name, short in names.items():
        svg = re.sub(rf'(\bid="|#){re.escape(name)}(?=["\)])', rf"\g<1>{short}", svg)
    return svg[svg.index("<svg") :]


@functools.cache
def scripts() -> str:
    """The scripts that draw specifications in a browser: Vega, Vega-Lite and Vega-Embed, of the installed package."""
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return re.sub(r"</(?=script)", r"<\\/", bundle, flags=re.IGNORECASE)


def embedded(content: object) -> Markup:
    """Data as JSON inside a script element: no string in it can end the element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for character, escaped in {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}.items():
        text = text.replace(character, escaped)
    return Markup(text)  # nothing in it is markup any more  # nosec B704
