"""The paper's procedure taken literally, and a straightforward exact version: what the library's speed is measured by.

`literal` is Algorithms 1 to 3 as they read: every search step passes the whole memory for the class means, passes the
new exemplars for their targets, differentiates the loss (a plain `backward`, which fills the parameters' gradients as
well) and fits a temperature by 100 epochs of SGD; images as they come, NCHW, in batches of 128.
`straightforward` knows that means, targets and signs do not depend on the magnitude: once each, then the bisection,
with exact temperatures. Neither shares code with the library but for that exact solver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import tcil

BATCH = 128


@dataclass(frozen=True)
class Answer:
    temperature: float
    magnitude: float


def features_of(model: Any, images: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model.features(batch) for batch in images.split(BATCH)])


def logits_of(model: Any, images: Tensor, seen: int) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(batch)[:, :seen] for batch in images.split(BATCH)])


def class_means(features: Tensor, labels: Tensor, seen: int) -> Tensor:
    return torch.stack([features[labels == c].mean(dim=0) for c in range(seen)])


def targets_of(features: Tensor, labels: Tensor, means: Tensor, first_new: int) -> Tensor:
    distances = torch.cdist(features, means)
    rows = torch.arange(len(labels))
    nearest, farthest = distances.clone(), distances.clone()
    nearest[rows, labels], farthest[rows, labels] = torch.inf, -torch.inf
    return torch.where(labels >= first_new, farthest.argmax(dim=1), nearest.argmin(dim=1))


def sgd_temperature(logits: Tensor, labels: Tensor, generator: torch.Generator) -> float:
    """TempOpt as the authors run it: lr 0.1, divided by 10 at epoch 50, 100 epochs, T from 1."""
    temperature = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([temperature], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [50])
    for _ in range(100):
        for rows in torch.randperm(len(labels), generator=generator).split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(logits[rows] / temperature, labels[rows]).backward()
            optimizer.step()
        schedule.step()
    return float(temperature.detach())


def signs_with_backward(model: Any, images: Tensor, targets: Tensor, seen: int) -> Tensor:
    """The sign of the input gradient by a plain backward pass; whatever else requires gradients gets them too."""
    signs = []
    for batch, wanted in zip(images.split(BATCH), targets.split(BATCH), strict=True):
        x = batch.clone().requires_grad_()
        functional.cross_entropy(model(x)[:, :seen], wanted).backward()
        signs.append(x.grad.sign())
    return torch.cat(signs)


def literal(task: Any) -> Answer:
    """Algorithm 1 with Algorithm 2 inside, everything recomputed at every step."""
    model, (images, labels), seen = task.model, task.memory, task.seen
    first_new = task.new_classes[0]
    generator = torch.Generator().manual_seed(0)

    def perturbed(chosen: Tensor, own: Tensor, magnitude: float) -> Tensor:
        means = class_means(features_of(model, images), labels, seen)
        targets = targets_of(features_of(model, chosen), own, means, first_new)
        return chosen - magnitude * signs_with_backward(model, chosen, targets, seen)

    wanted = sgd_temperature(logits_of(model, task.valid[0], seen), task.valid[1], generator)
    new = labels >= first_new
    low, high = 0.0, 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        logits = logits_of(model, perturbed(images[new], labels[new], middle), seen)
        if sgd_temperature(logits, labels[new], generator) < wanted:
            low = middle
        else:
            high = middle
    magnitude = (low + high) / 2
    logits = logits_of(model, perturbed(images, labels, magnitude), seen)
    return Answer(sgd_temperature(logits, labels, generator), magnitude)


def straightforward(task: Any) -> Answer:
    """Signs once, exact temperatures, bisection; in the layout in which images and network are given."""
    model, (images, labels), seen = task.model, task.memory, task.seen
    first_new = task.new_classes[0]
    features = features_of(model, images)
    targets = targets_of(features, labels, class_means(features, labels, seen), first_new)
    signs = input_signs(model, images, targets, seen)

    def temperature(chosen: Tensor, own: Tensor) -> float:
        return tcil.fit_temperature(logits_of(model, chosen, seen), own).limit

    wanted = temperature(*task.valid)
    new = labels >= first_new
    low, high = 0.0, 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        if temperature(images[new] - middle * signs[new], labels[new]) < wanted:
            low = middle
        else:
            high = middle
    magnitude = (low + high) / 2
    return Answer(temperature(images - magnitude * signs, labels), magnitude)


def input_signs(model: Any, images: Tensor, targets: Tensor, seen: int) -> Tensor:
    signs = []
    for batch, wanted in zip(images.split(BATCH), targets.split(BATCH), strict=True):
        x = batch.clone().requires_grad_()
        loss = functional.cross_entropy(model(x)[:, :seen], wanted)
        signs.append(torch.autograd.grad(loss, x)[0].sign())
    return torch.cat(signs)
