"""The task stream: which rows a task trains on and holds out."""

from __future__ import annotations

import pytest
import torch

from tcil.incremental.data.stream import TaskStream, class_order, equal_sizes


class TestStream:
    labels = torch.arange(1200) % 12

    def stream(self, **changes):
        settings = {
            "order": class_order(12, 7),
            "sizes": [3, 4, 5],
            "valid_per_class": 5,
            "pool_per_class": 9,
            "seed": 1,
        }
        return TaskStream(self.labels, **{**settings, **changes})

    def test_parts_are_apart_and_of_the_task(self):
        stream = self.stream(reserve_per_class=[4, 3, 2])
        everything = []
        for task, reserve in zip(stream, (4, 3, 2), strict=True):
            size = len(task.columns)
            assert (len(task.valid), len(task.pool), len(task.reserve)) == (5 * size, 9 * size, reserve * size)
            assert len(task.train) == (100 - 9 - reserve) * size
            parts = [*task.train.tolist(), *task.pool.tolist(), *task.reserve.tolist()]
            assert len(parts) == len(set(parts)) == 100 * size
            assert set(task.valid.tolist()) <= set(task.pool.tolist())
            assert set(stream.columns[torch.tensor(parts)].tolist()) == set(task.columns)
            everything += parts
        assert sorted(everything) == list(range(1200))

    def test_classes_come_back_with_other_images(self):
        plain, stream = self.stream(), self.stream(returning=2)
        assert [len(task.returned) for task in stream] == [0, 2, 2]
        assert [task.columns for task in stream] == [task.columns for task in plain]
        returned = [column for task in stream for column in task.returned]
        assert len(set(returned)) == 4
        rows = torch.cat([torch.cat([task.train, task.pool]) for task in stream])
        assert sorted(rows.tolist()) == list(range(1200))  # each image once, in one task
        for task, before in zip(stream, plain, strict=True):
            assert all(column < task.columns.start for column in task.returned)
            assert sorted(set(stream.columns[task.train].tolist())) == sorted(task.current)
            assert torch.bincount(stream.columns[task.valid], minlength=12)[task.current].tolist() == [5] * len(
                task.current
            )
            assert torch.bincount(stream.columns[task.pool], minlength=12)[task.current].tolist() == [9] * len(
                task.current
            )
            own = task.pool[torch.isin(stream.columns[task.pool], torch.tensor(task.columns))]
            assert own.tolist() == before.pool.tolist()  # what new classes hold out is as it was
            for column in task.columns:
                share = int((stream.columns[task.train] == column).sum())
                assert share == (46 if column in returned else 91)
        assert self.stream(returning=2)[2].returned == stream[2].returned
        redrawn = stream.redrawn(stream[1], torch.Generator().manual_seed(0))
        assert torch.bincount(stream.columns[redrawn], minlength=12)[stream[1].current].tolist() == [5] * 6

    def test_classes_come_back_only_with_images_left(self):
        with pytest.raises(ValueError, match="returning: got 1, with 2 images left"):
            self.stream(returning=1, valid_per_class=5, pool_per_class=95)

    def test_classes_of_a_task_may_have_unequal_numbers_of_training_images(self):
        plain, stream = self.stream(), self.stream(smallest=0.25)
        for task, before in zip(stream, plain, strict=True):
            counts = torch.bincount(stream.columns[task.train], minlength=12)[list(task.columns)].tolist()
            last = len(task.columns) - 1
            assert counts == [round(91 * 0.25 ** (place / last)) for place in range(last + 1)]
            assert task.pool.tolist() == before.pool.tolist()  # what is held out is as it was
            assert set(task.train.tolist()) < set(before.train.tolist())
        one_class = self.stream(sizes=[2, 1], smallest=0.25)
        assert [len(task.train) for task in one_class] == [91 + 23, 91]

    def test_columns_follow_the_class_order(self):
        stream = self.stream()
        for column, label in enumerate(stream.order):
            assert (stream.columns[self.labels == label] == column).all()

    def test_seeds_are_apart(self):
        assert self.stream(seed=1)[0].valid.tolist() == self.stream(seed=1)[0].valid.tolist()
        assert self.stream(seed=1)[0].valid.tolist() != self.stream(seed=2)[0].valid.tolist()
        assert class_order(12, 7) == class_order(12, 7) != class_order(12, 8)
        assert class_order(12, None) == list(range(12))

    def test_part_of_the_classes(self):
        stream = self.stream(order=[3, 1, 2, 9], sizes=[2, 2])
        assert stream.seen(1) == 4
        assert (stream.columns[self.labels == 5] == -1).all()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"sizes": [5, 8]}, "sizes: got"),
            ({"sizes": []}, "sizes: got"),
            ({"order": [0, 0, 1]}, "order: got"),
            ({"order": [0, 99]}, "dataset: got no training image of the classes"),
            ({"valid_per_class": 20}, "valid_per_class: got 20"),
            ({"pool_per_class": 100}, "validation: got 100 held-out images per class"),
            ({"reserve_per_class": [1]}, "reserve_per_class: got 1 numbers"),
        ],
    )
    def test_bad_settings(self, change, message):
        with pytest.raises(ValueError, match=message):
            self.stream(**change)

    def test_equal_sizes(self):
        assert equal_sizes(100, 10) == [10] * 10
        with pytest.raises(ValueError, match="tasks: got 11"):
            equal_sizes(10, 11)
