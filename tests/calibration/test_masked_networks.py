"""Networks that mask classes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tcil

MASKS = [-torch.inf, -1e4, -1e9, torch.finfo(torch.float32).min, "-1e4 + z"]


class MaskedHead(nn.Module):
    """Columns 4 and 5 are forbidden to inputs that do not say, in their last entry, that they are of the last task."""

    def __init__(self, mask):
        super().__init__()
        self.fc, self.mask = nn.Linear(16, 6), mask

    def forward(self, features, task):
        forbidden = (torch.arange(6) >= 4) & (task.detach() < 1.5)[:, None]
        logits = self.fc(features)
        return logits - 1e4 * forbidden if self.mask == "-1e4 + z" else logits.masked_fill(forbidden, self.mask)


class MaskedNetwork(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), MaskedHead(mask)

    def forward(self, x):
        return self.head(self.body(x[:, :8]), x[:, 8])


@pytest.fixture(scope="module")
def masked_task():
    """Weights and data of six classes in three tasks; the network with another mask has the same weights."""
    generator = torch.Generator().manual_seed(0)
    centres = 1.5 * torch.randn(6, 8, generator=generator)

    def draw(labels):
        inputs = centres[labels] + torch.randn(len(labels), 8, generator=generator)
        return torch.cat([inputs, (labels // 2)[:, None].float()], dim=1), labels

    memory, valid = draw(torch.arange(60) % 6), draw(4 + torch.arange(200) % 2)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = MaskedNetwork(-torch.inf)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(memory[0]), memory[1]).backward()
        optimizer.step()
    networks = [MaskedNetwork(mask) for mask in MASKS]
    for other in networks:
        other.load_state_dict(network.state_dict())
    return networks, memory, valid


@pytest.mark.parametrize("policy", ["paper", "random", "closest", "farthest"])
def test_no_exemplar_is_pushed_toward_a_masked_class(masked_task, policy):
    """The gradient would be NaN; how the mask is written does not matter."""
    networks, memory, valid = masked_task
    temperatures = []
    for network in networks:
        calibrator = tcil.TCIL(policy=policy).fit(network, memory, valid, new_classes=[4, 5])
        pushed, columns = calibrator.evidence_.pushed
        assert not bool(torch.isnan(pushed).any())
        assert torch.equal(pushed == -torch.inf, (columns < 4)[:, None] & (torch.arange(6) >= 4))
        temperatures.append(calibrator.temperature_)
    assert temperatures == pytest.approx([temperatures[0]] * len(MASKS), rel=1e-9)


@pytest.mark.parametrize(
    "name", ["PACT", "PerturbedTemperatureScaling", "EnsembleTemperatureScaling", "MulticlassIsotonic"]
)
def test_masked_classes_stay_at_zero_in_wrapped_and_exported_models(masked_task, name):
    networks, memory, valid = masked_task
    x, answers = memory[0], []
    forbidden = (memory[1] < 4)[:, None] & (torch.arange(6) >= 4)
    for network in networks:
        if name == "PACT":
            calibrator = tcil.PACT().fit(network, memory, valid, new_classes=[4, 5], imbalance=5.0)
        elif name == "PerturbedTemperatureScaling":
            calibrator = tcil.PerturbedTemperatureScaling(search="nelder-mead").fit(network, valid=memory)
        else:
            calibrator = getattr(tcil, name)().fit(*tcil.predict_logits(network, memory))
        with torch.no_grad():
            calibrated, logits = calibrator.wrap(network).eval(), network(x)
            out = calibrated(x)
        assert bool((out[forbidden] == -torch.inf).all())
        assert torch.equal(calibrator.transform(logits), out)
        assert torch.allclose(out.exp().sum(1), torch.ones(len(x)).double())
        assert torch.equal(out.argmax(1), logits.argmax(1))
        answers.append(out.exp())
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0])
    batch = torch.export.Dim("batch", min=2, max=4096)
    program = torch.export.export(calibrated, (x[:8],), dynamic_shapes=({0: batch},))
    with torch.no_grad():
        assert torch.allclose(program.module()(x).exp(), calibrated(x).exp(), atol=1e-6)


def test_labels_that_the_network_masks(masked_task):
    networks, memory, valid = masked_task
    for network in networks:
        wrong = memory[0].clone()
        wrong[4, 8] = 0.0  # an exemplar of class 4 that may not be one
        with pytest.raises(ValueError, match=r"memory labels: got the label 4 in row 4, whose logit is masked"):
            tcil.TCIL().fit(network, (wrong, memory[1]), valid, new_classes=[4, 5])
        wrong = valid[0].clone()
        wrong[:, 8] = 0.0
        with pytest.raises(
            ValueError, match=r"valid labels: got the label 4 in row 0, whose logit is masked.*200 such"
        ):
            tcil.PerturbedTemperatureScaling().fit(network, valid=(wrong, valid[1]))


def test_a_row_with_one_class_left(fitted):
    """Its probability is 1, in every map."""
    for calibrator in fitted[1].values():
        logits = torch.full((2, 6), -torch.inf)
        logits[0, 3], logits[1, :2] = 2.0, torch.tensor([1.0, 5.0])
        probs = calibrator.predict_proba(logits)
        assert torch.equal(probs[0], torch.eye(6)[3].double())
        assert not bool(torch.isnan(probs).any())
        assert float(probs[1].sum()) == pytest.approx(1)
        assert int(probs[1].argmax()) == 1
