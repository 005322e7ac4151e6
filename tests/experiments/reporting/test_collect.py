"""Which stored runs are read, and which of them are one study."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from stored_runs import stored, with_rows, with_settings
from tcil.experiments.config.settings import build
from tcil.experiments.reporting import collect


class TestCollect:
    def test_seeds_are_one_study(self, runs):
        found = collect.studies(collect.read_runs([runs]))
        sizes = {(s.settings.learner, s.settings.validation > 0): len(s.runs) for s in found}
        assert sizes == {("er", True): 2, ("er", False): 2, ("wa", True): 2, ("wa", False): 2}

    def test_other_classes_are_another_study(self):
        plain = [stored(build({"dataset": "noisy-digits", "seed": seed}), {"ts": 0.1}) for seed in (1, 2)]
        other = stored(build({"dataset": "noisy-digits", "seed": 1, "class_order_seed": 7}), {"ts": 0.2})
        first, second = collect.studies([*plain, other])
        assert [len(first.runs), len(second.runs)] == [2, 1]
        assert [first.difference, second.difference] == ["", "class_order_seed 7"]
        assert len(collect.studies([plain[1], other])) == 2  # whatever else is there

    def test_validation_images_that_follow_the_seed_make_no_other_study(self):
        def of(*pairs):
            return [stored(build({"seed": s, "validation_seed": v}), {"ts": 0.1}) for s, v in pairs]

        def sizes(runs):
            return sorted(tuple(run.seed for run in study.runs) for study in collect.studies(runs))

        assert sizes(of((1, 1), (2, 2), (3, 3))) == [(1, 2, 3)]
        assert sizes(of((1, 1), (2, 1), (3, 1))) == [(1, 2, 3)]
        assert sizes(of((1, 1), (2, 1), (2, 2), (3, 3))) == [(1, 2), (2, 3)]
        assert sizes(of((1, 1), (1, 7))) == [(1,), (1,)]
        settings = [build({"preset": "cifar100", "seed": s, "memory": size}) for s in (4, 5) for size in (500, 600)]
        found = collect.studies(stored(one, {"ts": 0.1}) for one in settings)
        assert [study.difference for study in found] == ["memory 500", "memory 600"]

    def test_titles_have_no_more_than_tells_studies_apart(self):
        settings = [{"preset": "cifar100-mini"}, {"preset": "cifar100-mini", "memory": 100}, {"preset": "cifar100"}]
        found = collect.studies(stored(build({"learner": "er", **one}), {"ts": 0.1}) for one in settings)
        assert [study.difference for study in found] == ["memory 400", "memory 100", ""]

    def test_kept_copies_say_the_same(self, runs, tmp_path):
        original = collect.read_runs([runs])
        collect.keep(original, tmp_path)
        again = collect.read_runs([tmp_path])
        for old, new in zip(original, again, strict=True):
            assert (old.tasks, old.settings, old.environment) == (new.tasks, new.settings, new.environment)

    def test_means_are_those_of_the_results(self, runs):
        run = next(r for r in collect.read_runs([runs]) if r.settings.validation)
        expected = np.mean([task.calibrators["t-cil"].ece for task in run.tasks])
        assert run.mean("t-cil", "ece") == pytest.approx(expected)
        assert run.values("t-cil", "ece_predicted_old")[0] is None

    @pytest.mark.parametrize("content", ["{", "[]", '{"settings": {}}'])
    def test_damaged_results_are_named(self, tmp_path, content):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(ValueError, match=r"results\.json, which cannot be read"):
            collect.read_runs([tmp_path])

    def test_other_json_in_a_folder_is_not_quoted(self, runs, tmp_path):
        (tmp_path / "secrets.json").write_text('{"password": "hush"}')
        (tmp_path / "list.json").write_text("[1, 2]")
        with pytest.raises(ValueError, match=r"^runs: got .*, without a finished run \(2 JSON files there ") as caught:
            collect.read_runs([tmp_path])
        assert "secrets" not in str(caught.value)
        collect.keep(collect.read_runs([runs]), tmp_path)
        assert len(collect.read_runs([tmp_path])) == len(collect.read_runs([runs]))
        (tmp_path / "cut.json").write_bytes(next(tmp_path.glob("*seed*.json")).read_bytes()[:100])
        with pytest.raises(ValueError, match=r"cut\.json, which cannot be read"):
            collect.read_runs([tmp_path])

    def test_files_of_another_format_are_told_apart_from_damage(self, tmp_path):
        """Tables of a user's own scripts may have the keys of results, with other things under them."""
        others = {
            "rows": {"settings": {"dataset": "letters", "learner": "er"}, "tasks": [{"ts": {"ece": 0.1}}]},
            "count": {"command": "python -m mine", "tasks": 10},
            "part": {"settings": {"dataset": "letters"}, "tasks": [{"task": 0, "calibrators": {}}]},
        }
        for name, record in others.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(record))
        with pytest.raises(ValueError, match=r"without a finished run \(3 JSON files there have another format\); exp"):
            collect.read_runs([tmp_path])
        with pytest.raises(
            ValueError, match=r"count\.json, a JSON file of another format, with the keys 'command, tas"
        ):
            collect.read_runs([tmp_path / "count.json"])
        (copy,) = collect.keep([stored(build({"tasks": 5}), {"ts": 0.1})], tmp_path)
        assert [run.path for run in collect.read_runs([tmp_path])] == [copy]
        record = json.loads(copy.read_text())
        del record["tasks"][0]["seen"]
        copy.write_text(json.dumps(record))
        with pytest.raises(ValueError, match=r"json, which cannot be read \(tasks\[0\].seen"):
            collect.read_runs([tmp_path])

    def test_an_empty_folder_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"runs: got .* without a finished run"):
            collect.read_runs([tmp_path])

    def test_studies_are_told_apart(self, runs, tmp_path):
        """Two learning rates: other titles, other anchors, other columns."""
        own = [r for r in collect.read_runs([runs]) if r.settings.learner == "er" and r.settings.validation]
        collect.keep(own, tmp_path / "a")
        slower = [with_settings(run, run.settings.record() | {"lr": 0.05}) for run in own]
        collect.keep([dataclasses.replace(r, path=r.path.with_name(r.path.name + "b")) for r in slower], tmp_path / "a")
        titles = [study.title for study in collect.studies(collect.read_runs([tmp_path / "a"]))]
        assert sorted(titles) == ["ER on noisy-digits, lr 0.05", "ER on noisy-digits, lr 0.1"]

    def test_a_run_found_twice_counts_once(self, runs, tmp_path):
        original = collect.read_runs([runs])
        collect.keep([with_rows(run, lambda rows: {"vanilla": rows["vanilla"]}) for run in original], tmp_path)
        both = collect.read_runs([tmp_path, runs])
        assert len(both) == len(original)
        assert all("ts" in r.titles() for r in both if r.settings.validation)
