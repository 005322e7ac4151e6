"""The search for the magnitude of the perturbation."""

from __future__ import annotations

import numpy as np

from tcil.experiments.reporting.charts import Chart, Legend, Panel, Rows, Spec, chosen, coloured, layered, tip
from tcil.experiments.reporting.collect import Study
from tcil.experiments.reporting.figures.parts import HEIGHT, WIDTH
from tcil.experiments.reporting.palette import INK, SHAPES

SHAPE_FOUND = SHAPES["star"]
SEQUENCE = ((59, 111, 212), (14, 154, 167), (58, 155, 58), (184, 144, 26), (217, 54, 62))  # of tasks, first to last


def search_trace(study: Study) -> Chart | None:
    """Temperature of the perturbed new exemplars against the magnitude, with the target and what was chosen."""
    run = study.runs[0]
    answers = [(task.task, task.answer("t-cil")) for task in run.tasks]
    searches = [(task, row.result) for task, row in answers if row is not None and row.result is not None]
    traces = [
        (task, search, search.magnitude, search.target_temperature)
        for task, search in searches
        if search.reachable and search.magnitude is not None and search.target_temperature is not None
    ]
    if not traces:
        return None
    rows: Rows = []
    found: Rows = []
    words, legend = [], []
    for place, (task, search, magnitude, target) in enumerate(traces):
        key = f"task {task}"
        legend.append(Legend(key, _shade(place, len(traces)), "circle", key))
        steps = sorted((step.magnitude, step.temperature) for step in search.trace)
        for at, temperature in (step for step in steps if np.isfinite(step[1])):
            lines = [("magnitude", f"{at:.4f}"), ("temperature", f"{temperature:.3f}")]
            told = tip(f"Task {task}, a step of the search", [(None, None, *line) for line in lines])
            rows.append({"key": key, "magnitude": at, "temperature": temperature, "tip": told})
        lines = [("magnitude", f"{magnitude:.4f}"), ("target temperature", f"{target:.3f}")]
        told = tip(f"Task {task}, chosen", [(None, None, *line) for line in lines])
        found.append({"key": key, "magnitude": magnitude, "temperature": target, "tip": told})
        words.append(f"task {task}: magnitude {magnitude:.3f} for target {target:.2f}")
    most, highest = max(t[2] for t in traces), max(t[3] for t in traces)
    x: Spec = {"field": "magnitude", "type": "quantitative", "title": "magnitude of the perturbation"}
    x["scale"] = {"domain": [0, 2 * most or 1], "nice": False}
    y: Spec = {"field": "temperature", "type": "quantitative", "title": "temperature of perturbed new exemplars"}
    y["scale"] = {"domain": [0, 2 * highest or 1], "nice": False}
    base: Spec = {"data": {"name": "steps"}, "transform": [chosen()]}
    hue = coloured(legend)
    encoding = {"x": x, "y": y, "color": hue}
    said = {"content": "data"}
    layers: list[Spec] = [
        {**base, "mark": {"type": "line", "strokeWidth": 1.3, "clip": True}, "encoding": encoding},
        {
            **base,
            "mark": {"type": "circle", "size": 26, "opacity": 1, "clip": True, "tooltip": said},
            "encoding": encoding,
        },
        {
            "data": {"name": "found"},
            "transform": [chosen()],
            "mark": {"type": "point", "shape": SHAPE_FOUND, "filled": True, "size": 190, "opacity": 1, "tooltip": said,
                     "stroke": INK, "strokeWidth": 0.7},
            "encoding": encoding,
        },
    ]  # fmt: skip
    seed = f", seed {run.seed}" if len(study.runs) > 1 else ""
    caption = (
        f"T-CIL's search{seed}: each step, and the magnitude that was chosen for the target temperature (stars). Steps"
        " beyond twice the largest magnitude or target are not in the picture."
    )
    return Chart(
        layered(layers, WIDTH, HEIGHT),
        (Panel({"steps": rows, "found": found}),),
        caption,
        "; ".join(words),
        tuple(legend),
    )


def _shade(place: int, count: int) -> str:
    """The colour of a task, from first to last."""
    at = place / max(1, count - 1) * (len(SEQUENCE) - 1)
    low = min(int(at), len(SEQUENCE) - 2)
    mixed = [round(a + (at - low) * (b - a)) for a, b in zip(SEQUENCE[low], SEQUENCE[low + 1], strict=True)]
    return "#" + "".join(f"{part:02x}" for part in mixed)
