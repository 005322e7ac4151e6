"""
Read a reliability diagram by group
===================================

One calibration error for all images hides a pattern of class-incremental learning: the network is over-confident when
it predicts a new class and under-confident when it predicts an old one. Split every metric by predicted group to see
it.
"""

import matplotlib.pyplot as plt
from letters_tasks import tasks

import tcil

task = tasks()[-1]
classes = range(task.new_classes[-1] + 1)
logits, labels = tcil.predict_logits(task.model, task.test, classes=classes)

# %%
# Three sets of probabilities from the same logits: the network as trained, the best single temperature (an oracle: it
# is fitted on the test labels), and PACT, which corrects the preference for new classes as well.

pact = tcil.PACT()
for earlier in tasks():
    pact.partial_fit(earlier.model, earlier.memory, earlier.valid, earlier.new_classes, imbalance=earlier.imbalance)
methods = {
    "as trained": logits.double().softmax(dim=1).numpy(),
    "best temperature (oracle)": tcil.TemperatureScaling().fit(logits, labels).predict_proba(logits),
    "PACT": pact.predict_proba(logits),
}

# %%
# ``predicted_groups`` says for each image whether the network *predicts* an old or a new class. That is what you know
# in production; the true class is not.

figure, panels = plt.subplots(1, 3, figsize=(10, 3.8), sharey=True, layout="constrained")
for panel, (name, probs) in zip(panels, methods.items(), strict=True):
    groups = tcil.metrics.predicted_groups(probs, task.new_classes)
    ece = tcil.metrics.expected_calibration_error(probs, labels, groups=groups)
    bins = tcil.metrics.reliability_bins(probs, labels, groups=groups)
    for group, found in sorted(bins.by_group.items()):
        colour = {"old": "tab:blue", "new": "tab:orange"}[group]
        used = found.count >= 10  # a mean of fewer images says little
        sizes = 300 * found.count[used] / found.count.sum()
        panel.scatter(
            found.confidence[used], found.accuracy[used], s=sizes + 8, color=colour, label=f"predicted {group}"
        )
    panel.plot([0, 1], [0, 1], color="black", linewidth=1, linestyle="--")
    panel.set(title=f"{name}\nECE {100 * ece:.1f} %", xlabel="confidence", xlim=(0, 1), ylim=(0, 1))
    told = ", ".join(f"{group} {100 * value:.1f} %" for group, value in sorted(ece.by_group.items()))
    print(f"{name}: pooled {100 * ece:.1f} %, predicted {told}")
panels[0].set_ylabel("accuracy")
panels[0].legend()
plt.show()

# %%
# Each dot is a bin of confidence; its area is the bin's share of the group. Dots below the diagonal are over-confident,
# dots above it under-confident. The best temperature makes the pooled error small by trading one group against the
# other: look at both groups before you trust a pooled number.
#
# How small can an error be? With few images even a perfectly calibrated network scores above zero. The noise floor is
# the mean error that it would have by chance.

print(f"noise floor: {100 * tcil.metrics.noise_floor(methods['PACT']):.1f} %")
