"""Every variant on the way to PACT, on finished runs with their networks: docs/beyond.md.

    python -m research.beyond measure RUN... --data DIR      # RUN/: one JSON each under docs/results/beyond/
    python -m research.beyond measure RUN... --data DIR --pact    # only PACT, where the rest is stored
    python -m research.beyond constants                      # PACT's constants, from the development runs' JSON
    python -m research.beyond page                           # the tables of docs/beyond.md, from all JSON files

A variant turns what is known after a task into a confidence for each test image; the test labels serve the oracles and
the scores alone. All scores are ECE in percent (10 bins): pooled, and the mean of those of the samples predicted as old
and as new classes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from scipy.optimize import minimize
from torch import Tensor

import tcil
from research import ROOT
from tcil.calibration.calibrators.maps import PriorAdjustedMap
from tcil.calibration.calibrators.pact import PACTFilter
from tcil.calibration.calibrators.pact import evidence as pact
from tcil.calibration.calibrators.tcil import TCILEvidence
from tcil.calibration.inputs.classifier import Classifier
from tcil.calibration.perturbation import DirectionPolicy
from tcil.calibration.perturbed_exemplars import PerturbedExemplars
from tcil.calibration.temperature import solve_temperature
from tcil.experiments.runs.analysis import exemplars_of
from tcil.experiments.runs.entries import FinishedTask
from tcil.experiments.runs.opening import open_run
from tcil.experiments.runs.run import Run
from tcil.foundation.files import replace_file
from tcil.incremental.data.images import Pixels

STORED = ROOT / "docs/results/beyond"
KEPT = (
    "dataset", "learner", "seed", "memory", "validation", "validation_pool", "reserve", "class_order_seed",
    "validation_seed",
)  # fmt: skip


@dataclass(eq=False)
class Known:
    """What a variant may use after a task, and the test logits that it gives confidences to."""

    task: FinishedTask
    evidence: TCILEvidence
    surrogates: dict[str, tuple[Tensor, Tensor]]  # logits and columns of all exemplars, changed in some way
    steps: dict[float, tuple[Tensor, Tensor]]  # the same, pushed as T-CIL does, by magnitude
    memory: dict[str, Any] = field(default_factory=dict)  # of the variant, from task to task

    @property
    def old(self) -> int:
        return self.task.new_columns.start

    @property
    def log_imbalance(self) -> float:
        return math.log(self.task.imbalance or 1.0)

    @property
    def valid(self) -> tuple[Tensor, Tensor]:
        return self.evidence.valid

    def old_part(self, surrogate: str) -> tuple[Tensor, Tensor]:
        logits, columns = self.surrogates[surrogate]
        rows = columns < self.old
        return logits[rows], columns[rows]


Variant = Callable[[Known], Tensor]  # log-probabilities of the test set


def scaled(known: Known, temperature: float | Tensor) -> Tensor:
    return torch.log_softmax(known.task.test_logits.double() / temperature, dim=1)


def adjusted(known: Known, log_temperature: float, bias: float, keep: bool = True, contrast: float = 0.0) -> Tensor:
    """PACT's map; log T of new classes is larger by the contrast."""
    t, b, new = torch.tensor(
        [math.exp(log_temperature), bias, math.exp(log_temperature + contrast)], dtype=torch.float64
    )
    result: Tensor = PriorAdjustedMap(t, b, known.evidence.is_new, torch.tensor(keep), new)(known.task.test_logits)
    return result


def fit_on(*parts: tuple[Tensor, Tensor]) -> float:
    return solve_temperature(torch.cat([z for z, _ in parts]), torch.cat([y for _, y in parts])).temperature


def within(known: Known) -> float:
    logits, columns = known.valid
    found = pact.temperature_with_error(logits[:, known.old :], columns - known.old)
    return found[0] if found else math.log(fit_on(known.valid))


# the variants -----------------------------------------------------------------------------------------------------


def one_temperature(surrogate: str) -> Variant:
    """The validation set for the new classes and a surrogate for the old ones, under one temperature."""

    def variant(known: Known) -> Tensor:
        return scaled(known, fit_on(known.valid, known.old_part(surrogate)) if known.old else fit_on(known.valid))

    return variant


def mixture(known: Known) -> Tensor:
    """Old exemplars toward the nearest class with probability 1 - 1/imbalance, else the farthest; new ones reversed."""
    if not known.old:
        return scaled(known, known.evidence.result.temperature)
    share = 1 - math.exp(-known.log_imbalance)
    near, columns = known.surrogates["near"]
    far, _ = known.surrogates["far"]
    draw = torch.rand(len(columns), generator=torch.Generator().manual_seed(0)) < share
    toward_near = torch.where(columns < known.old, draw, ~draw)
    return scaled(known, fit_on((torch.where(toward_near[:, None], near, far), columns)))


def matched_accuracy(known: Known) -> Tensor:
    """The magnitude at which new exemplars are right as often as validation images, instead of equally warm."""
    logits, columns = known.valid
    wanted = float((logits.argmax(1) == columns).double().mean())
    magnitudes = sorted(known.steps)
    found = magnitudes[-1]
    for magnitude in magnitudes:
        pushed, own = known.steps[magnitude]
        new = own >= known.old
        if float((pushed[new].argmax(1) == own[new]).double().mean()) <= wanted:
            found = magnitude
            break
    return scaled(known, fit_on(known.steps[found]))


def remembered(known: Known) -> Tensor:
    """T-CIL's temperature, averaged with those of earlier tasks (geometric mean, the newest counting half)."""
    now = math.log(known.evidence.result.temperature)
    before = known.memory.get("log_t", now)
    known.memory["log_t"] = 0.5 * now + 0.5 * before
    return scaled(known, math.exp(known.memory["log_t"]))


def group_temperatures(known: Known) -> Tensor:
    """One temperature per predicted group, on T-CIL's own perturbed exemplars."""
    pushed = known.evidence.pushed
    if pushed is None:
        return scaled(known, 1.0)
    scaling = tcil.GroupTemperatureScaling().fit(*pushed, new_classes=known.task.new_columns, classes=known.task.seen)
    result: Tensor = scaling.transform(known.task.test_logits)
    return result


def full_imbalance(known: Known) -> Tensor:
    """The whole log(imbalance) as bias, the temperature of the new classes among themselves: no perturbation at all."""
    return adjusted(known, within(known), known.log_imbalance if known.old else 0.0)


def label_shift_only(known: Known) -> Tensor:
    """The bias by the label-shift identity alone, at the temperature of the new classes."""
    log_t = within(known)
    found = pact.label_shift(*known.valid, known.evidence.is_new, log_t) if known.old else None
    return adjusted(known, log_t, found[0] if found else 0.0)


def surrogate_only(surrogate: str) -> Variant:
    """Temperature and bias fitted on the validation set and a surrogate of the old classes."""

    def variant(known: Known) -> Tensor:
        found = pact.joint_fit(known.valid, known.old_part(surrogate), known.evidence.is_new) if known.old else None
        return adjusted(known, *(found[:2] if found else (within(known), 0.0)))

    return variant


def tracked(history: bool = True, without: str = "", keep: bool = True) -> Variant:
    """PACT, or PACT without one of its pieces."""

    def variant(known: Known) -> Tensor:
        memo = known.memory.get("pact") if history else None
        log_imbalance = known.log_imbalance if known.old else None
        state = PACTFilter.of(memo, log_imbalance, known.evidence.result.target, spread=known.evidence.spread)
        pieces = {"surrogate": state.surrogate, "new classes": state.new_classes, "label shift": state.label_shift}
        for name, take in pieces.items():
            if name != without or not known.old:
                take(known.evidence)
        known.memory["pact"] = state.memo() if state.informed else None
        if not state.informed:
            return adjusted(known, 0.0, 0.0, keep)
        return adjusted(known, state.log_t.mean, state.bias.mean if state.bias else 0.0, keep)

    return variant


def oracle(known: Known, contrast: float = 0.0) -> tuple[float, float]:
    """log T and bias that fit the correctness of the test predictions best, where the contrast is as given."""
    logits, labels = known.task.test_logits.double(), known.task.test_columns
    top = logits.argmax(1)
    logits, _ = pact.evened((logits, labels), known.evidence.is_new, contrast, temperature=2.0)
    right, is_old = (top == labels).double(), (~known.evidence.is_new).double()

    def loss(point: np.ndarray) -> float:
        p = torch.softmax(logits * math.exp(-point[0]) + point[1] * is_old, dim=1).gather(1, top[:, None]).squeeze(1)
        p = p.clamp(1e-6, 1 - 1e-6)
        return -float((right * p.log() + (1 - right) * (1 - p).log()).mean())

    found = minimize(loss, [0.7, 0.5], method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-6}).x
    return float(found[0]), float(found[1])


def optimal_groups(known: Known) -> Tensor:
    task = known.task
    scaling = tcil.GroupTemperatureScaling().fit(task.test_logits, task.test_columns, new_classes=task.new_columns)
    result: Tensor = scaling.transform(task.test_logits)
    return result


VARIANTS: dict[str, tuple[str, Variant]] = {
    "Vanilla": ("", lambda known: scaled(known, 1.0)),
    "TS": ("", lambda known: scaled(known, fit_on(known.valid))),
    "T-CIL": ("", lambda known: scaled(known, known.evidence.result.temperature)),
    "Optimal TS": ("oracle", lambda known: scaled(known, fit_on((known.task.test_logits, known.task.test_columns)))),
    "Optimal group TS": ("oracle", optimal_groups),
    "Optimal T and bias": ("oracle", lambda known: adjusted(known, *oracle(known))),
    "direction by imbalance, same magnitude": ("one temperature", mixture),
    "magnitude by accuracy, five steps": ("one temperature", matched_accuracy),
    "remembered temperature": ("one temperature", remembered),
    "valid + pushed old": ("one temperature", one_temperature("near")),
    "valid + augmented old": ("one temperature", one_temperature("augmented")),
    "valid + mixed old": ("one temperature", one_temperature("mixed")),
    "valid + feature noise": ("one temperature", one_temperature("feature noise")),
    "group T on pushed": ("two temperatures", group_temperatures),
    "whole imbalance": ("temperature and bias", full_imbalance),
    "label shift": ("temperature and bias", label_shift_only),
    "pushed to nearest": ("temperature and bias", surrogate_only("near")),
    "pushed to farthest": ("temperature and bias", surrogate_only("far")),
    "augmented": ("temperature and bias", surrogate_only("augmented")),
    "mixed": ("temperature and bias", surrogate_only("mixed")),
    "feature noise": ("temperature and bias", surrogate_only("feature noise")),
    "PACT without history": ("PACT", tracked(history=False)),
    "PACT without new-class T": ("PACT", tracked(without="new classes")),
    "PACT without surrogate": ("PACT", tracked(without="surrogate")),
    "PACT without label shift": ("PACT", tracked(without="label shift")),
    "PACT": ("PACT", tracked()),
    "PACT, predictions too": ("PACT", tracked(keep=False)),
}


# measuring --------------------------------------------------------------------------------------------------------


def surrogates(run: Run, task: FinishedTask, rows: Tensor, magnitude: float) -> dict[str, tuple[Tensor, Tensor]]:
    """Exemplars changed in several ways, as stand-ins for unseen images."""
    assert task.model is not None
    assert task.memory is not None
    images, columns = task.memory
    generator = torch.Generator().manual_seed(0)
    found = {}
    with exemplars_of(task) as exemplars:
        for name, policy in {"near": DirectionPolicy.CLOSEST, "far": DirectionPolicy.FARTHEST}.items():
            pushed = PerturbedExemplars(exemplars, policy)
            found[name] = pushed.logits(magnitude)[pushed.rows.argsort()], columns
    shifted = Pixels(replace(run.dataset, padding=4)).augmented(run.dataset.train, rows, generator)
    partner = torch.empty_like(columns)
    for column in columns.unique():
        own = (columns == column).nonzero().squeeze(1)
        partner[own] = own[torch.randint(len(own), (len(own),), generator=generator)]
    mixed = (images + images[partner]) / 2
    with Classifier(task.model) as classifier, torch.no_grad():

        def through(inputs: Tensor) -> tuple[Tensor, Tensor]:
            parts = [classifier.logits_and_features(classifier.place(part)) for part in inputs.split(200)]
            return torch.cat([z for z, _ in parts])[:, : len(task.seen)], torch.cat([f for _, f in parts])

        found["augmented"], found["mixed"] = (through(shifted)[0], columns), (through(mixed)[0], columns)
        # Residuals of validation images about their class's exemplar mean, carried over to the old classes' means.
        logits, features = through(images)
        assert task.valid is not None
        valid_features = through(task.valid[0])[1]
        means = torch.stack([features[columns == c].mean(0) for c in task.seen])
        residuals = valid_features - means[task.valid[1]]
        drawn = residuals[torch.randint(len(residuals), (len(columns),), generator=generator)]
        # The head is linear: least squares on all features at hand gives it back, whatever the network calls it.
        known = torch.cat([features, valid_features]).double()
        outputs = torch.cat([logits, through(task.valid[0])[0]]).double()
        design = torch.cat([known, torch.ones(len(known), 1).double()], dim=1)
        head = torch.linalg.lstsq(design, outputs).solution
        noisy = torch.cat([(means[columns] + drawn).double(), torch.ones(len(columns), 1).double()], dim=1)
        found["feature noise"] = (noisy @ head).float(), columns
    return found


def scores(log_probs: Tensor, known: Known) -> dict[str, float | None]:
    probs, labels = log_probs.exp(), known.task.test_columns
    groups = tcil.metrics.predicted_groups(probs, known.task.new_columns)
    ece = tcil.metrics.expected_calibration_error(probs, labels, groups=groups)
    by_group = [ece.by_group.get(name) for name in ("old", "new")]
    present = [value for value in by_group if value is not None]
    return {
        "pooled": round(100 * float(ece), 4),
        "group": round(100 * float(np.mean(present)), 4),
        "accuracy": round(100 * float(tcil.metrics.accuracy(probs, labels)), 4),
    }


def measure(folder: Path, data: Path | None, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """All variants on all tasks of a finished run; or PACT's own, beside the others of a record made `before`."""
    chosen = [name for name, (family, _) in VARIANTS.items() if before is None or family == "PACT"]
    run = open_run(folder, data=data, tell=print)
    settings = run.settings
    memories: dict[str, dict[str, Any]] = {name: {} for name in chosen}
    rows: dict[str, list[Any]] = {name: [] for name in chosen}
    states = []
    with run.threads():
        for task, memory, learner in run.walk():
            finished = run.finished(task, memory, learner, {})
            assert finished.model is not None
            started = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", tcil.CalibrationWarning)
                evidence = tcil.TCIL().evidence(
                    finished.model, finished.memory, finished.valid, finished.new_columns, classes=finished.seen
                )
            t_cil_seconds = time.process_time() - started
            changed, steps = {}, {}
            if before is None:
                magnitude = evidence.result.magnitude
                changed = surrogates(run, finished, memory.rows, magnitude)
                with exemplars_of(finished) as exemplars:
                    pushed = PerturbedExemplars(exemplars, keep=True)
                    for size in (0.25, 0.5, 0.75, 1.0, 1.5):
                        steps[size * magnitude] = pushed.logits(size * magnitude), pushed.columns
            for name in chosen:
                known = Known(finished, evidence, changed, steps, memories[name])
                started = time.process_time()
                log_probs = VARIANTS[name][1](known)
                seconds = time.process_time() - started
                rows[name].append(scores(log_probs, known))
                if name == "PACT":
                    states.append(pieces_and_truth(known) | {"seconds": [t_cil_seconds, seconds]})
    about = {key: getattr(settings, key) for key in KEPT}
    about |= {"tasks": len(run.stream), "classes": run.stream.seen(len(run.stream) - 1), "run": folder.name}
    kept = before["scores"] if before else {}
    return {"about": about, "scores": {name: rows.get(name) or kept[name] for name in VARIANTS}, "states": states}


def pieces_and_truth(known: Known) -> dict[str, Any]:
    """What each piece of PACT's evidence says after a task, its sampling error, and the oracle."""
    evidence = known.evidence
    truth = oracle(known) if known.old else (math.log(fit_on((known.task.test_logits, known.task.test_columns))), None)
    logits, columns = known.valid
    found: dict[str, Any] = {
        "oracle": truth,
        "new_classes": pact.temperature_with_error(logits[:, known.old :], columns - known.old),
    }
    if known.old:
        shift = pact.label_shift(logits, columns, evidence.is_new, truth[0])
        found |= {"log_imbalance": known.log_imbalance, "surrogate": pact.surrogate(evidence), "label_shift": shift}
    return found


def constants() -> None:
    """The rule, on the development runs: the root mean square error of each piece less its sampling error, the root
    mean square change of the oracle from task to task, and its spread beside that of a uniform one."""
    squares: dict[str, list[float]] = {}

    def add(name: str, error: float, known: float = 0.0) -> None:
        squares.setdefault(name, []).append(error**2 - known)

    for record in filter(is_development, stored()):
        before, own = None, []
        for state in record["states"]:
            log_t, bias = state["oracle"]
            imbalance = state.get("log_imbalance")
            if before is not None and imbalance is not None and before[2] is None:
                add("first_drift", log_t - before[0])
            if imbalance is not None:
                if state["new_classes"]:
                    value, error = state["new_classes"]
                    add("new_class_error", value - log_t, error**2)
                if state["surrogate"]:
                    t, t_error, b, b_error = state["surrogate"]
                    own.append((t - log_t, b - bias))
                    add("surrogate_temperature_error", t - log_t, t_error**2)
                    add("surrogate_bias_error", b - bias, b_error**2)
                if state["label_shift"]:
                    value, _, error = state["label_shift"]
                    add("label_shift_error", value - bias, error**2)
                add("bias_spread", bias - imbalance / 2, imbalance**2 / 12)
                if before is not None and before[2] is not None:
                    add("temperature_drift", log_t - before[0])
                    add("bias_drift", bias - before[1] - (imbalance - before[2]) / 2)
            before = log_t, bias, imbalance
        print(f"{record['about']['learner']:5} surrogate less oracle, mean: {np.mean(own, axis=0).round(2)}")
    for name, values in squares.items():
        print(f"{name} = {max(0.0, float(np.mean(values))) ** 0.5:.3f}    from {len(values)} values")


def stored() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(STORED.glob("*.json"))]


def is_development(record: dict[str, Any]) -> bool:
    """Seed 1 of the four learners on cifar100-mini as it is: the constants come from these."""
    return kind(record).startswith("development")


def is_untouched(record: dict[str, Any]) -> bool:
    """Run or measured after the method was fixed, and looked at only to report."""
    return not kind(record).startswith(("development", "looked at"))


def kind(record: dict[str, Any]) -> str:
    """The group of runs that a record is reported with."""
    about = record["about"]
    if about["dataset"] == "noisy-digits":
        return "looked at: noisy digits" if about["seed"] <= 3 else "noisy digits, other seeds"
    if about["dataset"] != "cifar100" or about["classes"] != 20:
        return f"{about['dataset']}, {about['classes']} classes, {about['tasks']} tasks"
    if about["class_order_seed"] is not None:
        return "other classes, other validation images"
    if about["reserve"]:
        return "looked at: a quarter of the memory held back"
    if about["tasks"] != 5:
        return f"{about['tasks']} tasks"
    pool = about.get("validation_pool", 200)  # the first records do not name it: it was the preset's
    if about["memory"] != 400 or about["validation"] != 100 or pool != 200:
        return f"memory {about['memory']}, validation {about['validation']}"
    return "development: seed 1" if about["seed"] == 1 else "looked at: seeds 2, 3"


# the page ---------------------------------------------------------------------------------------------------------


def difference(records: Sequence[dict[str, Any]], name: str, other: str, key: str) -> str:
    """The mean paired difference with its 95 % bootstrap interval; runs of one learner and seed are drawn together.

    Of fewer than six such groups, their range instead, in square brackets: a bootstrap of so few has no tails.
    """
    clusters: dict[tuple[Any, ...], list[float]] = {}
    for record in records:
        about = record["about"]
        own = mean_of(record, name, key) - min(mean_of(record, one, key) for one in other.split(" or "))
        clusters.setdefault((about["learner"], about["seed"], about["dataset"]), []).append(own)
    sums = np.array([[sum(values), len(values)] for values in clusters.values()])
    mean = f"{sums[:, 0].sum() / sums[:, 1].sum():+.2f}"
    if len(sums) < 6:
        own_means = sums[:, 0] / sums[:, 1]
        return mean if len(sums) == 1 else f"{mean} [{own_means.min():+.2f} to {own_means.max():+.2f}]"
    draws = np.random.default_rng(0).integers(len(sums), size=(10000, len(sums)))
    means = sums[draws].sum(axis=1)
    low, high = np.quantile(means[:, 0] / means[:, 1], [0.025, 0.975])
    return f"{mean} ({low:+.2f} to {high:+.2f})"


def mean_of(record: dict[str, Any], name: str, key: str) -> float:
    return float(np.mean([row[key] for row in record["scores"][name]]))


def page() -> None:
    """Tables by group of runs, the paired differences, and the table of all variants, into docs/beyond.md."""
    records = stored()
    development, untouched = list(filter(is_development, records)), list(filter(is_untouched, records))
    if not development or not untouched:
        raise SystemExit("docs/results/beyond/ holds no development runs, or no others: run 'measure' first")
    lines = [*_by_runs(records), *_against(untouched), *_every_variant(development, untouched)]
    path = ROOT / "docs/beyond.md"
    text = path.read_text()
    start, end = "<!-- tables: research/beyond.py page -->\n", "<!-- end of tables -->"
    before, rest = text.split(start)
    after = rest.split(end)[1]
    replace_file(path, (before + start + "\n" + "\n".join(lines) + "\n\n" + end + after).encode())
    print("\n".join(lines))


def _by_runs(records: Sequence[dict[str, Any]]) -> list[str]:
    names = ("Vanilla", "TS", "T-CIL", "PACT", "Optimal TS", "Optimal group TS")
    lines, learners = [], ["er", "eeil", "wa", "der"]
    for key, title in (("pooled", "Pooled ECE"), ("group", "ECE by predicted group (mean of old and new)")):
        lines += [f"**{title}, %**, mean over tasks and runs", "", "| runs | learner | n | " + " | ".join(names) + " |"]
        lines += ["|" + "---|" * (len(names) + 3)]
        for group in sorted(
            {kind(r) for r in records}, key=lambda g: (not g.startswith("development"), not g.startswith("looked"), g)
        ):
            for learner in learners:
                own = [r for r in records if kind(r) == group and r["about"]["learner"] == learner]
                if own:
                    cells = [f"{np.mean([mean_of(r, n, key) for r in own]):.2f}" for n in names]
                    lines.append(f"| {group} | {learner.upper()} | {len(own)} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines


def _against(untouched: Sequence[dict[str, Any]]) -> list[str]:
    """The goals, on runs that no choice was made on."""
    lines = [
        f"**PACT less the other, on the {len(untouched)} untouched runs**: mean (95 % interval; of fewer than six seeds"
        " [their range]), by learner",
        "",
        "| against | learner | n | pooled ECE | ECE by group |",
        "|---|---|---|---|---|",
    ]
    groups = {"all": list(untouched)}
    for record in untouched:
        groups.setdefault(record["about"]["learner"].upper(), []).append(record)
    for other in ("Optimal TS", "Optimal group TS", "T-CIL", "TS or T-CIL"):
        for learner, own in groups.items():
            cells = [difference(own, "PACT", other, key) for key in ("pooled", "group")]
            title = "the better of TS and T-CIL" if " or " in other else other
            lines.append(f"| {title} | {learner} | {len(own)} | " + " | ".join(cells) + " |")
    lines.append("")
    for learner, own in groups.items():
        ratio = np.mean([mean_of(r, "PACT", "group") for r in own]) / np.mean(
            [mean_of(r, "Optimal group TS", "group") for r in own]
        )
        stay, move = (np.mean([mean_of(r, n, "accuracy") for r in own]) for n in ("PACT", "PACT, predictions too"))
        lines.append(
            f"- {learner}: ECE by group {ratio:.2f} times that of two oracle temperatures (goal: at most 1.2); accuracy"
            f" {stay:.1f} %, and {move:.1f} % with `keep_predictions=False`."
        )
    cost = [1 + s["seconds"][1] / s["seconds"][0] for r in untouched for s in r["states"] if "seconds" in s]
    if cost:
        lines.append(
            f"- Cost of PACT, its confidences of the test set included / of the T-CIL inside, by processor time:"
            f" {np.median(cost):.2f} in the median of {len(cost)} fits, {max(cost):.2f} at most (goal: at most 2)."
        )
    return [*lines, ""]


def _every_variant(development: Sequence[dict[str, Any]], untouched: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"**Every variant**: on the development runs ({len(development)}), where choices were made, and on the"
        f" untouched ones ({len(untouched)}), with the difference to T-CIL there",
        "",
        "| family | variant | pooled, dev. | by group, dev. | pooled | less T-CIL | by group | less T-CIL |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (family, _) in VARIANTS.items():
        cells = [f"{np.mean([mean_of(r, name, key) for r in development]):.2f}" for key in ("pooled", "group")]
        for key in ("pooled", "group"):
            cells.append(f"{np.mean([mean_of(r, name, key) for r in untouched]):.2f}")
            cells.append("" if name == "T-CIL" else difference(untouched, name, "T-CIL", key))
        lines.append(f"| {family} | {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    to_measure = commands.add_parser("measure")
    to_measure.add_argument("runs", type=Path, nargs="+")
    to_measure.add_argument("--data", type=Path)
    to_measure.add_argument("--pact", action="store_true", help="measure PACT anew, keep the rest of the stored record")
    commands.add_parser("constants")
    commands.add_parser("page")
    given = parser.parse_args()
    if given.command == "measure":
        STORED.mkdir(parents=True, exist_ok=True)
        for folder in track(given.runs, description="runs"):
            path = STORED / f"{folder.name}.json"
            record = measure(folder, given.data, json.loads(path.read_text()) if given.pact else None)
            replace_file(path, (json.dumps(record, indent=None) + "\n").encode())
            print(folder.name, {n: round(mean_of(record, n, "pooled"), 2) for n in ("T-CIL", "PACT", "Optimal TS")})
    elif given.command == "constants":
        constants()
    else:
        page()


if __name__ == "__main__":
    main()
