"""What every learner does."""

from __future__ import annotations

import pytest
import torch

from learner_tasks import batch, run_task, task_data
from tcil.incremental.learners import LEARNERS, TaskData, make_learner
from tcil.incremental.networks import small_cnn
from tcil.incremental.pretrained.heads import CosineHead


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


@pytest.mark.parametrize("name", ["wa", "der", "bic"])
def test_a_cosine_head_that_has_no_effect_or_cannot_be_aligned_is_refused_before_anything_is_trained(name, digits):
    def network(n_classes):
        made = small_cnn(n_classes)
        made.fc = CosineHead(made.fc.in_features, n_classes)
        return made

    learner = make_learner(name, network, 10, seed=1)
    with pytest.raises(
        ValueError, match=r"network: got ResNet whose fc is a CosineHead; expected a plain .*head=linear"
    ):
        learner.begin_task(task_data(digits, 0))


def test_unknown_names_suggest():
    expected = rf"learner: got 'eil'; expected one of {', '.join(LEARNERS)}. Did you mean 'eeil'"
    with pytest.raises(ValueError, match=expected):
        make_learner("eil", small_cnn, 10, seed=1)
    with pytest.raises(
        ValueError, match=r"option of learner der: got 'finetune_epoch'.*Did you mean 'finetune_epochs'"
    ):
        make_learner("der", small_cnn, 10, seed=1, options={"finetune_epoch": 3})


def test_balanced_rows_have_as_many_of_every_class_also_where_a_new_class_is_small():
    columns = torch.tensor([0] * 20 + [1] * 20 + [2] * 30 + [3] * 5)
    exemplars = {0: torch.arange(20), 1: torch.arange(20, 40)}
    data = TaskData(1, range(2, 4), torch.arange(40, 75), exemplars, columns, (range(2), range(2, 4)))
    rows = data.balanced_rows(torch.Generator().manual_seed(0))
    assert torch.bincount(columns[rows]).tolist() == [5, 5, 5, 5]
    assert len(rows.unique()) == 20
