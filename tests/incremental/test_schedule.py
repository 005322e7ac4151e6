"""Learning rates by epoch, and the weight decay of a whole schedule."""

from __future__ import annotations

import pytest

from tcil.incremental.learners.base import Schedule


class TestDecay:
    def test_schedule(self):
        schedule = Schedule(200, 0.1, (100, 150), 2e-4)
        assert [schedule.rate(e) for e in (0, 99, 100, 149, 150, 199)] == pytest.approx(
            [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
        )

    def test_total_decay(self):
        """Of the paper's CIFAR-100: (100 x 0.1 + 50 x 0.01 + 50 x 0.001) x 51 steps x 2e-4 / 0.1."""
        paper = Schedule(200, 0.1, (100, 150), 2e-4)
        assert paper.total_decay(51) == pytest.approx(10.55 * 51 * 2e-3) == pytest.approx(1.0761)
        assert Schedule(30, 0.05, (15, 22), 2e-4).total_decay(69) == pytest.approx(0.789 * 69 * 2e-3)
        short = Schedule(30, 0.05, (15, 22), 7.0).decaying(paper.total_decay(51), 69)
        assert short.total_decay(69) == pytest.approx(paper.total_decay(51))
        assert (short.epochs, short.lr, short.milestones) == (30, 0.05, (15, 22))
        assert short.weight_decay == pytest.approx(1.977e-3, rel=1e-3)


class TestRates:
    def rates(self, shape, *epochs):
        schedule = Schedule(epochs=10, lr=0.2, milestones=(5, 8), weight_decay=0.0, shape=shape)
        return [schedule.rate(epoch) for epoch in epochs]

    def test_steps_ignore_the_place_within_an_epoch(self):
        assert self.rates("steps", 0, 4.99, 5, 5.5, 8) == pytest.approx([0.2, 0.2, 0.02, 0.02, 0.002])
        assert self.rates("steps", 4.75) == self.rates("steps", 4)

    def test_cosine(self):
        assert self.rates("cosine", 0, 2.5, 5, 10) == pytest.approx([0.2, 0.1 * (1 + 0.5**0.5), 0.1, 0.0])

    def test_one_cycle(self):
        assert self.rates("one-cycle", 0, 1.5, 3, 6.5, 10) == pytest.approx([0.008, 0.104, 0.2, 0.1, 0.0])

    def test_unknown(self):
        with pytest.raises(ValueError, match="lr_shape: got 'line'"):
            self.rates("line", 0)
