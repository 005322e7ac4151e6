"""Methods of others and simple rules that round nine measures beside PACT; docs/pact-protocol.md describes each."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from research.beyond import Known, adjusted, fit_on, scaled, within
from research.pact.methods import Method, balanced, reserve_of
from tcil.extending import predict_features


def first_task(known: Known) -> Tensor:
    """The temperature of the first task's validation set, kept."""
    if not known.old:
        known.memory["temperature"] = fit_on(known.valid)
    return scaled(known, known.memory["temperature"])


def tcil_and_imbalance(known: Known) -> Tensor:
    """T-CIL's temperature, and the whole log(imbalance) as bias."""
    log_t = float(np.log(known.evidence.result.temperature))
    return adjusted(known, log_t, known.log_imbalance if known.old else 0.0)


def prior2posterior(known: Known) -> Tensor:
    """Bhat et al. 2025: the mean posterior on training images, here the exemplars, is the prior to be taken off."""
    probs = torch.softmax(known.task.memory_logits.double(), dim=1)
    is_new = ~(known.task.memory_columns < known.old)
    weights = torch.where(is_new, np.exp(known.log_imbalance) if known.old else 1.0, 1.0).double()
    prior = (weights[:, None] * probs).sum(0) / weights.sum()
    return torch.log_softmax(known.task.test_logits.double() / np.exp(within(known)) - prior.log(), dim=1)


def replayed(known: Known) -> Tensor:
    """Li et al. 2024: one temperature on reserve and validation set, every image counting once."""
    return scaled(known, fit_on(known.valid, reserve_of(known)))


def distance_aware(known: Known) -> Tensor:
    """Our reading of DATS (Serra and Buettner 2025): log T is a line in the distance of a class from the new task."""
    distance = distances(known)
    logits, columns = balanced(known)
    logits, far = logits.double(), distance[logits.argmax(1)]

    def loss(point: np.ndarray) -> float:
        t = torch.exp(point[0] + point[1] * far)
        return float(torch.nn.functional.cross_entropy(logits / t[:, None], columns))

    start = [float(np.log(fit_on((logits, columns)))), 0.0]
    found = minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-6}).x
    test = known.task.test_logits.double()
    t = torch.exp(found[0] + found[1] * distance[test.argmax(1)])
    return torch.log_softmax(test / t[:, None], dim=1)


def distances(known: Known) -> Tensor:
    """How far each class's mean is from the nearest mean of the new task, over the mean of these; 0 of new classes."""
    assert known.task.model is not None
    assert known.task.memory is not None
    rows = predict_features(known.task.model, known.task.memory, classes=known.task.seen)
    features = rows.features.double()
    means = torch.stack([features[rows.label_columns == column].mean(0) for column in known.task.seen])
    nearest = torch.cdist(means, means[known.old :]).amin(1)
    nearest[known.old :] = 0.0
    return nearest / nearest[: known.old].mean() if known.old else nearest


METHODS: dict[str, Method] = {
    "First-task TS": first_task,
    "T-CIL and imbalance": tcil_and_imbalance,
    "Prior2Posterior": prior2posterior,
    "replayed calibration": replayed,
    "distance-aware TS": distance_aware,
}
