"""Methods that PACT is compared with, and leads: what they compute on data where it is known."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from research.pact import compared, leads, methods, real_images
from tcil.calibration.exemplars import LogitSpread
from tcil.results import PACTEvidence

OLD, CLASSES, IMBALANCE = 2, 4, 5.0
IS_NEW = torch.arange(CLASSES) >= OLD


def drawn(per_class: list[int], seed: int, certain: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    columns = torch.arange(CLASSES).repeat_interleave(torch.tensor(per_class))
    logits = torch.randn(len(columns), CLASSES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logits + certain * torch.nn.functional.one_hot(columns, CLASSES), columns


@pytest.fixture
def known():
    memory, test = drawn([10] * CLASSES, 0, certain=100.0), drawn([50] * CLASSES, 1)
    reserve = drawn([2, 2, 0, 0], 3)
    task = SimpleNamespace(
        memory_logits=memory[0], memory_columns=memory[1], test_logits=test[0], test_columns=test[1],
        reserve_logits=reserve[0], reserve_columns=reserve[1], seen=range(CLASSES), new_columns=range(OLD, CLASSES),
    )  # fmt: skip
    valid = drawn([0, 0, 40, 40], 2)
    evidence = SimpleNamespace(is_new=IS_NEW, result=SimpleNamespace(temperature=2.0))
    return SimpleNamespace(
        task=task, evidence=evidence, valid=valid, old=OLD, log_imbalance=math.log(IMBALANCE), memory={}
    )


def test_the_prior_of_a_network_that_knows_its_exemplars_is_the_share_of_each_class(known):
    """So that Prior2Posterior is then the whole imbalance as bias."""
    found = compared.prior2posterior(known)
    within = compared.within(known)
    biased = known.task.test_logits / math.exp(within) + math.log(IMBALANCE) * (~IS_NEW)
    assert torch.allclose(found, torch.log_softmax(biased, dim=1), atol=1e-6)


def test_replayed_calibration_counts_every_image_once(known):
    both = [torch.cat(parts) for parts in zip(known.valid, compared.reserve_of(known), strict=True)]
    assert torch.equal(compared.replayed(known), compared.scaled(known, compared.fit_on(tuple(both))))


def test_the_first_temperature_is_kept(known):
    first = SimpleNamespace(**{**vars(known), "old": 0})
    compared.first_task(first)
    known.memory, known.valid = first.memory, drawn([0, 0, 40, 40], 9, certain=0.1)
    assert torch.equal(compared.first_task(known), compared.scaled(known, compared.fit_on(first.valid)))


def test_distances_are_of_old_classes_from_the_nearest_new_one(known):
    corners = torch.tensor([[0.0, 0.0], [6.0, 0.0], [3.0, 0.0], [9.0, 9.0]])
    columns = torch.arange(CLASSES).repeat(5)
    known.task.memory = corners[columns], columns
    known.task.model = torch.nn.Linear(2, CLASSES)
    found = compared.distances(known)
    assert found.tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0])  # both old ones are three away


def test_the_sampling_error_of_a_reserve_is_that_of_fixed_numbers_of_images():
    """Where q is calibrated: the estimates of many draws vary as much as each claims."""
    flat, wide = torch.zeros(2, dtype=torch.float64), torch.full((2,), 1e6, dtype=torch.float64)
    points, claimed = [], []
    for seed in range(120):
        logits, columns = drawn([15, 15, 60, 60], 100 + seed)
        point, covariance = leads.own_error((2 * logits, columns), IS_NEW, flat, wide)
        points.append(point)
        claimed.append(covariance.diagonal())
    true, told = torch.stack(points).var(0), torch.stack(claimed).median(0).values
    assert ((told / true > 0.6) & (told / true < 1.6)).all()


def test_both_sides_tell_temperature_and_bias_where_the_answer_is_known():
    """Logits twice as large as calibrated ones, which `drawn` has half of, and new classes 1 more: T is 2, b is 1/2."""
    flat, wide = torch.zeros(2, dtype=torch.float64), torch.full((2,), 1e6, dtype=torch.float64)
    points = []
    for seed in range(20):
        logits, columns = drawn([150, 150, 300, 300], 300 + seed)
        point, _ = leads.by_sides((4 * logits + IS_NEW.double(), columns), IS_NEW, flat, wide)
        points.append(point)
    found = torch.stack(points)
    spread = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - torch.tensor([math.log(2), 0.5])).abs() < 4 * spread + 0.03).all()


def test_a_reserve_has_as_many_images_of_each_old_class_as_asked_for(known):
    assert methods.reserve_of(known)[1].tolist() == [0, 0, 1, 1]
    logits, columns = methods.reserve_of(known, 1)
    assert columns.tolist() == [0, 1]
    assert torch.equal(logits, known.task.reserve_logits[[0, 2]])


def test_validation_images_that_were_kept_are_answered_by_the_network_of_now(known):
    images, columns = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])
    known.task.model, known.memory = torch.nn.Linear(3, CLASSES), {"validation": (images, columns)}
    logits, labels = real_images.last_validation(known)
    assert torch.allclose(logits, known.task.model(images), atol=1e-6)
    assert torch.equal(labels, columns)


def test_surprises_twice_as_large_as_claimed_widen_the_belief(known, monkeypatch):
    def surprised(known):
        known.memory |= {"belief": PACTEvidence("all", 0.1, 0.2, 0.3, 0.4), "surprises": [2.0] * 4, "contrast": 0.0}

    monkeypatch.setattr(methods, "tracked", lambda **_: surprised)
    told = []
    for _ in range(2):  # four surprises in each of two tasks, beside the four that the claim is worth
        assert torch.allclose(methods.averaged_by_innovations(known).exp().sum(1), torch.ones(200, dtype=torch.float64))
        told.append((known.memory["belief"].log_temperature_error, known.memory["belief"].bias_error))
    factors = math.sqrt((4 + 16) / 8), math.sqrt((4 + 32) / 12)
    assert told == [pytest.approx((0.2 * factor, 0.4 * factor)) for factor in factors]


def test_before_any_evidence_the_temperature_is_a_share_of_the_spread_and_the_bias_half_of_the_imbalance(known):
    known.evidence.spread = LogitSpread(math.log(4.0), per_class=1e9)
    known.evidence.result.target = None
    real_images.before_evidence(known)
    belief, constants = known.memory["belief"], methods.EIGHTH
    assert belief.log_temperature == pytest.approx(math.log(constants.spread_ratio * 4) + constants.spread_step)
    assert belief.bias == pytest.approx(math.log(IMBALANCE) / 2)
