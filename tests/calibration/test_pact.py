"""PACT as a calibrator: what it fits, its map, and what it refuses."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pact_worlds import DIMENSIONS, IS_NEW, MEMO, NEW, OLD, OVERCONFIDENCE, TARGET, K, World, new_labels
from torch import nn

import tcil
from tcil.calibration.calibrators.maps import PriorAdjustedMap
from tcil.calibration.calibrators.pact import PACTConstants, PACTFilter
from tcil.calibration.calibrators.pact.constants import MEASURED
from tcil.calibration.calibrators.pact.evidence import (
    joint_fit,
    label_shift,
    laplace,
    surrogate,
)
from tcil.foundation.options import Verdict


class TestFit:
    def fitted(self, imbalance, world=None, **options):
        world = world or World(imbalance)
        memory = world.memory()
        return world, tcil.PACT(**options).fit(
            world.model, memory, world.draw(new_labels(500)), NEW, imbalance=imbalance
        )

    def test_an_unbalanced_network_becomes_honest_in_both_groups(self):
        world, pact = self.fitted(20.0)
        logits, labels = world.logits(torch.arange(12000) % K)
        result = pact.result_
        assert abs(math.log(result.temperature / OVERCONFIDENCE)) < 3 * result.log_temperature_error
        assert abs(result.bias - math.log(20.0)) < 3 * result.bias_error

        def errors(probs):
            groups = tcil.metrics.predicted_groups(probs, NEW)
            score = tcil.metrics.expected_calibration_error(probs, labels, groups=groups)
            return [float(score), score.by_group["old"], score.by_group["new"]]

        ours = errors(pact.predict_proba(logits))
        oracle = errors(tcil.TemperatureScaling().fit(logits, labels).predict_proba(logits))
        assert max(ours) < 0.08
        assert oracle[2] > 0.06  # what one temperature cannot do, even if it knows the test set
        assert ours[0] <= oracle[0] + 0.02

    def test_where_the_learner_balances_by_itself_the_bias_is_small(self):
        """The counts say 20, the network's logits hold no prior."""
        world = World(1.0)
        memory = world.memory()
        pact = tcil.PACT().fit(world.model, memory, world.draw(new_labels(500)), NEW, imbalance=20.0)
        assert abs(pact.bias_) < 0.3 * math.log(20.0)

    def test_a_network_that_favours_new_classes_more_than_the_counts_say(self):
        """The counts say 1, the network's logits hold a prior of 20: the evidence overrules the counts."""
        world = World(20.0)
        pact = tcil.PACT().fit(world.model, world.memory(), world.draw(new_labels(500)), NEW, imbalance=1.0)
        assert pact.bias_ > 0.35  # from one task; the next ones go on

    def test_first_task_is_temperature_scaling(self):
        world = World(1.0)
        valid = world.draw(torch.arange(300) % K)
        pact = tcil.PACT().fit(world.model, world.memory(), valid, range(K))
        with torch.no_grad():
            ts = tcil.TemperatureScaling().fit(world.model(valid[0]), valid[1])
        spread, new = pact.result_.evidence
        assert (spread.source, new.source) == ("spread", "new classes")
        assert new.log_temperature == pytest.approx(math.log(ts.temperature_), abs=0.02)
        assert pact.temperature_ == pytest.approx(ts.temperature_, rel=0.06)  # the spread says 29 % more
        assert pact.result_.bias == 0.0

    def test_one_new_class(self):
        """Among one class there is no temperature; the other pieces are left."""
        world = World(6.0)
        memory = world.memory()
        pact = tcil.PACT().fit(world.model, memory, world.draw(torch.full((80,), 5)), [5], imbalance=6.0)
        assert [piece.source for piece in pact.result_.evidence] == ["spread", "surrogate", "label shift"]
        assert pact.temperature_ > 1
        assert pact.result_.verdicts == (Verdict.OK,)

    def test_the_filter_by_hand(self):
        """Every piece enters once, with its sampling error and its constant; that of T widens label shift's.

        With one temperature; with a contrast, in test_pact_filter.py.
        """
        world, c = World(6.0), PACTConstants.one_temperature()
        evidence = tcil.TCIL().evidence(world.model, world.memory(), world.draw(new_labels(80)), NEW)
        state = PACTFilter.of(MEMO, 2.5, TARGET, c)
        state.weigh(evidence)

        def combined(*pairs):
            precision = sum(1 / error**2 for _, error in pairs)
            return sum(value / error**2 for value, error in pairs) / precision, precision**-0.5

        t, t_error, b, b_error = surrogate(evidence)
        log_t = combined(
            (0.7, math.hypot(0.1, c.temperature_drift)),
            (t, math.hypot(t_error, c.surrogate_temperature_error)),
        )
        seen = laplace(
            evidence.valid[0][:, OLD:], evidence.valid[1] - OLD, log_t[0], log_t[1] ** 2 + c.new_class_error**2
        )
        log_t = combined(log_t, (seen[0], math.hypot(seen[1], c.new_class_error)))
        assert (state.log_t.mean, math.sqrt(state.log_t.variance)) == pytest.approx(log_t)
        value, slope, error = label_shift(*evidence.valid, IS_NEW, log_t[0])
        prior = 0.9 + 0.25, math.hypot(math.sqrt(0.02), c.bias_drift)
        shift = value, math.hypot(error, c.label_shift_error, slope * log_t[1])
        # Nothing is known of the offset, so that it widens the surrogate's error.
        offset = math.hypot(c.surrogate_offset, c.offset_drift)
        bias = combined(prior, (b, math.hypot(b_error, c.surrogate_bias_error, offset)), shift)
        assert (state.bias.mean, math.sqrt(state.bias.variance)) == pytest.approx(bias)

    def test_without_a_magnitude_there_is_nosurrogate(self):
        world = World(6.0)
        evidence = tcil.TCIL().evidence(world.model, world.memory(), world.draw(new_labels(80)), NEW)
        assert surrogate(evidence) is not None
        assert surrogate(replace(evidence, result=replace(evidence.result, reachable=False))) is None

    def test_how_the_search_ended_does_not_matter_where_other_evidence_is(self):
        """Exemplars as hard as validation images: T-CIL has no magnitude, PACT has the other pieces."""
        world = World(6.0)
        memory, valid = world.draw(torch.arange(240) % K, noise=1.5), world.draw(new_labels(200))
        with pytest.warns(tcil.CalibrationWarning, match="at or above the target"):
            assert Verdict.TARGET_BELOW_RANGE in tcil.TCIL().fit(world.model, memory, valid, NEW).result_.verdicts
        with pytest.warns(tcil.CalibrationWarning, match="is the validation set held out of training"):
            pact = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=6.0)
        assert [piece.source for piece in pact.result_.evidence] == ["spread", "new classes", "label shift"]
        assert pact.result_.verdicts == (Verdict.TARGET_BELOW_RANGE,)  # it may hint at validation data in training

    def test_a_magnitude_out_of_range_does_not_matter(self):
        """The validation set is warmer than exemplars can be made: T-CIL says so, PACT has the other pieces."""
        world = World(6.0)
        evidence = tcil.TCIL().evidence(world.model, world.memory(), world.draw(new_labels(80)), NEW)
        verdicts = (Verdict.TARGET_ABOVE_RANGE, Verdict.SINGLE_EXEMPLAR)
        result = replace(evidence.result, reachable=False, verdicts=verdicts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tcil.TCIL, "evidence", lambda *args, **kwargs: replace(evidence, result=result))
            pact = tcil.PACT().fit(world.model, world.memory(), world.draw(new_labels(80)), NEW, imbalance=6.0)
        assert pact.result_.verdicts == (Verdict.SINGLE_EXEMPLAR,)
        assert "surrogate" not in [piece.source for piece in pact.result_.evidence]

    def test_an_imbalance_that_looks_inverted(self):
        world = World(6.0)
        memory, valid = world.memory(), world.draw(new_labels(80))
        with pytest.warns(tcil.CalibrationWarning, match="the wrong way round"):
            pact = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=torch.tensor(1 / 6))
        assert pact.result_.verdicts == (Verdict.IMBALANCE_BELOW_ONE,)

    def test_the_threshold_of_the_wrong_way_round_is_documented(self):
        world = World(1.0)
        memory, valid = world.memory(), world.draw(new_labels(200))
        at = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=0.5)
        assert Verdict.IMBALANCE_BELOW_ONE not in at.result_.verdicts
        with pytest.warns(tcil.CalibrationWarning, match="more than twice as many training images"):
            below = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=0.49)
        assert Verdict.IMBALANCE_BELOW_ONE in below.result_.verdicts
        pages = Path(__file__).parents[2] / "docs"
        (row,) = re.findall(r"\| `imbalance_below_one` .*", (pages / "start" / "troubleshooting.md").read_text())
        assert "below 0.5" in row

    def test_label_shift_leaves_the_temperature_alone(self):
        """Where classes hardly overlap its mean misses the tail: that must not become a temperature."""
        for separation in (0.8, 1.6):
            world = World(6.0, separation=separation)
            evidence = tcil.TCIL().evidence(world.model, world.memory(), world.draw(new_labels(80)), NEW)
            states = [PACTFilter.of(MEMO, 2.5, TARGET) for _ in range(2)]
            states[0].weigh(evidence)
            states[1].new_classes(evidence)
            states[1].surrogate(evidence)
            assert states[0].log_t == states[1].log_t
            assert separation == 1.6 or states[0].bias != states[1].bias

    def test_a_class_without_validation_images_does_not_move_the_bias(self):
        """Ten new classes, two of them in the validation set: the others still count as new. (Counted by those that
        are there, it would be 2.6.)"""
        generator = torch.Generator().manual_seed(0)
        centres, n_old, n = torch.randn(12, 8, generator=generator), 2, 12
        is_new = torch.arange(n) >= n_old
        found = []
        for _ in range(20):

            def logits(y):
                x = centres[y] + torch.randn(len(y), 8, generator=generator)
                return x @ centres.T - centres.square().sum(1) / 2 + math.log(5.0) * is_new, y

            fit = joint_fit(logits(n_old + torch.arange(200) % 2), logits(torch.arange(200) % n_old), is_new)
            found.append(fit[1])
        assert np.mean(found) == pytest.approx(math.log(5.0), abs=0.8)

    def test_nothing_identified(self):
        """A validation set that is all right and memory that is all right: T stays 1, and it says so."""
        model = nn.Linear(K, K)
        with torch.no_grad():
            model.weight.copy_(30 * torch.eye(K))
            model.bias.zero_()
        every = torch.eye(K), torch.arange(K)
        valid = 1.01 * torch.eye(K)[OLD:].repeat(3, 1), torch.arange(OLD, K).repeat(3)
        with pytest.warns(tcil.CalibrationWarning, match="no temperature"):
            pact = tcil.PACT().fit(model, every, valid, NEW, imbalance=4.0)
        assert (pact.temperature_, pact.bias_) == (1.0, 0.0)
        assert Verdict.DEGENERATE_VALID in pact.result_.verdicts
        assert pact.history_ is None

    def test_a_piece_that_says_less_than_the_prior_is_none(self):
        """All right by a margin of 12: nearly any T does, and it says so instead of taking half the imbalance."""
        model = nn.Linear(K, K)
        with torch.no_grad():
            model.weight.copy_(12 * torch.eye(K))
            model.bias.zero_()
        memory = torch.eye(K).repeat(2, 1), torch.arange(K).repeat(2)
        valid = 1.01 * torch.eye(K)[OLD:].repeat(3, 1), torch.arange(OLD, K).repeat(3)
        with pytest.warns(tcil.CalibrationWarning, match="no temperature"):
            pact = tcil.PACT().fit(model, memory, valid, NEW, imbalance=20.0)
        assert (pact.temperature_, pact.bias_, pact.result_.evidence) == (1.0, 0.0, ())

    def test_nothing_identified_is_not_ok(self):
        world = World(6.0)
        with pytest.warns(tcil.CalibrationWarning, match="no temperature"):
            pact = tcil.PACT().fit(world.model, world.memory(), world.draw(torch.full((4,), 5)), [5], imbalance=6.0)
        assert Verdict.NOT_IDENTIFIED in pact.result_.verdicts
        assert pact.temperature_ == 1.0

    def test_only_what_is_remembered(self):
        """The same with history: its temperature is used, and the verdict says so."""
        model = nn.Linear(K, K)
        with torch.no_grad():
            model.weight.copy_(30 * torch.eye(K))
            model.bias.zero_()
        valid = 1.01 * torch.eye(K)[OLD:].repeat(3, 1), torch.arange(OLD, K).repeat(3)
        pact = tcil.PACT().fit(
            model, (torch.eye(K).repeat(2, 1), torch.arange(K).repeat(2)), valid, NEW, imbalance=4.0, history=MEMO
        )
        assert pact.temperature_ == pytest.approx(math.exp(0.7), rel=0.25)
        assert pact.result_.verdicts == (Verdict.REMEMBERED,)
        assert [piece.source for piece in pact.result_.evidence] == ["history", "label shift"]
        shift = pact.result_.evidence[1]
        assert shift.bias_error > 1  # classes do not overlap at all: it says next to nothing
        assert pact.bias_ < 3

    @pytest.mark.parametrize("n", [1, 2, 3, 6])
    @pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
    def test_tiny_validation_sets_give_finite_answers(self, n):
        for seed in range(3):
            world = World(10.0, seed)
            pact = tcil.PACT().fit(world.model, world.memory(), world.draw(new_labels(n)), NEW, imbalance=10.0)
            assert 0.2 < pact.temperature_ < 20
            assert abs(pact.bias_) < 6

    def test_labels_in_another_order(self):
        """The same with classes= permuted, and with a wide head by columns=."""
        world = World(20.0)
        memory, valid = world.memory(), world.draw(new_labels(200))
        plain = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0)
        names = torch.tensor([14, 3, 8, 21, 5, 9])
        renamed = tcil.PACT().fit(
            world.model, (memory[0], names[memory[1]]), (valid[0], names[valid[1]]), names[OLD:].tolist(),
            imbalance=np.float32(20.0), classes=names.tolist(),
        )  # fmt: skip
        wide = nn.Linear(DIMENSIONS, 25)
        with torch.no_grad():
            wide.weight[names], wide.bias[names] = world.model.weight, world.model.bias
        by_column = tcil.PACT().fit(
            wide, (memory[0], names[memory[1]]), (valid[0], names[valid[1]]), names[OLD:].tolist(),
            imbalance=20.0, columns=names.tolist(),
        )  # fmt: skip
        for other in (renamed, by_column):
            assert other.temperature_ == pytest.approx(plain.temperature_, rel=1e-4)
            assert other.bias_ == pytest.approx(plain.bias_, rel=1e-3)

    def test_predictions_stay_or_move(self):
        world, kept = self.fitted(20.0)
        _, moved = self.fitted(20.0, World(20.0), keep_predictions=False)
        logits, labels = world.logits(torch.arange(3000) % K)
        stay, move = kept.predict_proba(logits), moved.predict_proba(logits)
        assert torch.equal(stay.argmax(dim=1), logits.argmax(dim=1))
        assert (move.argmax(dim=1) == labels).double().mean() > (stay.argmax(dim=1) == labels).double().mean() + 0.02

    def test_the_imbalance_as_presentations_of_each_class(self):
        """The same as their ratio, by label and in the order of the columns, also where labels are others."""
        world = World(20.0)
        memory, valid = world.memory(), world.draw(new_labels(200))
        counts = torch.tensor([8.0, 12.0, 10.0, 10.0, 150.0, 250.0])  # means of 10 and 200
        plain = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0).result_
        forms = [dict(enumerate(counts.tolist())), counts, counts.numpy(), counts.tolist(), counts.long()]
        for form in forms:
            assert tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=form).result_ == plain
        names = torch.tensor([14, 3, 8, 21, 5, 9])
        for form in (dict(zip(names.tolist(), counts.tolist(), strict=True)), counts):
            renamed = tcil.PACT().fit(
                world.model, (memory[0], names[memory[1]]), (valid[0], names[valid[1]]), names[OLD:].tolist(),
                imbalance=form, classes=names.tolist(),
            )  # fmt: skip
            assert renamed.result_ == plain

    def test_presentations_at_the_first_task(self):
        world = World(1.0)
        memory, valid = world.memory(), world.draw(torch.arange(300) % K)
        found = tcil.PACT().fit(world.model, memory, valid, range(K), imbalance=[10, 20, 30, 40, 50, 60]).result_
        assert found == tcil.PACT().fit(world.model, memory, valid, range(K)).result_

    def test_constants_of_ones_own(self, tmp_path):
        """A piece that is trusted less moves the answer less; they are stored."""
        world = World(20.0)
        memory, valid = world.memory(), world.draw(new_labels(200))
        usual = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0)
        own = tcil.PACT(constants=PACTConstants(label_shift_error=5.0)).fit(
            world.model, memory, valid, NEW, imbalance=20.0
        )
        shift = next(piece for piece in own.result_.evidence if piece.source == "label shift")
        assert shift.bias_error > 5.0
        assert own.temperature_ == usual.temperature_
        assert own.result_.bias_error > usual.result_.bias_error
        again = tcil.load(own.save(tmp_path / "pact.json"))
        assert again.constants == own.constants != usual.constants
        assert tcil.load(usual.save(tmp_path / "usual.json")).constants == MEASURED


class TestMap:
    @settings(deadline=None, max_examples=200)
    @given(
        n=st.integers(2, 12),
        bias=st.floats(-6, 12),
        temperature=st.floats(0.05, 50),
        scale=st.floats(0.0, 100),
        seed=st.integers(0, 10**6),
    )
    def test_the_prediction_stays_and_rows_are_probabilities(self, n, bias, temperature, scale, seed):
        generator = torch.Generator().manual_seed(seed)
        logits = scale * torch.randn(40, n, generator=generator)
        is_new = torch.rand(n, generator=generator) < 0.5
        t, b = torch.tensor(temperature).double(), torch.tensor(bias).double()
        out = PriorAdjustedMap(t, b, is_new, torch.tensor(True))(logits)
        q = torch.log_softmax(logits.double() / t + b * (~is_new), dim=1).exp()
        top = logits.argmax(dim=1, keepdim=True)
        assert torch.allclose(out.exp().sum(dim=1), torch.ones(40).double(), atol=1e-9)
        chosen = out.gather(1, top)
        expected = q.gather(1, top).clamp(min=(1 + 2e-5) / n)
        moved = torch.log_softmax(logits.double() / t + b * (~is_new), dim=1).argmax(dim=1) != top.squeeze(1)
        for rounded in (out, out.float(), out.exp().float()):  # also where the margin is smallest
            assert torch.equal(rounded.argmax(dim=1)[moved], top.squeeze(1)[moved])
        assert torch.equal(out.argmax(dim=1)[~moved], q.argmax(dim=1)[~moved])
        assert torch.allclose(chosen.exp()[moved], expected[moved], atol=1e-9)
        assert torch.allclose(out.exp()[~moved], q[~moved], atol=1e-12)
        free = PriorAdjustedMap(t, b, is_new, torch.tensor(False))(logits)
        assert torch.allclose(free.exp(), q, atol=1e-12)

    def test_a_group_for_every_class(self):
        assert not PriorAdjustedMap(
            torch.tensor(2.0), torch.tensor(1.0), torch.tensor([True]), torch.tensor(True)
        ).sound(2)

    def test_gradients_are_finite(self):
        logits = torch.tensor([[200.0, 0.0, 0.0, 0.0], [1.0, 0.9, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
        t, b, is_new = torch.tensor(2.0), torch.tensor(3.0), torch.tensor([True, False, False, True])
        for keep in (True, False):
            out = PriorAdjustedMap(t, b, is_new, torch.tensor(keep))(logits)
            (gradient,) = torch.autograd.grad(out[:, 1].sum(), logits)
            assert bool(torch.isfinite(gradient).all())

    def test_a_damaged_one_is_not_sound(self):
        good = [torch.tensor(2.0), torch.tensor(1.0), torch.tensor([True, False]), torch.tensor(True)]
        assert PriorAdjustedMap(*good).sound(2)
        assert not PriorAdjustedMap(torch.tensor(-2.0), *good[1:]).sound(2)
        assert not PriorAdjustedMap(*good[:3], torch.tensor(1.0)).sound(2)
        assert not PriorAdjustedMap(good[0], torch.tensor(float("nan")), *good[2:]).sound(2)


class TestBadInput:
    def test_imbalance(self):
        world = World(1.0)
        seen = []
        world.model.register_forward_hook(lambda *_: seen.append(1))
        memory, valid = world.memory(), world.draw(new_labels(50))
        with pytest.raises(ValueError, match="imbalance: got None; expected training images of a new class"):
            tcil.PACT().fit(world.model, memory, valid, NEW)
        with pytest.raises(ValueError, match=r"imbalance: got 1e\+90; expected between"):
            tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=1e90)
        for wrong in (0, -1.0, math.inf, math.nan, "3", True):
            with pytest.raises(ValueError, match=r"imbalance: got .* expected a positive number"):
                tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=wrong)
        assert not seen

    @pytest.mark.parametrize(
        ("wrong", "match"),
        [
            ({0: 5, 1: 5, 2: 5, 3: 5, 4: 30}, r"imbalance: got no presentations of the classes \[5\]"),
            ({label: 5 for label in range(7)}, r"imbalance: got presentations of the classes \[6\]"),
            ({**dict.fromkeys(range(K), 5), 3: 0}, r"imbalance\[3\]: got 0; expected a positive number"),
            ({"cat": 3}, "imbalance: got"),
            ([5.0, 30.0], "imbalance: got 2 numbers; expected 6, one for each class"),
            (np.array([5.0, 5.0, -1.0, 5.0, 30.0, 30.0]), r"imbalance\[2\]: got -1.0; expected a positive number"),
            (torch.tensor([1e-9] * OLD + [1e9] * 2), "imbalance: got .* expected between"),
            (np.ones((2, 3)), r"imbalance: got an array of shape \(2, 3\); expected a positive number, or one a class"),
        ],
    )
    def test_presentations(self, wrong, match):
        world = World(1.0)
        seen = []
        world.model.register_forward_hook(lambda *_: seen.append(1))
        with pytest.raises(ValueError, match=match):
            tcil.PACT().fit(world.model, world.memory(), world.draw(new_labels(50)), NEW, imbalance=wrong)
        assert not seen

    def test_presentations_where_labels_are_not_known_before(self):
        """A loader tells its labels as it streams; with classes= they are known at once."""
        world, loader = World(1.0), torch.utils.data.DataLoader
        seen = []
        world.model.register_forward_hook(lambda *_: seen.append(1))
        memory = loader(torch.utils.data.TensorDataset(*world.memory()), batch_size=40)
        arguments = world.model, memory, world.draw(new_labels(50)), NEW
        with pytest.raises(ValueError, match="imbalance: got 2 numbers; expected 6"):
            tcil.PACT().fit(*arguments, imbalance=(5.0, 30.0), classes=range(K))
        assert not seen
        with pytest.raises(ValueError, match="imbalance: got 2 numbers; expected 6"):
            tcil.PACT().fit(*arguments, imbalance=(5.0, 30.0))

    def test_constants(self):
        for wrong, match in (
            (3, "constants: got 3; expected PACTConstants"),
            ({"drift": 1.0}, "constants: got 'drift'"),
            ({"bias_drift": -1.0}, r"constants.bias_drift: got -1.0; expected a positive number"),
        ):
            with pytest.raises(ValueError, match=match):
                tcil.PACT(constants=wrong)

    def test_options(self):
        with pytest.raises(ValueError, match="keep_predictions: got 1; expected True or False"):
            tcil.PACT(keep_predictions=1)
        with pytest.raises(ValueError, match="tolerance"):
            tcil.PACT(tolerance=2.0)


@pytest.mark.parametrize("argument", ["classes", "columns"])
def test_classes_may_be_read_only_once(task, argument):
    given = {"model": task.model, "memory": task.memory, "valid": task.valid, "new_classes": task.new_classes}
    once = tcil.PACT().fit(**given, imbalance=9.0, **{argument: iter(range(task.seen))})
    again = tcil.PACT().fit(**given, imbalance=9.0, **{argument: range(task.seen)})
    assert once.temperature_ == again.temperature_
