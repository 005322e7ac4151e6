"""Charts as data: the same picture for the same results, and no name that becomes markup or code."""

from __future__ import annotations

import json
import re

import pytest

from stored_runs import full_run, kept_run
from tcil.experiments.reporting import charts, collect, figures
from tcil.experiments.reporting.charts import Chart, Control, Legend, Panel
from tcil.experiments.reporting.figures.parts import ERROR_OF

EVIL = "</script><script>alert(1)</script>\"'><svg onload=x> datum.x"


@pytest.fixture(scope="module")
def study():
    return collect.Study((full_run(),))


def every_chart(study):
    drawn = [
        figures.errors_by_group(study),
        figures.error_by_task(study),
        figures.temperature_by_task(study),
        figures.reliability(study),
        figures.error_by_class(study),
        figures.search_trace(study),
        figures.errors_by_study([study, study]),
    ]
    assert None not in drawn
    return drawn


def expressions(spec):
    """All that a specification has evaluated."""
    if isinstance(spec, list):
        return [found for part in spec for found in expressions(part)]
    if not isinstance(spec, dict):
        return []
    own = [str(spec[key]) for key in ("filter", "expr", "signal", "calculate", "test", "labelExpr") if key in spec]
    return own + [found for key, part in spec.items() if key != "datasets" for found in expressions(part)]


class TestData:
    def test_values_are_those_of_the_results(self, study):
        chart = figures.error_by_task(study)
        (panel,) = chart.panels
        titles = study.titles()
        names = {heading.title: name for name, heading in titles.items()}
        assert panel.datasets["values"]
        for row in panel.datasets["values"]:
            own = study.runs[0].tasks[row["task"]].answer(names[row["key"]])
            assert row["value"] == pytest.approx(100 * own.metric(ERROR_OF[row["group"]]), abs=1e-4)

    def test_diagrams_are_of_every_task_and_group(self, study):
        chart = figures.reliability(study)
        tasks = range(study.n_tasks)
        places = {(row["task"], row["group"]) for panel in chart.panels for row in panel.datasets["bins"]}
        assert places == {(task, group) for task in tasks for group in ("all", "old", "new") if task or group != "old"}
        (vanilla,) = [panel for panel in chart.panels if panel.title == "Vanilla"]
        last = study.runs[0].row(-1, "vanilla")
        assert vanilla.told[f"{tasks[-1]} new"] == f"ECE {100 * last.ece_predicted_new:.1f} %"
        shares = [row["share"] for row in vanilla.datasets["bins"] if (row["task"], row["group"]) == (0, "all")]
        assert sum(shares) == pytest.approx(100, abs=0.01)

    def test_results_without_diagrams_of_groups_have_one_choice(self):
        whole = collect.Study((kept_run(),))
        assert [value for value, _ in figures.reliability(whole).controls[1].options] == ["all"]

    def test_every_key_of_the_data_is_in_the_legend(self, study):
        for chart in every_chart(study):
            known = {line.key for line in chart.legend if line.key is not None}
            rows = [row for panel in chart.panels for rows in panel.datasets.values() for row in rows]
            assert {row["key"] for row in rows if "key" in row} <= known
            assert set(chart.shown)
            assert len(chart.words) > 20

    def test_titles_that_are_not_told_apart(self, study):
        run = study.runs[0]
        tasks = [
            task.model_copy(update={"calibrators": {n: row.titled("same") for n, row in task.calibrators.items()}})
            for task in run.tasks
        ]
        alike = collect.Study((run.__class__(run.path, run.result.with_tasks(tasks)),))
        keys = [line.key for line in figures.error_by_task(alike).legend if line.key is not None]
        assert len(keys) == len(set(keys)) > 3


class TestSafety:
    def test_embedded_json_survives_any_string(self):
        text = str(charts.embedded({EVIL: [EVIL, "<!--", "&lt;", "\u2028"]}))
        assert not set("<>&") & set(text)
        assert json.loads(text) == {EVIL: [EVIL, "<!--", "&lt;", "\u2028"]}

    def test_names_are_data_and_never_expressions(self, study):
        run = study.runs[0]
        tasks = [
            task.model_copy(update={"calibrators": {EVIL: task.calibrators["ts"].titled(EVIL)}}) for task in run.tasks
        ]
        hostile = collect.Study((run.__class__(run.path, run.result.with_tasks(tasks)),))
        chart = figures.error_by_task(hostile)
        assert EVIL in chart.shown
        assert expressions(chart.spec)
        assert not [text for text in expressions(chart.full(chart.panels[0])) if "alert" in text]
        assert "<script" not in charts.static_svg(chart, chart.panels[0])

    def test_scripts_do_not_end_their_element(self):
        assert "vegaEmbed" in charts.scripts()
        assert not re.search(r"</script|<!--", charts.scripts(), re.IGNORECASE)


class TestStatic:
    def test_the_same_whatever_was_drawn_before(self, study):
        chart = figures.search_trace(study)  # clipped, by ids that count
        first = charts.static_svg(chart, chart.panels[0])
        charts.static_svg(figures.errors_by_group(study), figures.errors_by_group(study).panels[0])
        assert charts.static_svg(chart, chart.panels[0]) == first
        ids = re.findall(r'\bid="([^"]+)"', first)
        assert len(ids) == len(set(ids)) > 0
        assert {name for name in re.findall(r"url\(#([^)]+)\)", first)} <= set(ids)

    def test_a_file_of_its_own_has_its_legend(self, study):
        chart = figures.temperature_by_task(study)
        svg = charts.standalone_svg(chart)
        for key in chart.shown:
            assert f">{key}<" in svg

    def test_choices_of_the_beginning(self):
        rows = [{"key": "a", "group": group, "x": 1} for group in ("all", "old")]
        spec = charts.layered(
            [{"data": {"name": "rows"}, "transform": [charts.chosen("group")], "mark": "point"}], 9, 9
        )
        chart = Chart(
            spec,
            (Panel({"rows": rows}, told={"all": "both", "old": "one"}),),
            "caption",
            "words",
            (Legend("A", "red", "circle", "a"), Legend("B", "red", "square", "b", on=False), Legend("floor", "grey")),
            (Control("group", "Images", (("all", "all"), ("old", "old")), "all"),),
        )
        assert chart.full(chart.panels[0])["params"] == [
            {"name": "shown", "value": ["a"]},
            {"name": "group", "value": "all"},
        ]
        assert chart.told(chart.panels[0]) == "both"
        packed = chart.content()["panels"][0]["datasets"]["rows"]
        assert packed == {"fields": ["key", "group", "x"], "rows": [["a", "all", 1], ["a", "old", 1]]}
        assert "params" not in spec
