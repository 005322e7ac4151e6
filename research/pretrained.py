"""The measured tables of docs/pretrained.md: calibrators on top of a pre-trained backbone, by what is trained.

    python -m research.pretrained --measure RUN --data DIR    # fit all calibrators on a run, and keep their ECE
    python -m research.pretrained --keep RUN                  # or take over those of a run with all calibrators
    python -m research.pretrained --pixels RUN --data DIR     # perturb pixels instead of features, on one run
    python -m research.pretrained --probe RUNS --data DIR     # learning rates of the cosine head, by accuracy
    python -m research.pretrained                             # write the tables into docs/pretrained.md

The runs are those of `tcil run --preset cifar100-pretrained`; docs/pretrained.md has their commands. The last command
reads docs/results/pretrained/ alone: nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from research import ROOT
from tcil.foundation.files import make_folder, replace_file

if TYPE_CHECKING:
    from tcil.experiments.runs.store import StoredRun

PAGE = ROOT / "docs/pretrained.md"
KEPT = ROOT / "docs/results/pretrained"
PIXELS = KEPT / "pixels.json"
PROBE = KEPT / "probe.json"
LAST = ROOT / "docs/results/pretrained-last.json"  # the run with the last block trained
BEGIN, END = "<!-- measured: python -m research.pretrained -->\n", "<!-- end -->\n"

# Regimes in the order of the tables: what tells their settings.
TASKS = 10
REGIMES = {
    "ER, linear": ("er", ""),
    "ER, cosine": ("er", "head=cosine"),
    "NCM": ("ncm", ""),
    "RanPAC": ("ranpac", ""),
}
# Calibrators in the order of the tables, with their titles and what each needs beside the network.
CALIBRATORS = {
    "vanilla": ("Vanilla", "nothing"),
    "first-task-ts": ("First-task TS", "nothing later"),
    "ts": ("TS", "new validation"),
    "ets": ("ETS", "new validation"),
    "irm": ("IRM", "new validation"),
    "perturb-ts": ("PerturbTS", "new validation"),
    "statistics-ts": ("Statistics TS", "new validation, class statistics"),
    "exemplar-ts": ("Exemplar TS", "exemplars"),
    "t-cil": ("T-CIL", "new validation, exemplars, gradients"),
    "pact": ("PACT", "new validation, exemplars, gradients"),
    "pact-r": ("PACT-R", "as PACT, old held-out data"),
    "reserve-ts": ("Reserve TS", "new validation, old held-out data"),
    "reserve-group-ts": ("Reserve group TS", "new validation, old held-out data"),
    "optimal-ts": ("Optimal TS", "the test set"),
}

RATES = (0.02, 0.05, 0.1, 0.2, 0.5)  # of the cosine head, that the probe compares
PROBED, JUDGED, SPLITS = 12_000, 4_000, 2  # training images that a probe learns, those that judge it; how often

CHOSEN_ON = 1  # the seed of ER after which the spread of Statistics TS was introduced
SLOW = ("irm", "perturb-ts")  # taken from the run's own results, where it was run with all calibrators


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help="a run folder: fit all calibrators on its finished tasks")
    parser.add_argument("--keep", type=Path, help="a run folder with all rows: take them over as they are")
    parser.add_argument("--pixels", type=Path, help="a finished run folder: perturb pixels through the backbone")
    parser.add_argument("--probe", type=Path, help="the folder of runs: compare learning rates of the cosine head")
    parser.add_argument("--tasks", default="5,10", help="after which tasks --pixels measures, counted from 1")
    parser.add_argument("--exemplars", type=int, default=2000, help="how many of them --pixels perturbs at most")
    parser.add_argument("--data", type=Path, help="the folder that holds the images")
    given = parser.parse_args()
    if given.measure is not None:
        measure(given.measure, given.data)
    elif given.keep is not None:
        keep(given.keep)
    elif given.pixels is not None:
        measure_pixels(given.pixels, given.data, [int(part) - 1 for part in given.tasks.split(",")], given.exemplars)
    elif given.probe is not None:
        probe(given.probe, given.data)
    else:
        table = "\n".join(lines()) + "\n"
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        _, after = rest.split(END)
        replace_file(PAGE, f"{before}{BEGIN}\n{table}\n{END}{after}".encode())
        print(table)


def measure(folder: Path, data: Path | None) -> None:
    """Fit every calibrator on each finished task of a run, and keep a few metrics: quicker than all of 'tcil run'."""
    import tcil
    from tcil.experiments.runs.entries import NotApplicable, entry_of
    from tcil.experiments.runs.opening import open_run

    run, done = open_run(folder, data=data, tell=print), list[dict[str, Any]]()
    stored = run.store.read_results()
    history: dict[str, Any] = {}
    for task, memory, learner in run.walk():
        finished, rows = run.finished(task, memory, learner, {}), dict[str, Any]()
        if stored is not None and task.index < len(stored.tasks):  # what 'tcil run' itself has computed
            found = stored.tasks[task.index].calibrators
            rows = {name: _kept(found[name]) for name in SLOW if name in found and found[name].ece is not None}
        for name in [name for name in CALIBRATORS if name not in SLOW]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", tcil.CalibrationWarning)
                try:
                    fitted = entry_of(name).fit(replace(finished, remembered=history.get(name)))
                    probs = finished.test_logits.double().softmax(1) if fitted is None else None
                    probs = fitted.predict_proba(finished.test_logits) if probs is None else probs
                except (NotApplicable, tcil.NotReachableError):
                    continue
            if fitted is not None and fitted.history_ is not None:
                history[name] = fitted.history_
            groups = tcil.metrics.predicted_groups(probs, finished.current)
            ece = tcil.metrics.expected_calibration_error(probs, finished.test_columns, groups=groups)
            rows[name] = {
                "accuracy": _rounded(tcil.metrics.accuracy(probs, finished.test_columns)),
                "ece": _rounded(ece),
                "ece_predicted_old": _rounded(ece.by_group.get("old")),
                "ece_predicted_new": _rounded(ece.by_group.get("new")),
                "temperature": _rounded(getattr(fitted, "temperature_", None)),
                "bias": _rounded(getattr(fitted, "bias_", None)),
                "spread": _rounded(getattr(getattr(fitted, "result_", None), "spread", None)),
            }
        done.append(rows)
        print(folder.name, task.index + 1, {name: round(100 * row["ece"], 2) for name, row in rows.items()}, flush=True)
        make_folder(KEPT)
        text = json.dumps({"settings": run.settings.model_dump(mode="json"), "tasks": done}, indent=1, sort_keys=True)
        replace_file(KEPT / f"{folder.name}.json", f"{text}\n".encode())
        if stored is not None and len(done) == len(stored.tasks):
            break


def keep(folder: Path) -> None:
    """Take over the rows that a finished run has stored; rows kept before that it does not have stay."""
    from tcil.experiments.reporting.collect import read_runs

    for run in read_runs([folder]):
        if "tune=last" in (run.settings.network or ""):
            keep_last(run)
            continue
        rows = [
            {name: _kept(row) for name, row in task.calibrators.items() if row.ece is not None} for task in run.tasks
        ]
        path = KEPT / f"{folder.name}.json"
        record = {"settings": run.settings.record(), "tasks": _joined(_read(path).get("tasks", []), rows)}
        make_folder(KEPT)
        replace_file(path, f"{json.dumps(record, indent=1, sort_keys=True)}\n".encode())
        print(f"kept {folder.name}: {len(rows)} tasks")


def _joined(kept: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a run beside those kept before, if the run was made again and is the same up to rounding."""
    if not kept:
        return list(rows)
    same = ("accuracy", "ece")
    for old, new in zip(kept, rows, strict=True):
        found = [[task["vanilla"][name] for name in same] for task in (old, new)]
        assert np.allclose(found[0], found[1], rtol=0, atol=0.002), f"another network: {found}"
    return [{**old, **new} for old, new in zip(kept, rows, strict=True)]


def keep_last(run: StoredRun) -> None:
    """Take over the rows of the run with the last block trained, in the form of its own file."""
    names = ("ece", "ece_predicted_old", "ece_predicted_new", "aece", "accuracy", "temperature", "noise_floor")
    tasks = [
        {
            "task": task.task,
            "calibrators": {
                name: {metric: getattr(row, metric) for metric in names}
                for name, row in sorted(task.calibrators.items())
                if row.ece is not None
            },
        }
        for task in run.tasks
    ]
    until = f" --tasks-until {len(tasks)}" if len(tasks) < TASKS else ""
    record = {
        "command": "tcil run --preset cifar100-pretrained --network pretrained:efficientnet_lite0,side=96,tune=last"
        f" --set epochs=3 --seeds 1 --no-full-data{until} --data DIR",
        "what": "metrics of every calibrator after each task, from the results.json of the run folder",
        "settings": run.settings.record(),
        "tasks": tasks,
    }
    replace_file(LAST, f"{json.dumps(record, indent=1)}\n".encode())
    print(f"kept the last block trained: {len(tasks)} tasks")


def _kept(row: Any) -> dict[str, float | None]:
    names = ("accuracy", "ece", "ece_predicted_old", "ece_predicted_new", "temperature")
    return {name: _rounded(getattr(row, name)) for name in names}


def _rounded(value: Any) -> float | None:
    return None if value is None else float(f"{float(value):.6g}")


def measure_pixels(folder: Path, data: Path | None, tasks: Sequence[int], most: int) -> None:
    """T-CIL and PACT (without a history) on pixels through the backbone, beside the same on cached features.

    Of the exemplars, at most so many are used, evenly over the classes.
    """
    import torch

    import tcil
    from tcil.experiments.runs.opening import open_run
    from tcil.incremental.networks import network_factory
    from tcil.incremental.pretrained.networks import PretrainedFactory, loaded

    run = open_run(folder, data=data, tell=print)
    factory: object = network_factory(run.settings.network)
    assert isinstance(factory, PretrainedFactory), run.settings.network
    backbone, columns = loaded(factory.backbone), run.stream.columns
    rows = _read(PIXELS).get("rows", {})
    for task, memory, learner in run.walk():
        if task.index not in tasks or str(task.index + 1) in rows:
            continue
        finished = run.finished(task, memory, learner, {})
        assert finished.memory is not None
        assert finished.valid is not None
        some = torch.arange(0, len(memory.rows), max(1, -(-len(memory.rows) // most)))
        kept = memory.rows[some]
        images = {
            "features": (learner.model, (finished.memory[0][some], finished.memory[1][some]), finished.valid),
            "pixels": (
                factory.whole(learner.model, run.dataset).eval(),
                (backbone.normalised(run.images.train.images[kept]), columns[kept]),
                (backbone.normalised(run.images.train.images[task.valid]), columns[task.valid]),
            ),
        }
        row: dict[str, Any] = {"exemplars": len(some)}
        for name, (model, exemplars, valid) in images.items():
            pact = tcil.PACT().fit(
                model, exemplars, valid, task.columns, classes=finished.seen, imbalance=finished.imbalance
            )
            result, probs = pact.result_, pact.predict_proba(finished.test_logits)
            ece = tcil.metrics.expected_calibration_error
            scaled = torch.softmax(finished.test_logits.double() / result.t_cil.temperature, dim=1)
            row[name] = {
                "t_cil_temperature": _rounded(result.t_cil.temperature),
                "t_cil_ece": _rounded(ece(scaled, finished.test_columns)),
                "magnitude": _rounded(result.t_cil.magnitude),
                "pact_temperature": _rounded(result.temperature),
                "pact_ece": _rounded(ece(probs, finished.test_columns)),
            }
            print(task.index + 1, name, row[name], flush=True)
        rows[str(task.index + 1)] = row
        make_folder(KEPT)
        text = json.dumps({"run": folder.name, "rows": rows}, indent=1, sort_keys=True)
        replace_file(PIXELS, f"{text}\n".encode())


def probe(runs: Path, data: Path | None) -> None:
    """Train the cosine head on some images of all classes at several rates; other training images judge it.

    Neither the test set nor a calibrator is involved. The schedule is that of the preset.
    """
    import torch

    from tcil.experiments.config.settings import build
    from tcil.incremental.data.datasets import load_dataset
    from tcil.incremental.networks import network_factory
    from tcil.incremental.pretrained.networks import PretrainedFactory
    from tcil.incremental.schedule import Schedule
    from tcil.incremental.training import OptimizerKind, make_optimizer

    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    settings = build({"preset": "cifar100-pretrained"})
    named: object = network_factory(f"{settings.network},head=cosine")
    assert isinstance(named, PretrainedFactory)
    factory, features = named.inputs(load_dataset(settings.dataset, data), runs / "features")
    x, y = features.train.images.float() / features.std[0], features.train.labels
    for rate, split in [(rate, split) for rate in RATES for split in range(SPLITS)]:
        generator = torch.Generator().manual_seed(split)
        order = torch.randperm(len(x), generator=generator)
        learned, judging = order[:PROBED], order[PROBED : PROBED + JUDGED]
        torch.manual_seed(split)
        model, kind = factory(len(y.unique())), OptimizerKind.parse(settings.optimizer, "optimizer")
        schedule = Schedule(settings.epochs, rate, tuple(settings.milestones), settings.weight_decay)
        optimizer = make_optimizer(kind, model.parameters(), rate, settings.weight_decay)
        for epoch in range(settings.epochs):
            batches = learned[torch.randperm(PROBED, generator=generator)].split(settings.batch_size)
            for step, rows in enumerate(batches):
                for group in optimizer.param_groups:
                    group["lr"] = schedule.rate(epoch + step / len(batches))
                optimizer.zero_grad(set_to_none=True)
                torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
        with torch.no_grad():
            correct = (model(x[judging]).argmax(dim=1) == y[judging]).double().mean()
        found.setdefault(f"{rate:g}", []).append(_rounded(correct) or 0.0)
        print(rate, split, f"{100 * float(correct):.2f}", flush=True)
    make_folder(KEPT)
    text = json.dumps({"learned": PROBED, "judged": JUDGED, "accuracy": found}, indent=1)
    replace_file(PROBE, f"{text}\n".encode())


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def studies() -> dict[str, list[dict[str, Any]]]:
    """The kept runs on CIFAR-100 of each regime, by seed; where none was measured to its end, the longest one."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(KEPT.glob("cifar100-*.json")):
        record = _read(path)
        settings = record["settings"]
        for title, (learner, option) in REGIMES.items():
            others = [other for other in ("head=cosine", "tune=last") if other != option]
            named = settings["learner"] == learner and option in settings["network"]
            if named and not any(other in settings["network"] for other in others):
                found.setdefault(title, []).append(record)
    told = {}
    for title in [title for title in REGIMES if title in found]:
        whole = [record for record in found[title] if len(record["tasks"]) == TASKS]
        some = whole or [max(found[title], key=lambda record: len(record["tasks"]))]
        name = title if whole else f"{title} (first {len(some[0]['tasks'])} tasks)"
        told[name] = sorted(some, key=lambda record: record["settings"]["seed"])
    return told


def lines() -> Iterator[str]:
    """All tables."""
    runs = studies()
    yield "| regime | seeds | accuracy, mean over ten tasks, % | accuracy after the last task, % |"
    yield "|---|---|---|---|"
    for title, some in runs.items():
        seeds = ", ".join(str(run["settings"]["seed"]) for run in some)
        means = _values(some, "vanilla", "accuracy", slice(None))
        last = _values(some, "vanilla", "accuracy", slice(9, None))
        yield f"| {title} | {seeds} | {_text(means)} | {_text(last)} |"
    for heading, tasks in (
        ("ECE, mean over tasks 2 to 10, in %", slice(1, None)),
        ("ECE after the last task, in %", slice(9, None)),
    ):
        yield ""
        yield f"**{heading}:**"
        yield ""
        yield f"| calibrator | needs | {' | '.join(runs)} |"
        yield f"|---|---|{'---|' * len(runs)}"
        for name, (title, needs) in CALIBRATORS.items():
            cells = [_cell(some, name, tasks) for some in runs.values()]
            yield f"| {title} | {needs} | {' | '.join(cells)} |"
    yield from _seed_lines(runs.get("ER, linear", []))
    yield from _tuned_lines(runs.get("ER, linear", []))
    yield from _pixel_lines()
    yield from _smoke_lines()


def _seed_lines(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """ER by seed: the rule of Statistics TS was chosen on one of them, so that only the others judge it."""
    if not any(run["settings"]["seed"] != CHOSEN_ON for run in runs):
        return
    seeds = [run["settings"]["seed"] for run in runs]
    titles = [f"seed {seed}" + (" (Statistics TS chosen on it)" if seed == CHOSEN_ON else "") for seed in seeds]
    yield ""
    yield "**ER, linear, by seed: ECE, mean over tasks 2 to 10, and after the last task, in %:**"
    yield ""
    yield f"| calibrator | {' | '.join(titles)} |"
    yield f"|---|{'---|' * len(runs)}"
    for name in ("statistics-ts", "pact", "optimal-ts"):
        both = (slice(1, None), slice(9, None))
        cells = ["; ".join(_text(_values([run], name, "ece", tasks)) for tasks in both) for run in runs]
        yield f"| {CALIBRATORS[name][0]} | {' | '.join(cells)} |"


def _tuned_lines(frozen: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The last block trained, beside the same seed with all of the backbone frozen, over the tasks that were run."""
    record = _read(LAST)
    beside = [run for run in frozen if record and run["settings"]["seed"] == record["settings"]["seed"]]
    if not beside:
        return
    tuned = {"tasks": [task["calibrators"] for task in record["tasks"]]}
    tasks = slice(1, (n := len(tuned["tasks"])))
    yield ""
    yield f"**Last block trained, three epochs per task, ER, seed 1: mean over tasks 2 to {n}, in %:**"
    yield ""
    yield "| row | last block trained | where it predicts an old class | a new class | head alone |"
    yield "|---|---|---|---|---|"
    cells = [_text(_values([run], "vanilla", "accuracy", tasks)) for run in (tuned, beside[0])]
    yield f"| accuracy | {cells[0]} | | | {cells[1]} |"
    for name, (title, _) in CALIBRATORS.items():
        metrics = ("ece", "ece_predicted_old", "ece_predicted_new")
        own = [_text(_values([tuned], name, metric, tasks)) for metric in metrics]
        if own[0] != "n/a":
            yield f"| ECE, {title} | {' | '.join(own)} | {_text(_values([beside[0]], name, 'ece', tasks))} |"


def _pixel_lines() -> Iterator[str]:
    record = _read(PIXELS)
    if not record:
        return
    yield ""
    yield "**What is perturbed, ER with a linear head, seed 1 (PACT without a history):**"
    yield ""
    yield "| after task | exemplars | perturbed | magnitude | T-CIL: T | ECE, % | PACT: T | ECE, % |"
    yield "|---|---|---|---|---|---|---|---|"
    for task, row in sorted(record["rows"].items(), key=lambda item: int(item[0])):
        for name in ("features", "pixels"):
            one = row[name]
            figures = (
                f"{one['magnitude']:.4f} | {one['t_cil_temperature']:.3f} | {100 * one['t_cil_ece']:.2f}"
                f" | {one['pact_temperature']:.3f} | {100 * one['pact_ece']:.2f}"
            )
            yield f"| {task} | {row['exemplars']} | {name} | {figures} |"


def _smoke_lines() -> Iterator[str]:
    found = [_read(path) for path in sorted(KEPT.glob("tiny-imagenet-*.json"))]
    if not found:
        return
    yield ""
    yield "**Smoke test, 20 classes of Tiny-ImageNet, which the backbone has seen (five tasks, one seed):**"
    yield ""
    yield "| learner | accuracy, % | ECE of Vanilla, % | TS | Statistics TS | T-CIL | PACT | Optimal TS |"
    yield "|---|---|---|---|---|---|---|---|"
    for record in found:
        names = ("vanilla", "ts", "statistics-ts", "t-cil", "pact", "optimal-ts")
        cells = [_text(_values([record], name, "ece", slice(1, None))) for name in names]
        accuracy = _text(_values([record], "vanilla", "accuracy", slice(None)))
        yield f"| {record['settings']['learner'].upper()} | {accuracy} | {' | '.join(cells)} |"


def _values(runs: Sequence[dict[str, Any]], name: str, metric: str, tasks: slice) -> list[float]:
    """One number for each run, in percent: the mean over tasks; none for a run that lacks one of them."""
    values = []
    for run in runs:
        own = [task.get(name, {}).get(metric) for task in run["tasks"][tasks]]
        if own and all(value is not None for value in own):
            values.append(100 * float(np.mean(own)))
    return values if name in SLOW or len(values) == len(runs) else []


def _cell(runs: Sequence[dict[str, Any]], name: str, tasks: slice) -> str:
    """The mean ECE of some runs, and of which seeds it is, where it is not of all."""
    values = _values(runs, name, "ece", tasks)
    seeds = [str(run["settings"]["seed"]) for run in runs if _values([run], name, "ece", tasks)]
    return _text(values) + (f" (seed {', '.join(seeds)})" if values and len(values) < len(runs) else "")


def _text(values: Sequence[float]) -> str:
    if not values:
        return "n/a"
    return f"{np.mean(values):.2f}" + (f" ± {np.std(values):.2f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
