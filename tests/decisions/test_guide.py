"""The guide docs/decisions.md: its code runs, and its numbers are those of the stored results."""

from __future__ import annotations

import json
import re

import torch

from conftest import ROOT

GUIDE = ROOT / "docs" / "decisions.md"
RESULTS = ROOT / "docs" / "results" / "decisions"


def stored(name):
    return json.loads((RESULTS / name).read_text())


def table_rows(title):
    """Cells by the first one, of the table with this first heading."""
    _, _, rest = GUIDE.read_text().partition(f"\n| {title} |")
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    return {cells[0]: cells[1:] for line in lines if (cells := [cell.strip() for cell in line.strip("| ").split("|")])}


def test_code_of_the_guide_runs(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    rows = torch.cat([(task.test[1] == label).nonzero().squeeze(1)[:12] for label in range(task.seen)])
    space = {
        "model": task.model,
        "x_mem": task.memory[0],
        "y_mem": task.memory[1],
        "x_val": task.valid[0],
        "y_val": task.valid[1],
        "x_reserve": task.test[0][rows],
        "y_reserve": task.test[1][rows],
        "new_classes": task.new_classes,
        "x_stream": task.test[0][rows],
        "x_test": task.test[0],
        "y_test": task.test[1],
    }
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "decisions.md", "exec"), space)
    labels, accepted = space["served"](task.test[0][:5])
    assert labels.shape == accepted.shape == (5,)
    assert space["sets_of"](task.test[0][:5]).shape == (5, task.seen)


def test_smallest_reserves_of_the_guide():
    sizes = stored("sizes.json")
    for name, by_risk in sizes["thresholds"].items():
        if name != "what":
            assert table_rows("smallest reserve, images of each group")[name] == [str(n) for n in by_risk.values()]


def test_redraws_of_the_guide():
    record = stored("redraws.json")
    studies = [*record["risks"], *record["sets"]]
    assert all(study["redraws"] >= 1000 for study in studies)
    broken = [study for study in studies if study["draw"]["source"] == "memory"]
    sound = [study for study in studies if study["draw"]["source"] != "memory"]
    assert all(study["kept"] for study in sound)
    text = " ".join(GUIDE.read_text().split())
    assert f"all {len(sound)} promises were kept" in text
    assert all(not study["kept"] for study in record["sets"] if study["draw"]["source"] == "memory")
    lost = sum(not study["kept"] for study in broken)
    assert f"{lost} of {len(broken)} promises were broken" in text


def test_value_of_calibration_in_the_guide():
    claims = stored("value-checkpoints.json")["claims"]
    names = {"vanilla": "Vanilla", "ts": "TS", "t-cil": "T-CIL", "pact": "PACT", "pact-r": "PACT-R"}
    rows = table_rows("claimed risk: achieved (accepted), %")
    for name, by_world in claims.items():
        wanted = []
        for risk in (0.05, 0.1, 0.2):
            for group in ("old", "new"):
                mean = by_world["mean"]
                achieved = mean[f"risks/model_based/{group}/{risk}/achieved"]
                accepted = mean[f"risks/model_based/{group}/{risk}/coverage"]
                wanted.append(f"{100 * achieved:.1f} ({100 * accepted:.0f})")
        assert rows[names[name]] == wanted


def test_value_of_calibration_in_the_readme():
    claims = stored("value-checkpoints.json")["claims"]
    readme = (GUIDE.parent.parent / "README.md").read_text()
    for group in ("old", "new"):
        where = f"risks/model_based/{group}/0.1"
        wanted = [
            f"{100 * by_world['mean'][f'{where}/achieved']:.1f} ({100 * by_world['mean'][f'{where}/coverage']:.0f})"
            for by_world in (claims[name] for name in ("vanilla", "ts", "t-cil", "pact", "pact-r"))
        ]
        assert f"| predicted as {group} classes | {' | '.join(wanted)} |" in readme
