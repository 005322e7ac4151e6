"""Heads that grow with the classes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from learner_tasks import task_data
from tcil.incremental.learners.base import grow_head
from tcil.incremental.learners.registry import make_learner
from tcil.incremental.networks import small_cnn


def test_growing_head_keeps_old_rows():
    model = small_cnn(4)
    before = model.fc.weight.detach().clone(), model.fc.bias.detach().clone()
    grow_head(model, 7)
    assert model.fc.out_features == 7
    assert torch.equal(model.fc.weight[:4], before[0])
    assert torch.equal(model.fc.bias[:4], before[1])


class TestGrowingHeads:
    def test_a_head_without_a_bias(self):
        network = small_cnn(4)
        network.fc = nn.Linear(network.fc.in_features, 4, bias=False)
        before = network.fc.weight.detach().clone()
        grow_head(network, 6)
        assert network.fc.bias is None
        assert network.fc.weight.shape[0] == 6
        assert torch.equal(network.fc.weight[:4], before)

    @pytest.mark.parametrize(
        ("network", "told"),
        [(nn.Linear(3, 2), "Linear whose fc is missing"), (nn.ModuleDict({"fc": nn.ReLU()}), "fc is a ReLU")],
    )
    def test_a_head_that_cannot_grow(self, network, told):
        with pytest.raises(ValueError, match=f"network: got .*{told}; expected a linear layer fc"):
            grow_head(network, 6)


def test_class_means_need_a_head_with_a_bias(digits):
    def network(n_classes):
        made = small_cnn(n_classes)
        made.fc = nn.Linear(made.fc.in_features, n_classes, bias=False)
        return made

    learner = make_learner("ncm", network, 10, seed=0)
    with pytest.raises(ValueError, match=r"network: got .* without a bias; expected a linear layer fc with a bias"):
        learner.begin_task(task_data(digits, 0))


@pytest.mark.parametrize("name", ["wa", "der", "ncm", "ranpac"])
def test_a_network_without_a_linear_head_is_named_before_anything_is_trained(name, digits):
    class Other(nn.Module):
        def __init__(self, n_classes):
            super().__init__()
            self.classifier = nn.Linear(64, n_classes)

    learner = make_learner(name, Other, 10, seed=0)
    with pytest.raises(ValueError, match="network: got Other whose fc is missing; expected a linear layer fc"):
        learner.begin_task(task_data(digits, 0))
