"""What every learner does."""

from __future__ import annotations

import pytest

from learner_tasks import batch, run_task, task_data
from tcil.incremental.learners import LEARNERS, make_learner
from tcil.incremental.networks import small_cnn


@pytest.mark.parametrize("head", ["fixed", "growing"])
@pytest.mark.parametrize("name", [name for name, kind in LEARNERS.items() if kind.rehearses])
def test_every_learner_learns_three_tasks(name, head, digits):
    short = {"finetune_epochs": 1, "finetune_milestones": ()} if name in ("eeil", "der", "bic") else {}
    learner = make_learner(name, small_cnn, 10, seed=1, options={"head": head, **short})
    for index in range(3):
        run_task(learner, digits, task_data(digits, index))
        x, _ = batch(digits, task_data(digits, index))
        width = learner.model(x).shape[1]
        assert width == (10 if head == "fixed" else 2 * (index + 1))
    assert learner.teacher is None


def test_unknown_names_suggest():
    expected = rf"learner: got 'eil'; expected one of {', '.join(LEARNERS)}. Did you mean 'eeil'"
    with pytest.raises(ValueError, match=expected):
        make_learner("eil", small_cnn, 10, seed=1)
    with pytest.raises(
        ValueError, match=r"option of learner der: got 'finetune_epoch'.*Did you mean 'finetune_epochs'"
    ):
        make_learner("der", small_cnn, 10, seed=1, options={"finetune_epoch": 3})
