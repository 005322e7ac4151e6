"""The paper's numbers as data: complete, consistent, and the same as in its source, cell by cell."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from pydantic import ValidationError

from conftest import ROOT
from tcil.experiments.config import settings
from tcil.experiments.reproduction import paper

SOURCE = ROOT.parent / "shared" / "paper" / "t-cil.tex"
DATASETS = ("cifar10", "cifar100", "tiny-imagenet")
LEARNERS = ("er", "eeil", "wa", "der")
CALIBRATORS = ("vanilla-all-data", "ts", "ets", "irm", "perturb-ts", "t-cil")
POLICIES = ("t-cil-random", "t-cil-closest", "t-cil-farthest", "t-cil")
SIZES = (100, 300, 500, 700, 1000)
COUNTS = {"baselines": 18, "compatibility": 24, "policies": 4, "grid": 72, "tasks20": 16, "validation": 5}


def mean(table, dataset, learner, calibrator, metric="ece", **more):
    row = paper.find(table, dataset=dataset, learner=learner, calibrator=calibrator, **more)
    return None if row.metrics[metric] is None else row.metrics[metric][0]


def reduction(compared):
    before, after = (mean(**end.model_dump(), metric=compared.metric) for end in (compared.start, compared.end))
    return round(100 * (1 - after / before), 1)


def test_every_table_is_there():
    assert Counter(row.table for row in paper.rows()) == COUNTS
    for table, count in COUNTS.items():
        assert len(paper.rows(table)) == count
    keys = [tuple(row.model_dump(exclude={"metrics"}).values()) for row in paper.rows()]
    assert len(set(keys)) == len(keys)


def test_rows_have_the_promised_shape():
    for row in paper.rows():
        assert row.dataset in DATASETS
        assert row.learner in LEARNERS
        assert row.calibrator in {*CALIBRATORS, *POLICIES}
        expected = ["accuracy", "ece"] if row.table == "validation" else ["accuracy", "ece", "aece"]
        assert list(row.metrics) == expected
        absent = row.calibrator == "perturb-ts" and row.dataset == "cifar10"
        for printed in row.metrics.values():
            assert (printed is None) == absent
            if printed is not None:
                average, deviation = printed
                assert 0 < average < 100
                assert 0 <= deviation < 10


def test_tasks_and_validation_sizes():
    usual = dict(zip(DATASETS, (5, 10, 10), strict=True))
    sizes = paper.claims()["validation_sizes"].values
    for row in paper.rows():
        assert row.tasks == (20 if row.table == "tasks20" else usual[row.dataset])
        if row.calibrator == "vanilla-all-data":
            assert row.validation is None
        elif row.table == "tasks20":
            assert row.validation == 100
        elif row.table != "validation":
            assert row.validation == sizes[row.learner][DATASETS.index(row.dataset)]
    assert tuple(row.validation for row in paper.rows("validation")) == SIZES


@pytest.mark.parametrize("table", ["grid", "tasks20"])
def test_presets_are_the_papers(table):
    protocols = {name: f"protocol_{name.partition('-')[0]}" for name in DATASETS}
    for row in paper.rows(table):
        if row.calibrator == "t-cil":
            built = settings.build({"dataset": row.dataset, "learner": row.learner, "tasks": row.tasks})
            values = paper.claims()[protocols[row.dataset]].values
            assert built.validation == row.validation
            assert (built.memory, built.batch_size) == (values["memory"], values["batch_size"])
            preset = settings.build({"dataset": row.dataset, "learner": row.learner})
            assert preset.tasks == values["tasks"]


@pytest.mark.parametrize("table", ["baselines", "compatibility", "policies", "validation"])
def test_tables_that_overlap_agree(table):
    met = 0
    for row in paper.rows(table):
        keys = {"dataset": row.dataset, "learner": row.learner, "calibrator": row.calibrator}
        same = paper.find("grid", **keys)
        if same is not None and same.validation == row.validation:
            met += 1
            assert {key: same.metrics[key] for key in row.metrics} == row.metrics
            assert same.tasks == row.tasks
    assert met == {"baselines": 18, "compatibility": 24, "policies": 1, "validation": 1}[table]


def test_calibrators_share_a_network():
    """Post-hoc calibrators keep accuracy, so that those of a learner and dataset were all fitted to the same runs."""
    for dataset in DATASETS:
        for learner in LEARNERS:
            fitted = [r for r in paper.rows("grid") if (r.dataset, r.learner) == (dataset, learner)][1:]
            assert len({r.metrics["accuracy"] for r in fitted} - {None}) == 1
    assert len({row.metrics["accuracy"] for row in paper.rows("policies")}) == 1


def test_printed_reductions():
    claims = paper.claims()
    compared = {name: claim for name, claim in claims.items() if claim.compared}
    printed = {name: claim.values["reduction"] for name, claim in compared.items()}
    assert sorted(printed.values()) == [20.0, 23.4, 65.2, 80.5, 82.3]
    recomputed = {name: reduction(claim.compared) for name, claim in compared.items()}
    assert recomputed == {name: claim.derived["reduction"] for name, claim in compared.items()}
    wrong = {name: (printed[name], recomputed[name]) for name in printed if printed[name] != recomputed[name]}
    assert wrong == {"reduction_cifar100": (65.2, 64.7), "reduction_cifar10": (20.0, 19.9)}
    # The first is right for PerturbTS, which is not the best baseline; the second for none.
    assert reduction(claims["reduction_cifar100"].reproduced_by) == 65.2
    for name in ("ts", "ets", "irm"):
        for metric in ("ece", "aece"):
            ends = {"learner": "er", "dataset": "cifar10", "table": "baselines"}
            pair = {"from": {**ends, "calibrator": name}, "to": {**ends, "calibrator": "t-cil"}, "metric": metric}
            assert reduction(paper.Comparison(**pair)) != 20.0
    text = "\n".join(paper.contradictions())
    for percent in ("65.2 %", "64.7 %", "20.0 %", "19.9 %"):
        assert percent in text


@pytest.mark.parametrize("name", ["reduction_cifar10", "reduction_cifar100", "reduction_tiny"])
def test_reductions_name_the_best_baseline(name):
    compared = paper.claims()[name].compared
    best = min(
        (row for row in paper.rows("baselines") if row.dataset == compared.start.dataset),
        key=lambda row: row.metrics["ece"] if row.metrics["ece"] and row.calibrator != "t-cil" else (100.0, 0.0),
    )
    assert best.calibrator == compared.start.calibrator


def test_what_is_said_about_the_tables():
    """The numbers that we derived from rows, for claims and contradictions."""
    claims = paper.claims()

    def derived(name):
        return claims[name].derived

    lowest = {}
    for dataset in DATASETS:
        for learner in LEARNERS:
            eces = {name: mean("grid", dataset, learner, name) for name in CALIBRATORS}
            lowest[dataset, learner] = min((ece, name) for name, ece in eces.items() if ece is not None)[1]
    assert derived("t_cil_wins_the_grid") == {
        "settings": len(lowest),
        "settings_where_t_cil_has_the_lowest_ece": list(lowest.values()).count("t-cil"),
    }
    assert {key: name for key, name in lowest.items() if name != "t-cil"} == {
        ("cifar10", "eeil"): "ts",
        ("tiny-imagenet", "eeil"): "perturb-ts",
        ("tiny-imagenet", "wa"): "perturb-ts",
    }
    post_hoc = {name: mean("grid", "tiny-imagenet", "eeil", name) for name in CALIBRATORS[1:]}
    assert max(post_hoc, key=post_hoc.get) == "t-cil"

    def change(dataset, learner, metric, table="compatibility"):
        ends = (mean(table, dataset, learner, name, metric) for name in ("t-cil", "vanilla-all-data"))
        return round(next(ends) - next(ends), 2)

    accuracy = [change(dataset, learner, "accuracy") for dataset in DATASETS for learner in LEARNERS]
    assert derived("accuracy_hardly_changes") == {"largest_loss": -min(accuracy), "largest_gain": max(accuracy)}
    assert sum(gain > 0 for gain in accuracy) == 4
    worse = {(d, k) for d in DATASETS for k in LEARNERS if change(d, k, "ece") > 0}
    assert worse == {("tiny-imagenet", "wa")}
    worse = {(d, k) for d in DATASETS[1:] for k in LEARNERS if change(d, k, "ece", "tasks20") > 0}
    assert worse == {("cifar100", "wa"), ("tiny-imagenet", "wa")}

    vanilla = {k: [mean("grid", d, k, "vanilla-all-data") for d in DATASETS] for k in LEARNERS}
    assert [max(vanilla, key=lambda k: vanilla[k][i]) for i in range(3)] == ["er", "er", "der"]
    exact = {k: [mean("grid", d, k, "vanilla-all-data", "accuracy") for d in DATASETS] for k in LEARNERS}
    assert [max(exact, key=lambda k: exact[k][i]) for i in range(3)] == ["eeil", "der", "der"]

    reserve = claims["reserve_costs_accuracy"].values
    gain = round(reserve["accuracy_without_reserve"] - reserve["accuracy_with_reserve"], 2)
    assert reserve["accuracy_without_reserve"] == mean("grid", "cifar100", "er", "t-cil", "accuracy")
    assert derived("reserve_costs_accuracy")["gain"] == gain
    assert derived("reserve_gain_is_like_eeil") == {
        "gain": gain,
        "eeil_over_er_vanilla": round(exact["eeil"][1] - exact["er"][1], 2),
        "eeil_over_er_with_validation_set": round(
            mean("grid", "cifar100", "eeil", "t-cil", "accuracy") - reserve["accuracy_without_reserve"], 2
        ),
    }
    for name in ("old_new_accuracy_gap", "misprediction_gap"):
        values = claims[name].values
        assert derived(name)["ratio"] == round(values["later_gap"] / values["earlier_gap"], 2)

    sizes = {}
    for name in ("cifar10", "cifar100", "tiny"):
        per_class = claims[f"dataset_{name}"].values["train_per_class"]
        protocol = claims[f"protocol_{name}"].values
        sizes[f"{name}_memory"] = protocol["memory"]
        sizes[f"{name}_new_task"] = per_class * protocol["classes_per_task"]
        if name != "cifar10":
            sizes[f"{name}_new_task_of_20"] = sizes[f"{name}_new_task"] // 2
    assert derived("memory_is_small") == sizes

    for metric, where in (("ece", "rises from 5.74 at 500 to 5.81"), ("accuracy", "rises from 56.25 at 500 to 56.55")):
        by_size = [row.metrics[metric][0] for row in paper.rows("validation")]
        assert by_size[3] > by_size[2]  # both are said to fall
        assert any(where in line for line in paper.contradictions())


def test_claims_have_text_place_and_values():
    for name, claim in paper.claims().items():
        assert claim.text, name
        assert re.search(r"lines? \d", claim.where), name
        for value in claim.values.values():
            assert all(isinstance(number, int | float) for number in (value if isinstance(value, tuple) else [value]))
        values = [v if isinstance(v, tuple) else [v] for v in claim.values.values()]
        printed = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", claim.printed or "")}
        assert printed <= {float(number) for numbers in values for number in numbers}, name
    assert len(paper.contradictions()) == len(set(paper.contradictions()))
    claimed = paper.claims()
    assert claimed["ece_falls_with_validation_size"].values["sizes"] == paper.VALIDATION_SIZES
    sizes = {
        "cifar100": claimed["memory_sizes"].values["cifar100"],
        "tiny-imagenet": claimed["memory_sizes"].values["tiny"],
    }
    assert sizes == paper.MEMORY_SIZES


def test_nobody_changes_what_the_paper_says():
    with pytest.raises(TypeError, match="does not support item assignment"):
        paper.claims()["bins"].values["bins"] = 15
    with pytest.raises(TypeError, match="does not support item assignment"):
        paper.claims()["bins"] = None
    with pytest.raises(TypeError, match="does not support item assignment"):
        paper.rows()[0].metrics["ece"] = None
    with pytest.raises(ValidationError, match="frozen"):
        paper.claims()["bins"].text = ""
    paper.contradictions().clear()
    assert paper.claims()["bins"].values == {"bins": 10}
    assert paper.contradictions()


def test_what_is_not_known_of_a_claim_is_refused():
    with pytest.raises(ValidationError, match="wheer"):
        paper.Claim(text="so", wheer="line 1", where="line 1", values={})


def test_find():
    keys = {"dataset": "cifar100", "learner": "er", "calibrator": "t-cil"}
    assert paper.find("validation", **keys, validation=100).metrics == {"accuracy": (56.97, 0.65), "ece": (6.94, 1.02)}
    assert paper.find("tasks20", **keys, tasks=20).metrics["aece"] == (7.07, 0.46)
    assert paper.find("tasks20", **keys, tasks=10) is None
    assert paper.find("policies", **{**keys, "calibrator": "ts"}) is None
    with pytest.raises(ValueError, match="expected one of 100, 300, 500, 700, 1000"):
        paper.find("validation", **keys)
    with pytest.raises(ValueError, match="Did you mean 'baselines'"):
        paper.rows("baseline")


# The tables once more, read from the paper's source without regard to its labels: only the order of cells counts.

CELL = re.compile(r"\{(\d+\.\d+)\}\\tiny\{\$\\pm\s*\$?\s*(\d+\.\d+)\s*\$?\}|\{(n/a)\}")
BOTH = ("vanilla-all-data", "t-cil")
METRICS = ("accuracy", "ece", "aece")
ER_100 = ("cifar100", "er")
# By label: our table, and (dataset, learner, calibrator, validation where rows differ by it, metric) of each cell.
ORDER = {
    "tbl:baselines": ("baselines", [(d, "er", c, None, f) for c in CALIBRATORS for d in DATASETS for f in METRICS]),
    "tbl:compatibility": (
        "compatibility",
        [(d, k, c, None, f) for k in LEARNERS for c in BOTH for d in DATASETS for f in METRICS],
    ),
    "tbl:label_policy": ("policies", [(*ER_100, c, None, f) for c in POLICIES for f in METRICS]),
    "tbl:baselines_all": (
        "grid",
        [(d, k, c, None, f) for k in LEARNERS for c in CALIBRATORS for d in DATASETS for f in METRICS],
    ),
    "tbl:compatibility_20task": (
        "tasks20",
        [(d, k, c, None, f) for k in LEARNERS for c in BOTH for d in DATASETS[1:] for f in METRICS],
    ),
    "tbl:varying_val_size": ("validation", [(*ER_100, "t-cil", n, f) for f in ("ece", "accuracy") for n in SIZES]),
}
WORDS = {"two": 2, "three": 3, "four": 4, "five": 5}


@pytest.fixture(scope="module")
def source():
    if not SOURCE.exists():
        pytest.skip(f"{SOURCE} is absent")
    return SOURCE.read_text(encoding="utf-8")


def body(source, label):
    """What stands between the tabular that a label belongs to and the label."""
    return source[: source.index(f"\\label{{{label}}}")].rpartition("\\begin{tabular}")[2]


@pytest.mark.real
@pytest.mark.parametrize("label", ORDER)
def test_every_cell_is_the_papers(source, label):
    table, order = ORDER[label]
    text = body(source, label)
    cells = [None if absent else (float(a), float(b)) for a, b, absent in CELL.findall(text)]
    assert len(cells) == len(order) == text.count("\\pm") + text.count("n/a")
    assert len(cells) == sum(len(row.metrics) for row in paper.rows(table))
    for cell, (dataset, learner, calibrator, validation, metric) in zip(cells, order, strict=True):
        row = paper.find(table, dataset=dataset, learner=learner, calibrator=calibrator, validation=validation)
        assert row.metrics[metric] == cell, (row, metric)


@pytest.mark.real
def test_no_other_table_of_numbers(source):
    assert sum(len(order) for _, order in ORDER.values()) == len(CELL.findall(source))


@pytest.mark.real
def test_validation_sizes_are_the_papers(source):
    lines = re.findall(r"^ (\w+) & (\d+) & (\d+) & (\d+) \\\\", body(source, "tbl:val_size"), flags=re.MULTILINE)
    sizes = {learner.lower(): tuple(int(cell) for cell in cells) for learner, *cells in lines}
    assert sizes == paper.claims()["validation_sizes"].values


@pytest.mark.real
def test_numbers_of_claims_stand_in_the_lines_named(source):
    lines = source.split("\n")
    for name, claim in paper.claims().items():
        places = [
            int(number)
            for listed in re.findall(r"lines? ([\d, ]+)", claim.where)
            for number in re.findall(r"\d+", listed)
        ]
        text = " ".join(lines[place - 1] for place in places)
        assert all(lines[place - 1].strip() for place in places), name
        numbers = {float(number.replace(",", "")) for number in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text)}
        numbers |= {value for word, value in WORDS.items() if re.search(rf"\b{word}\b", text)}
        for value in claim.values.values():
            assert numbers >= set(value if isinstance(value, tuple) else [value]), name
