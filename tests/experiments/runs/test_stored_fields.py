"""Files of a run folder whose JSON is whole, but not what is due."""

from __future__ import annotations

import copy
import gzip
import json
import re

import pytest

from command_lines import QUICK, command, results
from conftest import ROOT
from tcil.experiments.process.exits import ExitCode
from tcil.experiments.reporting import collect, tables
from tcil.experiments.reporting import page as report
from tcil.experiments.runs.entries import CALIBRATORS
from tcil.experiments.runs.records import parse
from tcil.experiments.runs.results import RunResult, kind_of
from tcil.experiments.runs.store import DamagedFileWarning, RunFolder
from tcil.foundation.checksums import Damaged


def places(record, path=()):
    """Every field of a record."""
    yield path
    if isinstance(record, dict | list):
        for key, value in record.items() if isinstance(record, dict) else enumerate(record[:2]):
            yield from places(value, (*path, key))


def changed(record, path, value):
    """The record with another value at this place; `...` takes it away."""
    if not path:
        return value
    record = copy.deepcopy(record)
    place = record
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return record


WRONG = (..., None, 5, -1, "x", [], {}, [None], 1e999, float("nan"), 10**400, True, [[]], {"a": {}})


class TestRunFolders:
    """JSON that is whole, but not what is due."""

    @pytest.mark.usefixtures("undrawn")
    def test_every_field_of_other_types(self, tmp_path):
        """Whatever is changed: it is refused with the file's name and a field, or every table and page can be made."""
        few = results()
        rows = few["tasks"][0]["calibrators"]
        few["tasks"][0]["calibrators"] = {name: rows[name] for name in ("vanilla", "t-cil", "reserve-ts")}
        file = tmp_path / "results.json"
        refused, accepted = [], 0
        for number, path in enumerate(places(few)):
            for value in (WRONG[number % len(WRONG)], WRONG[(5 * number + 3) % len(WRONG)]):
                if not path and value is ...:
                    continue
                file.write_text(json.dumps(changed(few, path, value)))
                try:
                    runs = collect.read_runs([tmp_path])
                except ValueError as error:
                    refused.append(str(error))
                    continue
                accepted += 1
                assert report.study_sections(collect.studies(collect.shown(runs)))
                assert tables.comparison(runs, runs, "ece").rows
                assert isinstance(runs[0].is_complete(CALIBRATORS), bool)
        assert all(text.startswith(f"runs: got {file}, which cannot be read (") for text in refused)
        assert len(refused) > 100
        assert accepted > 30

    @pytest.mark.parametrize(
        ("path", "value", "field"),
        [
            ((), [], "the whole file"),
            (("tasks",), {}, "tasks: got {}"),
            (("tasks", 0), [], "tasks[0]: got []"),
            (("tasks", 0, "calibrators", "ts", "ece"), "0.1", "tasks[0].calibrators.ts.ece: got '0.1'"),
            (("tasks", 0, "calibrators", "ts", "ece"), ..., "tasks[0].calibrators.ts: ece is missing"),
            (("tasks", 0, "calibrators", "ts", "ece"), 1e300, "tasks[0].calibrators.ts.ece: got 1e+300"),
            (("tasks", 0, "calibrators", "ts", "bins", "count"), [1], "tasks[0].calibrators.ts.bins.count"),
            (("tasks", 0, "calibrators", "t-cil", "result", "verdicts"), ["?"], "verdict: got '?'"),
            (("tasks", 0, "task"), 3, "by_task of vanilla has not 4 tasks"),
            (("settings", "seed"), 2**70, "settings.seed: got 1180591620717411303424"),
            (("settings", "tasks"), 7, "its settings ask for 7"),
            (("environment", "seconds"), [1], "environment.seconds: got [1]"),
        ],
    )
    def test_the_field_is_named(self, tmp_path, path, value, field):
        file = tmp_path / "results.json"
        file.write_text(json.dumps(changed(results(), path, value)))
        for words in (["report", tmp_path, "--out", tmp_path / "out"], ["compare", tmp_path, tmp_path]):
            said = command(*words)
            assert f"runs: got {file}" in said
            assert field in said
        assert not (tmp_path / "out").exists()

    def test_stored_results_have_the_shape(self):
        files = list((ROOT / "docs" / "results" / "runs").glob("*.json.gz"))
        assert files
        for file in files[:20]:
            parse(RunResult, json.loads(gzip.decompress(file.read_bytes())))

    @pytest.mark.parametrize("content", ["[" * 100_000, "[]", "5", "null", '{"a": ', "\udcff", '{"settings": 5}'])
    def test_no_results_at_all(self, tmp_path, content):
        (tmp_path / "results.json").write_text(content, errors="surrogateescape")
        assert f"got {tmp_path}/results.json, which cannot be read" in command("report", tmp_path)

    @pytest.mark.parametrize(
        ("name", "content", "field"),
        [
            ("environment.json", '{"threads": "2"}', "threads: got '2'"),
            ("environment.json", '{"threads": 0}', "threads: got 0"),
            ("environment.json", '{"layout": "sideways"}', "layout: got 'sideways'"),
            ("environment.json", '{"seconds": {"task-00": 5}}', "seconds.task-00: got 5"),
            ("environment.json", "[]", "the whole file: got []"),
            ("analysis.json", '{"format": 2, "tasks": {}}', "tasks: got {}"),
            ("settings.json", '{"dataset": 5}', "dataset: got 5"),
            ("data.json", "[1]", "the whole file: got [1]"),
            ("redraw.json", '{"TS": 5}', "TS: got 5"),
            ("task-00/results.json", '{"calibrators": []}', "calibrators: got []"),
            ("task-00/analysis.json", '{"task": 0, "epsilon": 5}', "epsilon: got 5"),
        ],
    )
    def test_other_files_count_as_damaged(self, tmp_path, name, content, field):
        """So a run computes them anew, as it does where a checksum does not match."""
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
        with pytest.warns(DamagedFileWarning, match=re.escape(str(tmp_path / name))):
            assert RunFolder(tmp_path).read(name, kind_of(name)) is None
        with pytest.raises(Damaged) as error:
            parse(kind_of(name), json.loads(content))
        assert field in " ".join(part for part in (str(error.value), _all(name, content)))

    @pytest.mark.training
    def test_a_run_goes_on_whatever_its_files_say(self, tmp_path, monkeypatch):
        monkeypatch.setattr("tcil.experiments.reporting.show.present", lambda run, console, **more: None)
        command("run", "--out", tmp_path, *QUICK, code=ExitCode.DONE)
        (folder,) = tmp_path.iterdir()
        names = ["results.json", "environment.json", "task-00/results.json", "task-01/results.json", "status.json"]
        before = {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
        for content in ("[]", '{"tasks": 5, "calibrators": 5, "threads": "x", "seconds": []}'):
            for name in names:
                (folder / name).write_text(content)
            said = command("run", "--out", tmp_path, *QUICK, code=ExitCode.DONE)
            assert "task-00/results.json is damaged" in said
            for name in ("results.json", "task-00/results.json", "task-01/results.json"):
                assert (folder / name).read_bytes() == before[name]


def _all(name, content):
    """Every error of a record, as pydantic has them."""
    from pydantic import ValidationError

    try:
        kind_of(name).model_validate(json.loads(content))
    except ValidationError as error:
        fields = [(".".join(map(str, e["loc"])) or "the whole file", e["input"]) for e in error.errors()]
        return "; ".join(f"{field}: got {given!r}" for field, given in fields)
    return ""
