"""
How memory and validation size matter
=====================================

T-CIL works with two small sets of images: the memory and the validation set. How small can they be?
"""

import matplotlib.pyplot as plt
import torch
from letters_tasks import per_class, tasks

import tcil


def errors(task, memory, valid):
    """ECE on the test set in percent: as trained, TS, T-CIL and the oracle temperature."""
    classes = range(task.new_classes[-1] + 1)
    logits, labels = tcil.predict_logits(task.model, task.test, classes=classes)
    valid_logits, valid_labels = tcil.predict_logits(task.model, valid, classes=classes)
    methods = {
        "TS": tcil.TemperatureScaling().fit(valid_logits, valid_labels),
        "T-CIL": tcil.TCIL().fit(task.model, memory, valid, task.new_classes),
        "Optimal TS (oracle)": tcil.TemperatureScaling().fit(logits, labels),
    }
    ece = tcil.metrics.expected_calibration_error
    found = {name: 100 * ece(method.predict_proba(logits), labels) for name, method in methods.items()}
    return {"as trained": 100 * ece(logits.double().softmax(dim=1), labels)} | found


# %%
# Validation images
# -----------------
# The same network after its third task, calibrated with fewer validation images. Six draws of each size show the
# spread.

task = tasks()[2]
sizes = (4, 8, 12, 20)
by_size = {}
for size in sizes:
    draws = 1 if size == 20 else 6
    subsets = [per_class(task.valid, size, torch.Generator().manual_seed(seed))[0] for seed in range(draws)]
    by_size[size] = [errors(task, task.memory, subset) for subset in subsets]

figure, panel = plt.subplots(figsize=(7, 3.8), layout="constrained")
for name in by_size[20][0]:
    values = [torch.tensor([row[name] for row in by_size[size]]) for size in sizes]
    low, middle, high = (torch.stack([getattr(value, end)() for value in values]) for end in ("min", "mean", "max"))
    (line,) = panel.plot(sizes, middle, marker="o", label=name)
    panel.fill_between(sizes, low, high, color=line.get_color(), alpha=0.15)
panel.set(xlabel="validation images per new class", ylabel="ECE on the test set, %", title="lines: mean, bands: range")
panel.legend(fontsize=9)
plt.show()

# %%
# Exemplars
# ---------
# A smaller memory also makes another network: it forgets more. So each size is a training of its own, here of three
# tasks.

memories = (60, 120, 200)
by_memory = []
for size in memories:
    last = tasks(n_tasks=3, memory=size)[-1]
    by_memory.append(errors(last, last.memory, last.valid))
figure, panel = plt.subplots(figsize=(7, 3.8), layout="constrained")
for name in by_memory[0]:
    panel.plot(memories, [row[name] for row in by_memory], marker="o", label=name)
panel.set(xlabel="exemplars in memory", ylabel="ECE on the test set, %", title="one training for each size")
panel.legend(fontsize=9)
plt.show()

# %%
# One seed and one small network are an illustration. The guide on comparing methods shows how to measure such effects
# with seeds and intervals, and the results page has both effects on CIFAR-100.
