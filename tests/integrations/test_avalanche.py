"""The plugin inside Avalanche: what it counts, when it fits, what it reports, and what it refuses."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections import Counter

import pytest
import torch
from torch import nn

import tcil
from conftest import ROOT
from integrations.conftest import need, seed_everything

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def avalanche():
    return need("avalanche")


@pytest.fixture
def benchmark(avalanche, blob_tasks):
    from avalanche.benchmarks import tensors_benchmark

    train, valid, test = zip(*blob_tasks, strict=True)
    return tensors_benchmark(
        train_tensors=train, test_tensors=test, task_labels=[0] * 3, other_streams_tensors={"valid": valid}
    )


@pytest.fixture
def growing(avalanche):
    from avalanche.models import IncrementalClassifier

    seed_everything()
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), IncrementalClassifier(32))


def strategy_of(model, plugins, kind=None, **more):
    from avalanche.logging import TextLogger
    from avalanche.training.plugins import EvaluationPlugin
    from avalanche.training.supervised import Naive

    log = io.StringIO()
    strategy = (kind or Naive)(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.2),
        train_mb_size=16,
        train_epochs=4,
        eval_mb_size=50,
        plugins=plugins,
        evaluator=EvaluationPlugin(loggers=[TextLogger(log)]),
        **more,
    )
    return strategy, log


def replay(size=60):
    from avalanche.training.plugins import ReplayPlugin

    return ReplayPlugin(mem_size=size)


def plugin_of(*args, **kwargs):
    from tcil.integrations.avalanche import CalibrationPlugin

    return CalibrationPlugin(*args, **kwargs)


def tensors_of(dataset):
    rows = [dataset[place] for place in range(len(dataset))]
    return torch.stack([row[0] for row in rows]), torch.tensor([int(row[1]) for row in rows])


class Counting:
    """An independent count of what goes through the loss."""

    def __init__(self):
        self.labels = Counter()

    def before_backward(self, strategy, **kwargs):
        self.labels.update(strategy.mb_y.tolist())
        if getattr(strategy, "replay_loader", None) is not None:  # that of ER_ACE
            self.labels.update(strategy.mb_buffer_y.tolist())


def test_the_same_temperature_as_without_avalanche(benchmark, growing):
    memory, pact, count = replay(), tcil.PACT(), Counting()
    plugin = plugin_of(benchmark.valid_stream, pact)
    strategy, _ = strategy_of(growing, [memory, plugin, count])
    own, seen = tcil.PACT(), []
    for experience, valid in zip(benchmark.train_stream, benchmark.valid_stream, strict=True):
        count.labels.clear()
        strategy.train(experience)
        new = sorted(experience.classes_in_this_experience)
        seen += new
        assert plugin.presented == count.labels
        own.partial_fit(
            growing,
            tensors_of(memory.storage_policy.buffer.eval()),
            tensors_of(valid.dataset.eval()),
            new,
            columns=seen,
            imbalance=dict(count.labels) if len(seen) > 2 else None,
        )
        assert pact.temperature_ == pytest.approx(own.temperature_, abs=1e-6)
        assert pact.bias_ == pytest.approx(own.bias_, abs=1e-6)
    assert plugin.calibrator.classes_ == tuple(seen) == tuple(range(6))
    # Replay fills half of each minibatch from a memory of 60: far from 60 / 15, the ratio of stored images.
    assert 1 < pact.result_.imbalance < 3


def test_training_is_the_same_with_and_without_it(benchmark, avalanche):
    from avalanche.models import IncrementalClassifier

    weights = []
    for with_plugin in (False, True):
        seed_everything()
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), IncrementalClassifier(16))
        plugins = [replay(), *([plugin_of(benchmark.valid_stream)] if with_plugin else [])]
        strategy, _ = strategy_of(model, plugins)
        strategy.train(benchmark.train_stream[:2])
        weights.append(torch.cat([value.detach().flatten() for value in model.parameters()]))
    assert torch.equal(*weights)


def test_errors_are_reported_by_experience_stream_and_group(benchmark, growing):
    plugin = plugin_of(benchmark.valid_stream)
    strategy, log = strategy_of(growing, [replay(), plugin])
    strategy.train(benchmark.train_stream[:2])
    scores = strategy.eval(benchmark.test_stream[:2])
    x, y = (torch.cat(part) for part in zip(*(tensors_of(e.dataset) for e in benchmark.test_stream[:2]), strict=True))
    with torch.no_grad():
        logits = growing.eval()(x)[:, :4]
    probs = plugin.calibrator.predict_proba(logits)
    groups = tcil.metrics.predicted_groups(probs, [2, 3])
    ece = tcil.metrics.expected_calibration_error(probs, y, groups=groups)
    end = "/eval_phase/test_stream/Task000"
    assert scores[f"ECE_Stream{end}"] == pytest.approx(float(ece), abs=1e-6)
    assert scores[f"ECE_PredictedOld_Stream{end}"] == pytest.approx(ece.by_group["old"], abs=1e-6)
    assert scores[f"ECE_PredictedNew_Stream{end}"] == pytest.approx(ece.by_group["new"], abs=1e-6)
    plain = tcil.metrics.expected_calibration_error(torch.softmax(logits.double(), 1), y)
    assert scores[f"ECE_Uncalibrated_Stream{end}"] == pytest.approx(float(plain), abs=1e-6)
    assert f"ECE_Exp{end}/Exp001" in scores
    assert "ECE_Stream" in log.getvalue()


def test_outputs_are_calibrated_at_evaluation(benchmark):
    from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
    from avalanche.training.plugins import EvaluationPlugin

    found, model = {}, nn.Linear(8, 2)
    for replace in (True, False):
        plugin = plugin_of(benchmark.valid_stream, replace_outputs=replace)
        strategy, _ = strategy_of(model, [replay(), plugin])
        strategy.evaluator.metrics = EvaluationPlugin(accuracy_metrics(stream=True), loss_metrics(stream=True)).metrics
        plugin.classes, plugin.new_classes, plugin._current = [0, 1], [0, 1], True
        plugin.calibrator._fitted(
            tcil.extending.TemperatureMap(torch.tensor(3.0).double()), (0, 1), tcil.fit_temperature([[1.0, 0]], [1])
        )
        found[replace] = {k.partition("/")[0]: v for k, v in strategy.eval(benchmark.test_stream[:1]).items()}
    x, y = tensors_of(benchmark.test_stream[0].dataset)
    with torch.no_grad():
        logits = model(x).double()
    nll = nn.functional.cross_entropy(logits / 3, y)
    assert found[True]["Loss_Stream"] == pytest.approx(float(nll), abs=1e-5)
    assert found[False]["Loss_Stream"] != pytest.approx(float(nll), abs=1e-3)
    assert found[True]["Top1_Acc_Stream"] == found[False]["Top1_Acc_Stream"]


def test_a_head_that_grows_at_evaluation_changes_nothing(benchmark, growing):
    plugin = plugin_of(benchmark.valid_stream)
    strategy, _ = strategy_of(growing, [replay(), plugin])
    strategy.train(benchmark.train_stream[:2])
    before = strategy.eval(benchmark.test_stream[:2])
    assert growing[2].classifier.out_features == 4
    after = strategy.eval(benchmark.test_stream)  # the third task's classes have not been learned
    assert growing[2].classifier.out_features == 6
    name = "ECE_Stream/eval_phase/test_stream/Task000"
    assert after[name] == pytest.approx(before[name], abs=1e-9)
    assert not [name for name in after if name.startswith("ECE") and "Exp002" in name]
    x, _ = tensors_of(benchmark.test_stream[0].dataset)
    with torch.no_grad():
        log_probs = plugin.wrap(strategy).eval()(x)
        assert torch.allclose(log_probs, plugin.calibrator.transform(growing(x)[:, :4]))


def test_classes_in_any_order_on_a_fixed_head(avalanche, blob_tasks):
    """Label is column: until the last task, the columns of the classes seen are not the first ones."""
    from avalanche.benchmarks import tensors_benchmark

    train, valid, test = zip(*reversed(blob_tasks), strict=True)
    benchmark = tensors_benchmark(
        train_tensors=train, test_tensors=test, task_labels=[0] * 3, other_streams_tensors={"valid": valid}
    )
    seed_everything()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 6))
    plugin = plugin_of(benchmark.valid_stream)
    strategy, _ = strategy_of(model, [replay(), plugin])
    strategy.train(benchmark.train_stream[0])
    assert plugin.calibrator.classes_ == (4, 5)
    strategy.train(benchmark.train_stream[1])
    assert plugin.calibrator.classes_ == (4, 5, 2, 3)
    assert plugin.new_classes == [2, 3]
    scores = strategy.eval(benchmark.test_stream[:2])
    assert 0 <= scores["ECE_Stream/eval_phase/test_stream/Task000"] < 0.5


def test_classes_that_come_back_are_new_again(avalanche, blob_tasks):
    from avalanche.benchmarks import tensors_benchmark

    (first, second, _), again = blob_tasks, blob_tasks[0]
    train, valid, test = zip(first, second, again, strict=True)
    benchmark = tensors_benchmark(
        train_tensors=train, test_tensors=test, task_labels=[0] * 3, other_streams_tensors={"valid": valid}
    )
    seed_everything()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    plugin = plugin_of(benchmark.valid_stream, tcil.PACT())
    strategy, _ = strategy_of(model, [replay(), plugin])
    strategy.train(benchmark.train_stream)
    assert plugin.new_classes == [0, 1]
    assert plugin.classes == [0, 1, 2, 3]
    counts = plugin.presented
    assert plugin.calibrator.result_.imbalance == pytest.approx((counts[0] + counts[1]) / (counts[2] + counts[3]))


class TestRefusals:
    def test_before_the_memory(self, benchmark, growing):
        strategy, _ = strategy_of(growing, [plugin_of(benchmark.valid_stream), replay()])
        with pytest.raises(ValueError, match=r"CalibrationPlugin before ReplayPlugin; expected \[ReplayPlugin"):
            strategy.train(benchmark.train_stream[0])

    def test_strategies_that_add_the_memory_last(self, benchmark, growing):
        from avalanche.training.supervised import Replay

        more = {"kind": Replay, "mem_size": 60, "criterion": nn.CrossEntropyLoss()}
        strategy, _ = strategy_of(growing, [plugin_of(benchmark.valid_stream)], **more)
        with pytest.raises(ValueError, match=r"use Naive\(plugins="):
            strategy.train(benchmark.train_stream[0])

    def test_no_memory_at_all(self, benchmark, growing):
        strategy, _ = strategy_of(growing, [plugin_of(benchmark.valid_stream)])
        with pytest.raises(ValueError, match="none with a storage_policy"):
            strategy.train(benchmark.train_stream[0])

    def test_temperature_scaling_needs_none(self, benchmark, growing):
        plugin = plugin_of(benchmark.valid_stream, tcil.TemperatureScaling())
        strategy, _ = strategy_of(growing, [plugin])
        strategy.train(benchmark.train_stream[0])
        logits, labels = tcil.predict_logits(growing, tensors_of(benchmark.valid_stream[0].dataset))
        assert plugin.calibrator.temperature_ == pytest.approx(tcil.fit_temperature(logits, labels).temperature)

    def test_a_memory_outside_the_minibatch(self, benchmark, growing):
        from avalanche.training.supervised import ER_ACE

        strategy, _ = strategy_of(growing, [plugin_of(benchmark.valid_stream, tcil.PACT())], kind=ER_ACE, mem_size=60)
        with pytest.raises(
            ValueError, match="ER_ACE keeps its memory outside the minibatch; expected a number"
        ) as told:
            strategy.train(benchmark.train_stream[0])
        assert "function of the strategy" in str(told.value)  # both ways out
        assert "calibrator=tcil.TCIL()" in str(told.value)
        plugin = plugin_of(benchmark.valid_stream, tcil.PACT(), imbalance=2.5)
        strategy, _ = strategy_of(growing, [plugin], kind=ER_ACE, mem_size=60)
        strategy.train(benchmark.train_stream[:2])
        assert plugin.calibrator.result_.imbalance == 2.5

    def test_or_a_function_that_computes_the_imbalance(self, benchmark, growing):
        """The one in docs/integrations.md, compared with a count of what ER_ACE draws."""
        from avalanche.training.supervised import ER_ACE

        page = (ROOT / "docs" / "integrations.md").read_text()
        (shown,) = re.findall(r"^```python\n(def drawn.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
        space = {"CalibrationPlugin": plugin_of, "benchmark": benchmark, "tcil": tcil}
        exec(compile(shown, "docs/integrations.md", "exec"), space)
        plugin, count = space["plugin"], Counting()
        count.before_training_exp = lambda strategy, **kwargs: count.labels.clear()
        strategy, _ = strategy_of(growing, [plugin, count], kind=ER_ACE, mem_size=60)
        strategy.train(benchmark.train_stream)
        old, new = (sum(count.labels[label] for label in group) / len(group) for group in ((0, 1, 2, 3), (4, 5)))
        assert plugin.calibrator.result_.imbalance == pytest.approx(new / old, rel=0.1)

    def test_a_loop_that_shows_no_exemplars(self, benchmark, growing):
        memory = replay()
        memory.before_training_exp = lambda *args, **kwargs: None  # fills its memory and never draws from it
        strategy, _ = strategy_of(growing, [memory, plugin_of(benchmark.valid_stream, tcil.PACT())])
        strategy.train(benchmark.train_stream[0])
        with pytest.raises(ValueError, match="outside the minibatch"):
            strategy.train(benchmark.train_stream[1])

    def test_heads_that_need_task_labels(self, benchmark, avalanche):
        from avalanche.models import MTSimpleMLP

        strategy, _ = strategy_of(MTSimpleMLP(input_size=8), [replay(), plugin_of(benchmark.valid_stream)])
        with pytest.raises(ValueError, match="which needs task labels"):
            strategy.train(benchmark.train_stream[0])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"valid": 3}, "valid: got int"),
            ({"calibrator": 2.0}, "calibrator: got float"),
            ({"calibrator": tcil.GroupTemperatureScaling()}, "held-out data of all classes"),
            ({"imbalance": -1}, "imbalance: got -1"),
            ({"memory": 3}, "memory: got int"),
        ],
    )
    def test_arguments(self, avalanche, arguments, message):
        with pytest.raises(ValueError, match=message):
            plugin_of(**{"valid": [], **arguments})


def test_evaluations_before_the_fit_are_left_alone(benchmark, growing):
    plugin = plugin_of(benchmark.valid_stream)
    strategy, _ = strategy_of(growing, [replay(), plugin], eval_every=1)
    strategy.train(benchmark.train_stream[0], eval_streams=[benchmark.test_stream[:1]])
    values = strategy.evaluator.all_metric_results["ECE_Stream/eval_phase/test_stream/Task000"][1]
    assert len(values) <= 1  # four evaluations, of which at most the last is of a calibrated network


def test_the_default_is_pact(avalanche):
    assert repr(plugin_of([])) == "CalibrationPlugin(PACT())"


def test_a_group_without_predictions_is_nan_not_the_value_before(benchmark, growing):
    """Avalanche's `eval` returns the last value of each metric: one that is left out repeats an earlier one."""
    plugin = plugin_of(benchmark.valid_stream)
    strategy, _ = strategy_of(growing, [replay(), plugin])
    strategy.train(benchmark.train_stream[0])
    end = "/eval_phase/test_stream/Task000"
    scores = strategy.eval(benchmark.test_stream[:1])
    assert math.isnan(scores[f"ECE_PredictedOld_Stream{end}"])  # there are no old classes
    assert math.isnan(scores[f"ECE_PredictedOld_Exp{end}/Exp000"])
    strategy.train(benchmark.train_stream[1])
    scores = strategy.eval(benchmark.test_stream[:2])
    assert not math.isnan(scores[f"ECE_PredictedNew_Stream{end}"])
    with torch.no_grad():
        growing[2].classifier.bias[2:] -= 1e3  # everything is predicted as an old class
    scores = strategy.eval(benchmark.test_stream[:2])
    for name in (f"ECE_PredictedNew_Stream{end}", f"ECE_PredictedNew_Exp{end}/Exp001"):
        assert math.isnan(scores[name]), name
    assert 0 <= scores[f"ECE_PredictedOld_Stream{end}"] <= 1


def test_columns_of_the_calibrated_model_are_in_order_of_arrival(avalanche, blob_tasks):
    """The line of docs/integrations.md that turns columns into labels."""
    from avalanche.benchmarks import tensors_benchmark

    train, valid, test = zip(*reversed(blob_tasks), strict=True)
    benchmark = tensors_benchmark(
        train_tensors=train, test_tensors=test, task_labels=[0] * 3, other_streams_tensors={"valid": valid}
    )
    seed_everything()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 6))
    plugin = plugin_of(benchmark.valid_stream)
    strategy, _ = strategy_of(model, [replay(), plugin])
    strategy.train(benchmark.train_stream)
    page = (ROOT / "docs" / "integrations.md").read_text()
    (line,) = re.findall(r"^labels = .*plugin.classes.*$", page, flags=re.MULTILINE)
    x, _ = tensors_of(benchmark.test_stream[0].dataset)
    with torch.no_grad():
        space = {"torch": torch, "plugin": plugin, "log_probabilities": plugin.wrap(strategy).eval()(x)}
        exec(line, space)
        assert torch.equal(space["labels"], model(x).argmax(dim=1))


def test_a_model_is_not_wrapped_before_the_first_fit(benchmark, growing):
    plugin = plugin_of(benchmark.valid_stream)
    strategy, _ = strategy_of(growing, [replay(), plugin])
    with pytest.raises(tcil.NotFittedError, match="is not fitted yet: train the strategy"):
        plugin.wrap(strategy)
    strategy.train(benchmark.train_stream[0])
    plugin.before_training_exp(strategy)
    with pytest.raises(tcil.NotFittedError, match="the weights have changed since the last fit"):
        plugin.wrap(strategy)


def test_a_warning_names_the_experience_and_the_line_of_the_user(benchmark, growing):
    both = [tensors_of(valid.dataset) for valid in benchmark.valid_stream[:2]]  # rows of old classes are warned of
    plugin = plugin_of(lambda experience: both[: experience.current_experience + 1])
    strategy, _ = strategy_of(growing, [replay(), plugin])
    strategy.train(benchmark.train_stream[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.train(benchmark.train_stream[1])
    found = [one for one in caught if one.category is tcil.CalibrationWarning]
    assert found
    assert all(str(one.message).startswith("experience 1: PACT: ") for one in found)
    assert {one.filename for one in found} == {__file__}
