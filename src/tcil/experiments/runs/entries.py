"""The calibrators of the tables: how each is fitted on a finished task, and how users name them."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import tcil
from tcil.calibration.calibrators import Calibrator, PACTResult, TCILEvidence
from tcil.calibration.inputs.classifier import checked_device
from tcil.calibration.temperature import Interval, temperature_interval
from tcil.experiments.runs.catalogue import ALL_DATA, ALL_DATA_TITLE, CATALOGUE
from tcil.experiments.runs.reasons import NoAnswer, NotApplicableReason
from tcil.experiments.runs.records import JsonObject
from tcil.experiments.runs.results import RANKED, WITH_OPTIONS
from tcil.foundation.errors import invalid, unknown_name
from tcil.foundation.extensions import extension, said

Labelled = tuple[Tensor, Tensor]  # logits or images, and the column of each label


@dataclass(frozen=True, eq=False)
class FinishedTask:
    """What is known after a task, labels as logit columns. Only the oracle may use the test logits.

    Attributes
    ----------
    index : int
        The number of the task, from 0.
    new_columns : range
        The columns of its new classes.
    task_columns : tuple of range
        The columns of each task so far.
    test_logits, test_columns, valid_logits, valid_columns : tensor
        Logits and true columns of the test set of all classes, and of the new task's validation set.
    memory_logits, memory_columns, reserve_logits, reserve_columns : tensor
        The same of the exemplars, and of held-out images of old classes; empty where there are none.
    model : torch.nn.Module or None
        The network; None where logits alone were imported.
    memory, valid, reserve : pair of tensors or None
        Images and columns of the exemplars, of the validation set and of the reserve.
    imbalance : float or None
        Training images of a new class for each one of an old class.
    history : dict
        What earlier tasks left, by calibrator.
    remembered : dict or None
        The history of the calibrator that is being fitted.
    returned : tuple of int
        Columns of old classes that came back with this task, with validation images of theirs.

    Examples
    --------
    >>> import torch
    >>> from tcil.extending import FinishedTask
    >>> none = (torch.zeros(0, 4), torch.zeros(0, dtype=torch.long))
    >>> test = valid = (torch.randn(8, 4), torch.arange(8) % 4)
    >>> FinishedTask(1, range(2, 4), (range(2), range(2, 4)), *test, *valid, *none, *none).seen
    range(0, 4)
    """

    index: int
    new_columns: range
    task_columns: tuple[range, ...]
    test_logits: Tensor
    test_columns: Tensor
    valid_logits: Tensor
    valid_columns: Tensor
    memory_logits: Tensor
    memory_columns: Tensor
    reserve_logits: Tensor
    reserve_columns: Tensor
    model: nn.Module | None = None
    memory: Labelled | None = None
    valid: Labelled | None = None
    imbalance: float | None = None  # training images of a new class for each one of an old class
    history: Mapping[str, JsonObject] = field(default_factory=dict)
    remembered: JsonObject | None = None  # history of the calibrator that is being fitted
    reserve: Labelled | None = None
    returned: tuple[int, ...] = ()

    @property
    def seen(self) -> range:
        """All columns seen so far."""
        return range(self.new_columns.stop)

    @property
    def current(self) -> list[int]:
        """What calibrators take as new classes: those that the task brought images of, for the first time or again."""
        return [*self.new_columns, *self.returned]

    def is_new(self, columns: Tensor) -> Tensor:
        """Which of these columns calibrators take for new: those of new classes, and of classes that came back."""
        return torch.isin(columns, torch.tensor(self.current))


class NotApplicable(Exception):
    """A calibrator lacks what it needs on this task (no images, no reserve); its row says why.

    The reason is one of those that are known, or a sentence.

    Examples
    --------
    >>> from tcil.extending import NotApplicable
    >>> def needs_a_model(task):
    ...     if task.model is None:
    ...         raise NotApplicable("needs the network")
    """

    def __init__(self, reason: NotApplicableReason | str) -> None:
        super().__init__(str(reason))
        if isinstance(reason, NotApplicableReason):
            self.answer = NoAnswer(reason=reason)
        else:
            self.answer = NoAnswer(reason=NotApplicableReason.OTHER, words=reason)


Fit = Callable[..., Any]  # of a fitted Calibrator, or None for the network as it is
IntervalOf = Callable[["FinishedTask", Any], Interval | None]


@dataclass(frozen=True)
class Entry:
    """A calibrator in the tables.

    Attributes
    ----------
    title : str
        Its name in tables.
    meaning : str
        One line on what it is.
    fit : callable
        From the finished task, and the options that the user named as `name[option=value]`, to a fitted calibrator;
        or to None, for the network as it is.
    block : str
        The part of a table that it stands in.
    kind : type, optional
        The calibrator's class, against which options are checked. Default: it has none.
    interval : callable, optional
        From the task and the fitted calibrator to the 95 % interval of the temperature.
    device : str or int, optional
        Where the user wants it to work; by default where the network is.

    Examples
    --------
    >>> import tcil
    >>> from tcil.extending import Entry
    >>> def fit(task):
    ...     return tcil.TemperatureScaling().fit(task.valid_logits, task.valid_columns)
    >>> Entry("Mine", "TS again", fit).block
    'ranked'
    """

    title: str
    meaning: str
    fit: Fit
    block: str = RANKED
    kind: type[Calibrator] | None = None
    interval: IntervalOf | None = None
    device: str | int | None = None


def _needs_images(task: FinishedTask) -> tuple[nn.Module, Labelled, Labelled]:
    if task.model is None or task.memory is None or task.valid is None:
        raise NotApplicable(NotApplicableReason.NEEDS_IMAGES)
    return task.model, task.memory, task.valid


def _needs_exemplars(task: FinishedTask) -> tuple[nn.Module, Labelled, Labelled]:
    model, memory, valid = _needs_images(task)
    if not len(memory[1]):
        raise NotApplicable(NotApplicableReason.NEEDS_MEMORY)
    return model, memory, valid


def _perturb_ts(task: FinishedTask, **options: Any) -> Calibrator:
    model, _, valid = _needs_images(task)
    return tcil.PerturbedTemperatureScaling(**options).fit(model, valid, classes=task.seen)


def _t_cil(task: FinishedTask, **options: Any) -> Calibrator:
    model, memory, valid = _needs_exemplars(task)
    return tcil.TCIL(**options).fit(model, memory, valid, task.current, classes=task.seen)


def _pact(task: FinishedTask, reserve: Labelled | None = None, **options: Any) -> Calibrator:
    model, memory, valid = _needs_exemplars(task)
    if task.imbalance is None and task.index > 0:
        raise NotApplicable(NotApplicableReason.NEEDS_COUNTS)
    return tcil.PACT(**options).fit(
        model, memory, valid, task.current, classes=task.seen, imbalance=task.imbalance, reserve=reserve,
        history=task.remembered,
    )  # fmt: skip


def _pact_r(task: FinishedTask, **options: Any) -> Calibrator:
    _needs_images(task)
    if task.reserve is None:
        raise NotApplicable(NotApplicableReason.NEEDS_RESERVE)
    return _pact(task, task.reserve, **options)


def _statistics(task: FinishedTask, **options: Any) -> Calibrator:
    if task.model is None or task.valid is None:
        raise NotApplicable(NotApplicableReason.NEEDS_IMAGES)
    if task.remembered is None and task.index > 0:
        raise NotApplicable(NotApplicableReason.NEEDS_FIRST_TASK)
    calibrator = tcil.StatisticsTemperatureScaling(**options)
    return calibrator.fit(task.model, task.valid, task.current, classes=task.seen, history=task.remembered)


def _first_task(task: FinishedTask, **options: Any) -> Calibrator:
    history = task.remembered
    if history is None and task.index > 0:
        raise NotApplicable(NotApplicableReason.NEEDS_FIRST_TASK)
    calibrator = tcil.FirstTaskTemperatureScaling(**options)
    if history is None:
        return calibrator.fit(*_valid(task))
    return calibrator.fit(classes=task.seen, history=history)


def _reserve(task: FinishedTask) -> Labelled:
    if not len(task.reserve_columns):
        raise NotApplicable(NotApplicableReason.NEEDS_RESERVE)
    old = ~task.is_new(task.reserve_columns)
    if not bool(old.any()):
        raise NotApplicable(NotApplicableReason.NO_OLD_TASK)
    # Old classes from the reserve, new ones from the validation set.
    logits, columns = _valid(task)
    return torch.cat([task.reserve_logits[old], logits]), torch.cat([task.reserve_columns[old], columns])


def _valid(task: FinishedTask) -> Labelled:
    if not len(task.valid_columns):
        raise NotApplicable(NotApplicableReason.NEEDS_VALIDATION)
    return task.valid_logits, task.valid_columns


def _exemplars(task: FinishedTask) -> Labelled:
    if not len(task.memory_columns):
        raise NotApplicable(NotApplicableReason.NEEDS_MEMORY)
    return task.memory_logits, task.memory_columns


def _test(task: FinishedTask) -> Labelled:
    return task.test_logits, task.test_columns


def _on(data: Callable[[FinishedTask], Labelled], kind: Callable[..., Any]) -> Fit:
    """How a calibrator that needs no images is fitted."""
    return lambda task, **options: kind(**options).fit(*data(task))


def _on_groups(data: Callable[[FinishedTask], Labelled]) -> Fit:
    return lambda task: tcil.GroupTemperatureScaling().fit(*data(task), new_classes=task.current)


def _t_cil_interval(evidence: TCILEvidence) -> Interval | None:
    """Perturbed exemplars and validation images are resampled. The magnitude is not searched again: the temperature of
    the exemplars is taken to move with that of the validation set, its target, in proportion."""
    return None if evidence.pushed is None else temperature_interval(evidence.pushed, evidence.valid)


def _pact_interval(result: PACTResult) -> Interval | None:
    """By the filter's own error."""
    if result.log_temperature_error is None:
        return None
    spread = math.exp(1.96 * result.log_temperature_error)
    return result.temperature / spread, result.temperature * spread


def _entry(
    name: str, fit: Fit, kind: type[Calibrator] | None = None, interval: IntervalOf | None = None
) -> tuple[str, Entry]:
    described = CATALOGUE[name]
    return name, Entry(described.title, described.meaning, fit, described.block, kind, interval)


_TS = tcil.TemperatureScaling
CALIBRATORS: dict[str, Entry] = dict(
    [
        _entry("vanilla", lambda task: None),
        _entry("ts", _on(_valid, _TS), _TS, lambda task, _: temperature_interval(_valid(task))),
        _entry("ets", _on(_valid, tcil.EnsembleTemperatureScaling), tcil.EnsembleTemperatureScaling),
        _entry("irm", _on(_valid, tcil.MulticlassIsotonic), tcil.MulticlassIsotonic),
        _entry("perturb-ts", _perturb_ts, tcil.PerturbedTemperatureScaling),
        _entry("t-cil", _t_cil, tcil.TCIL, lambda _, fitted: _t_cil_interval(fitted.evidence_)),
        _entry("pact", _pact, tcil.PACT, lambda _, fitted: _pact_interval(fitted.result_)),
        _entry("first-task-ts", _first_task, tcil.FirstTaskTemperatureScaling),
        _entry("exemplar-ts", _on(_exemplars, _TS), _TS),
        _entry("optimal-ts", _on(_test, _TS), _TS, lambda task, _: temperature_interval(_test(task))),
        _entry("optimal-group-ts", _on_groups(_test)),
        _entry("reserve-ts", lambda task: _TS().fit(*_reserve(task))),
        _entry("reserve-group-ts", _on_groups(_reserve)),
        _entry("pact-r", _pact_r, tcil.PACT, lambda _, fitted: _pact_interval(fitted.result_)),
    ]
)


# On top of them, for networks whose inputs are features that do not change from task to task; or on request.
ON_FEATURES: dict[str, Entry] = dict([_entry("statistics-ts", _statistics, tcil.StatisticsTemperatureScaling)])


def specs_of(text: str | None) -> list[str] | None:
    """Calibrators by comma, each a name or `name[option=value,...]`; None stays None, which means all."""
    if text is None:
        return None
    specs = re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?", text)
    if not specs or ",".join(specs) != text:
        raise invalid("calibrators", repr(text), "names by comma, such as ts,t-cil[policy=random]")
    return specs


def is_own(name: str) -> bool:
    """Whether a calibrator, with or without options, is not one of tcil."""
    return name.partition("[")[0] not in {**CALIBRATORS, **ON_FEATURES}


def entry_of(name: str) -> Entry:
    """A calibrator by name or `name[option=value,...]`; one of the user's own is an Entry, or a function of one."""
    name, bracket, options = name.partition("[")
    if bracket:
        return _with_options(name, entry_of(name), options.removesuffix("]"))
    own = {**CALIBRATORS, **ON_FEATURES}
    if name in own:
        return own[name]
    entry = extension("calibrator", name, own)
    if not isinstance(entry, Entry) and callable(entry):
        entry = _made(name, entry) if _takes_nothing(entry) else None
    if not isinstance(entry, Entry):
        advice = "Tables need a title and a way to fit: mine = tcil.extending.Entry('Mine', 'what it does', fit)."
        raise invalid("calibrator", repr(name), "an Entry, or a factory of one", advice)
    return entry


def _made(name: str, factory: Callable[[], Any]) -> Any:
    try:
        return factory()
    except Exception as error:
        raise invalid(
            "calibrator", f"{name!r}, which failed ({said(error)})", "an Entry, or a factory of one"
        ) from error


def _takes_nothing(made: Callable[..., Any]) -> bool:
    """Whether it can be called without arguments, and is no class of calibrators."""
    if isinstance(made, type) and issubclass(made, Calibrator):
        return False
    try:
        inspect.signature(made).bind()
    except (TypeError, ValueError):
        return False
    return True


def _with_options(name: str, entry: Entry, text: str) -> Entry:
    """The same calibrator with options, which are tried at once."""
    kind = entry.kind
    if kind is None:
        raise invalid("calibrators", f"{name}[{text}]", f"{name}, which has no options")
    known, options = [field.name for field in fields(kind) if field.init], {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            raise invalid("calibrators", f"{name}[{text}]", f"{name}[option=value]")
        if key not in known:
            raise unknown_name(f"option of calibrator {name}", key, known)
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    kind(**options)
    title, fit = f"{entry.title} ({text.replace(',', ', ')})", partial(entry.fit, **options)
    return replace(entry, title=title, fit=fit, block=WITH_OPTIONS, device=options.get("device"))


def check_calibrators(names: Sequence[str] | None, *, here: bool = True) -> None:
    """Refuse calibrators that are unknown or cannot work, before any work; devices, if they are of this machine."""
    entries = {name: entry_of(name) for name in names or ()}
    titled = {entry.title: name for name, entry in (CALIBRATORS | ON_FEATURES | entries).items() if not is_own(name)}
    titled[ALL_DATA_TITLE] = ALL_DATA
    for name, entry in entries.items():
        if is_own(name) and (not entry.title.strip() or titled.setdefault(entry.title, name) != name):
            other = titled.get(entry.title, name)
            given = f"{name} with the title {entry.title!r}" + (f", which {other} has" if other != name else "")
            raise invalid("calibrators", given, "a title of its own for each, since tables name rows by it")
    for device in [entry.device for entry in entries.values()]:
        if device is not None and here:
            checked_device(device)
