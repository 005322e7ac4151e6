"""A world of logits without a network: old classes that are often called new, and a memory known by heart."""

from __future__ import annotations

import numpy as np
import pytest

from research.decisions.worlds import World


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def made_world(n_old=8, n_new=4, per_class=300, margin=3.8, bias=0.8, seed=0):
    """Some classes are harder than others; `bias` is what new classes have over old ones."""
    rng = np.random.default_rng(seed)
    n_classes = n_old + n_new
    new = np.arange(n_classes) >= n_old
    ease = margin + rng.uniform(-1.5, 1.5, n_classes)

    def logits(columns, more):
        raw = rng.normal(size=(len(columns), n_classes)) * 1.2 + bias * new
        raw[np.arange(len(columns)), columns] += ease[columns] + more
        return 1.3 * raw

    columns = np.repeat(np.arange(n_classes), per_class)
    memory = np.repeat(np.arange(n_classes), 20)
    return World(
        f"made of {n_classes} classes",
        {"vanilla": softmax(logits(columns, 0.0))},
        columns,
        new,
        {"vanilla": softmax(logits(memory, 9.0))},
        memory,
    )


@pytest.fixture(scope="session")
def world():
    return made_world()


@pytest.fixture(scope="session")
def drawn(world):
    """Calibration images of both groups: probabilities and labels."""
    rng = np.random.default_rng(5)
    rows = rng.choice(len(world.columns), 600, replace=False)
    return world.probs["vanilla"][rows], world.columns[rows]
