"""Lightning: calibrate at the end of `Trainer.fit`, and report calibration errors at `Trainer.test`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tcil.calibration.calibrators import Calibrator
from tcil.calibration.calibrators.arguments import positive
from tcil.calibration.exemplars import as_new_classes
from tcil.calibration.inputs.examples import Examples, ExampleStream, Unpack
from tcil.foundation.arrays import as_classes, as_labels
from tcil.foundation.errors import invalid, shortened
from tcil.foundation.extensions import said
from tcil.integrations.extras import missing_extra
from tcil.integrations.fitting import (
    checked_calibrator,
    fit_after_task,
    needs_imbalance,
    needs_memory,
    presented_ratio,
    require_memory,
)
from tcil.metrics import expected_calibration_error, predicted_groups

try:
    from lightning.pytorch import Callback
except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not belong to this torch
    raise missing_extra("lightning", error) from error

__all__ = ["CalibrationCallback"]


class CalibrationCallback(Callback):
    """Fits a calibrator on the module when `Trainer.fit` ends, by `partial_fit`.

    Create one callback for each task, with the same calibrator. During training it counts how often each class is
    presented, for PACT. At `Trainer.test` it logs `calibration/ece`, `calibration/ece_uncalibrated`, and
    `calibration/ece_predicted_old` and `_new` for samples predicted as old and as new classes.

    The module's `forward` must return logits, and batches must hold inputs and labels.

    Parameters
    ----------
    calibrator : Calibrator
        For instance `tcil.PACT()`, for which the imbalance is known here. The same one for all tasks.
    new_classes : iterable of int
        The labels of this task.
    valid : pair of tensors or arrays, Dataset, DataLoader, or callable
        Held-out data of this task. Or a function without arguments that returns it when training ends.
    memory : as valid, optional
        Exemplars of all classes, those of this task included. Not needed by calibrators of logits.
    classes : iterable of int, optional
        The labels of all classes so far. Default: 0 to the largest new class.
    columns : iterable of int, optional
        Their columns in the module's logits. Default: the first ones if `classes` is given, else the labels.
    imbalance : float, optional
        For PACT. Default: as counted in training batches: their integer labels of 0 or more. Others, such as the soft
        labels of mixup, are not counted.
    unpack : two keys, two positions or a function, optional
        Where a batch has its inputs and labels. Default: as `TCIL.fit` finds them.

    Attributes
    ----------
    calibrator : Calibrator
        Fitted when training ends; `calibrator.wrap(module)` is the calibrated network.
    presented : Counter
        How often images of each class were presented.

    Examples
    --------
    >>> import tcil, torch
    >>> from tcil.integrations.lightning import CalibrationCallback
    >>> held_out = torch.randn(20, 4), torch.arange(20) % 2
    >>> CalibrationCallback(tcil.TemperatureScaling(), new_classes=[0, 1], valid=held_out).classes
    (0, 1)
    """

    def __init__(
        self,
        calibrator: Calibrator,
        new_classes: Iterable[int],
        valid: Examples | Callable[[], Examples],
        memory: Examples | Callable[[], Examples] | None = None,
        *,
        classes: Iterable[int] | None = None,
        columns: Iterable[int] | None = None,
        imbalance: float | None = None,
        unpack: Unpack | None = None,
    ) -> None:
        super().__init__()
        self.calibrator = checked_calibrator(calibrator)
        self.new_classes = as_new_classes(new_classes)
        self.classes = tuple(range(max(self.new_classes) + 1)) if classes is None else as_classes(classes, "classes")
        if not set(self.new_classes) <= set(self.classes):
            raise invalid("new_classes", shortened(self.new_classes), "labels among classes")
        usual = range(len(self.classes))
        self.columns = tuple(usual) if columns is None else as_classes(columns, "columns")
        if len(self.columns) != len(self.classes):
            raise invalid("columns", f"{len(self.columns)} columns", f"{len(self.classes)}, one for each class")
        require_memory(calibrator, memory)
        self.imbalance = None if imbalance is None else positive(imbalance, "imbalance")
        self.presented: Counter[int] = Counter()
        self._valid, self._memory, self._unpack = valid, memory, unpack
        self._uncounted = ""  # why the labels of a batch could not be counted
        example = torch.zeros(1, 1), torch.zeros(1, dtype=torch.long)
        self._reader = ExampleStream(example, "batch", batch_size=1, unpack=unpack)
        self._rows: list[tuple[Tensor, Tensor]] = []

    # training ------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count from the beginning."""
        self.presented, self._uncounted = Counter(), ""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the labels of the batch, where they are needed; no batch that can be trained on ends the training."""
        if self.imbalance is not None or not needs_imbalance(self.calibrator):
            return
        try:
            labels = self._parts(batch)[1]
        except Exception as error:  # `unpack` may be the user's own
            self._uncounted = self._uncounted or said(error)
        else:
            self.presented.update(labels[labels >= 0].tolist())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Fit the calibrator."""
        fit_after_task(
            self.calibrator,
            pl_module,
            memory=_now(self._memory) if needs_memory(self.calibrator) else None,
            valid=_now(self._valid),
            new_classes=self.new_classes,
            classes=self.classes,
            columns=self.columns,
            imbalance=self._ratio(),
            unpack=self._unpack,
        )

    def _ratio(self) -> float | None:
        if self.imbalance is not None or not needs_imbalance(self.calibrator):
            return self.imbalance
        ratio = presented_ratio(self.presented, self.classes, self.new_classes)
        if ratio is not None and not self.presented:
            reason = f" ({self._uncounted})" if self._uncounted else ""
            given = f"None, and training batches without labels that can be counted{reason}"
            advice = (
                "Pass imbalance=, how many images of a new class training presented for each one of an old class; or"
                " unpack=, a function that returns inputs and integer labels of a batch; or a calibrator that does not"
                " need it, such as tcil.TCIL()."
            )
            raise invalid("imbalance", given, "a number, or integer labels", advice)
        if ratio == float("inf"):
            given = "None, and training batches without a single image of an old class"
            raise invalid("imbalance", given, "a number, where exemplars reach training by another way")
        return ratio

    # test ----------------------------------------------------------------------------------------------------

    def on_test_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Reset the metrics."""
        self._rows = []

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Take the logits that `test_step` returns under "logits", or run the module once more."""
        inputs, labels = self._parts(batch)
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
        if logits is None:
            with torch.no_grad():
                answer = pl_module(inputs)
            logits = getattr(answer, "logits", answer)
        picked = logits.detach().cpu()[:, list(self.columns)]
        known = torch.isin(labels.cpu(), torch.tensor(self.classes))
        if bool(known.any()):
            self._rows.append((picked[known], labels.cpu()[known]))

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the calibration errors."""
        if not self._rows:
            return
        logits, labels = (torch.cat(parts) for parts in zip(*self._rows, strict=True))
        probs = self.calibrator.predict_proba(logits)
        groups = predicted_groups(probs, self.new_classes, classes=self.classes)
        ece = expected_calibration_error(probs, labels, classes=self.classes, groups=groups)
        plain = expected_calibration_error(torch.softmax(logits.double(), dim=1), labels, classes=self.classes)
        named = {f"ece_predicted_{group}": value for group, value in ece.by_group.items()}
        for name, value in {"ece": float(ece), "ece_uncalibrated": float(plain), **named}.items():
            pl_module.log(f"calibration/{name}", float(value))

    def _parts(self, batch: Any) -> tuple[Any, Tensor]:
        """Inputs and labels of a batch, found as `fit` finds them; the inputs are those of the user, unchecked."""
        inputs, labels = self._reader.unpacked(batch)
        return inputs, as_labels(labels, "batch labels")


def _now(examples: Any) -> Any:
    """What a function of the user's returns by now; anything else as it is."""
    return examples() if callable(examples) and not hasattr(examples, "__iter__") else examples
