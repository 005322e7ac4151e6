"""A plain report of one run: one self-contained HTML file with tables and curves."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import jinja2

from tcil.calibration.storage import replace_file
from tcil.experiments.tables import COLUMNS, mean, percent, titles

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; } caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; } th:first-child { text-align: left; }
td:first-child, tbody th { text-align: left; font-weight: 400; } img { max-width: 100%; } code { background: #f3f3f3; }
tr.apart th, tr.apart td { color: #666; font-style: italic; }
</style></head><body>
<h1>{{ title }}</h1>
<p>{{ tasks }} tasks, {{ classes }} classes. Figures in percent; ECE old and new are those of images predicted as old
and new classes; the floor is what a perfectly calibrated model would score by chance. Rows in italics see data that the
others do not.</p>
<table><caption>Mean over tasks</caption><thead><tr><th scope="col">calibrator</th>
{% for name in columns %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr{% if row.apart %} class="apart"{% endif %}><th scope="row">{{ row.title }}</th>
{% for cell in row.cells %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</tbody></table>
<img alt="{{ alt }}" src="data:image/svg+xml;base64,{{ figure }}">
<table><caption>Settings</caption><tbody>
{% for key, value in settings %}<tr><th scope="row">{{ key }}</th><td>{{ value }}</td></tr>{% endfor %}
</tbody></table>
<table><caption>Environment</caption><tbody>
{% for key, value in environment %}<tr><th scope="row">{{ key }}</th><td>{{ value }}</td></tr>{% endfor %}
</tbody></table>
</body></html>
"""


def write_report(results: dict[str, Any], environment: dict[str, Any], path: Path) -> Path:
    """Render the report; every string is escaped."""
    rows: list[dict[str, Any]] = []
    for name, (title, block) in titles(results).items():
        cells = [percent(mean(results, name, key)) for key in COLUMNS]
        cells = cells if cells[0] != "-" else ["n/a"] * len(cells)
        rows.append({"title": title, "apart": block != "ranked", "cells": cells})
    settings = results["settings"]
    last = {row["title"]: row["cells"][1] for row in rows}
    page = jinja2.Environment(autoescape=True).from_string(_PAGE)
    html = page.render(
        title=f"{settings['learner']} on {settings['dataset']}, seed {settings['seed']}",
        tasks=len(results["tasks"]),
        classes=results["tasks"][-1]["seen"],
        columns=list(COLUMNS.values()),
        rows=rows,
        figure=_curves(results),
        alt="ECE by task for every calibrator; means: " + ", ".join(f"{k} {v}" for k, v in last.items()),
        settings=sorted(settings.items()),
        environment=sorted(environment.items()),
    )
    replace_file(path, html.encode())
    return path


def _curves(results: dict[str, Any]) -> str:
    """ECE by task for every calibrator, as a base64 SVG."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "tcil"
    figure, axis = plt.subplots(figsize=(8, 4))
    for name, (title, block) in titles(results).items():
        points = [
            (task["task"], 100 * task["calibrators"][name]["ece"])
            for task in results["tasks"]
            if "not_applicable" not in task["calibrators"].get(name, {"not_applicable": ""})
        ]
        if points:
            style = {"linestyle": "-" if block == "ranked" else "--", "linewidth": 2.5 if name == "t-cil" else 1.3}
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=title, **style)  # type: ignore[arg-type]
    axis.set_xlabel("after task")
    axis.set_ylabel("ECE, %")
    axis.set_xticks([task["task"] for task in results["tasks"]])
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, ncols=2)
    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    plt.close(figure)
    return base64.b64encode(content.getvalue()).decode()
