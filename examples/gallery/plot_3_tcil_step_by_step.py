"""
T-CIL step by step
==================

What T-CIL perturbs, how it finds the magnitude, and where the temperature comes from. :class:`tcil.TCIL` does all of
this in one call; here each step is a picture.
"""

import matplotlib.pyplot as plt
import numpy as np
from letters_tasks import tasks

import tcil

# Internals, only to draw what happens inside: they may change without notice.
from tcil.calibration.exemplars import open_exemplars
from tcil.calibration.perturbed_exemplars import PerturbedExemplars

task = tasks()[2]
calibrator = tcil.TCIL().fit(task.model, task.memory, task.valid, task.new_classes)
result = calibrator.result_

# %%
# 1. The target
# -------------
# The validation set has new classes only. Its temperature is the target. It is too low for all classes together,
# because the network classifies its newest classes best.

print(f"temperature of the validation set (target): {result.target_temperature:.2f}")

# %%
# 2. The perturbation
# -------------------
# The network has memorised its exemplars, so they look too easy. T-CIL moves each one along the sign of the input
# gradient toward another class: old exemplars toward the class whose mean feature is nearest, new exemplars toward the
# farthest. ``magnitude`` is how far every input value moves.

magnitudes = (0.0, result.magnitude, 4 * result.magnitude, 16 * result.magnitude)
with open_exemplars(task.model, task.memory, task.new_classes) as exemplars:
    perturbed = PerturbedExemplars(exemplars, keep=True)
    images = {magnitude: perturbed.inputs(magnitude) for magnitude in magnitudes}
    logits = {magnitude: perturbed.logits(magnitude) for magnitude in np.linspace(0, 3 * result.magnitude, 13)}
    is_new = np.arange(len(perturbed.columns)) < perturbed.n_new
    columns = perturbed.columns

figure, panels = plt.subplots(2, len(magnitudes), figsize=(8, 4.2), layout="constrained")
for row, (kind, example) in enumerate((("new", 0), ("old", perturbed.n_new))):
    for panel, magnitude in zip(panels[row], magnitudes, strict=True):
        panel.imshow(images[magnitude][example, 0], cmap="gray")
        panel.set(title=f"{kind}, magnitude {magnitude:.3f}", xticks=[], yticks=[])
        panel.title.set_fontsize(9)
plt.show()

# %%
# The second column is what T-CIL uses. The larger magnitudes only show where the perturbation leads.

# %%
# 3. The search
# -------------
# As exemplars are perturbed more, the network's confidence in them falls and their temperature rises. The magnitude is
# found when the *new* exemplars have the temperature of the validation set: then they are as hard as unseen images of
# the same classes. ``result_.trace`` has the magnitudes that were tried.

curve = {magnitude: tcil.fit_temperature(of[is_new], columns[is_new]) for magnitude, of in logits.items()}
known = [(magnitude, fit.temperature) for magnitude, fit in curve.items() if fit.verdict == "ok"]
steps = [step for step in result.trace if 0 < step.temperature < 10 and step.magnitude <= 3 * result.magnitude]
figure, panel = plt.subplots(figsize=(7, 3.6), layout="constrained")
panel.plot(*zip(*known, strict=True), label="temperature of the new exemplars")
panel.axhline(result.target_temperature, color="tab:green", linestyle="--", label="target: validation set")
panel.scatter([s.magnitude for s in steps], [s.temperature for s in steps], color="black", zorder=3, label="tried")
panel.axvline(result.magnitude, color="grey", linewidth=1)
panel.set(
    xlabel="magnitude",
    ylabel="temperature",
    title=f"magnitude {result.magnitude:.4f}",
    ylim=(0, 4 * result.target_temperature),
)
panel.legend()
plt.show()

# %%
# 4. The temperature
# ------------------
# Perturb *all* exemplars by that magnitude, old and new, and fit one temperature on them. On the test set, compare it
# with the target and with the temperature that the test labels themselves would choose.

classes = range(task.new_classes[-1] + 1)
test_logits, test_labels = tcil.predict_logits(task.model, task.test, classes=classes)
temperatures = np.linspace(0.8, 5, 43)


def error_at(temperature):
    """ECE of the test set with this temperature, in percent."""
    probs = (test_logits.double() / temperature).softmax(dim=1)
    return 100 * tcil.metrics.expected_calibration_error(probs, test_labels)


figure, panel = plt.subplots(figsize=(7, 3.6), layout="constrained")
panel.plot(temperatures, [error_at(t) for t in temperatures], color="grey")
marks = {
    "as trained": 1.0,
    "TS (target)": result.target_temperature,
    "T-CIL": result.temperature,
    "oracle": tcil.fit_temperature(test_logits, test_labels).temperature,
}
for name, temperature in marks.items():
    panel.scatter([temperature], [error_at(temperature)], zorder=3, label=f"{name}: T = {temperature:.2f}")
panel.set(xlabel="temperature", ylabel="ECE on the test set, %")
panel.legend()
plt.show()
