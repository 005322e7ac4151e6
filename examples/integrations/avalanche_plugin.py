"""Avalanche: class-incremental digits, calibrated after each experience by one plugin.

python examples/integrations/avalanche_plugin.py        (pip install "tcil[avalanche]" scikit-learn)
"""

import torch
from avalanche.benchmarks import benchmark_with_validation_stream, tensors_benchmark
from avalanche.models import IncrementalClassifier
from avalanche.training.plugins import ReplayPlugin
from avalanche.training.supervised import Naive
from sklearn.datasets import load_digits

import tcil
from tcil.integrations.avalanche import CalibrationPlugin

images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images = images.float() / 16 + 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
even = torch.arange(len(labels)) % 2 == 0
tasks = [[(images[half & (labels // 2 == task)], labels[half & (labels // 2 == task)]) for task in range(5)]
         for half in (even, ~even)]  # fmt: skip
benchmark = tensors_benchmark(train_tensors=tasks[0], test_tensors=tasks[1], task_labels=[0] * 5)
benchmark = benchmark_with_validation_stream(benchmark, validation_size=0.2, shuffle=True)

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), IncrementalClassifier(256))
plugin = CalibrationPlugin(benchmark.valid_stream, tcil.PACT())
strategy = Naive(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train_mb_size=16, train_epochs=40,
    eval_mb_size=64, plugins=[ReplayPlugin(mem_size=100), plugin],
)  # fmt: skip
for experience in benchmark.train_stream:
    strategy.train(experience)
    scores = strategy.eval(benchmark.test_stream[: experience.current_experience + 1])
print({name.partition("/")[0]: round(value, 3) for name, value in scores.items() if "ECE" in name and "Stream" in name})
