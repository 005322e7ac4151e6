"""One job on several ranks (gloo, real processes): the temperatures of one process, the same network everywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tcil
from tcil.calibration.perturbation import DirectionPolicy
from tcil.experiments.config.settings import build
from tcil.experiments.process.stopping import Stopped
from tcil.experiments.runs.run import Run
from tcil.foundation import ranks
from tcil.incremental import training
from tcil.incremental.data.images import Pixels
from tcil.incremental.learners.base import Schedule, Stage
from tcil.incremental.networks import small_cnn
from tcil.incremental.training import EpochState, OptimizerKind, train_stage


def on_ranks(size, work, folder):
    """What `work(rank)` returns (as JSON) in each of so many processes that form a group."""
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
                dist.barrier()  # a rank that is done at once would close its connections while others still connect
                (folder / f"{rank}.json").write_text(json.dumps(work(rank)))
                dist.destroy_process_group()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * size
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def model_and_data():
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(6, 8, generator=generator)

    def draw(labels):
        return centres[labels] + torch.randn(len(labels), 8, generator=generator), labels

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 6))
    memory = draw(torch.arange(90) % 6)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(memory[0]), memory[1]).backward()
        optimizer.step()
    return network, memory, draw(4 + torch.arange(200) % 2)


class TestCalibration:
    @pytest.mark.parametrize("size", [2, 3])
    def test_temperatures_are_those_of_one_process(self, size, model_and_data, tmp_path):
        network, memory, valid = model_and_data
        # 7 cuts the memory into many batches with a short one last; of 200, all but the first rank have none.
        cases = [(policy, batch) for policy in DirectionPolicy for batch in (7, 16, 200)]

        def fitted(policy, batch):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return tcil.TCIL(policy=policy, batch_size=batch).fit(network, memory, valid, [4, 5]).result_

        def work(rank):
            with tcil.distributed.sharded():
                found = [fitted(*case) for case in cases]
                noisy = tcil.PerturbedTemperatureScaling(batch_size=16).fit(network, valid=valid).result_
                logits, _ = tcil.predict_logits(network, memory, batch_size=7)
            return [[r.temperature, r.magnitude, len(r.trace)] for r in found], noisy.temperature, logits.tolist()

        alone = [fitted(*case) for case in cases]
        noisy = tcil.PerturbedTemperatureScaling(batch_size=16).fit(network, valid=valid).result_
        logits, _ = tcil.predict_logits(network, memory, batch_size=7)
        everywhere = on_ranks(size, work, tmp_path)
        assert all(answers == everywhere[0] for answers in everywhere)
        for result, (temperature, magnitude, steps) in zip(alone, everywhere[0][0], strict=True):
            assert temperature == pytest.approx(result.temperature, abs=1e-6)
            assert (magnitude, steps) == (pytest.approx(result.magnitude, abs=1e-6), len(result.trace))
        assert everywhere[0][1] == pytest.approx(noisy.temperature, abs=1e-6)
        assert torch.equal(torch.tensor(everywhere[0][2]), logits)

    def test_every_rank_runs_its_part_only(self, model_and_data, tmp_path):
        network, memory, _ = model_and_data

        def work(rank):
            seen = []
            handle = network[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
            with tcil.distributed.sharded():
                tcil.predict_logits(network, memory, batch_size=10)
            handle.remove()
            return sum(seen)

        assert on_ranks(3, work, tmp_path) == [30, 40, 40]  # of 90; the first batch is everyone's

    def test_a_process_group_alone_changes_nothing(self, model_and_data, tmp_path):
        """One rank fits, the other never does: whoever does not ask to share is not made to wait."""
        network, memory, valid = model_and_data

        def work(rank):
            if rank == 0:
                return tcil.TCIL().fit(network, memory, valid, [4, 5]).temperature_
            return None

        expected = tcil.TCIL().fit(network, memory, valid, [4, 5]).temperature_
        assert on_ranks(2, work, tmp_path) == [expected, None]

    def test_without_a_group(self):
        with tcil.distributed.sharded():
            assert ranks.current().size == 1
        message = r"None where torch\.distributed is not initialised"
        with pytest.raises(ValueError, match=message), tcil.distributed.sharded("all"):
            pass


def stage_of(model, rows):
    def loss(x, y):
        return nn.functional.cross_entropy(model(x)[:, :10], y)

    return Stage("train", rows, Schedule(2, 0.1, (), 2e-4), loss, list(model.parameters()))


def trained(model, dataset, rows, batch_size=32):
    losses = []
    train_stage(
        model, stage_of(model, rows), dataset, dataset.train.labels, batch_size=batch_size, optimizer=OptimizerKind.SGD,
        generator=torch.Generator().manual_seed(3), state=EpochState(), on_epoch=lambda _, loss: losses.append(loss),
    )  # fmt: skip
    return losses


class TestTraining:
    def test_without_bn_it_is_the_training_of_one_process(self, digits, tmp_path):
        """Same batches, same augmentation, and the gradient of the whole batch's mean, also where parts are unequal."""

        def network():
            torch.manual_seed(5)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))

        rows = torch.arange(100)  # batches of 33, 33, 33 and a single row, which the third rank has no part of

        def work(rank):
            model = network()
            with tcil.distributed.sharded():
                losses = trained(model, digits, rows, 33)
            return losses, [p.tolist() for p in model.parameters()]

        model = network()
        losses = trained(model, digits, rows, 33)
        everywhere = on_ranks(3, work, tmp_path)
        assert all(answers == everywhere[0] for answers in everywhere)
        assert everywhere[0][0] == pytest.approx(losses, abs=1e-6)
        for found, parameter in zip(everywhere[0][1], model.parameters(), strict=True):
            assert torch.allclose(torch.tensor(found), parameter, atol=1e-6)

    @pytest.mark.parametrize("frozen", ["embed", "beside"])
    def test_frozen_features_are_computed_once_by_all_ranks_together(self, digits, tmp_path, frozen):
        """Each rank embeds its batches (and the first), and reads of all of them what one process would read."""
        whole, rows = dataclasses.replace(digits, padding=0), torch.arange(60)
        torch.manual_seed(0)
        part = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

        def read(keep):
            seen = []

            def embed(x):
                seen.append(len(x))
                return part(x).detach()

            stage = dataclasses.replace(stage_of(part, rows), **{frozen: embed})
            generator = torch.Generator().manual_seed(1)
            reader = training._reader(stage, Pixels(whole), whole.train, generator, 10)
            return reader(rows.flip(0), keep)[-1].tolist(), sum(seen)

        def work(rank):
            with ranks.sharded():
                return read(ranks.current().part(60))

        alone, count = read(slice(None))
        (first, counted), (second, recounted) = on_ranks(2, work, tmp_path)
        assert first + second == alone
        checked = 2  # images, the same on each rank, on which it is seen whether a network can be folded
        assert (count, counted, recounted) == (60 + checked, 30 + checked, 40 + checked)

    def test_with_bn_all_ranks_have_one_network(self, digits, tmp_path):
        rows = torch.arange(40)

        def work(rank):
            torch.manual_seed(5)
            model = small_cnn(10)
            with tcil.distributed.sharded():
                trained(model, digits, rows, 40)
            return {name: value.flatten().tolist() for name, value in model.state_dict().items()}

        one, other = on_ranks(2, work, tmp_path)
        assert one == other
        assert any(value != 0 for name, values in one.items() if name.endswith("running_mean") for value in values)

    def test_weights_that_are_clamped_are_the_same_everywhere(self, digits, tmp_path):
        """WA's restricted head on two ranks, whole and stopped at every eighth step: one network, no weight below 0."""
        options = {"learner_options": {"restrict_head": True}}
        settings = build({"dataset": "digits", "learner": "wa", "epochs": 2, "tasks": 2, "memory": 40, **options})

        def heads(folder, stop=lambda: False):
            run = Run(settings, folder, dataset=digits, stop=stop)
            run.execute(["vanilla"])
            return [[p.tolist() for p in learner.model.fc.parameters()] for _, _, learner in run.walk()]

        def work(rank):
            with tcil.distributed.sharded():
                whole, cut = heads(tmp_path / "whole"), None
                while cut is None:
                    steps = iter(range(7))
                    with contextlib.suppress(Stopped):
                        cut = heads(tmp_path / "cut", lambda: next(steps, None) is None)  # noqa: B023
            return whole, cut

        one, other = on_ranks(2, work, tmp_path)
        assert one == other
        whole, cut = one
        assert whole == cut
        for weight, bias in whole:
            assert min(map(min, weight)) == 0 == max(map(abs, bias))
            assert max(map(max, weight)) > 0

    def test_a_run_has_the_same_results_everywhere_and_can_be_stopped(self, digits, tmp_path):
        """A stop that only one rank knows of stops all at the same step; resumed, the bytes are those undisturbed."""
        learner = {"learner_options": {"finetune_epochs": 2, "finetune_milestones": [1]}}
        settings = build({"dataset": "digits", "learner": "der", "epochs": 2, "tasks": 2, "memory": 40, **learner})
        names = ["vanilla", "ts", "t-cil"]

        def work(rank):
            with tcil.distributed.sharded():
                whole = Run(settings, tmp_path / "whole", dataset=digits).execute(names)
                stops, cut = 0, None
                while cut is None:
                    steps = iter(range(7))
                    try:
                        stop = (lambda: next(steps, None) is None) if rank == 1 else (lambda: False)  # noqa: B023
                        cut = Run(settings, tmp_path / "cut", dataset=digits, stop=stop).execute(names)
                    except Stopped:
                        stops += 1
            return whole.record(), cut.record(), stops

        one, other = on_ranks(2, work, tmp_path)
        assert one == other
        whole, cut, stops = one
        assert whole == cut
        assert stops >= 5
        for path in (tmp_path / "whole").rglob("*.safetensors"):
            assert path.read_bytes() == (tmp_path / "cut" / path.relative_to(tmp_path / "whole")).read_bytes()

    def test_running_statistics_by_hand(self, tmp_path):
        """Weighted by rows: two ranks with 3 and 2 rows of a batch of 5."""
        values = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))

        def work(rank):
            from tcil.incremental.training import _exchange, _share

            model = nn.BatchNorm1d(4)
            with tcil.distributed.sharded():
                together = ranks.current()
                part, weight = _share(together, 5)
                loss = model(values[part]).square().mean()
                loss.backward()
                mean, stop = _exchange(together, model, list(model.parameters()), loss.detach(), weight, rank == 1)
            return model.running_mean.tolist(), float(mean), stop, weight

        one, other = on_ranks(2, work, tmp_path)
        assert one[:3] == other[:3]
        by_hand = 0.1 * (0.6 * values[:3].mean(0) + 0.4 * values[3:].mean(0))
        assert torch.allclose(torch.tensor(one[0]), by_hand)
        assert one[2] is True
        assert (one[3], other[3]) == (0.6, 0.4)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_torchrun(tmp_path):
    """The command itself: one folder, written by the first rank, with the number of ranks in its environment."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tcil", "run"]
    short = ["--dataset", "digits", "--set", "epochs=1", "--set", "tasks=2", "--set", "memory=30", "--no-full-data"]
    words = [*torchrun, *short, "--calibrators", "vanilla,ts,t-cil", "--out", str(tmp_path / "runs")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "environment.json").read_text())["ranks"] == 2
    assert done.stdout.count("run folder") == 1
