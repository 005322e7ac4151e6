"""T-CIL (Hwang, Kim and Whang, CVPR 2025): one temperature from adversarially perturbed exemplars."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from tcil.calibration.calibrators.arguments import missing_valid, positive
from tcil.calibration.calibrators.single_temperature import SingleTemperature
from tcil.calibration.calibrators.wrapped import tell_of_calibrated
from tcil.calibration.exemplars import (
    BATCH_SIZE,
    Exemplars,
    LogitSpread,
    as_new_classes,
    check_coverage,
    read_exemplars,
)
from tcil.calibration.inputs.classifier import Classifier
from tcil.calibration.inputs.duplicates import count_shared, digests_of
from tcil.calibration.inputs.examples import MAX_BATCHES, Examples, ExampleStream, Unpack
from tcil.calibration.inputs.features import FeatureSpec
from tcil.calibration.inputs.input_scale import InputScale
from tcil.calibration.inputs.weights import SeenModel, UsedWeights
from tcil.calibration.perturbation import (
    DirectionPolicy,
    MagnitudeSearch,
    SearchMethod,
    SearchStep,
    search_magnitude,
)
from tcil.calibration.perturbed_exemplars import PerturbedExemplars
from tcil.calibration.prediction import stream_logits
from tcil.calibration.temperature import Solver, TemperatureFit, solve_temperature, temperature_error
from tcil.foundation import random_state
from tcil.foundation.arrays import (
    check_own_unmasked,
    classes_and_columns,
    label_columns,
    warn_of_other_masks,
    whole_number,
)
from tcil.foundation.errors import NotFittedError, invalid, shortened, warn
from tcil.foundation.options import Verdict
from tcil.foundation.records import Record

_UNCERTAIN = 0.35  # a standard error of log T: twice or half, at 95 %


@dataclass(frozen=True)
class TCILResult(Record):
    """The outcome of every step of a T-CIL fit.

    Attributes
    ----------
    temperature : float
        The fitted temperature: logits are divided by it.
    magnitude : float
        The magnitude of the perturbation, at which new exemplars have `target_temperature`.
    target_temperature : float
        The temperature of the new task's validation set.
    reachable : bool
        Whether some magnitude reproduces it.
    verdicts : tuple of Verdict
        What was unusual; `Verdict.OK` alone if nothing was.
    trace : tuple of SearchStep
        The steps of the magnitude search.
    bracket : tuple of float
        The range of magnitudes that was searched.
    target : TemperatureFit
        The fit on the validation set.
    memory : TemperatureFit or None
        The final fit on all perturbed exemplars; None if the validation set identifies no temperature.
    n_exemplars, n_new_exemplars : int
        Number of exemplars in memory, and of those of new classes.
    n_valid, n_valid_ignored : int
        Number of validation rows of new classes, and of old classes, which are not used.
    n_valid_in_memory : int
        How many of `n_valid` are also exemplars, which training has seen.

    Examples
    --------
    >>> import torch, tcil
    >>> _ = torch.manual_seed(0)
    >>> corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    >>> network = torch.nn.Linear(2, 4, bias=False)
    >>> _ = network.load_state_dict({"weight": 3 * corners})
    >>> all_classes, new = torch.arange(40) % 4, 2 + torch.arange(100) % 2
    >>> memory = corners[all_classes] + 0.3 * torch.randn(40, 2), all_classes
    >>> valid = corners[new] + torch.randn(100, 2), new
    >>> result = tcil.TCIL().fit(network, memory, valid, new_classes=[2, 3]).result_
    >>> result.reachable, result.n_new_exemplars, [str(verdict) for verdict in result.verdicts]
    (True, 20, ['ok'])
    >>> before, after = (step.temperature for step in result.trace[-2:])       # both ends of the last bracket
    >>> before < result.target_temperature < after
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
    n_valid_in_memory: int = 0


@dataclass(frozen=True, eq=False)
class TCILEvidence(Record):
    """The data behind a T-CIL fit: logits over `classes`, and the columns of their labels.

    Attributes
    ----------
    result : TCILResult
        The result of the fit.
    classes : tuple of int
        The label of each column.
    is_new : Tensor
        Which columns are new, (K,).
    valid : pair of Tensor
        Logits and label columns of the validation rows of new classes.
    pushed : pair of Tensor or None
        Logits and label columns of all exemplars at the fitted magnitude, new classes first; None if the validation
        set identifies no temperature.
    model : dict
        Properties of the network: width and position of its head, hash of its weights.
    scales : str
        Description of the range of the inputs.
    spread : LogitSpread or None
        How far the logits of the exemplars are apart, without a perturbation; None if they do not differ.
    exemplars : frozenset of bytes
        Digests of the images in memory.

    Examples
    --------
    >>> import torch, tcil
    >>> _ = torch.manual_seed(0)
    >>> corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    >>> network = torch.nn.Linear(2, 4, bias=False)
    >>> _ = network.load_state_dict({"weight": 3 * corners})
    >>> all_classes, new = torch.arange(40) % 4, 2 + torch.arange(100) % 2
    >>> memory = corners[all_classes] + 0.3 * torch.randn(40, 2), all_classes
    >>> valid = corners[new] + torch.randn(100, 2), new
    >>> evidence = tcil.TCIL().evidence(network, memory, valid, new_classes=[2, 3])
    >>> logits, columns = evidence.pushed
    >>> tcil.TemperatureScaling().fit(logits, columns).temperature_ == evidence.result.temperature
    True
    """

    result: TCILResult
    classes: tuple[int, ...]
    is_new: Tensor
    valid: tuple[Tensor, Tensor]
    pushed: tuple[Tensor, Tensor] | None
    model: SeenModel
    scales: str = ""
    spread: LogitSpread | None = None
    exemplars: frozenset[bytes] = frozenset()


@dataclass(eq=False, kw_only=True)
class TCIL(SingleTemperature[TCILResult]):
    """T-CIL: one temperature for old and new classes, from validation data of the newest task only.

    1. Fit the target temperature on the new task's validation set.
    2. Choose a direction for every exemplar: the sign of the input gradient that leads toward another class. For old
       exemplars that is the class with the nearest feature mean, for new ones the class with the farthest (`policy`).
    3. Search the magnitude in [0, 1] at which the perturbed new exemplars have the target temperature (`search`,
       `tolerance`).
    4. Fit the temperature on all exemplars, perturbed by that magnitude.

    Parameters
    ----------
    policy : DirectionPolicy or str, default "paper"
        The class toward which an exemplar is perturbed.
    tolerance : float, default 1e-3
        Width of the last bracket of the magnitude search.
    search : SearchMethod or str, default "interpolation"
        How the magnitude is searched: "interpolation", or the paper's "bisection". Both end in the same bracket.
    solver : Solver or str, default "exact"
        How a temperature is fitted: "exact", or "sgd" for the authors' schedule, which is too noisy for interpolation
        and always uses bisection.
    seed : int, default 0
        Seed of the random policy and of SGD.
    batch_size : int, default 64
        Images per forward pass.
    device : str or torch.device, optional
        Where the network runs. Default: where its parameters are.

    Attributes
    ----------
    temperature_ : float
        The fitted temperature, greater than 0.
    result_ : TCILResult
        The outcome of every step, with its verdicts.
    classes_ : tuple of int
        The label of each logit column.
    evidence_ : TCILEvidence
        The logits that the last `fit` used; not stored by `save`.

    Examples
    --------
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
    >>> calibrator = tcil.TCIL().fit(network, memory, valid, new_classes=[2, 3])
    >>> calibrator.result_.reachable, calibrator.temperature_ > 1
    (True, True)
    >>> calibrated = calibrator.wrap(network)
    >>> calibrated(valid[0][:2]).shape
    torch.Size([2, 4])
    """

    policy: DirectionPolicy | str = DirectionPolicy.PAPER
    tolerance: float = 1e-3
    search: SearchMethod | str = SearchMethod.INTERPOLATION
    solver: Solver | str = Solver.EXACT
    seed: int = 0
    batch_size: int = BATCH_SIZE
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
        self._evidence: TCILEvidence | None = None

    @property
    def evidence_(self) -> TCILEvidence:
        """The logits that the last `fit` used; not stored by `save`."""
        if self._evidence is None:
            raise NotFittedError("TCIL has no evidence: it is not fitted yet, or was loaded from a file")
        return self._evidence

    def fit(
        self,
        model: nn.Module,
        memory: Examples,
        valid: Examples,
        new_classes: Iterable[Any],
        *,
        classes: Iterable[Any] | None = None,
        columns: Iterable[Any] | None = None,
        features: FeatureSpec | None = None,
        unpack: Unpack | None = None,
        max_batches: int = MAX_BATCHES,
    ) -> Self:
        """Fit after a task. The model and all random states are left unchanged.

        If only one of the two sets is normalised, or divided by 255, the verdict is `input_scales_differ`. Smaller
        differences, such as different means and standard deviations, are not detected.

        Parameters
        ----------
        model : torch.nn.Module
            The trained network.
        memory : pair of tensors or arrays, Dataset or DataLoader
            Exemplars of all classes, (inputs, labels), with inputs as the network takes them. A Dataset is any object
            with a length and indexing; loaders are streamed.
        valid : as memory
            The new task's validation set.
        new_classes : iterable of int
            The labels of the new task.
        classes : iterable of int, optional
            `classes[i]` is the label of logit column i. Default: i itself, with K one more than the largest label in
            memory and new_classes. Of a wider head, the first K columns are used.
        columns : iterable of int, optional
            The logit columns of the classes, instead of the first K. If a fixed head has a column for every label,
            pass the labels seen so far.
        features : str, callable or pair of callables, optional
            The head or the feature layer, if it is not found automatically.
        unpack : callable or pair, optional
            How to get inputs and labels from a batch: two keys of a dict, two positions in a tuple, or a function.
        max_batches : int
            Maximum number of batches of a loader without a length; more raise an error. So does such a memory of more
            than 8 GiB of new exemplars.

        Returns
        -------
        TCIL
            The fitted calibrator.
        """
        evidence = self.evidence(
            model, memory, valid, new_classes, classes=classes, columns=columns, features=features, unpack=unpack,
            max_batches=max_batches,
        )  # fmt: skip
        result = evidence.result
        self._fitted(self._map(result.temperature), evidence.classes, result, **evidence.model)
        self._evidence = evidence
        warn_of(result, "T-CIL", evidence.scales)
        return self

    def evidence(
        self,
        model: nn.Module,
        memory: Examples,
        valid: Examples,
        new_classes: Iterable[Any],
        *,
        classes: Iterable[Any] | None = None,
        columns: Iterable[Any] | None = None,
        features: FeatureSpec | None = None,
        unpack: Unpack | None = None,
        max_batches: int = MAX_BATCHES,
    ) -> TCILEvidence:
        """Compute the data behind a fit, for methods that build on T-CIL; takes the arguments of `fit`."""
        self._check_options()
        if valid is None:
            raise missing_valid()
        tell_of_calibrated(model)
        new = as_new_classes(new_classes)
        names, places = classes_and_columns(classes, columns)
        with random_state.preserved(memory, valid):
            stream = partial(ExampleStream, batch_size=self.batch_size, unpack=unpack, max_batches=max_batches)
            memory_stream, valid_stream = stream(memory, "memory"), stream(valid, "valid")
            _check_known_labels(memory_stream, valid_stream, names, new)
            with Classifier(model, features=features, device=self.device) as classifier:
                exemplars = read_exemplars(classifier, memory_stream, names, places, new)
                validation = _read_validation(exemplars, valid_stream)
                answer = self._calibrate(exemplars, validation)
        differ, scales = exemplars.differ_in_scale(validation.scale)
        noted = _noted(exemplars, validation, answer.target, differ)
        result = _result(answer, exemplars, validation, noted)
        seen = _seen_model(model, exemplars)
        return TCILEvidence(
            result, exemplars.classes, exemplars.is_new, validation.rows, answer.pushed, seen, scales,
            exemplars.logit_spread, exemplars.digests,
        )  # fmt: skip

    def _calibrate(self, exemplars: Exemplars, valid: _Validation) -> _Answer:
        """Algorithm 1 of the paper; its line 3, the class means, is done when the exemplars are read."""
        target = self._temperature(*valid.rows)  # line 2
        if target.verdict is not Verdict.OK:
            return _Answer(target, self._no_search(exemplars, target))
        perturbed = PerturbedExemplars(exemplars, DirectionPolicy(self.policy), self.seed)
        search = self._search_magnitude(perturbed, target)  # lines 4 and 5
        pushed = perturbed.logits(search.magnitude), perturbed.columns  # lines 6 to 10
        return _Answer(target, search, self._temperature(*pushed), pushed)  # line 11

    def _search_magnitude(self, perturbed: PerturbedExemplars, target: TemperatureFit) -> MagnitudeSearch:
        """MagSearch (Algorithm 2) on the new exemplars, whose directions do not depend on the magnitude."""
        exemplars = perturbed.exemplars
        return search_magnitude(
            lambda magnitude: self._temperature(perturbed.logits(magnitude, new_only=True), exemplars.new_columns),
            self._temperature(exemplars.new_logits, exemplars.new_columns),
            target.limit,
            tolerance=self.tolerance,
            input_scale=exemplars.spread,
            method=SearchMethod.BISECTION if self.solver is Solver.SGD else SearchMethod(self.search),
            glance=lambda magnitude: self._temperature(*perturbed.glance(magnitude)),
        )

    def _no_search(self, exemplars: Exemplars, target: TemperatureFit) -> MagnitudeSearch:
        """The outcome without a target temperature; the magnitude is the end of the bracket nearest to the target."""
        end = 1.0 if target.verdict is Verdict.ANTI_INFORMATIVE else 0.0
        clean = SearchStep(0.0, self._temperature(exemplars.new_logits, exemplars.new_columns).limit)
        return MagnitudeSearch(end, False, (0.0, 1.0), (clean,), (Verdict.DEGENERATE_VALID,))

    def _temperature(self, logits: Tensor, columns: Tensor) -> TemperatureFit:
        """TempOpt (Algorithm 3)."""
        return solve_temperature(logits, columns, Solver(self.solver), self.seed)


@dataclass(frozen=True, eq=False)
class _Validation:
    """The validation set without rows of old classes, the number of those, and the range of all inputs.

    `n_exemplars` of its rows are also in memory.
    """

    rows: tuple[Tensor, Tensor]
    n_ignored: int
    n_exemplars: int
    scale: InputScale
    half_precision: bool


@dataclass(frozen=True, eq=False)
class _Answer:
    """The results of Algorithm 1; without a target, there is no temperature and there are no logits."""

    target: TemperatureFit
    search: MagnitudeSearch
    memory: TemperatureFit | None = None
    pushed: tuple[Tensor, Tensor] | None = None


def _read_validation(exemplars: Exemplars, stream: ExampleStream) -> _Validation:
    scale, digests = InputScale(), list[bytes]()

    def noted(inputs: Tensor) -> Tensor:
        scale.add(inputs)
        digests.extend(digests_of(inputs))
        return inputs

    logits, labels = stream_logits(exemplars.classifier, stream, noted)
    columns = _check_valid(labels, exemplars.classes, exemplars.new_labels, stream.doubt)
    logits, new = exemplars.pick(logits), exemplars.is_new[columns]
    check_own_unmasked(logits, columns, exemplars.classes, "valid labels")
    warn_of_other_masks(logits, "model", exemplars.classes)
    shared, _ = count_shared(digests, new, exemplars.digests)
    return _Validation((logits[new], columns[new]), int((~new).sum()), shared, scale, stream.half_precision)


def _check_known_labels(
    memory: ExampleStream, valid: ExampleStream, names: tuple[int, ...] | None, new: tuple[int, ...]
) -> None:
    """Check labels that are available without a pass, before the model runs."""
    if memory.labels is None:
        return
    classes = check_coverage(memory.labels.unique(), names, new, memory.doubt)
    if valid.labels is not None:
        _check_valid(valid.labels, classes, new, valid.doubt)


def _check_valid(labels: Tensor, names: tuple[int, ...], new: tuple[int, ...], doubt: str) -> Tensor:
    """The columns of the validation labels; raises unless all are valid and some are of new classes."""
    columns = label_columns(labels, names, "valid labels", len(names), doubt)
    if not bool(torch.isin(labels, torch.tensor(new)).any()):
        given = f"{len(labels)} rows, none of a new class"
        raise invalid("valid", given, f"rows of new_classes={shortened(new)}", doubt)
    return columns


def _noted(
    exemplars: Exemplars, valid: _Validation, target: TemperatureFit, scales_differ: bool
) -> tuple[Verdict, ...]:
    """Verdicts about the data, independent of the search."""
    new, present = exemplars.is_new.nonzero().squeeze(1).tolist(), set(valid.rows[1].tolist())
    seen = {
        Verdict.UNCERTAIN_TARGET: target.verdict is Verdict.OK and _is_uncertain(valid, target),
        Verdict.VALID_IN_MEMORY: valid.n_exemplars > 0,
        Verdict.OLD_ROWS_IN_VALID: valid.n_ignored > 0,
        Verdict.CLASSES_NOT_IN_VALID: not present.issuperset(new),
        Verdict.EXEMPLARS_AT_CHANCE: exemplars.at_chance,
        Verdict.INPUT_SCALES_DIFFER: scales_differ,
        Verdict.HALF_PRECISION_IMAGES: exemplars.stream.half_precision or valid.half_precision,
        Verdict.SINGLE_EXEMPLAR: bool((exemplars.counts == 1).any()),
    }
    return tuple(verdict for verdict, so in seen.items() if so)


def _is_uncertain(valid: _Validation, target: TemperatureFit) -> bool:
    error = temperature_error(*valid.rows, target.temperature)
    return error is None or error > _UNCERTAIN


def _result(answer: _Answer, exemplars: Exemplars, valid: _Validation, noted: tuple[Verdict, ...]) -> TCILResult:
    target, search, memory = answer.target, answer.search, answer.memory
    degenerate = (Verdict.DEGENERATE_MEMORY,) if memory is not None and memory.verdict is not Verdict.OK else ()
    return TCILResult(
        temperature=1.0 if memory is None else memory.temperature,
        magnitude=search.magnitude,
        target_temperature=target.temperature,
        reachable=search.reachable,
        verdicts=(*search.verdicts, *degenerate, *noted) or (Verdict.OK,),
        trace=search.trace,
        bracket=search.bracket,
        target=target,
        memory=memory,
        n_exemplars=len(exemplars),
        n_new_exemplars=len(exemplars.new_inputs),
        n_valid=target.n_samples,
        n_valid_ignored=valid.n_ignored,
        n_valid_in_memory=valid.n_exemplars,
    )


def _seen_model(model: nn.Module, exemplars: Exemplars) -> SeenModel:
    source, places = exemplars.classifier.source.storable(), exemplars.head_columns
    used = UsedWeights.of(model, source, places or range(len(exemplars.classes)))
    return SeenModel(head_width=exemplars.classifier.width, columns=places, source=source, model_hash=used)


def warn_of(result: TCILResult, who: str, scales: str, reserve: str = "") -> None:
    """Warn of every unusual verdict; `scales` describes the range of the inputs, `reserve` what is wrong with it."""
    details = {
        Verdict.VALID_IN_MEMORY: f"valid: {result.n_valid_in_memory} of {result.n_valid} images",
        Verdict.RESERVE_IN_MEMORY: reserve,
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
        Verdict.IMBALANCE_BELOW_ONE: "expected: images of a new class / images of an old one",
        Verdict.NOT_IDENTIFIED: f"valid: {result.n_valid} rows",
        Verdict.TARGET_JUMPED: f"{result.n_new_exemplars} new exemplars",
        Verdict.OUT_OF_DEPTH: f"valid: {result.n_valid} rows",
    }
    for verdict in result.verdicts:
        if verdict in details:
            warn(f"{who}: {verdict.meaning} ({details[verdict]})")
