"""The memory: how many exemplars of each class are kept, and which."""

from __future__ import annotations

import pytest
import torch

from tcil.incremental.data.memory import Memory, UniformMemory


class TestMemory:
    def test_counts_of_the_paper(self):
        """2,000 exemplars: 66 of each of 30 classes, 1,980 in all."""
        generator = torch.Generator().manual_seed(0)
        policy, kept, trained = UniformMemory(2000), {}, {}
        for task in range(10):
            new = {c: torch.arange(c * 500, c * 500 + 490) for c in range(task * 10, task * 10 + 10)}
            trained |= new
            before, kept = kept, policy.update(kept, new, generator)
            seen = 10 * (task + 1)
            assert {len(rows) for rows in kept.values()} == {2000 // seen}
            for c, rows in kept.items():
                pool = before.get(c, trained[c])
                assert set(rows.tolist()) <= set(pool.tolist())
                assert len(set(rows.tolist())) == len(rows)
            if seen == 30:
                assert len(Memory(kept).rows) == 1980

    def test_draws_are_uniform(self):
        generator = torch.Generator().manual_seed(0)
        counts = torch.zeros(20)
        for _ in range(2000):
            counts[UniformMemory(5).update({}, {0: torch.arange(20)}, generator)[0]] += 1
        assert ((counts - 500).abs() < 100).all()

    def test_too_small(self):
        with pytest.raises(ValueError, match="at least one for each of 3 classes"):
            UniformMemory(2).update({}, {c: torch.arange(5) for c in range(3)}, torch.Generator())
