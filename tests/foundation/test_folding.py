"""Batch norms folded into convolutions: only where nothing but rounding changes, and undone to the letter."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import tcil
from tcil.calibration.inputs.classifier import Classifier
from tcil.foundation.folding import folded_copy, swapped, watch_pairs
from tcil.incremental.networks import small_cnn


def trained(network):
    """Batch norms with statistics of their own."""
    generator = torch.Generator().manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.copy_(torch.randn(len(module.running_mean), generator=generator))
            module.running_var.copy_(torch.rand(len(module.running_var), generator=generator) + 0.5)
            module.weight.data.copy_(torch.rand(len(module.weight), generator=generator) + 0.5)
    return network.eval()


def images(n=4, channels=1):
    return torch.randn(n, channels, 8, 8, generator=torch.Generator().manual_seed(1))


def pairs_of(network, x):
    with torch.no_grad():
        return watch_pairs(network, lambda: network(x))[0]


def test_every_pair_of_a_resnet_is_found_and_the_answer_stays():
    network, x = trained(small_cnn()), images()
    pairs = pairs_of(network, x)
    assert len(pairs) == sum(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    before, modules = network(x), dict(network.named_modules())
    with swapped(network, pairs):
        assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
        assert torch.allclose(network(x), before, atol=1e-5)
    assert dict(network.named_modules()) == modules
    assert torch.equal(network(x), before)


def elsewhere(work):
    """What another thread gets."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_other_threads_run_the_layers_as_they_were():
    network, x = trained(small_cnn()), images()
    before, pairs, calls = network(x), pairs_of(network, x), []
    for _, norm in pairs:
        network.get_submodule(norm).register_forward_hook(lambda *_: calls.append(threading.get_ident()))
    with swapped(network, pairs):
        assert torch.equal(elsewhere(lambda: network(x)), before)
        assert len(calls) == len(pairs)
        network(x)
    assert len(calls) == len(pairs)  # this thread ran none of them


def test_a_backward_pass_in_another_thread_runs_the_folded_layers_again():
    """As autograd does on a GPU, where a checkpoint runs its layers a second time."""
    network, x = trained(small_cnn()), images().requires_grad_()

    def gradient(run):
        with swapped(network, pairs):
            total = torch.utils.checkpoint.checkpoint(network, x, use_reentrant=False).sum()
            return run(lambda: torch.autograd.grad(total, x)[0])

    pairs = pairs_of(network, x.detach())
    assert torch.equal(gradient(elsewhere), gradient(lambda work: work()))


def test_a_pass_of_another_thread_is_not_watched():
    network, x = trained(small_cnn()), images()

    def run():
        elsewhere(lambda: network(x))
        return network(x)

    with torch.no_grad():
        assert watch_pairs(network, run)[0] == pairs_of(network, x)


def test_a_folded_copy_serves_every_thread():
    network, x = trained(small_cnn()), images()
    folded = folded_copy(network, x)
    assert torch.equal(elsewhere(lambda: folded(x)), folded(x))
    assert torch.allclose(folded.double()(x.double()), network.double()(x.double()), atol=1e-4)


def test_undone_after_an_error():
    network = trained(small_cnn())
    modules = dict(network.named_modules())
    with pytest.raises(KeyError), swapped(network, pairs_of(network, images())):
        raise KeyError
    assert dict(network.named_modules()) == modules


def test_folded_copy_leaves_the_original():
    network, x = trained(small_cnn()), images()
    state = copy.deepcopy(network.state_dict())
    folded = folded_copy(network, x)
    assert torch.allclose(folded(x), network(x), atol=1e-5)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert not any(p.requires_grad for p in folded.parameters())
    assert all(torch.equal(state[key], value) for key, value in network.state_dict().items())


class Odd(nn.Module):
    """One convolution and one norm, put to an odd use."""

    def __init__(self, use):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)
        self.use = use

    def forward(self, x):
        return self.fc(self.use(self, x).relu().mean(dim=(2, 3)))


ODD = {
    "read twice": lambda m, x: (lambda y: m.bn(y) + y)(m.conv(x)),
    "changed between": lambda m, x: m.bn(m.conv(x).abs()),
    "norm called twice": lambda m, x: m.bn(m.bn(m.conv(x))),
    "convolution called twice": lambda m, x: m.bn(m.conv(x)) + m.conv(-x),
}


@pytest.mark.parametrize("use", ODD.values(), ids=list(ODD))
def test_odd_uses_are_left_alone(use):
    network, x = trained(Odd(use)), images()
    folded = folded_copy(network, x)
    assert any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert torch.equal(folded(x), network(x))


@pytest.mark.parametrize(
    "why", ["training", "hook", "no statistics", pytest.param("half", marks=pytest.mark.processes), "shared"]
)
def test_layers_that_are_not_plain_are_left_alone(why, request):
    network = trained(Odd(lambda m, x: m.bn(m.conv(x))))
    assert len(pairs_of(network, images())) == 1
    if why == "training":
        network.bn.train()
    elif why == "hook":
        network.conv.register_forward_hook(lambda *args: None)
    elif why == "no statistics":
        network.bn = nn.BatchNorm2d(4, track_running_stats=False).eval()
    elif why == "half":
        request.getfixturevalue("bf16")
        network.bfloat16()
    else:
        network.again = network.conv
    x = images().bfloat16() if why == "half" else images()
    assert pairs_of(network, x) == []


def test_a_fit_folds_and_hands_the_model_back(task, monkeypatch):
    folded = []
    original = Classifier.fold

    def spy(self, sample):
        original(self, sample)
        folded.append(sum(isinstance(module, nn.BatchNorm2d) for module in self.model.modules()))

    monkeypatch.setattr(Classifier, "fold", spy)
    modules, state = dict(task.model.named_modules()), copy.deepcopy(task.model.state_dict())
    result = tcil.TCIL().fit(task.model, task.memory, task.valid, task.new_classes).result_
    assert folded == [0]
    assert dict(task.model.named_modules()) == modules
    assert all(torch.equal(state[key], value) for key, value in task.model.state_dict().items())
    monkeypatch.setattr(Classifier, "fold", lambda self, sample: None)
    plain = tcil.TCIL().fit(task.model, task.memory, task.valid, task.new_classes).result_
    assert result.temperature == pytest.approx(plain.temperature, rel=1e-3)


def test_features_in_the_middle_of_a_pair_are_not_folded_away(task):
    """A user's feature function that reads a convolution's own output would see something else: then nothing is."""
    model = task.model

    def extract(x):
        return model.layer1[0].conv1(torch.relu(model.bn1(model.conv1(x))))

    def head(features):
        block = model.layer1[0]
        shortcut = head.shortcut
        out = torch.relu(block.bn2(block.conv2(torch.relu(block.bn1(features)))) + shortcut)
        return model.fc(model.layer2(out).mean(dim=(2, 3)))

    def both(x):
        head.shortcut = torch.relu(model.bn1(model.conv1(x)))
        return extract(x)

    with Classifier(model, features=(both, head)) as classifier, torch.no_grad():
        before = classifier.logits_and_features(classifier.place(task.memory[0][:5]))
        classifier.fold(task.memory[0][:2])
        after = classifier.logits_and_features(classifier.place(task.memory[0][:5]))
    assert torch.equal(before[1], after[1])


class Reaching(nn.Module):
    """Looks into its batch norm, which is not there while folded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x.to(self.bn.weight.dtype)))
        return self.fc(x.relu().mean(dim=(2, 3)))


def test_a_network_that_reaches_into_its_norms_is_not_folded():
    torch.manual_seed(0)
    model = Reaching().eval()
    x = torch.randn(60, 1, 6, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tcil.CalibrationWarning)
        tcil.TCIL().fit(model, (x[:30], torch.arange(30) % 3), (x[30:], 2 * torch.ones(30, dtype=torch.long)), [2])
    assert isinstance(model.bn, nn.BatchNorm2d)
    assert isinstance(folded_copy(model, x[:2]).bn, nn.BatchNorm2d)
