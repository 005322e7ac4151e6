"""PACT: prior-adjusted confidence, tracked from task to task. A temperature for old classes, one for new, and a bias.

With a reserve, a few images of old classes that were never trained on, it is PACT-R.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from tcil.calibration.calibrators.base import Calibrator
from tcil.calibration.calibrators.fitted import History
from tcil.calibration.calibrators.maps import CalibrationMap, PriorAdjustedMap
from tcil.calibration.calibrators.pact.constants import MEASURED, PACTConstants
from tcil.calibration.calibrators.pact.evidence import Labelled, PACTEvidence
from tcil.calibration.calibrators.pact.filter import PACTFilter, check_history
from tcil.calibration.calibrators.pact.imbalance import Imbalance, imbalance_ratio, parse_imbalance
from tcil.calibration.calibrators.tcil import TCIL, TCILEvidence, TCILResult, warn_of
from tcil.calibration.exemplars import as_new_classes, check_coverage
from tcil.calibration.inputs.classifier import Classifier
from tcil.calibration.inputs.duplicates import count_shared, digests_of
from tcil.calibration.inputs.examples import MAX_BATCHES, Examples, ExampleStream, Unpack
from tcil.calibration.inputs.features import FeatureSpec
from tcil.calibration.inputs.weights import weights_hash
from tcil.calibration.prediction import stream_logits
from tcil.foundation import random_state
from tcil.foundation.arrays import check_own_unmasked, classes_and_columns, label_columns, pick_columns
from tcil.foundation.errors import invalid
from tcil.foundation.options import Verdict
from tcil.foundation.records import Record

_INVERTED = 0.5  # an imbalance below which it was perhaps meant the other way round
_OF_THE_SEARCH = frozenset(
    (Verdict.TARGET_ABOVE_RANGE, Verdict.TARGET_JUMPED, Verdict.BELOW_TOLERANCE, Verdict.BRACKET_WIDENED,
     Verdict.DEGENERATE_VALID, Verdict.DEGENERATE_MEMORY, Verdict.UNCERTAIN_TARGET)
)  # fmt: skip


@dataclass(frozen=True)
class PACTResult(Record):
    """What PACT found: softmax(z / temperature + bias for old classes), calibrated where classes are equally frequent.

    The errors are standard errors by the filter, as good as its constants (docs/pact.md has how they compare with the
    truth).

    Attributes
    ----------
    temperature, bias : float
        The answer; 1 and 0 where there is no evidence: the network is left as it is.
    log_temperature_error, bias_error : float or None
        Their standard errors; None where there is no evidence, or no old class.
    imbalance : float
        Training images of a new class for each one of an old class.
    verdicts : tuple of Verdict
        Whatever was out of the ordinary; `Verdict.OK` alone where nothing was.
    evidence : tuple of PACTEvidence
        What the answer was weighed from, "history" first, or "spread" where there is none.
    t_cil : TCILResult
        The run of T-CIL inside.
    n_reserve : int
        Images of old classes in the reserve.
    new_temperature : float or None
        What divides the logits of new classes, instead of `temperature`; about the same. None in results of
        earlier versions.

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
    >>> presented = {0: 10, 1: 10, 2: 50, 3: 50}                      # in an epoch of training
    >>> result = tcil.PACT().fit(network, memory, valid, new_classes=[2, 3], imbalance=presented).result_
    >>> result.imbalance, result.bias_error < 0.5
    (5.0, True)
    >>> for piece in result.evidence:
    ...     print(piece.source)
    spread
    new classes
    surrogate
    label shift
    """

    temperature: float
    log_temperature_error: float | None
    bias: float
    bias_error: float | None
    imbalance: float
    verdicts: tuple[Verdict, ...]
    evidence: tuple[PACTEvidence, ...]
    t_cil: TCILResult
    n_reserve: int = 0
    new_temperature: float | None = None


@dataclass(eq=False, kw_only=True)
class PACT(Calibrator[PACTResult]):
    """PACT: a confidence that knows how unbalanced training was (ours, beyond the paper).

    A network trained on many images of each new class and few of each old one behaves, on unseen images, as if old
    classes were rare. So `q = softmax(z / T + b [class is old])` is calibrated for a test set in which classes are
    equally frequent, with b mostly between 0 (the learner balances by itself) and log(imbalance). Some learners shrink
    the logits of new classes (WA, BiC), so T of new classes differs from that of old ones by a factor, exp(contrast).

    T of old classes goes with the spread of the exemplars' logits (the root mean square about the mean of their row):
    one T for all was 0.40 to 0.56 times it in nine of ten tasks of six learners, with 4 to 200 classes (docs/pact.md).
    Beyond that, each task gives three pieces of evidence on log T and b, none of which needs data of old classes beyond
    the memory:

    1. New classes: the likelihood of log T on the validation set with the logits of the new classes alone. Their own
       frequencies are equal, so it needs no b. It is taken in by Laplace's approximation at the combined mode, so that
       a few images, all of them correct, cannot say that T is 0. It tells of log T and the contrast together, each by
       its share of what is not known. The other pieces see logits about the mean of their row, those of new classes
       divided by exp(contrast).
    2. Surrogate: log T and b that minimise the cross-entropy of q on the validation set (new classes) together with
       T-CIL's perturbed exemplars of old classes, every class counting equally.
    3. Label shift: if q is calibrated, the odds of old against new classes, averaged over images of new classes (each
       class counting equally), are the ratio of the numbers of classes: E[q(old) / q(new)] = K_old / K_new. At the T
       known by then, that is one equation for b; what is not known of T adds to its error.

    The error of each is its sampling error (the sandwich estimate; for the surrogate also that of the validation
    temperature which sets T-CIL's magnitude) and a measured constant (`PACTConstants`). The surrogate's b has an offset
    beside, which is the learner's, unknown at first, and learned from task to task by what label shift says. All are
    combined, in this order, with what earlier tasks left (`history`), each weighed by its precision: Kalman filters for
    log T, for the contrast, and for b and the offset. Before any evidence T is 0.41 times the spread, with an error of
    0.15 in log T, and of 0.30 beside where the first fit is of a task with old classes (so fit after the first task
    too). Where logits do not differ it is 1, with an error of 1. With the first old classes the ratio becomes 0.45, and
    half of what the first task said of it is kept, because it varies more where there are few classes; b then has the
    mean and variance of a uniform one between 0 and log(imbalance), and a measured variance beside. From task to task
    log T moves by the change of the log spread, b by half the change of log(imbalance), and all drift by measured
    constants. A piece that its data do not identify is left out (the new classes where their error is above 1). Pieces
    share their validation set, which the filter does not know. With `constants=PACTConstants.one_temperature()` all
    classes have one temperature, and the surrogate is taken in first.

    With `reserve`, a few images of old classes that were never trained on (one or two a class are enough to help), the
    method is PACT-R: the likelihood of q on reserve and validation set, every class counting equally, is combined with
    all that is known by then, with its sampling error. The history stays that without the reserve, because the
    same images are there again after the next task.

    Where label shift is more than three errors away from what is believed by then, it is trusted so much less that it
    is three: old and new classes then hardly overlap in the images at hand, and their mean odds miss the tail that
    would matter. Where another piece is, the verdict is `out_of_depth`. If that piece is the new classes, what was
    believed of T by then is widened until they are three errors away, because the network may be of another kind; in
    a task without old classes this makes no verdict.

    The prediction stays: its confidence is q of the predicted class (or 1 / K if q is below), and the other classes
    share the rest as in q, or more evenly where one of them would overtake it. With `keep_predictions=False` q itself
    is given: predictions may then move to old classes.

    Parameters
    ----------
    keep_predictions : bool, default True
        Whether the predicted class stays the network's.
    tolerance : float, default 1e-3
        How wide the last bracket of T-CIL's magnitude search may be.
    batch_size : int, default 64
        Images in one pass through the network.
    device : str or torch.device, optional
        Where the network runs; by default where it is.
    constants : PACTConstants, optional
        How far each piece of evidence is trusted, and how much T and b drift; by default as measured.
        `PACTConstants.one_temperature()` for one temperature for all classes.

    Attributes
    ----------
    temperature_, bias_, new_temperature_ : float
        What q is made of; the last divides the logits of new classes.
    result_ : PACTResult
        What was found, with its verdicts and the pieces of evidence.
    classes_ : tuple of int
        The label of each logit column.
    history_ : dict or None
        What the next task's `fit` takes as `history`.

    Examples
    --------
    >>> import torch, tcil
    >>> _ = torch.manual_seed(0)
    >>> centres = 2 * torch.randn(4, 8)
    >>> def draw(labels):
    ...     return 0.4 * centres[labels] + torch.randn(len(labels), 8), labels
    >>> network = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    >>> memory, new = draw(torch.arange(40) % 4), draw(2 + torch.arange(200) % 2)         # 10 old images, 110 new ones
    >>> x, y = torch.cat([memory[0], new[0]]), torch.cat([memory[1], new[1]])
    >>> optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    >>> for _ in range(60):
    ...     optimizer.zero_grad()
    ...     torch.nn.functional.cross_entropy(network(x), y).backward()
    ...     optimizer.step()
    >>> valid = draw(2 + torch.arange(200) % 2)
    >>> pact = tcil.PACT().fit(network, memory, valid, new_classes=[2, 3], imbalance=110 / 10)
    >>> pact.temperature_ > 1, pact.bias_ > 0, [piece.source for piece in pact.result_.evidence]
    (True, True, ['spread', 'new classes', 'surrogate', 'label shift'])
    >>> kept = draw(torch.arange(4) % 2)                                       # two images of each old class: PACT-R
    >>> surer = tcil.PACT().fit(network, memory, valid, new_classes=[2, 3], imbalance=110 / 10, reserve=kept).result_
    >>> surer.evidence[-1].source, surer.bias_error < pact.result_.bias_error
    ('reserve', True)
    >>> test = draw(torch.arange(400) % 4)
    >>> before = tcil.metrics.expected_calibration_error(network(test[0]).softmax(dim=1).detach(), test[1])
    >>> tcil.metrics.expected_calibration_error(pact.predict_proba(network(test[0]).detach()), test[1]) < before
    True
    """

    keep_predictions: bool = True
    tolerance: float = 1e-3
    batch_size: int = TCIL.batch_size
    device: str | torch.device | None = None
    constants: PACTConstants | Mapping[str, float] = MEASURED
    map_type: ClassVar[type[CalibrationMap]] = PriorAdjustedMap
    result_type: ClassVar[type[Any]] = PACTResult

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.keep_predictions, bool):
            raise invalid("keep_predictions", repr(self.keep_predictions), "True or False")
        inner = self._t_cil()
        self.tolerance, self.batch_size = inner.tolerance, inner.batch_size
        self.constants = PACTConstants.parse(self.constants)

    def _t_cil(self) -> TCIL:
        return TCIL(tolerance=self.tolerance, batch_size=self.batch_size, device=self.device)

    @property
    def temperature_(self) -> float:
        """The fitted temperature, greater than 0."""
        return float(cast(PriorAdjustedMap, self._mapping()).temperature)

    @property
    def new_temperature_(self) -> float:
        """The fitted temperature of new classes, greater than 0."""
        return float(cast(PriorAdjustedMap, self._mapping()).new_temperature)

    @property
    def bias_(self) -> float:
        """What is added to the scaled logits of old classes."""
        return float(cast(PriorAdjustedMap, self._mapping()).bias)

    def fit(
        self,
        model: nn.Module,
        memory: Examples,
        valid: Examples,
        new_classes: Iterable[Any],
        *,
        imbalance: Imbalance | None = None,
        reserve: Examples | None = None,
        history: History | None = None,
        classes: Iterable[Any] | None = None,
        columns: Iterable[Any] | None = None,
        features: FeatureSpec | None = None,
        unpack: Unpack | None = None,
        max_batches: int = MAX_BATCHES,
    ) -> Self:
        """Fit after a task. `imbalance`, `reserve` and `history` are PACT's own, the others those of `TCIL.fit`.

        Parameters
        ----------
        model : torch.nn.Module
            The trained network.
        memory, valid : pair of tensors or arrays, Dataset or DataLoader
            Exemplars of all classes, and the new task's validation set.
        new_classes : iterable of int
            The labels of the new task.
        imbalance : float, mapping or array
            In the training of this task, images of a new class for each image of an old one (490 new images per class
            beside 25 exemplars: 490 / 25). Or, from which it is computed, how often an epoch of training presented
            images of each class: a mapping from labels (a `Counter` of all labels that the training loader gave) or
            an array over the classes. Count what training saw, not what is stored: loaders often oversample the
            memory, and then 25 exemplars that were each drawn four times are 100. Not needed after the first task,
            where there are no old classes.
        reserve : pair of tensors or arrays, Dataset or DataLoader, optional
            Images of old classes that were never trained on, with their labels. Those of new classes are not used: the
            validation set serves them, and unless all classes are new, a reserve without an image of an old class is
            refused. Where some of its images are also in memory, the verdict is `reserve_in_memory`; if most of them
            are, it is refused.
        history : dict, optional
            `history_` of the PACT of the task before; without it nothing is remembered.
        classes, columns : iterable of int, optional
            The label of each logit column, and which columns of the head they are.
        features : str, callable or pair of callables, optional
            The head or the feature layer, where it cannot be found.
        unpack : callable or pair, optional
            Where a batch has its inputs and labels.
        max_batches : int
            A loader without a length is refused after so many batches.

        Returns
        -------
        PACT
            Itself, fitted.
        """
        self._check_options()
        given = parse_imbalance(imbalance)
        _check_history_of(model, history)
        new = as_new_classes(new_classes)
        names_given, places = classes_and_columns(classes, columns)
        names = names_given
        with random_state.preserved(memory, valid, reserve):
            stream = partial(ExampleStream, batch_size=self.batch_size, unpack=unpack, max_batches=max_batches)
            spare = None if reserve is None else stream(reserve, "reserve")
            if not isinstance(given, float) or spare is not None:  # what is wrong with them is told before any work
                held = stream(memory, "memory")
                if held.labels is not None:
                    names = check_coverage(held.labels.unique(), names, new, held.doubt)
                if names is not None:
                    imbalance_ratio(given, names, new)
                    if spare is not None and spare.labels is not None:
                        label_columns(spare.labels, names, "reserve labels", len(names), spare.doubt)
                        _check_old(spare.labels, names, new)
                if spare is not None and spare.labels is not None and held.labels is not None:
                    old = ~torch.isin(spare.labels, torch.tensor(new))
                    _check_unseen(_all_digests(spare), old, frozenset(_all_digests(held)))
            evidence = self._t_cil().evidence(
                model, memory, valid, new, classes=names_given, columns=places, features=features, unpack=unpack,
                max_batches=max_batches,
            )  # fmt: skip
            kept = None if spare is None else self._read_reserve(model, spare, evidence, places, features)
        result, beliefs = self._weighed(evidence, imbalance_ratio(given, evidence.classes, new), history, kept)
        mapping = PriorAdjustedMap(
            torch.tensor(result.temperature, dtype=torch.float64),
            torch.tensor(result.bias, dtype=torch.float64),
            evidence.is_new,
            torch.tensor(self.keep_predictions),
            torch.tensor(result.new_temperature, dtype=torch.float64),
        )
        memo = history
        if beliefs.informed:
            before = None if history is None else {key: value for key, value in history.items() if key != "before"}
            memo = {**beliefs.memo(), "model": weights_hash(model), "new_classes": sorted(new), "before": before}
        self._fitted(mapping, evidence.classes, result, **evidence.model, history=memo)
        said = "" if kept is None else kept.said
        warn_of(replace(evidence.result, verdicts=result.verdicts), "PACT", evidence.scales, said)
        return self

    def _earlier(self, *args: Any, **kwargs: Any) -> History | None:
        """What the task before left. Where the last fit had the same new classes, on these weights or on others, it was
        of this very task: then what that fit began with.
        """
        history = super()._earlier(*args, **kwargs)
        if history is None or "before" not in history:
            return history
        given = inspect.signature(self.fit).bind_partial(*args, **kwargs).arguments
        if "new_classes" not in given:  # which fit will say
            return history
        again = sorted(as_new_classes(given["new_classes"])) == history.get("new_classes")
        return cast("History | None", history["before"]) if again else history

    def _read_reserve(
        self,
        model: nn.Module,
        stream: ExampleStream,
        evidence: TCILEvidence,
        places: tuple[int, ...] | None,
        features: FeatureSpec | None,
    ) -> _Reserve:
        """Logits and columns of the rows of old classes in the reserve."""
        names, digests = evidence.classes, list[bytes]()

        def noted(inputs: Tensor) -> Tensor:
            digests.extend(digests_of(inputs))
            return inputs

        with Classifier(model, features=features, device=self.device) as classifier:
            logits, labels = stream_logits(classifier, stream, noted)
        own = label_columns(labels, names, "reserve labels", len(names), stream.doubt)
        logits = pick_columns(logits, len(names), places)
        check_own_unmasked(logits, own, names, "reserve labels")
        old = ~evidence.is_new[own]
        _check_old(labels, names, [name for name, is_new in zip(names, evidence.is_new, strict=True) if is_new])
        return _Reserve((logits[old], own[old]), _check_unseen(digests, old, evidence.exemplars))

    def _weighed(
        self, evidence: TCILEvidence, ratio: float, history: History | None, reserve: _Reserve | None
    ) -> tuple[PACTResult, PACTFilter]:
        """What earlier tasks left, moved to this one, and the evidence of this one, weighed."""
        has_old = not bool(evidence.is_new.all())
        log_imbalance = math.log(ratio) if has_old else None
        constants = PACTConstants.parse(self.constants)
        beliefs = PACTFilter.of(history, log_imbalance, evidence.result.target, constants, evidence.spread)
        before = beliefs.as_evidence("history")
        if history is None:
            before = replace(before, source="spread", bias=None, bias_error=None)
        first = None if has_old else beliefs.first_answer(evidence)
        pieces, informed = beliefs.weigh(evidence), beliefs.informed
        now = first or beliefs.as_evidence("all")
        if reserve is not None and (found := beliefs.with_reserve(evidence, reserve.rows)) is not None:
            said, now = found
            pieces.append(said)
        inverted = has_old and ratio < _INVERTED
        odd = max(beliefs.surprises, default=0.0) > constants.most_surprise
        verdicts = _verdicts(
            evidence.result.verdicts, pieces, informed=beliefs.informed, inverted=inverted, contradicted=odd,
            trained=reserve is not None and reserve.n_exemplars > 0,
        )  # fmt: skip
        kept = 0 if reserve is None else len(reserve.rows[1])
        known_before = history is not None or (beliefs.informed and evidence.spread is not None)
        weighed = (before, *pieces) if known_before else tuple(pieces)
        result = _result(beliefs, now, ratio, verdicts, weighed, evidence.result, kept)
        beliefs.informed = informed  # what the reserve said is not handed on
        return result, beliefs


def _check_old(labels: Tensor, classes: Iterable[int], new: Iterable[int]) -> None:
    """Raise if the labels of a reserve are those of new classes only, although there are old ones."""
    recent = set(new)
    if set(classes) - recent and not set(labels.tolist()) - recent:
        given, expected = f"{len(labels)} images of new classes only", "images of old classes"
        raise invalid("reserve", given, expected, "Pass reserve=None until there are some.")


class _Reserve(NamedTuple):
    """The images of old classes in a reserve, and how many of them are exemplars."""

    rows: Labelled
    n_exemplars: int

    @property
    def said(self) -> str:
        return f"reserve: {self.n_exemplars} of {len(self.rows[1])} images"


def _check_unseen(reserve: list[bytes], old: Tensor, memory: frozenset[bytes]) -> int:
    """Refuse a reserve of which most old images are exemplars, which training has memorised; else how many are."""
    trained, rows = count_shared(reserve, old, memory)
    if 2 * trained > rows:
        given = f"{trained} of {rows} images that are also in memory"
        raise invalid("reserve", given, "images that were never trained on")
    return trained


def _all_digests(stream: ExampleStream) -> list[bytes]:
    return [digest for inputs, _ in stream for digest in digests_of(inputs)]


def _check_history_of(model: nn.Module, history: History | None) -> None:
    """Refuse what is not the memo of a PACT, or that of the network which is fitted now."""
    check_history(history)
    if history is not None and history["model"] == weights_hash(model):
        given = "that of a fit of this very network"
        raise invalid("history", given, "history_ of the PACT of the task before", "It would count its data twice.")


def _verdicts(
    of_t_cil: tuple[Verdict, ...],
    pieces: list[PACTEvidence],
    *,
    informed: bool,
    inverted: bool,
    contradicted: bool,
    trained: bool,
) -> tuple[Verdict, ...]:
    """T-CIL's own, without those that do not matter where there is other evidence, and what PACT adds."""
    kept, added = set(of_t_cil) - {Verdict.OK}, list[Verdict]()
    if any(piece.log_temperature is not None for piece in pieces):
        # Then it does not matter how T-CIL's own search ended (unless it hints at validation data in training).
        kept -= _OF_THE_SEARCH
    elif informed:
        kept -= _OF_THE_SEARCH
        added.append(Verdict.REMEMBERED)
    elif not kept & {Verdict.DEGENERATE_VALID, Verdict.DEGENERATE_MEMORY}:
        added.append(Verdict.NOT_IDENTIFIED)
    if inverted:
        added.append(Verdict.IMBALANCE_BELOW_ONE)
    if trained:
        added.append(Verdict.RESERVE_IN_MEMORY)
    if contradicted:
        added.append(Verdict.OUT_OF_DEPTH)
    return (*(verdict for verdict in of_t_cil if verdict in kept), *added) or (Verdict.OK,)


def _result(
    beliefs: PACTFilter,
    now: PACTEvidence,
    imbalance: float,
    verdicts: tuple[Verdict, ...],
    pieces: tuple[PACTEvidence, ...],
    t_cil: TCILResult,
    n_reserve: int,
) -> PACTResult:
    """The answer; without any evidence the network is left as it is."""
    if not beliefs.informed:
        return PACTResult(1.0, None, 0.0, None, imbalance, verdicts, pieces, t_cil, n_reserve, 1.0)
    assert now.log_temperature is not None
    return PACTResult(
        temperature=math.exp(now.log_temperature),
        log_temperature_error=now.log_temperature_error,
        bias=now.bias or 0.0,
        bias_error=now.bias_error,
        imbalance=imbalance,
        verdicts=verdicts,
        evidence=pieces,
        t_cil=t_cil,
        n_reserve=n_reserve,
        new_temperature=math.exp(now.log_temperature + beliefs.contrast.mean),
    )
