"""
How much depends on the validation draw
=======================================

A validation set of 40 images is a small sample. Another draw gives another temperature, and another calibration error.
If two methods differ by less than that spread, one draw cannot tell which is better.
"""

import matplotlib.pyplot as plt
import torch
from letters_tasks import per_class, tasks

import tcil

# %%
# The network after its fourth task has 80 held-out images of its four new classes. Draw half of them, calibrate and
# measure, many times.

task = tasks()[3]
classes = range(task.new_classes[-1] + 1)
logits, labels = tcil.predict_logits(task.model, task.test, classes=classes)
found = {"TS": [], "T-CIL": [], "PACT": []}
for seed in range(15):
    valid, _ = per_class(task.valid, 10, torch.Generator().manual_seed(seed))
    valid_logits, valid_labels = tcil.predict_logits(task.model, valid, classes=classes)
    fitted = {
        "TS": tcil.TemperatureScaling().fit(valid_logits, valid_labels),
        "T-CIL": tcil.TCIL().fit(task.model, task.memory, valid, task.new_classes),
        "PACT": tcil.PACT().fit(task.model, task.memory, valid, task.new_classes, imbalance=task.imbalance),
    }
    for name, calibrator in fitted.items():
        error = tcil.metrics.expected_calibration_error(calibrator.predict_proba(logits), labels)
        found[name].append(100 * error)

figure, panel = plt.subplots(figsize=(7, 3.8), layout="constrained")
panel.boxplot(list(found.values()), tick_labels=list(found))
for place, values in enumerate(found.values(), start=1):
    panel.scatter([place + 0.2] * len(values), values, s=12, alpha=0.6)
oracle = tcil.TemperatureScaling().fit(logits, labels).predict_proba(logits)
panel.axhline(100 * tcil.metrics.expected_calibration_error(oracle, labels), color="black", label="Optimal TS (oracle)")
floor = 100 * tcil.metrics.noise_floor(oracle)
panel.axhline(floor, color="grey", linestyle=":", label="noise floor")
panel.set(ylabel="ECE on the test set, %", title="15 draws of 40 validation images")
panel.legend()
plt.show()

# %%
# Compare methods on the same draws: differences within a draw vary less than the errors themselves.

difference = torch.tensor(found["TS"]) - torch.tensor(found["T-CIL"])
low, middle, high = (getattr(difference, name)() for name in ("min", "mean", "max"))
print(f"ECE of TS minus ECE of T-CIL: {middle:.1f} points, from {low:.1f} to {high:.1f}")

# %%
# The command line does the same on a finished run: ``tcil calibrate RUN --redraw 50``. There PACT also has its history
# from earlier tasks, which makes it steadier than in this example.
