"""T-CIL (Hwang, Kim and Whang, CVPR 2025): one temperature from adversarially perturbed exemplars."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from tcil.calibration import random_state, ranks
from tcil.calibration.arrays import (
    as_classes,
    check_own_unmasked,
    classes_and_columns,
    label_columns,
    pick_columns,
    whole_number,
)
from tcil.calibration.calibrators.base import SingleTemperature
from tcil.calibration.calibrators.inputs import missing_valid, new_class_mask, positive
from tcil.calibration.classifier import Classifier, UsedWeights
from tcil.calibration.errors import CalibrationWarning, invalid
from tcil.calibration.examples import MAX_BATCHES, Examples, ExampleStream, Unpack
from tcil.calibration.features import FeatureSpec
from tcil.calibration.input_scale import InputScale
from tcil.calibration.options import Verdict
from tcil.calibration.perturbation import (
    ClassMeans,
    DirectionPolicy,
    MagnitudeSearch,
    SearchMethod,
    SearchStep,
    TargetChooser,
    search_magnitude,
)
from tcil.calibration.prediction import stream_logits
from tcil.calibration.temperature import Solver, TemperatureFit, solve_temperature

GLANCE = 20  # new exemplars that tell whether a magnitude far from the root lies on the side it should


@dataclass(frozen=True)
class TCILResult:
    """What T-CIL found, step by step.

    `temperature` is what the logits are divided by. `magnitude` reproduces `target_temperature`, the temperature of
    the new task's validation set (`target`), on the perturbed new exemplars; `reachable` says whether it could.
    `memory` is the final fit on all perturbed exemplars, `bracket` the range of magnitudes that was searched and
    `trace` every step of the search. `verdicts` lists whatever was out of the ordinary.

    >>> import tcil
    >>> "trace" in tcil.TCILResult.__dataclass_fields__
    True
    """

    temperature: float
    magnitude: float
    target_temperature: float
    reachable: bool
    verdicts: tuple[Verdict, ...]
    trace: tuple[SearchStep, ...]
    bracket: tuple[float, float]
    target: TemperatureFit
    memory: TemperatureFit | None
    n_exemplars: int
    n_new_exemplars: int
    n_valid: int
    n_valid_ignored: int


@dataclass(frozen=True, eq=False)
class TCILEvidence:
    """What T-CIL learns from: logits over `classes`, and their columns.

    `valid` are the rows of new classes in the validation set; `pushed` all exemplars at the magnitude found, the new
    ones first (None where the validation set identifies no temperature). `model` is what was noted of the network,
    `scales` says in words which values the inputs have.

    >>> import tcil
    >>> list(tcil.TCILEvidence.__dataclass_fields__)
    ['result', 'classes', 'is_new', 'valid', 'pushed', 'model', 'scales']
    """

    result: TCILResult
    classes: tuple[int, ...]
    is_new: Tensor
    valid: tuple[Tensor, Tensor]
    pushed: tuple[Tensor, Tensor] | None
    model: dict[str, Any]
    scales: str = ""


@dataclass(eq=False, kw_only=True)
class TCIL(SingleTemperature):
    """T-CIL: calibrate old and new classes alike with validation data of the newest task only.

    1. The target temperature is that of the new task's validation set.
    2. Every exemplar gets a direction: down the input gradient of the cross-entropy toward another class; the nearest
       class mean for old classes, the farthest for new ones (`policy`).
    3. The magnitude is searched in [0, 1] to `tolerance`, so that the perturbed new exemplars have the target
       temperature; by `search`, "interpolation" or the paper's "bisection", to the same answer.
    4. The temperature of all exemplars, perturbed that far, is the answer.

    Options: `policy`, `tolerance`, `search`, `solver` ("exact", or "sgd" for the authors' schedule, which is too rough
    for interpolation and always bisected), `seed` (for the random policy and SGD), `batch_size`, `device` (default:
    where the model is).

    >>> import torch, tcil
    >>> _ = torch.manual_seed(0)
    >>> centres = 2 * torch.randn(4, 8)
    >>> def draw(labels):
    ...     return centres[labels] + torch.randn(len(labels), 8), labels
    >>> network = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    >>> memory = draw(torch.arange(40) % 4)
    >>> optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    >>> for _ in range(60):
    ...     optimizer.zero_grad()
    ...     torch.nn.functional.cross_entropy(network(memory[0]), memory[1]).backward()
    ...     optimizer.step()
    >>> valid = draw(2 + torch.arange(200) % 2)                              # classes 2 and 3 are the new task
    >>> calibrator = tcil.TCIL().fit(network, memory=memory, valid=valid, new_classes=[2, 3])
    >>> calibrator.result_.reachable, calibrator.temperature_ > 1, len(calibrator.result_.trace)
    (True, True, 7)
    >>> calibrated = calibrator.wrap(network)
    >>> calibrated(valid[0][:2]).shape
    torch.Size([2, 4])
    """

    policy: DirectionPolicy | str = DirectionPolicy.PAPER
    tolerance: float = 1e-3
    search: SearchMethod | str = SearchMethod.INTERPOLATION
    solver: Solver | str = Solver.EXACT
    seed: int = 0
    batch_size: int = 64
    device: str | torch.device | None = None
    result_type: ClassVar[type[Any]] = TCILResult

    def __post_init__(self) -> None:
        super().__post_init__()
        self.policy = DirectionPolicy.parse(self.policy, "policy")
        self.solver = Solver.parse(self.solver, "solver")
        self.search = SearchMethod.parse(self.search, "search")
        self.tolerance = positive(self.tolerance, "tolerance")
        if self.tolerance >= 1:
            raise invalid("tolerance", repr(self.tolerance), "less than 1, the width of the magnitude bracket")
        self.seed = whole_number(self.seed, "seed", 0)
        self.batch_size = whole_number(self.batch_size, "batch_size", 1)
        self.evidence_: TCILEvidence | None = None  # of the last fit; not stored by save

    def fit(
        self,
        model: nn.Module,
        memory: Examples,
        valid: Examples | None = None,
        new_classes: Iterable[Any] | None = None,
        *,
        classes: Iterable[Any] | None = None,
        columns: Iterable[Any] | None = None,
        features: FeatureSpec | None = None,
        unpack: Unpack | None = None,
        max_batches: int = MAX_BATCHES,
    ) -> Self:
        """Fit after a task: the trained model, the memory with exemplars of all classes, the new task's validation set.

        `memory` and `valid` are (inputs, labels) pairs of tensors or arrays, Datasets (anything with a length and
        examples by index) or DataLoaders (streamed), with inputs as the network takes them. `unpack` says where a batch
        has its inputs and labels: two keys of a dict, two positions in a tuple, or a function. A loader without a
        length is refused after `max_batches`. If one set is normalised and the other is not, or pixels are divided by
        255 in one only, the verdict is `input_scales_differ`; smaller differences, such as two ways to normalise, are
        not seen. All random states are left as they were.

        `classes[i]` is the label of logit column i (default: i itself, with K one more than the largest label in memory
        and new_classes). A wider head is cut to its first K columns, or to `columns`: where a fixed head has a column
        for every label, pass the labels seen so far as `columns`. `features` names the head or the feature layer where
        it cannot be found.
        """
        evidence = self.evidence(
            model, memory, valid, new_classes, classes=classes, columns=columns, features=features, unpack=unpack,
            max_batches=max_batches,
        )  # fmt: skip
        result = evidence.result
        self._fitted(self._map(result.temperature), evidence.classes, result, **evidence.model)
        self.evidence_ = evidence
        warn_of(result, "T-CIL", evidence.scales)
        return self

    def evidence(
        self,
        model: nn.Module,
        memory: Examples,
        valid: Examples | None = None,
        new_classes: Iterable[Any] | None = None,
        *,
        classes: Iterable[Any] | None = None,
        columns: Iterable[Any] | None = None,
        features: FeatureSpec | None = None,
        unpack: Unpack | None = None,
        max_batches: int = MAX_BATCHES,
    ) -> TCILEvidence:
        """What `fit` learns its temperature from, for methods that build on it; the arguments are those of `fit`."""
        if valid is None:
            raise missing_valid()
        if new_classes is None:
            raise invalid("new_classes", "None", "the labels of the newest task, such as range(90, 100)")
        new = as_classes(new_classes, "new_classes", ordered=False)
        names, places = classes_and_columns(classes, columns)
        with random_state.preserved(memory, valid):
            exemplars = ExampleStream(
                memory, "memory", batch_size=self.batch_size, unpack=unpack, max_batches=max_batches
            )
            validation = ExampleStream(
                valid, "valid", batch_size=self.batch_size, unpack=unpack, max_batches=max_batches
            )
            if exemplars.labels is not None:  # known without a pass, so refused before the model runs
                known = _check_coverage(exemplars.labels.unique(), names, new)
                if validation.labels is not None:
                    _check_valid(validation.labels, known, new)
            with Classifier(model, features=features, device=self.device) as classifier:
                survey = _survey(classifier, exemplars, names, places, new)
                logits, own, ignored, scale = _valid_logits(classifier, validation, survey)
                target = self._solve(logits, own)
                result, pushed = self._search(classifier, exemplars, survey, target, ignored)
        missing = set(survey.is_new.nonzero().squeeze(1).tolist()) - set(own.tolist())
        noted = [Verdict.OLD_ROWS_IN_VALID] * (ignored > 0)
        noted += [Verdict.CLASSES_NOT_IN_VALID] * bool(missing)
        noted += [Verdict.EXEMPLARS_AT_CHANCE] * survey.at_chance
        differ, scales = survey.compared(scale)
        noted += [Verdict.INPUT_SCALES_DIFFER] * differ
        noted += [Verdict.HALF_PRECISION_IMAGES] * (exemplars.half_precision or validation.half_precision)
        noted += [Verdict.SINGLE_EXEMPLAR] * bool((survey.counts == 1).any())
        seen = {
            "head_width": classifier.width,
            "columns": places,
            "source": classifier.source.storable(),
            "model_hash": UsedWeights.of(model, classifier.source.storable(), places or range(survey.n_classes)),
        }
        result = _with_verdicts(result, noted)
        return TCILEvidence(result, survey.classes, survey.is_new, (logits, own), pushed, seen, scales)

    def _solve(self, logits: Tensor, columns: Tensor) -> TemperatureFit:
        return solve_temperature(logits, columns, Solver(self.solver), self.seed)

    def _search(
        self,
        classifier: Classifier,
        exemplars: ExampleStream,
        survey: _Survey,
        target: TemperatureFit,
        ignored: int,
    ) -> tuple[TCILResult, tuple[Tensor, Tensor] | None]:
        """Lines 5 to 11: the magnitude from the new exemplars, then the temperature of all, and their logits."""
        choose = TargetChooser(DirectionPolicy(self.policy), survey.means, survey.is_new, self.seed)
        counts = (survey.n_exemplars, len(survey.new_columns), target.n_samples, ignored)
        if target.verdict is not Verdict.OK:
            end = 1.0 if target.verdict is Verdict.ANTI_INFORMATIVE else 0.0
            trace = (SearchStep(0.0, self._solve(survey.new_logits, survey.new_columns).limit),)
            verdicts = (Verdict.DEGENERATE_VALID,)
            result = TCILResult(1.0, end, target.temperature, False, verdicts, trace, (0.0, 1.0), target, None, *counts)
            return result, None

        def step_of(inputs: Tensor, columns: Tensor) -> Tensor:
            """The unit perturbation: against the gradient of CE toward the target class."""
            return -classifier.input_gradient(inputs, lambda f, masked: choose(f, columns, masked), survey.pick).sign()

        def pushed_logits(inputs: Tensor, steps: Tensor, magnitude: float) -> Tensor:
            with torch.no_grad():
                moved = classifier.place(inputs) + magnitude * steps
                return survey.pick(classifier.logits(moved)).cpu()

        together = ranks.current()

        def batches(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
            return zip(*(tensor.split(self.batch_size) for tensor in tensors), strict=True)

        new_inputs, new_columns = survey.new_inputs, survey.new_columns
        own, lengths = list[tuple[Tensor, Tensor]](), list[int]()  # this rank's batches; how long each of all is
        for number, (inputs, columns) in enumerate(batches(new_inputs, new_columns)):
            lengths.append(len(columns))
            if number == 0 or together.owns(number):
                own.append((inputs, step_of(inputs, columns)))
            else:
                choose.skip(columns)

        def new_logits_at(magnitude: float) -> Tensor:
            return together.gathered([pushed_logits(*pair, magnitude) for pair in own], lengths)

        few = slice(None, None, max(1, len(new_columns) // GLANCE))
        few_steps = torch.cat([steps for _, steps in own])[few] if together.size == 1 else None

        def glance(magnitude: float) -> TemperatureFit:
            if few_steps is None:  # the other ranks have most of the steps
                return self._solve(new_logits_at(magnitude)[few], new_columns[few])
            pairs = batches(new_inputs[few], few_steps)
            logits = torch.cat([pushed_logits(inputs, steps, magnitude) for inputs, steps in pairs])
            return self._solve(logits, new_columns[few])

        found: MagnitudeSearch = search_magnitude(
            lambda magnitude: self._solve(new_logits_at(magnitude), new_columns),
            self._solve(survey.new_logits, new_columns),
            target.limit,
            tolerance=self.tolerance,
            input_scale=survey.input_scale,
            method=SearchMethod.BISECTION if self.solver is Solver.SGD else SearchMethod(self.search),
            glance=glance,
        )
        logits, all_columns = [pushed_logits(*pair, found.magnitude) for pair in own], [new_columns]
        for inputs, labels in exemplars if survey.has_old else ():
            columns = label_columns(labels, survey.classes, "memory labels", survey.n_classes)
            old = ~survey.is_new[columns]
            if bool(old.any()):
                if together.owns(len(lengths)):
                    images = inputs[old.to(inputs.device)]
                    logits.append(pushed_logits(images, step_of(images, columns[old]), found.magnitude))
                else:
                    choose.skip(columns[old])
                lengths.append(int(old.sum()))
                all_columns.append(columns[old])
        pushed = together.gathered(logits, lengths), torch.cat(all_columns)
        fit = self._solve(*pushed)
        degenerate = () if fit.verdict is Verdict.OK else (Verdict.DEGENERATE_MEMORY,)
        result = TCILResult(
            fit.temperature,
            found.magnitude,
            target.temperature,
            found.reachable,
            (*found.verdicts, *degenerate),
            found.trace,
            found.bracket,
            target,
            fit,
            *counts,
        )
        return result, pushed


@dataclass(frozen=True)
class _Survey:
    """What one pass over the clean memory tells, with the new exemplars, the only images kept."""

    classes: tuple[int, ...]
    columns: tuple[int, ...] | None
    is_new: Tensor
    means: Tensor
    counts: Tensor
    new_inputs: Tensor
    new_columns: Tensor
    new_logits: Tensor
    input_scale: float
    accuracy: float
    new_scale: InputScale
    old_scale: InputScale

    def compared(self, valid: InputScale) -> tuple[bool, str]:
        """Whether memory and validation inputs are on different scales, and the values that tell."""
        new, old = (self.new_scale.differs_from(valid, same_classes=True),
                    self.old_scale.differs_from(valid, same_classes=False))  # fmt: skip
        memory = f"old classes in memory: {self.old_scale}" if old and not new else f"memory: {self.new_scale}"
        return new or old, f"{memory}; valid: {valid}"

    def pick(self, logits: Tensor) -> Tensor:
        """The logits of the classes seen, out of a head that may be wider."""
        return pick_columns(logits, self.n_classes, self.columns)

    @property
    def n_classes(self) -> int:
        return len(self.classes)

    @property
    def n_exemplars(self) -> int:
        return int(self.counts.sum())

    @property
    def at_chance(self) -> bool:
        """Whether the exemplars, on which the network was trained, are classified no better than by chance."""
        chance = 1 / self.n_classes
        return bool(self.accuracy <= chance + 2 * (chance * (1 - chance) / self.n_exemplars) ** 0.5)

    @property
    def has_old(self) -> bool:
        return not bool(self.is_new.all())

    @property
    def new_labels(self) -> tuple[int, ...]:
        return tuple(label for label, new in zip(self.classes, self.is_new.tolist(), strict=True) if new)


def _survey(
    classifier: Classifier,
    exemplars: ExampleStream,
    names: tuple[int, ...] | None,
    places: tuple[int, ...] | None,
    new: tuple[int, ...],
) -> _Survey:
    """Line 3: class means of the features; on the way, the new exemplars and the scale of the inputs."""
    means = ClassMeans()
    wanted = torch.tensor(new)
    inputs_kept, columns_kept, logits_kept = [], [], []
    count, total, squares, hits = 0, 0.0, 0.0, 0
    together, all_columns = ranks.current(), list[Tensor]()
    new_scale, old_scale = InputScale(), InputScale()
    with torch.no_grad():
        for number, (inputs, labels) in enumerate(exemplars):
            rows = torch.isin(labels, wanted)
            own_rows = rows.to(inputs.device)
            inputs_kept.append(inputs[own_rows])
            _check_shape(inputs, inputs_kept[0])
            new_scale.add(inputs_kept[-1])
            old_scale.add(inputs, ~own_rows)
            if number == 0 or together.owns(number):
                logits, features = classifier.logits_and_features(classifier.place(inputs))
                if number == 0:
                    classifier.fold(inputs[:2])
                width = logits.shape[1]
                columns = label_columns(labels, names, "memory labels", width)
                if names is not None:
                    logits = pick_columns(logits, len(names), places)
                check_own_unmasked(logits, columns, names, "memory labels")
                logits_kept.append(logits[rows.to(logits.device)].cpu())
                if together.owns(number):
                    means.add(features, columns)
                    hits += int((logits.argmax(dim=1).cpu() == columns).sum())
            else:
                columns = label_columns(labels, names, "memory labels", width)
            columns_kept.append(columns[rows])
            all_columns.append(columns)
            count += inputs.numel()
            total += float(inputs.mean()) * inputs.numel()
            squares += float(inputs.square().mean()) * inputs.numel()
    means.share(together, int(torch.cat(all_columns).max()) + 1, features.shape[1])
    present = means.counts.nonzero().squeeze(1)
    if names is not None:
        present = torch.tensor(names)[present]
    names = _check_coverage(present, names, new)
    variance = squares / count - (total / count) ** 2
    return _Survey(
        names,
        places,
        new_class_mask(new, names),
        means.means(),
        means.counts,
        torch.cat(inputs_kept),
        torch.cat(columns_kept),
        together.gathered(logits_kept, [len(columns) for columns in columns_kept])[:, : len(names)],
        max(variance, 0.0) ** 0.5,
        int(together.total(torch.tensor(hits))) / int(means.counts.sum()),
        new_scale,
        old_scale,
    )


def _check_shape(inputs: Tensor, first: Tensor) -> None:
    """Exemplars of several shapes cannot be kept side by side."""
    if inputs.shape[1:] != first.shape[1:]:
        shapes = f"examples of the shapes {tuple(first.shape[1:])} and {tuple(inputs.shape[1:])}"
        raise invalid("memory inputs", shapes, "one shape for all", "Use a transform that gives all the same size.")


def _valid_logits(
    classifier: Classifier, validation: ExampleStream, survey: _Survey
) -> tuple[Tensor, Tensor, int, InputScale]:
    """Line 2: the validation set without rows of old classes, how many those were, and the scale of all inputs."""
    scale = InputScale()

    def noted(inputs: Tensor) -> Tensor:
        scale.add(inputs)
        return inputs

    logits, labels = stream_logits(classifier, validation, noted)
    columns = _check_valid(labels, survey.classes, survey.new_labels)
    rows = survey.is_new[columns]
    check_own_unmasked(survey.pick(logits), columns, survey.classes, "valid labels")
    return survey.pick(logits)[rows], columns[rows], int((~rows).sum()), scale


def _check_coverage(present: Tensor, names: tuple[int, ...] | None, new: tuple[int, ...]) -> tuple[int, ...]:
    """Every class needs an exemplar, else it has no feature mean; returns the label of each column."""
    found = set(present.tolist())
    wanted: Sequence[int] = range(max([*found, *new]) + 1) if names is None else names
    unknown = sorted((set(new) | found) - set(names)) if names is not None else []
    if unknown:
        where = "new_classes" if set(unknown) & set(new) else "memory labels"
        raise invalid(where, f"the labels {unknown[:8]}", f"labels among the {len(wanted)} in classes=")
    absent = sorted(set(new) - found)
    if absent:
        raise invalid(
            "new_classes",
            f"the labels {absent[:8]} without an exemplar in memory",
            "exemplars of every class",
            "Update the memory with the new task before calibrating.",
        )
    missing = list(itertools.islice((label for label in wanted if label not in found), 8))
    if missing:
        how = (
            "Without classes=, the logit columns are the labels 0 to the largest seen; name them if they are not. Where"
            " a fixed head has a column for every label, pass the labels seen so far as columns=."
            if names is None
            else "Leave it out of classes= if the model has not learned it."
        )
        raise invalid("memory", f"no exemplar of the classes {missing}", "at least one of every class", how)
    if len(wanted) < 2:
        raise invalid("memory", "exemplars of a single class", "at least two classes")
    return tuple(wanted)


def _check_valid(labels: Tensor, names: tuple[int, ...], new: tuple[int, ...]) -> Tensor:
    """The columns of the validation labels, which must be known and some of them new."""
    columns = label_columns(labels, names, "valid labels", len(names))
    if not bool(torch.isin(labels, torch.tensor(new)).any()):
        raise invalid("valid", f"{len(labels)} rows, none of a new class", f"rows of new_classes={list(new)[:6]}")
    return columns


def _with_verdicts(result: TCILResult, more: list[Verdict]) -> TCILResult:
    return replace(result, verdicts=(*result.verdicts, *more) or (Verdict.OK,))


def warn_of(result: TCILResult, who: str, scales: str) -> None:
    """Say whatever was out of the ordinary; `scales` are the values of the inputs, in words."""
    details = {
        Verdict.OLD_ROWS_IN_VALID: f"valid: {result.n_valid_ignored} rows",
        Verdict.CLASSES_NOT_IN_VALID: f"valid: {result.n_valid} rows",
        Verdict.EXEMPLARS_AT_CHANCE: f"{result.n_exemplars} exemplars",
        Verdict.INPUT_SCALES_DIFFER: scales,
        Verdict.BELOW_TOLERANCE: f"magnitude {result.magnitude:.3g}",
        Verdict.BRACKET_WIDENED: f"magnitudes were searched up to {result.bracket[1]:.4g}",
        Verdict.TARGET_ABOVE_RANGE: f"target {result.target_temperature:.4g}",
        Verdict.TARGET_BELOW_RANGE: f"target {result.target_temperature:.4g}",
        Verdict.DEGENERATE_VALID: f"valid: {result.target.verdict}",
        Verdict.DEGENERATE_MEMORY: f"memory: {result.memory.verdict}" if result.memory else "",
        Verdict.IMBALANCE_BELOW_ONE: "new classes / old ones is expected",
        Verdict.NOT_IDENTIFIED: f"valid: {result.n_valid} rows",
        Verdict.TARGET_JUMPED: f"{result.n_new_exemplars} new exemplars",
    }
    for verdict in result.verdicts:
        if verdict in details:
            warnings.warn(f"{who}: {verdict.meaning} ({details[verdict]})", CalibrationWarning, stacklevel=3)
