"""Perturbed exemplars: the directions are the same however often and from wherever they are asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tcil
from tcil.calibration.exemplars import open_exemplars
from tcil.calibration.perturbation import DirectionPolicy
from tcil.calibration.perturbed_exemplars import GLANCE, PerturbedExemplars

NEW, K = [1, 3], 5


@pytest.fixture(scope="module")
def network():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, K)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def memory():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(150, 6, dtype=torch.float64, generator=generator), torch.randperm(150, generator=generator) % K


@pytest.mark.parametrize("policy", DirectionPolicy)
def test_read_again_or_kept_they_are_the_same(network, memory, policy):
    loader = DataLoader(TensorDataset(*memory), batch_size=16)
    with open_exemplars(network, loader, NEW) as exemplars:
        read, kept = PerturbedExemplars(exemplars, policy, seed=3), PerturbedExemplars(exemplars, policy, 3, keep=True)
        for magnitude in (0.5, 0.2, 0.5):
            torch.testing.assert_close(read.logits(magnitude), kept.logits(magnitude))
            torch.testing.assert_close(read.inputs(magnitude), kept.inputs(magnitude))


def test_rows_are_the_new_ones_first(network, memory):
    with open_exemplars(network, memory, NEW, batch_size=32) as exemplars:
        perturbed = PerturbedExemplars(exemplars)
        images, columns = memory[0][perturbed.rows], memory[1][perturbed.rows]
        assert torch.equal(perturbed.columns, columns)
        assert set(columns[: perturbed.n_new].tolist()) == set(NEW)
        assert not set(columns[perturbed.n_new :].tolist()) & set(NEW)
        assert torch.equal(perturbed.inputs(0.0), images)
        torch.testing.assert_close(perturbed.logits(0.0), network(images).detach())
        torch.testing.assert_close(perturbed.logits(0.0, new_only=True), exemplars.new_logits)
        torch.testing.assert_close(perturbed.features(0.0), network[:2](images).detach())


def test_every_value_moves_toward_the_target_class(network, memory):
    """Against the gradient: a small push makes the nearest other class's cross-entropy fall for each of them."""
    with open_exemplars(network, memory, NEW) as exemplars:
        perturbed = PerturbedExemplars(exemplars, DirectionPolicy.CLOSEST)
        images = perturbed.inputs(0.0)
        distances = torch.cdist(perturbed.features(0.0), exemplars.means)
        distances[torch.arange(len(images)), perturbed.columns] = torch.inf
        targets = distances.argmin(dim=1)
        clean, pushed = (torch.log_softmax(perturbed.logits(m), dim=1) for m in (0.0, 1e-4))
        moved = perturbed.inputs(1e-4) - images
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 1e-4))
    assert bool((pushed > clean).gather(1, targets[:, None]).all())


def test_a_glance_is_at_some_of_the_new_ones(network, memory):
    with open_exemplars(network, memory, NEW) as exemplars:
        perturbed = PerturbedExemplars(exemplars)
        logits, columns = perturbed.glance(0.3)
        every = max(1, perturbed.n_new // GLANCE)
        assert GLANCE <= len(columns) < perturbed.n_new
        torch.testing.assert_close(logits, perturbed.logits(0.3, new_only=True)[::every])
        assert torch.equal(columns, exemplars.new_columns[::every])


def test_they_are_what_t_cil_learned_from(network, memory):
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(200, 6, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        predicted = torch.tensor(NEW)[network(images)[:, NEW].argmax(dim=1)]
        known = memory[0], network(memory[0]).argmax(dim=1)
    valid = images, torch.where(torch.arange(200) % 3 > 0, predicted, torch.tensor(NEW).repeat(100))
    evidence = tcil.TCIL(policy="random", seed=5).evidence(network, known, valid, NEW)
    assert evidence.pushed is not None
    assert evidence.result.magnitude > 0
    with open_exemplars(network, known, NEW) as exemplars:
        perturbed = PerturbedExemplars(exemplars, DirectionPolicy.RANDOM, seed=5)
        torch.testing.assert_close(perturbed.logits(evidence.result.magnitude), evidence.pushed[0])
        assert torch.equal(perturbed.columns, evidence.pushed[1])


def test_the_model_is_as_it_was(network, memory):
    network.train()
    with open_exemplars(network, memory, NEW):
        assert not network.training
    assert network.training
    with pytest.raises(ValueError, match="without an exemplar in memory"), open_exemplars(network, memory, [7]):
        pass


def test_evidence_is_there_after_a_fit_only():
    with pytest.raises(tcil.NotFittedError, match="no evidence"):
        _ = tcil.TCIL().evidence_


def test_the_scale_of_inputs_far_from_zero_is_found():
    inputs = 1e4 + torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    with open_exemplars(torch.nn.Linear(5, 4), (inputs, torch.arange(64) % 4), [2, 3], batch_size=10) as exemplars:
        assert exemplars.spread == pytest.approx(float(inputs.double().std(correction=0)), rel=1e-3)
