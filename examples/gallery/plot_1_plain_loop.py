"""
Calibrate in your own training loop
===================================

An ordinary PyTorch loop learns ten digits in two tasks, five classes each, and keeps a small memory of the first task.
Three lines of tcil after the second task turn the network into a calibrated one.
"""

# %%
# The data
# --------
# Digits from scikit-learn, with noise: clean digits are so easy that nothing is left to calibrate. Half of the images
# are for training, half for the test.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import tcil

generator = torch.Generator().manual_seed(0)
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None]
images = (images - images.mean()) / images.std()
images += 1.2 * torch.randn(images.shape, generator=generator)
labels = torch.tensor(digits.target, dtype=torch.long)
order = torch.randperm(len(labels), generator=generator)
train_rows, test_rows = order[:900], order[900:]


def rows_of(rows, classes):
    """The rows whose label is one of these classes."""
    return rows[torch.isin(labels[rows], torch.tensor(list(classes)))]


# %%
# Two tasks
# ---------
# This is Experience Replay: train on the new images and the memory together. From the new task, 20 images of each class
# are held out for calibration. Nothing here is specific to tcil.

network = tcil.networks.small_cnn(n_classes=10)  # any torch.nn.Module that returns logits will do
memory = torch.tensor([], dtype=torch.long)
for new_classes in (range(0, 5), range(5, 10)):
    new_rows = rows_of(train_rows, new_classes)
    valid = torch.cat([rows_of(new_rows, [label])[:20] for label in new_classes])
    training = torch.cat([new_rows[~torch.isin(new_rows, valid)], memory])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    network.train()
    for _ in range(12):
        for batch in training[torch.randperm(len(training), generator=generator)].split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images[batch]), labels[batch]).backward()
            optimizer.step()
    memory = torch.cat([rows_of(training, [label])[:10] for label in range(new_classes.stop)])

# %%
# Three lines
# -----------
# T-CIL needs the network, exemplars of every class seen, and held-out images of the new classes only.

calibrator = tcil.TCIL().fit(
    network,
    memory=(images[memory], labels[memory]),
    valid=(images[valid], labels[valid]),
    new_classes=new_classes,
)
calibrated = calibrator.wrap(network).eval()
probabilities = calibrated(images[test_rows]).exp()
print(calibrator.result_)

# %%
# Before and after
# ----------------
# On the diagonal, confidence and accuracy agree. Bars below it are over-confident.

before = network.eval()(images[test_rows]).detach().softmax(dim=1)
figure, panels = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True, layout="constrained")
for panel, title, probs in zip(panels, ("as trained", "with T-CIL"), (before, probabilities.detach()), strict=True):
    bins = tcil.metrics.reliability_bins(probs, labels[test_rows])
    ece = tcil.metrics.expected_calibration_error(probs, labels[test_rows])
    panel.bar(bins.lower, bins.accuracy, width=0.1, align="edge", edgecolor="white")
    panel.plot([0, 1], [0, 1], color="black", linewidth=1, linestyle="--")
    panel.set(title=f"{title}: ECE {100 * ece:.1f} %", xlabel="confidence", xlim=(0, 1), ylim=(0, 1))
panels[0].set_ylabel("accuracy")
plt.show()

# %%
# For the next task, call ``network.train()``, train on, and fit a new calibrator. The temperature of one task does not
# fit the network of another.
