"""What PACT believes from task to task: the spread of the logits, and the memory of earlier tasks."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from pact_worlds import DIMENSIONS, MEMO, NEW, OLD, OVERCONFIDENCE, TARGET, K, World, new_labels
from torch import nn

import tcil
from tcil.calibration.calibrators.maps import PriorAdjustedMap
from tcil.calibration.calibrators.pact import PACTConstants, PACTFilter
from tcil.calibration.calibrators.pact.constants import MEASURED
from tcil.calibration.calibrators.pact.evidence import evened, label_shift, laplace, surrogate
from tcil.calibration.calibrators.pact.filter import Belief, BiasBelief, Sum
from tcil.calibration.exemplars import LogitSpread, centred_squares, open_exemplars
from tcil.foundation.options import Verdict

ONE = PACTConstants.one_temperature()


def spread(log=1.0, per_class=20.0):
    return LogitSpread(log, per_class)


class TestSpread:
    """T goes with the spread of the exemplars' logits."""

    @pytest.mark.parametrize("batch_size", [7, 64])
    def test_it_is_the_root_mean_square_about_the_mean_of_each_row(self, batch_size):
        world = World(5.0)
        memory = world.memory()
        with torch.no_grad():
            z = world.model(memory[0]).double()
        wanted = float((z - z.mean(dim=1, keepdim=True)).square().mean().sqrt().log())
        with open_exemplars(world.model, memory, NEW, batch_size=batch_size) as exemplars:
            assert exemplars.logit_spread.log == pytest.approx(wanted, abs=1e-6)
            assert exemplars.logit_spread.per_class == 20

    def test_columns_that_are_masked_or_of_no_class_do_not_count(self):
        world = World(5.0)
        memory = world.memory()
        wide = nn.Linear(DIMENSIONS, K + 3)
        with torch.no_grad():
            wide.weight[:K], wide.bias[:K] = world.model.weight, world.model.bias
            wide.weight[K:], wide.bias[K:] = 100.0, 50.0
        with open_exemplars(world.model, memory, NEW) as plain, open_exemplars(wide, memory, NEW) as wider:
            assert wider.logit_spread.log == pytest.approx(plain.logit_spread.log, abs=1e-6)
        masked = torch.tensor([[1.0, 3.0, -torch.inf], [2.0, 4.0, 6.0]])
        assert centred_squares(masked).tolist() == [2.0 + 8.0, 5.0]

    def test_logits_that_do_not_differ_have_none(self):
        flat = nn.Linear(DIMENSIONS, K)
        with torch.no_grad():
            flat.weight.zero_()
            flat.bias.zero_()
        with open_exemplars(flat, World(1.0).memory(), NEW) as exemplars:
            assert exemplars.logit_spread is None

    def test_before_any_evidence_t_is_a_share_of_it(self):
        few = MEASURED.few_exemplars / 20
        first = PACTFilter.of(None, None, TARGET, spread=spread())
        assert first.log_t.mean == pytest.approx(1 + math.log(MEASURED.spread_ratio))
        assert first.log_t.variance == pytest.approx(MEASURED.spread_error**2 + few**2)
        late = PACTFilter.of(None, 2.0, TARGET, spread=spread())
        assert late.log_t.mean == pytest.approx(first.log_t.mean + MEASURED.spread_step)
        assert late.log_t.variance == pytest.approx(first.log_t.variance + MEASURED.late_spread_error**2)

    def test_log_t_moves_with_it_from_task_to_task(self):
        memo = {**MEMO, "log_spread": 1.0}
        few = MEASURED.few_exemplars / 5
        state = PACTFilter.of(memo, 2.5, TARGET, spread=spread(1.3, per_class=5))
        assert state.log_t.mean == pytest.approx(0.7 + 0.3)
        assert state.log_t.variance == pytest.approx(0.01 + MEASURED.spread_drift**2 + few**2)
        assert state.memo()["log_spread"] == 1.3
        first = {**memo, "bias": None, "log_imbalance": None}
        state = PACTFilter.of(first, 2.5, TARGET, ONE, spread(1.3, per_class=5))
        assert state.log_t.mean == pytest.approx(0.7 + 0.3)
        assert state.log_t.variance == pytest.approx(0.01 + ONE.first_spread_drift**2 + few**2)

    def test_a_memo_without_it_is_joined_with_what_it_says(self):
        """As version 0.2 left it."""
        state = PACTFilter.of(MEMO, 2.5, TARGET, spread=spread())
        says = 1 + math.log(MEASURED.spread_ratio)
        assert min(0.7, says) < state.log_t.mean < max(0.7, says)
        assert state.log_t.variance < 0.01 + MEASURED.temperature_drift**2
        assert abs(state.log_t.mean - 0.7) < 0.3 * abs(says - 0.7)  # nothing has shown yet that the ratio holds here

    def test_a_network_of_another_kind_is_believed_by_its_images(self):
        """The spread says 8 times the T that 4,000 validation images say: it gives way.

        Where there are no old classes, T is measured. Later, the verdict tells of the contradiction.
        """
        world, wrong = World(1.0), PACTConstants(spread_ratio=8 * 0.44)
        memory, valid = world.memory(), world.draw(torch.arange(4000) % K)
        pact = tcil.PACT(constants=wrong).fit(world.model, memory, valid, range(K))
        assert pact.result_.verdicts == (Verdict.OK,)
        assert pact.temperature_ == pytest.approx(OVERCONFIDENCE, rel=0.1)
        with pytest.warns(tcil.CalibrationWarning, match="contradict"):
            later = tcil.PACT(constants=wrong).fit(
                world.model, memory, world.draw(new_labels(4000)), NEW, imbalance=1.0
            )
        assert Verdict.OUT_OF_DEPTH in later.result_.verdicts
        assert later.temperature_ == pytest.approx(OVERCONFIDENCE, rel=0.4)

    @pytest.mark.parametrize("factor", [100, 1e-2])
    def test_few_images_are_not_lost_where_the_spread_is_far_off(self, factor):
        world, wrong = World(1.0), PACTConstants(spread_ratio=factor * 0.44)
        pact = tcil.PACT(constants=wrong).fit(world.model, world.memory(), world.draw(torch.arange(200) % K), range(K))
        assert [piece.source for piece in pact.result_.evidence] == ["spread", "new classes"]
        assert pact.temperature_ == pytest.approx(OVERCONFIDENCE, rel=0.3)

    def test_an_exemplar_far_out_does_not_take_over(self):
        world = World(1.0)
        memory, valid = world.memory(), world.draw(torch.arange(300) % K)
        memory[0][0] *= 1000
        pact = tcil.PACT().fit(world.model, memory, valid, range(K))
        assert pact.temperature_ == pytest.approx(OVERCONFIDENCE, rel=0.3)

    def test_constants_that_an_earlier_version_stored_are_those_of_now(self):
        now = tcil.PACT().constants
        seven = {f.name: getattr(now, f.name) for f in fields(PACTConstants) if f.name != "first_spread_kept"}
        assert PACTConstants.parse(seven) == now
        last = ("spread_step", "contrast_error", "contrast_drift", "label_shift_offset")
        six = {name: value for name, value in seven.items() if name not in last}
        assert PACTConstants.parse(six) == now
        assert PACTConstants.parse({**six, "spread_ratio": 0.5}).spread_ratio == 0.5
        names = [name for name in six if "spread" not in name or name == "bias_spread"]
        stored = {name: getattr(now, name) for name in names if name != "few_exemplars"}
        before = {**stored, "new_class_error": 0.06, "surrogate_temperature_error": 0.30}
        assert PACTConstants.parse(before) == now
        own = PACTConstants.parse({**before, "bias_drift": 0.5, "new_class_error": 0.07})
        assert (own.bias_drift, own.new_class_error) == (0.5, 0.07)

    def test_a_belief_is_widened_until_an_observation_is_so_many_errors_away(self):
        belief = Belief(0.0, 0.01)
        belief.widen(2.0, 0.3, 3.0)
        assert belief.surprise(2.0, 0.3) == pytest.approx(3.0)
        before = belief.variance
        belief.widen(0.1, 0.3, 3.0)  # it is near enough
        assert belief.variance == before


class TestContrast:
    """Some learners shrink the logits of new classes: these then have a temperature of their own."""

    @staticmethod
    def shrunk(factor, n_tasks=6):
        """PACT over tasks of one kind, after one without old classes; later the logits of new classes are shrunk."""
        history, results = None, []
        for task in range(n_tasks):
            world = World(6.0 if task else 1.0)
            with torch.no_grad():
                world.model.bias += 1e-4 * task  # another network, as after each task
                if task:
                    world.model.weight[OLD:] *= factor
                    world.model.bias[OLD:] *= factor
            labels = new_labels(2000) if task else torch.arange(2000) % K
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", tcil.CalibrationWarning)
                pact = tcil.PACT().fit(
                    world.model, world.memory(), world.draw(labels), NEW if task else range(K), imbalance=6,
                    history=history,
                )  # fmt: skip
            history = pact.history_
            results.append(pact.result_)
        return results[1:]

    def test_it_is_learned_from_task_to_task(self):
        ratios = [math.log(result.new_temperature / result.temperature) for result in self.shrunk(0.7)]
        assert ratios[-1] < ratios[0] < 0
        assert ratios[-1] == pytest.approx(math.log(0.7), abs=0.15)
        even = self.shrunk(1.0)[-1]
        assert abs(math.log(even.new_temperature / even.temperature)) < abs(ratios[-1]) / 2

    def test_both_temperatures_are_found(self):
        found = self.shrunk(0.7)[-1]
        assert found.temperature == pytest.approx(OVERCONFIDENCE, rel=0.2)
        assert found.new_temperature == pytest.approx(0.7 * OVERCONFIDENCE, rel=0.2)

    def test_a_sum_is_seen_as_by_a_kalman_filter(self):
        parts = Belief(0.5, 0.04), Belief(-0.1, 0.01)
        whole = Sum(*parts)
        assert (whole.mean, whole.variance) == pytest.approx((0.4, 0.05))
        assert whole.surprise(0.4 + 3 * math.sqrt(0.05 + 0.04), 0.2) == pytest.approx(3.0)
        whole.see(1.0, 0.2)
        gain = np.array([0.04, 0.01]) / (0.05 + 0.04)
        assert [part.mean for part in parts] == pytest.approx(list(np.array([0.5, -0.1]) + gain * 0.6))
        assert [part.variance for part in parts] == pytest.approx(list(np.array([0.04, 0.01]) * (1 - gain)))

    def test_one_that_is_far_off_widens_both_parts(self):
        parts = Belief(0.5, 0.04), Belief(-0.1, 0.01)
        Sum(*parts).widen(9.0, 0.2, 3.0)
        assert Sum(*parts).surprise(9.0, 0.2) == pytest.approx(3.0)
        assert parts[0].variance == pytest.approx(4 * parts[1].variance)

    def test_with_a_reserve_and_masked_classes(self):
        world = World(6.0)
        memory, valid, kept = world.memory(), world.draw(new_labels(100)), world.draw(torch.arange(8) % OLD)
        pact = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=6.0, reserve=kept)
        assert pact.result_.evidence[-1].source == "reserve"
        assert pact.new_temperature_ != pact.temperature_
        with torch.no_grad():
            z = world.model(kept[0])
        z[:, 0] = -torch.inf
        probabilities = pact.predict_proba(z)
        assert (probabilities[:, 0] == 0).all()
        torch.testing.assert_close(probabilities.sum(1), torch.ones(8, dtype=probabilities.dtype))
        for mask in (-1e4, -1e9):  # as some frameworks write it
            z[:, 0] = mask
            for found in (pact.predict_proba(z), pact.wrap(nn.Identity(), dtype=torch.float32, force=True)(z).exp()):
                torch.testing.assert_close(found.double(), probabilities.double(), atol=1e-5, rtol=1e-5)
        served = pact.wrap(world.model, dtype=torch.float32).eval()(kept[0]).exp()
        wanted = pact.wrap(world.model).eval()(kept[0]).exp()
        torch.testing.assert_close(served.double(), wanted.double(), atol=1e-5, rtol=1e-5)

    def test_a_number_added_to_the_logits_of_an_image_has_no_effect(self):
        world = World(6.0)
        memory, valid = world.memory(), world.draw(new_labels(100))

        class LogProbabilities(torch.nn.Module):
            def forward(self, x):
                return torch.log_softmax(world.model(x), dim=1) - 3 * x[:, :1]

        own, other = (
            tcil.PACT().fit(model, memory, valid, NEW, imbalance=6.0) for model in (world.model, LogProbabilities())
        )
        assert own.new_temperature_ != own.temperature_
        assert (own.temperature_, own.new_temperature_, own.bias_) == pytest.approx(
            (other.temperature_, other.new_temperature_, other.bias_), rel=1e-3
        )
        x, _ = world.draw(torch.arange(60) % K)
        with torch.no_grad():
            found, wanted = own.predict_proba(LogProbabilities()(x)), own.predict_proba(world.model(x))
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
    @pytest.mark.parametrize("away", [0.2, -0.3, 1.45])
    def test_a_part_of_what_the_first_task_said_of_the_ratio_is_kept(self, kept, away):
        """And all that is beyond three errors: that network is of another kind."""
        c = PACTConstants(first_spread_kept=kept)
        own = math.log(c.spread_ratio) + 1.0
        memo = {
            **MEMO, "log_temperature": [own + away, 0.01], "bias": None, "offset": None, "log_imbalance": None,
            "log_spread": 1.0,
        }  # fmt: skip
        state = PACTFilter.of(memo, 2.5, TARGET, c, LogitSpread(1.2, 10.0))
        usual = min(away, 0.45)
        assert state.log_t.mean == pytest.approx(own + away - (1 - kept) * usual + c.spread_step + 0.2)
        wide = kept**2 * 0.01 + c.first_spread_drift**2 + (c.few_exemplars / 10) ** 2
        assert state.log_t.variance == pytest.approx(wide)

    def test_more_than_all_of_it_is_refused(self):
        with pytest.raises(ValueError, match=r"constants.first_spread_kept: got 1.5; expected a number from 0 to 1"):
            PACTConstants(first_spread_kept=1.5)

    def test_there_is_none_without_old_classes(self):
        world = World(1.0)
        first = tcil.PACT().fit(world.model, world.memory(), world.draw(torch.arange(300) % K), range(K))
        assert first.new_temperature_ == first.temperature_
        assert first.history_["contrast"] is None

    def test_the_next_task_has_what_it_was_and_one_of_an_earlier_version_begins_anew(self):
        memo = {**MEMO, "contrast": [-0.3, 0.02]}
        state = PACTFilter.of(memo, 2.5, TARGET, MEASURED)
        assert (state.contrast.mean, state.contrast.variance) == (
            -0.3, pytest.approx(0.02 + MEASURED.contrast_drift**2),
        )  # fmt: skip
        assert state.memo()["contrast"] == [state.contrast.mean, state.contrast.variance]
        state = PACTFilter.of(MEMO, 2.5, TARGET, MEASURED)
        assert (state.contrast.mean, state.contrast.variance) == (0.0, pytest.approx(MEASURED.contrast_error**2))
        plain = PACTFilter.of(memo, 2.5, TARGET, ONE)
        assert (plain.contrast.mean, plain.contrast.variance, plain.memo()["contrast"]) == (0.0, 0.0, None)

    def test_one_temperature_for_all_classes(self):
        world = World(6.0)
        data = world.memory(), world.draw(new_labels(100))
        pact = tcil.PACT(constants=ONE).fit(world.model, *data, NEW, imbalance=6.0)
        assert pact.new_temperature_ == pact.temperature_ == pact.result_.new_temperature
        assert [piece.source for piece in pact.result_.evidence] == [
            "spread",
            "surrogate",
            "new classes",
            "label shift",
        ]
        own = tcil.PACT().fit(world.model, *data, NEW, imbalance=6.0)
        assert own.new_temperature_ == own.result_.new_temperature != own.temperature_
        assert [piece.source for piece in own.result_.evidence] == ["spread", "new classes", "surrogate", "label shift"]

    def test_the_filter_by_hand(self):
        """The new classes tell of log T and the contrast together; the others see logits that are evened by it."""
        world, c = World(6.0), MEASURED
        evidence = tcil.TCIL().evidence(world.model, world.memory(), world.draw(new_labels(80)), NEW)
        state = PACTFilter.of(MEMO, 2.5, TARGET, c)
        state.weigh(evidence)
        of_t, of_contrast = 0.1**2 + c.temperature_drift**2, c.contrast_error**2
        seen = laplace(
            evidence.valid[0][:, OLD:], evidence.valid[1] - OLD, 0.7, of_t + of_contrast + c.new_class_error**2
        )
        total = of_t + of_contrast + seen[1] ** 2 + c.new_class_error**2
        contrast = of_contrast / total * (seen[0] - 0.7)
        assert (state.contrast.mean, state.contrast.variance) == pytest.approx(
            (contrast, of_contrast - of_contrast**2 / total)
        )
        scale = torch.where(torch.arange(K) >= OLD, math.exp(-contrast), 1.0).double()
        centred = [z.double() - z.double().mean(1, keepdim=True) for z in (evidence.valid[0], evidence.pushed[0])]
        even = replace(
            evidence,
            valid=(centred[0] * scale, evidence.valid[1]),
            pushed=(centred[1] * scale, evidence.pushed[1]),
        )
        t, t_error, b, b_error = surrogate(even)
        log_t = Belief(0.7 + of_t / total * (seen[0] - 0.7), of_t - of_t**2 / total)
        log_t.see(t, math.hypot(t_error, c.surrogate_temperature_error))
        assert (state.log_t.mean, state.log_t.variance) == pytest.approx((log_t.mean, log_t.variance))
        value, slope, error = label_shift(*even.valid, evidence.is_new, log_t.mean)
        bias = BiasBelief(0.9 + 0.25, 0.02 + c.bias_drift**2, 0.0, c.surrogate_offset**2 + c.offset_drift**2)
        bias.see(b, math.hypot(b_error, c.surrogate_bias_error), with_offset=True)
        wide = math.hypot(error, c.label_shift_error, slope * math.sqrt(log_t.variance))
        bias.see(value - c.label_shift_offset, wide)
        assert (state.bias.mean, state.bias.variance) == pytest.approx((bias.mean, bias.variance))

    def test_saved_and_loaded_with_the_rest(self, tmp_path):
        world = World(6.0)
        pact = tcil.PACT().fit(world.model, world.memory(), world.draw(new_labels(100)), NEW, imbalance=6.0)
        again = tcil.load(pact.save(tmp_path / "pact.json"))
        assert (again.new_temperature_, again.result_) == (pact.new_temperature_, pact.result_)
        x, _ = world.draw(torch.arange(60) % K)
        with torch.no_grad():
            z = world.model(x).double()
        z = z - z.mean(1, keepdim=True)
        scaled = torch.where(torch.arange(K) >= OLD, z / pact.new_temperature_, z / pact.temperature_ + pact.bias_)
        wanted = torch.log_softmax(scaled, dim=1)
        same = wanted.argmax(1) == z.argmax(1)  # where predictions stay, it is q itself
        assert same.sum() > 30
        torch.testing.assert_close(torch.log(pact.predict_proba(z))[same], wanted[same], atol=1e-6, rtol=1e-6)

    def test_a_model_saved_by_an_earlier_version_has_one_temperature(self):
        world = World(6.0)
        data = world.memory(), world.draw(new_labels(100))
        wrapped = tcil.PACT(constants=ONE).fit(world.model, *data, NEW, imbalance=6.0).wrap(world.model)
        state = {name: value for name, value in wrapped.state_dict().items() if "new_temperature" not in name}
        assert len(state) == len(wrapped.state_dict()) - 1
        again = tcil.PACT().fit(world.model, *data, NEW, imbalance=6.0).wrap(world.model)
        again.load_state_dict(state)
        x, _ = world.draw(torch.arange(20) % K)
        torch.testing.assert_close(again.eval()(x), wrapped.eval()(x))

    def test_a_logit_far_below_the_others_has_no_effect_on_them(self):
        """As a class that is masked by a number that is not recognised as a mask; there is no step on the way to it."""
        is_new = torch.tensor([False, True, False, False])
        mapping = PriorAdjustedMap(*(torch.tensor(v).double() for v in (2.0, 0.5)), is_new, torch.tensor(False),
                                   torch.tensor(1.5).double())  # fmt: skip
        low = [-10.0, -20.0, -40.0, -59.999, -60.001, -100.0, -300.0, -3e3]
        z = torch.tensor([[0.0, 0.0, -2.0, value] for value in low]).double()
        new = mapping(z).exp()[:, 1]
        assert float(new.diff().abs()[3:].max()) < 1e-4 < float(new.diff().abs()[:2].min())
        rows = evened((z, torch.zeros(len(z), dtype=torch.long)), is_new, math.log(0.75), 2.0)[0]
        seen = torch.softmax(rows / 2 + 0.5 * ~is_new, dim=1)[:, 1]  # what the fit sees is what the map gives
        torch.testing.assert_close(seen, new)

    def test_zero_may_be_a_tensor(self):
        for zero in (0, torch.tensor(0.0), np.float32(0.0)):
            assert PACTConstants(contrast_error=zero).contrast_error == 0.0

    @pytest.mark.parametrize("value", [-0.1, float("nan"), True, "0.1"])
    def test_constants_that_are_no_errors_are_refused(self, value):
        with pytest.raises(ValueError, match=r"constants.contrast_error: got .*; expected 0 or a positive number"):
            PACTConstants(contrast_error=value)


class TestHistory:
    def test_the_next_task_goes_on_from_it(self):
        world = World(20.0)
        memory, valid = world.memory(), world.draw(new_labels(100))
        first = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0)
        history = json.loads(json.dumps(first.history_))
        with pytest.raises(ValueError, match="history: got that of a fit of this very network"):
            tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, history=history)
        with torch.no_grad():
            world.model.bias += 1e-4  # another network, if only just
        again = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, history=history)
        assert again.result_.log_temperature_error < 0.95 * first.result_.log_temperature_error
        elsewhere = {**history, "log_temperature": [history["log_temperature"][0] + 0.5, history["log_temperature"][1]]}
        moved = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, history=elsewhere)
        assert again.temperature_ < moved.temperature_ < math.exp(elsewhere["log_temperature"][0])

    def test_a_repeated_partial_fit_replaces_the_last_one(self, tmp_path):
        """As after a wrong argument or more training in a notebook, or a crash between save and the next task."""
        world = World(20.0, seed=5)
        memory, valid = world.memory(), world.draw(new_labels(100))
        earlier = world.draw(torch.arange(40) % 2)
        once, twice = tcil.PACT(), tcil.PACT()
        for pact in (once, twice):
            pact.partial_fit(world.model, memory, earlier, [0, 1], imbalance=20.0)
        with torch.no_grad():
            world.model.bias += 1e-4  # the next task
        twice.partial_fit(world.model, memory, valid, NEW, imbalance=2.0)
        with torch.no_grad():
            world.model.bias += 1e-4  # trained a little more
        once.partial_fit(world.model, memory, valid, NEW, imbalance=20.0)
        twice.partial_fit(world.model, memory, valid, NEW, imbalance=3.0)
        twice = tcil.load(twice.save(tmp_path / "pact.json"))
        twice.partial_fit(model=world.model, memory=memory, valid=valid, new_classes=NEW, imbalance=20.0)
        assert twice.result_ == once.result_
        assert twice.history_ == once.history_
        assert "before" not in once.history_["before"]
        assert once.history_["before"]["new_classes"] == [0, 1]
        twice.partial_fit(world.model, memory, valid, (label for label in NEW), imbalance=20.0)  # read once only
        assert twice.result_ == once.result_
        with pytest.raises(TypeError, match="new_classes"):
            once.partial_fit(world.model, memory, valid)
        with pytest.raises(ValueError, match="history: got"):
            tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, history={**once.history_, "before": {}})
        held = world.draw(torch.arange(40) % 2)  # another task of a network that is frozen
        with pytest.raises(ValueError, match="that of a fit of this very network"):
            once.partial_fit(world.model, memory, held, [0, 1], imbalance=20.0)

    def test_drift_makes_it_less_certain_and_the_bias_follows_the_imbalance(self):
        state = PACTFilter.of(MEMO, 2.5, TARGET)
        assert (state.log_t.mean, state.log_t.variance) == pytest.approx((0.7, 0.01 + MEASURED.temperature_drift**2))
        assert (state.bias.mean, state.bias.variance) == pytest.approx(
            (0.9 + (2.5 - 2.0) / 2, 0.02 + MEASURED.bias_drift**2)
        )

    def test_the_bias_enters_with_the_first_old_classes(self):
        first = {"calibrator": "PACT", "log_temperature": [0.3, 0.01], "bias": None, "log_imbalance": None}
        still = PACTFilter.of(first, None, TARGET)
        assert (still.log_t.mean, still.log_t.variance, still.bias) == (
            0.3,
            pytest.approx(0.01 + MEASURED.temperature_drift**2),
            None,
        )
        state = PACTFilter.of(first, 2.0, TARGET)
        assert (state.log_t.mean, state.log_t.variance) == (0.3, pytest.approx(0.01 + MEASURED.first_drift**2))
        assert (state.bias.mean, state.bias.variance) == (1.0, pytest.approx(4 / 12 + MEASURED.bias_spread**2))
        again = PACTFilter.of(MEMO, None, TARGET)  # a new sequence that goes on from an old one
        assert (again.log_t.mean, again.bias) == (0.7, None)

    def test_weighing_is_by_precision(self):
        belief = Belief(0.0, 0.25)
        belief.see(1.0, 0.5)  # as precise as what was known
        assert (belief.mean, belief.variance) == (0.5, 0.125)
        assert belief.surprise(0.5 + 3 * math.sqrt(0.125 + 1), 1.0) == pytest.approx(3.0)

    def test_the_bias_and_the_offset_are_a_kalman_filter_of_two_numbers(self):
        belief = BiasBelief(0.5, 0.3, 0.1, 0.4, -0.05)
        mean, covariance = np.array([0.5, 0.1]), np.array([[0.3, -0.05], [-0.05, 0.4]])
        for value, error, with_offset in ((1.2, 0.3, True), (0.2, 0.5, False), (0.9, 0.1, True)):
            row = np.array([1.0, float(with_offset)])
            total = row @ covariance @ row + error**2
            assert belief.surprise(value, error, with_offset=with_offset) == pytest.approx(
                abs(value - row @ mean) / math.sqrt(total)
            )
            belief.see(value, error, with_offset=with_offset)
            gain = covariance @ row / total
            mean, covariance = mean + gain * (value - row @ mean), covariance - np.outer(gain, row @ covariance)
            assert (belief.mean, belief.offset) == pytest.approx(tuple(mean))
            assert (belief.variance, belief.offset_variance, belief.covariance) == pytest.approx(
                (covariance[0, 0], covariance[1, 1], covariance[0, 1])
            )

    def test_the_offset_is_learned_from_task_to_task(self):
        """A surrogate that is always 1 too high, beside an honest label shift, is seen through."""
        belief = BiasBelief(0.0, 1.0, 0.0, 0.65**2)
        for _ in range(6):
            belief.see(1.0, 0.2, with_offset=True)
            belief.see(0.0, 0.4)
            belief.move(0.0, 0.1, 0.1)
        assert belief.offset == pytest.approx(1.0, abs=0.3)
        assert abs(belief.mean) < 0.3

    def test_a_memo_goes_through_json_and_one_of_version_0_2_is_taken(self):
        state = PACTFilter.of(MEMO, 2.5, TARGET)  # without an offset
        wanted = MEASURED.surrogate_offset**2 + MEASURED.offset_drift**2
        assert state.bias.offset_variance == pytest.approx(wanted)
        state.bias.see(2.0, 0.3, with_offset=True)
        memo = json.loads(json.dumps(state.memo()))
        again = PACTFilter.of({**memo, "model": ""}, 2.5, TARGET)
        assert (again.bias.offset, again.bias.covariance) == (state.bias.offset, state.bias.covariance)

    def test_the_first_prior_follows_the_scale_of_the_logits(self):
        """Networks whose logits are a thousand times smaller get a temperature that is a thousand times smaller."""
        world = World(1.0)
        valid = world.draw(torch.arange(300) % K)
        memory = world.memory()
        plain = tcil.PACT().fit(world.model, memory, valid, range(K)).temperature_
        with torch.no_grad():
            world.model.weight.mul_(1e-3)
            world.model.bias.mul_(1e-3)
        assert tcil.PACT().fit(world.model, memory, valid, range(K)).temperature_ == pytest.approx(
            1e-3 * plain, rel=0.05
        )

    @pytest.mark.parametrize(
        "history",
        [
            {},
            [1],
            {"calibrator": "FirstTaskTemperatureScaling", "temperature": 2.0},
            {**MEMO, "log_temperature": [0.0]},
            {**MEMO, "log_temperature": ["0.7", 0.01]},
            {**MEMO, "log_temperature": [800.0, 0.01]},
            {**MEMO, "bias": [float("nan"), 0.02]},
            {**MEMO, "bias": [0.9, -0.02]},
            {**MEMO, "bias": None},
            {**MEMO, "log_imbalance": None},
            {**MEMO, "log_imbalance": "2.0"},
            {**MEMO, "model": None},
            {**MEMO, "offset": [0.1, 0.2]},
            {**MEMO, "offset": [0.1, -0.2, 0.0]},
            {**MEMO, "offset": [0.1, 0.2, 0.5]},  # more than variances allow
            {**MEMO, "offset": "none"},
            {**MEMO, "contrast": [0.1]},
            {**MEMO, "contrast": [0.1, -0.2]},
            {**MEMO, "contrast": ["0.1", 0.2]},
            {**MEMO, "bias": None, "log_imbalance": None, "contrast": [0.1, 0.2]},
            {**MEMO, "log_spread": "1.0"},
            {**MEMO, "log_spread": float("nan")},
            {**MEMO, "log_spread": 1e5},
            {"calibrator": "PACT", "mean": [0.7, 0.9], "covariance": [[0.01, 0.0], [0.0, 0.02]]},
        ],
    )
    def test_other_things_are_refused(self, history):
        world = World(1.0)
        with pytest.raises(ValueError, match=r"(?s)history: got .* expected history_ of the PACT"):
            tcil.PACT().fit(world.model, world.memory(), None, NEW, imbalance=1.0, history=history)
