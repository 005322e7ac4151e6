"""Avalanche: class-incremental digits, calibrated after each experience by one plugin.

python examples/integrations/avalanche_plugin.py        (pip install -c constraints.txt ".[avalanche]" scikit-learn)
"""

import torch
from avalanche.benchmarks import tensors_benchmark
from avalanche.models import IncrementalClassifier
from avalanche.training.plugins import ReplayPlugin
from avalanche.training.supervised import Naive
from task_data import digits

import tcil
from tcil.integrations.avalanche import CalibrationPlugin

train, valid, test = ([digits(task, part) for task in range(5)] for part in ("train", "valid", "test"))
benchmark = tensors_benchmark(
    train_tensors=train, test_tensors=test, other_streams_tensors={"valid": valid}, task_labels=[0] * 5
)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), IncrementalClassifier(256))
plugin = CalibrationPlugin(benchmark.valid_stream, tcil.PACT())
strategy = Naive(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train_mb_size=32, train_epochs=20,
    eval_mb_size=64, plugins=[ReplayPlugin(mem_size=100), plugin],
)  # fmt: skip
for experience in benchmark.train_stream:
    strategy.train(experience)
    scores = strategy.eval(benchmark.test_stream[: experience.current_experience + 1])
print({name.partition("/")[0]: round(value, 3) for name, value in scores.items() if "ECE" in name and "Stream" in name})
