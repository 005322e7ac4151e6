"""PyCIL: hold out validation images before training, and calibrate a learner after each task.

PyCIL is a checkout, not a package; nothing of it is imported here.

    held_out = pycil.hold_out(data_manager, per_class=20)
    for task in range(data_manager.nb_tasks):
        learner.incremental_train(data_manager)
        learner.after_task()                                    # aligns the weights of WA
        pycil.calibrate(learner, data_manager, held_out, pact)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import nn

from tcil.calibration.calibrators import Calibrator
from tcil.calibration.calibrators.arguments import positive
from tcil.foundation.arrays import Ints, whole_number
from tcil.foundation.errors import invalid
from tcil.foundation.records import Record
from tcil.integrations.fitting import checked_calibrator, fit_after_task, needs_imbalance, needs_memory

__all__ = ["HeldOut", "calibrate", "dataset_labels", "hold_out"]

AnyCalibrator = TypeVar("AnyCalibrator", bound=Calibrator)
_PARTS = (1, 2)  # of (index, image, label), as PyCIL's datasets give them


@dataclass(frozen=True, eq=False)
class HeldOut(Record):
    """Images that were taken out of PyCIL's training data.

    Attributes
    ----------
    images : array (N, ...)
        As PyCIL stores them: uint8 pixels, or paths of files.
    targets : array (N,)
        PyCIL's class indices, which are the columns of its networks.

    Examples
    --------
    >>> import numpy as np
    >>> HeldOut(np.zeros((4, 32, 32, 3), np.uint8), np.array([0, 0, 1, 1])).of([1]).targets
    array([1, 1])
    """

    images: Any
    targets: Ints

    def of(self, classes: Any) -> HeldOut:
        """The images of these classes.

        Parameters
        ----------
        classes : iterable of int
            PyCIL's class indices.

        Returns
        -------
        HeldOut
            A selection.
        """
        rows = np.isin(self.targets, list(classes))
        return HeldOut(self.images[rows], self.targets[rows])


def hold_out(data_manager: Any, per_class: int, *, seed: int = 0) -> HeldOut:
    """Take `per_class` images of each class out of a DataManager's training data. PyCIL has no validation set.

    Call it once, before the first task. The DataManager is changed: neither training nor the memory sees these images.

    Parameters
    ----------
    data_manager : DataManager
        PyCIL's. Its classes are in the order of its tasks already.
    per_class : int
        How many images of each class.
    seed : int
        For the random choice. No random state is touched.

    Returns
    -------
    HeldOut
        The images and their class indices.

    Examples
    --------
    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> pixels, targets = np.zeros((60, 32, 32, 3), np.uint8), np.arange(60) % 3
    >>> manager = SimpleNamespace(_train_data=pixels, _train_targets=targets)    # in place of PyCIL's
    >>> len(hold_out(manager, per_class=5).targets), len(manager._train_targets)
    (15, 45)
    """
    per_class = whole_number(per_class, "per_class", 1)
    targets = np.asarray(_of(data_manager, "_train_targets", "data_manager", "PyCIL's DataManager"))
    images = data_manager._train_data
    labels, counts = np.unique(targets, return_counts=True)
    if counts.min() <= per_class:
        given = f"{per_class}, with {counts.min()} training images of class {labels[counts.argmin()]}"
        raise invalid("per_class", given, "fewer than every class has")
    generator = np.random.default_rng(whole_number(seed, "seed", 0))
    chosen = [generator.choice(np.flatnonzero(targets == label), per_class, replace=False) for label in labels]
    out = np.zeros(len(targets), dtype=bool)
    out[np.concatenate(chosen)] = True
    kept, held = (_rows(images, rows) for rows in (~out, out))
    data_manager._train_data, data_manager._train_targets = kept, targets[~out]
    return HeldOut(held, targets[out])


def _rows(images: Any, rows: Any) -> Any:
    """These rows of an array, or of a list of paths."""
    return images[rows] if isinstance(images, np.ndarray) else np.array(images)[rows]


def calibrate(
    learner: Any,
    data_manager: Any,
    held_out: HeldOut,
    calibrator: AnyCalibrator,
    *,
    imbalance: float | None = None,
) -> AnyCalibrator:
    """Fit a calibrator on a learner after a task, by `partial_fit`: one calibrator for all tasks.

    Call it after `learner.after_task()`, which changes the network of some learners: WA aligns its weights there. The
    learner is left as it is. The calibrator's classes are PyCIL's indices, 0 to K - 1, as are the targets that PyCIL's
    loaders give; `dataset_labels` tells which labels of the dataset they are.

    Parameters
    ----------
    learner : BaseLearner
        PyCIL's, after a task.
    data_manager : DataManager
        The one that the learner was trained with.
    held_out : HeldOut
        What `hold_out` returned.
    calibrator : Calibrator
        For instance `tcil.PACT()`, for which the imbalance is known here. The same one for all tasks.
    imbalance : float, optional
        For PACT: images of a new class that training presented for each one of an old class. By default that of
        learners which train on the new data and the memory together, once an epoch (Replay, WA, iCaRL, DER's first
        stage): training images of a new class / exemplars of an old class during this task.

    Returns
    -------
    Calibrator
        The calibrator, fitted. `calibrator.wrap(learner._network)` gives calibrated log-probabilities.
    """
    checked_calibrator(calibrator)
    known = _of(learner, "_known_classes", "learner", "a learner of PyCIL")
    total, network = int(learner._total_classes), learner._network
    if not isinstance(network, nn.Module) or learner._cur_task < 0:
        raise invalid("learner", "one that has not learned a task", "a learner after incremental_train and after_task")
    if known != total:
        advice = "Call learner.after_task() first; it aligns the weights of WA, for instance."
        raise invalid("learner", "one whose task is not finished", "a learner after after_task()", advice)
    size = int(data_manager.get_task_size(learner._cur_task))
    new = range(total - size, total)
    memory = None
    if needs_memory(calibrator):
        stored = learner._get_memory()
        if stored is None:
            advice = "Calibrate learners without a memory by tcil.TemperatureScaling()."
            raise invalid("learner", "one without exemplars", f"a memory, for {type(calibrator).__name__}", advice)
        memory = _dataset(data_manager, *stored)
    if needs_imbalance(calibrator) and imbalance is None and total > size:
        imbalance = _imbalance(learner, data_manager, new, total - size)
    own = held_out.of(new)
    fit_after_task(
        calibrator,
        network,
        memory=memory,
        valid=_dataset(data_manager, own.images, own.targets),
        new_classes=new,
        columns=range(total),
        imbalance=None if imbalance is None else positive(imbalance, "imbalance"),
        unpack=_PARTS,
        task=f"task {learner._cur_task}",
    )
    return calibrator


def dataset_labels(data_manager: Any, calibrator: Calibrator) -> tuple[int, ...]:
    """The label that each column of a calibrated network has in the dataset, whose classes PyCIL reorders.

    Parameters
    ----------
    data_manager : DataManager
        The one that the learner was trained with.
    calibrator : Calibrator
        Fitted by `calibrate`.

    Returns
    -------
    tuple of int
        `labels[i]` is that of column i.

    Examples
    --------
    >>> import tcil
    >>> from types import SimpleNamespace
    >>> scaling = tcil.TemperatureScaling().fit([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [0, 1, 1])
    >>> dataset_labels(SimpleNamespace(_class_order=[7, 2, 9, 0]), scaling)
    (7, 2)
    """
    order = _of(data_manager, "_class_order", "data_manager", "PyCIL's DataManager")
    return tuple(int(order[index]) for index in calibrator.classes_)


def _imbalance(learner: Any, data_manager: Any, new: range, n_old: int) -> float:
    """Training images of a new class for each exemplar of an old class, as they were during this task."""
    trained = float(np.isin(np.asarray(data_manager._train_targets), list(new)).sum()) / len(new)
    of_old = learner._memory_per_class if learner._fixed_memory else learner._memory_size // n_old
    if not of_old:
        raise invalid("imbalance", "None, and no exemplars of old classes", "a number")
    return trained / float(of_old)


def _dataset(data_manager: Any, images: Any, targets: Any) -> Any:
    """PyCIL's dataset of these raw images, with its evaluation transform; examples are (index, image, label)."""
    return data_manager.get_dataset([], source="train", mode="test", appendent=(images, targets))


def _of(thing: Any, name: str, argument: str, expected: str) -> Any:
    if not hasattr(thing, name):
        raise invalid(argument, type(thing).__name__, expected)
    return getattr(thing, name)
