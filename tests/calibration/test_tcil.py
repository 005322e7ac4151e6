"""T-CIL: against the literal algorithm, how it searches, and honest about what it found."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from literal_tcil import t_cil
from tcil_fits import fit
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tcil
from tcil.calibration.inputs.classifier import Classifier
from tcil.calibration.perturbation import (
    ClassMeans,
    DirectionPolicy,
    SearchMethod,
    TargetChooser,
    search_magnitude,
)
from tcil.calibration.temperature import TemperatureFit


class TestAgainstTheLiteralAlgorithm:
    """tests/calibration/literal_tcil.py was written from the paper without sight of src/."""

    @pytest.mark.parametrize("index", [1, 2, 4])
    def test_same_answer_on_a_real_small_network(self, digits_tasks, index):
        task = digits_tasks[index]
        ours = fit(task).result_
        pairs = [list(zip(*examples, strict=True)) for examples in (task.memory, task.valid)]
        literal = t_cil(task.model, task.model.features, *pairs, set(task.new_classes), task.seen)
        assert ours.target_temperature == pytest.approx(literal["target_temperature"], rel=1e-5)
        assert ours.magnitude == literal["magnitude"]  # the same bisection path, to the bit
        assert ours.temperature == pytest.approx(literal["temperature"], rel=1e-4)
        assert ours.reachable

    def test_same_targets(self, task):
        pairs = [list(zip(*examples, strict=True)) for examples in (task.memory, task.valid)]
        literal = t_cil(task.model, task.model.features, *pairs, set(task.new_classes), task.seen)
        with torch.no_grad():
            features = task.model.features(task.memory[0])
        means = ClassMeans()
        means.add(features, task.memory[1])
        is_new = torch.tensor([c in task.new_classes for c in range(task.seen)])
        choose = TargetChooser(DirectionPolicy.PAPER, means.means(), is_new, 0)
        assert choose(features, task.memory[1]).tolist() == literal["targets"]


class TestPolicies:
    features = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.5, 0.0], [9.0, 0.0]])
    means = features.double()
    columns = torch.arange(4)
    is_new = torch.tensor([False, False, True, True])

    def targets(self, policy, seed=0):
        return TargetChooser(DirectionPolicy(policy), self.means, self.is_new, seed)(
            self.features, self.columns
        ).tolist()

    def test_paper(self):
        assert self.targets("paper") == [1, 0, 0, 0]

    def test_closest_and_farthest(self):
        assert self.targets("closest") == [1, 0, 3, 2]
        assert self.targets("farthest") == [3, 3, 0, 0]

    def test_random_is_another_class_each_equally_likely(self):
        choose = TargetChooser(DirectionPolicy.RANDOM, self.means, self.is_new, 0)
        columns = torch.full((30000,), 2)
        drawn = choose(torch.zeros(30000, 2), columns)
        counts = torch.bincount(drawn, minlength=4)
        assert counts[2] == 0
        assert ((counts[[0, 1, 3]] - 10000).abs() < 400).all()

    def test_random_follows_the_seed(self, task):
        one, same, other = (fit(task, policy="random", seed=seed).temperature_ for seed in (0, 0, 1))
        assert one == same != other

    def test_policies_differ_on_a_real_network(self, task):
        answers = {policy: fit(task, policy=policy).temperature_ for policy in DirectionPolicy}
        assert len(set(answers.values())) == 4


class TestMagnitudeSearch:
    def run(self, curve, target, scale=1.0, tolerance=1e-3, method=SearchMethod.BISECTION, glance=None):
        def fit(t):
            verdict = "all_correct" if t == 0 else "anti_informative" if t == math.inf else "ok"
            return TemperatureFit(t if verdict == "ok" else 1.0, tcil.options.Verdict(verdict), 0, 0, 0, 10)

        return search_magnitude(
            lambda e: fit(curve(e)), fit(curve(0.0)), target, tolerance=tolerance, input_scale=scale, method=method,
            glance=None if glance is None else lambda e: fit(glance(e)),
        )  # fmt: skip

    def test_bisection_of_the_paper(self):
        found = self.run(lambda e: 10 * e, 3.0)
        assert found.magnitude == pytest.approx(0.3, abs=1e-3)
        assert found.reachable
        assert len(found.trace) == 11  # the clean exemplars, known already, and ten passes
        low = max(step.magnitude for step in found.trace if step.temperature < 3.0)
        high = min(step.magnitude for step in found.trace if step.temperature >= 3.0)
        assert found.magnitude == (low + high) / 2

    def test_out_of_reach(self):
        above = self.run(lambda e: 1 + e, 5.0)
        assert (above.magnitude, above.reachable, above.verdicts) == (1.0, False, ("target_above_range",))
        below = self.run(lambda e: 3 + e, 2.0)
        assert (below.magnitude, below.reachable, below.verdicts) == (0.0, False, ("target_below_range",))
        assert len(below.trace) == 1

    def test_root_next_to_zero_is_reachable_and_said_to_be_coarse(self):
        found = self.run(lambda e: 0.0 if e < 2e-4 else 4.0 if e < 0.5 else 5.0, 2.0)
        assert 0 < found.magnitude < 1e-3
        assert found.reachable
        assert found.verdicts == ("below_tolerance",)

    def test_widens_for_inputs_of_a_larger_scale(self):
        found = self.run(lambda e: e, 12.0, scale=70.0)
        assert found.magnitude == pytest.approx(12.0, abs=0.07)
        assert (found.reachable, found.bracket, found.verdicts) == (True, (0.0, 70.0), ("bracket_widened",))
        assert len(found.trace) <= 1 + 10 + 10
        still = self.run(lambda e: e, 120.0, scale=70.0)
        assert (still.magnitude, still.reachable) == (70.0, False)
        assert still.verdicts == ("bracket_widened", "target_above_range")

    def test_a_jump_from_all_right_to_all_wrong(self):
        found = self.run(lambda e: 0.0 if e < 0.4 else math.inf, 2.0)
        assert found.magnitude == pytest.approx(0.4, abs=1e-3)
        assert (found.reachable, found.verdicts) == (False, ("target_jumped",))

    def growing(self, rng, target):
        """A curve that never falls and meets the target somewhere."""
        root, power = 10 ** rng.uniform(-3, 0.1), rng.uniform(0.2, 4)
        right, wrong = root * rng.uniform(0, 1), root * rng.uniform(1, 4)
        return {
            "power": lambda e: target * (e / root) ** power,
            "cut": lambda e: 0.0 if e < right else math.inf if e > wrong else target * (e / root) ** power,
            "jump": lambda e: 0.0 if e < root else math.inf,
            "steps": lambda e: target * 2 ** math.floor(3 * math.log(e / root)) if e else 0.0,
        }[rng.choice(["power", "cut", "jump", "steps"])]

    def test_interpolation_ends_in_the_bisections_bracket(self):
        """Growing curves of many shapes, with degenerate stretches on either side."""
        rng = random.Random(0)
        for _ in range(300):
            target = rng.uniform(0.2, 5)
            curve = self.growing(rng, target)
            for scale in (1.0, 7.0):
                want = self.run(curve, target, scale)
                got = self.run(curve, target, scale, method=SearchMethod.INTERPOLATION)
                assert got.magnitude == pytest.approx(want.magnitude, rel=1e-12)
                assert (got.reachable, got.bracket, got.verdicts) == (want.reachable, want.bracket, want.verdicts)
                assert len(got.trace) <= len(want.trace) + 6  # a jump cannot be interpolated

    def test_interpolation_on_a_smooth_curve_takes_few_steps(self):
        for root in (0.004, 0.03, 0.2, 0.9):
            found = self.run(lambda e, root=root: 2 * (e / root) ** 0.6, 2.0, method=SearchMethod.INTERPOLATION)
            assert abs(found.magnitude - root) < 1e-3
            assert len(found.trace) - 1 <= 6

    @pytest.mark.parametrize(
        "curve",
        [
            lambda e: 4.0 * e / 0.03 if e < 0.1 else 1.0 + e,  # falls again: the bisection never sees the first root
            lambda e: 5.0 if 0.01 < e < 0.02 or e > 0.6 else 1.0,  # a bump below the root
            lambda e: 1.0 if 0.4 < e < 0.55 else 60 * e,  # a dip around the bisection's first middle
        ],
    )
    def test_interpolation_gives_way_where_the_temperature_does_not_grow(self, curve):
        bisected = self.run(curve, 3.0)
        found = self.run(curve, 3.0, method=SearchMethod.INTERPOLATION, glance=curve)
        assert (found.magnitude, found.verdicts) == (bisected.magnitude, bisected.verdicts)

    def test_a_glance_that_errs_is_checked(self):
        """Few samples may lie: only the temperature of all of them overrules the interpolation."""
        want = self.run(lambda e: 100 * e, 3.0, method=SearchMethod.INTERPOLATION)
        found = self.run(lambda e: 100 * e, 3.0, method=SearchMethod.INTERPOLATION, glance=lambda e: 0.1)
        assert found.magnitude == want.magnitude
        assert len(found.trace) > len(want.trace)

    def test_wiggles_beside_the_root_still_give_a_crossing(self):
        """Too near for a glance: another crossing than the bisection's may be found, but it is one."""
        found = self.run(
            lambda e: 100 * e * (1 + 0.5 * math.sin(400 * e)), 3.0, method=SearchMethod.INTERPOLATION
        )  # fmt: skip
        below, above = (found.magnitude + side * 0.5 / 1024 for side in (-1, 1))
        steps = {round(step.magnitude, 9): step.temperature for step in found.trace}
        assert steps[round(below, 9)] < 3.0 <= steps[round(above, 9)]

    @pytest.mark.parametrize("method", list(SearchMethod))
    def test_a_tolerance_below_what_numbers_can_tell_apart_ends(self, method):
        found = self.run(lambda magnitude: 4 * magnitude, 1.0, tolerance=1e-17, method=method)
        assert found.reachable
        assert found.magnitude == pytest.approx(0.25, abs=1e-15)

    def test_tolerance(self):
        assert len(self.run(lambda e: 10 * e, 3.0, tolerance=0.1).trace) == 1 + 4


class TestVerdicts:
    @pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
    def test_all_correct_validation_set(self, task):
        with torch.no_grad():
            right = task.model(task.valid[0])[:, :6].argmax(1) == task.valid[1]
        result = fit(task, valid=(task.valid[0][right], task.valid[1][right])).result_
        assert (result.temperature, result.magnitude, result.reachable) == (1.0, 0.0, False)
        assert result.verdicts[0] == "degenerate_valid"
        assert result.target.verdict == "all_correct"

    @pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
    def test_anti_informative_validation_set(self, task):
        """Images of old classes under the names of new ones."""
        old = task.memory[1] < 4
        with torch.no_grad():
            logits = task.model(task.memory[0][old])[:, :6]
        worst = torch.where(logits[:, 4] < logits[:, 5], 4, 5)
        low = logits.gather(1, worst[:, None]).squeeze(1) < logits.mean(1)
        result = fit(task, valid=(task.memory[0][old][low], worst[low])).result_
        assert result.target.verdict == "anti_informative"
        assert (result.temperature, result.magnitude, result.reachable) == (1.0, 1.0, False)

    def test_degenerate_valid_warns(self, task):
        with torch.no_grad():
            right = task.model(task.valid[0])[:, :6].argmax(1) == task.valid[1]
        with pytest.warns(tcil.CalibrationWarning, match="the model is left as it is"):
            fit(task, valid=(task.valid[0][right], task.valid[1][right]))

    @pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
    def test_constant_model(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
        nn.init.zeros_(model[1].weight)
        nn.init.zeros_(model[1].bias)
        x, y = torch.randn(9, 4), torch.arange(9) % 3
        result = tcil.TCIL().fit(model, (x, y), (x, y), [0, 1, 2]).result_
        assert result.target.verdict == "constant_logits"
        assert result.temperature == 1.0

    @pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
    def test_one_exemplar_per_class(self, task):
        rows = [int((task.memory[1] == c).nonzero()[0]) for c in range(6)]
        result = fit(task, memory=(task.memory[0][rows], task.memory[1][rows])).result_
        assert "single_exemplar" in result.verdicts
        assert result.temperature > 0

    def test_half_precision_images(self, task):
        half = fit(task, memory=(task.memory[0].half(), task.memory[1])).result_
        wide = fit(task, memory=(task.memory[0].half().float(), task.memory[1])).result_
        assert "half_precision_images" in half.verdicts
        assert half.temperature == wide.temperature

    def test_raw_pixels_widen_the_bracket(self, task):
        """The same network behind images in 0..255: the same answer, on their own scale."""
        scale = 40.0

        class Raw(nn.Module):
            def __init__(self):
                super().__init__()
                self.network = task.model

            def forward(self, x):
                return self.network(x / scale)

        plain = fit(task).result_
        with pytest.warns(tcil.CalibrationWarning, match="magnitudes were searched up to"):
            raw = (
                tcil.TCIL()
                .fit(
                    Raw(),
                    (scale * task.memory[0], task.memory[1]),
                    (scale * task.valid[0], task.valid[1]),
                    task.new_classes,
                )
                .result_
            )
        assert raw.bracket[1] > 10
        assert raw.magnitude == pytest.approx(scale * plain.magnitude, abs=0.05)
        assert raw.temperature == pytest.approx(plain.temperature, rel=0.02)
        assert "bracket_widened" in raw.verdicts

    @pytest.mark.parametrize(("images", "verdicts"), [(200, ("ok",)), (8, ("uncertain_target",))])
    def test_few_validation_images_are_remarked(self, images, verdicts):
        """Of 200 images 36 are wrong, and of 8 one: then another draw has another temperature."""
        generator = torch.Generator().manual_seed(2)
        corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        network = nn.Linear(2, 4, bias=False)
        network.load_state_dict({"weight": 3 * corners})

        def draw(labels, noise):
            return corners[labels] + noise * torch.randn(len(labels), 2, generator=generator), labels

        memory, valid = draw(torch.arange(40) % 4, 0.3), draw(2 + torch.arange(images) % 2, 0.8)
        assert tcil.TCIL().fit(network, memory, valid, new_classes=[2, 3]).result_.verdicts == verdicts

    def test_result_is_frozen(self, task):
        with pytest.raises(dataclasses.FrozenInstanceError):
            fit(task).result_.temperature = 3.0


class TestPasses:
    """One feature pass, one gradient pass, the search's passes over the new exemplars, one over the perturbed."""

    def count(self, task, **options):
        images = {"forward": 0, "with_graph": 0}

        def note(module, args, output):
            images["forward"] += len(output)
            images["with_graph"] += len(output) * output.requires_grad

        handle = task.model.register_forward_hook(note)
        result = fit(task, **options).result_
        handle.remove()
        return images, result

    def test_images_through_the_model(self, task):
        images, result = self.count(task, search="bisection")
        n, new, valid = result.n_exemplars, result.n_new_exemplars, result.n_valid
        assert images["with_graph"] == n
        tried_folding = 2 + 2  # two images before and after
        assert images["forward"] == n + n + 10 * new + n + valid + tried_folding

    def test_interpolation_passes_only_its_steps_and_a_few_glances(self, task):
        """How many steps it takes depends on the curve: see the search's own tests."""
        images, result = self.count(task)
        n, new, valid = result.n_exemplars, result.n_new_exemplars, result.n_valid
        tried_folding = 2 + 2
        glances = images["forward"] - (n + n + (len(result.trace) - 1) * new + n + valid + tried_folding)
        assert 0 <= glances <= 4 * new

    def test_loaders_cost_no_more(self, task):
        loader = DataLoader(TensorDataset(*task.memory), batch_size=7)
        assert self.count(task, memory=loader)[0] == self.count(task)[0]

    def test_parameters_get_no_gradients(self, task):
        seen = []
        original = torch.autograd.grad

        def spy(outputs, inputs, *args, **kwargs):
            seen.append([p.requires_grad for p in task.model.parameters()])
            return original(outputs, inputs, *args, **kwargs)

        torch.autograd.grad = spy
        try:
            fit(task)
        finally:
            torch.autograd.grad = original
        assert seen
        assert not any(any(flags) for flags in seen)
        assert all(p.grad is None for p in task.model.parameters())


class TestInChunks:
    """What grows with classes is worked off in pieces, to the same answer."""

    def test_distances(self, monkeypatch):
        generator = torch.Generator().manual_seed(0)
        features, columns = torch.randn(57, 8, generator=generator), torch.arange(57) % 11
        means = ClassMeans()
        means.add(features, columns)
        for policy in DirectionPolicy:
            answers = []
            for elements in (1 << 21, 33, 1):
                monkeypatch.setattr("tcil.calibration.perturbation._CHUNK_ELEMENTS", elements)
                answers.append(TargetChooser(policy, means.means(), torch.arange(11) > 8, 0)(features, columns))
            assert torch.equal(answers[0], answers[1])
            assert torch.equal(answers[0], answers[2])

    def test_a_whole_fit(self, task, monkeypatch):
        whole = fit(task).result_
        monkeypatch.setattr("tcil.calibration.perturbation._CHUNK_ELEMENTS", 20)
        monkeypatch.setattr("tcil.calibration.temperature._CHUNK_ELEMENTS", 20)
        pieces = fit(task).result_
        assert pieces.temperature == pytest.approx(whole.temperature, rel=1e-12)
        assert (pieces.magnitude, pieces.n_exemplars) == (whole.magnitude, whole.n_exemplars)


@pytest.mark.parametrize("policy", DirectionPolicy)
def test_both_searches_find_the_same(digits_tasks, policy):
    for index in (1, 3, 4):
        one, other = (fit(digits_tasks[index], policy=policy, search=search).result_ for search in SearchMethod)
        assert (one.magnitude, one.temperature, one.verdicts) == (other.magnitude, other.temperature, other.verdicts)


def test_sgd_is_bisected(task):
    assert len(fit(task, solver="sgd").result_.trace) == 11


def test_sgd_solver_runs_for_parity(task):
    exact, sgd = fit(task).result_, fit(task, solver="sgd").result_
    assert sgd.memory.solver == "sgd"
    assert sgd.temperature != exact.temperature
    assert 0.2 * exact.temperature < sgd.temperature < 5 * exact.temperature


def test_better_than_ts_and_vanilla_on_the_demo(digits_tasks):
    """On the strongly forgetting digits run, T-CIL's mean ECE beats both, as the paper claims."""
    totals = {"vanilla": 0.0, "ts": 0.0, "tcil": 0.0}
    for task in digits_tasks[1:]:
        classes = range(task.seen)
        logits, labels = tcil.predict_logits(task.model, task.test, classes=classes)
        valid = tcil.predict_logits(task.model, task.valid, classes=classes)
        ece = tcil.metrics.expected_calibration_error
        totals["vanilla"] += ece(torch.softmax(logits.double(), 1), labels)
        totals["ts"] += ece(tcil.TemperatureScaling().fit(*valid).predict_proba(logits), labels)
        totals["tcil"] += ece(fit(task).predict_proba(logits), labels)
    assert totals["tcil"] < totals["vanilla"]
    assert totals["tcil"] < totals["ts"]


def test_predict_logits_kinds(task):
    logits, _ = tcil.predict_logits(task.model, task.valid, classes=range(6))
    assert isinstance(logits, torch.Tensor)
    assert logits.shape == (len(task.valid[1]), 6)
    arrays = tcil.predict_logits(task.model, (task.valid[0].numpy(), task.valid[1].numpy()), classes=range(6))
    assert isinstance(arrays[0], np.ndarray)
    np.testing.assert_allclose(arrays[0], logits.numpy())
    with pytest.raises(ValueError, match="data labels: got the label"):
        tcil.predict_logits(task.model, task.test, classes=range(3))


def test_classifier_reports_where_features_come_from(task):
    with Classifier(task.model) as classifier, torch.no_grad():
        _, features = classifier.logits_and_features(classifier.place(task.valid[0]))
        assert classifier.source.heads == ("fc",)
        assert torch.allclose(features, task.model.features(task.valid[0]), atol=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_bad_images_are_counted_whatever_the_chunks(task, monkeypatch, rows):
    monkeypatch.setattr("tcil.calibration.inputs.examples._ROWS", rows)
    images, labels = task.memory[0].clone(), task.memory[1]
    images[3, 0, 0, 0], images[50:53] = math.nan, math.inf
    with pytest.raises(ValueError, match=f"NaN or infinity in 4 of {len(labels)} examples"):
        fit(task, memory=(images, labels))


def test_one_pass_of_the_test_set_serves_all(task, tmp_path, monkeypatch):
    """In a run, no test image goes through the network twice: calibrators and metrics share its logits."""
    from tcil.experiments.config.settings import build
    from tcil.experiments.runs.run import Run
    from tcil.incremental.data.datasets import load_dataset
    from tcil.incremental.data.images import Pixels

    settings = build({"dataset": "digits", "tasks": [4], "classes": 4, "epochs": 1, "milestones": [], "memory": 40})
    run = Run(settings, tmp_path, dataset=load_dataset("digits"))
    passed, forward = [], tcil.networks.ResNet.forward

    def note(self, x):
        passed.append(x.detach().clone())
        return forward(self, x)

    monkeypatch.setattr(tcil.networks.ResNet, "forward", note)
    run.execute()
    rows = torch.isin(run.dataset.test.labels, torch.tensor(run.stream.order)).nonzero().squeeze(1)
    test = Pixels(run.dataset).plain(run.dataset.test, rows)
    seen = torch.cat([batch for batch in passed if len(batch) > 2]).flatten(1)
    times = [(seen == image).all(dim=1).sum().item() for image in test.flatten(1)]
    assert set(times) == {1}
