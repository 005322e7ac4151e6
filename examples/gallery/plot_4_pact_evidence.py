"""
PACT's evidence from task to task
=================================

PACT estimates a temperature T for old classes, one for new classes, and a bias b that is added to the scaled logits of
old classes. After each task it weighs several pieces of evidence by their errors and carries the result to the next
task. This example shows what each piece says.
"""

import matplotlib.pyplot as plt
import torch
from letters_tasks import tasks

import tcil

# %%
# One :class:`tcil.PACT` lives beside the learner. ``partial_fit`` after each task builds on the tasks before.

pact = tcil.PACT()
found = []
for task in tasks():
    pact.partial_fit(task.model, task.memory, task.valid, task.new_classes, imbalance=task.imbalance)
    found.append(pact.result_)
    of_each = f"T = {pact.temperature_:.2f} (new classes {pact.new_temperature_:.2f}),  b = {pact.bias_:.2f}"
    print(f"imbalance {task.imbalance:4.1f}:  {of_each}")

# %%
# For comparison, the oracle: the T and b that fit the test labels best.


def oracle(task):
    """log T and b with the lowest cross-entropy on the test set."""
    classes = range(task.new_classes[-1] + 1)
    logits, labels = tcil.predict_logits(task.model, task.test, classes=classes)
    logits, is_old = logits.double(), (torch.arange(len(classes)) < task.new_classes[0]).double()
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([x], max_iter=100, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(logits * torch.exp(-x[0]) + x[1] * is_old, labels)
        value.backward()
        return value

    optimizer.step(loss)
    return x.detach().tolist()


best = [oracle(task) for task in tasks()]

# %%
# The points are pieces of evidence with their standard errors, the band is PACT's answer, the line is the oracle.
#
# - **spread**: T goes with the spread of the exemplars' logits, which is known before any other evidence;
# - **surrogate**: the fit on the validation set and T-CIL's perturbed exemplars of old classes;
# - **new classes**: the temperature among the new classes alone, which is that of the new classes;
# - **label shift**: how often images of new classes are taken for old ones;
# - **history**: the answer of the previous task, with some drift allowed.

colours = {
    "history": "grey", "spread": "tab:brown", "surrogate": "tab:blue", "new classes": "tab:green",
    "label shift": "tab:red",
}  # fmt: skip
figure, panels = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
views = (
    (panels[0], "log T", "log_temperature", lambda r: torch.tensor(r.temperature).log().item(), 0),
    (panels[1], "b", "bias", lambda r: r.bias, 1),
)
for panel, name, field, answer, place in views:
    for number, result in enumerate(found):
        for shift, piece in enumerate(result.evidence):
            value, error = getattr(piece, field), getattr(piece, f"{field}_error")
            if value is not None:
                panel.errorbar(
                    number + 0.12 * (shift - 1.5), value, error, fmt="o", color=colours[piece.source], capsize=3
                )
        error = getattr(result, f"{field}_error")
        if error is not None:
            middle = answer(result)
            panel.fill_between([number - 0.3, number + 0.3], middle - error, middle + error, color="gold", alpha=0.4)
    first = place  # there is no bias after the first task
    panel.plot(range(first, len(best)), [row[place] for row in best[first:]], color="black", label="oracle")
    panel.set_ylabel(name)
for source, colour in colours.items():
    panels[0].plot([], [], "o", color=colour, label=source)
panels[0].fill_between([], [], [], color="gold", alpha=0.4, label="PACT")
figure.legend(ncols=7, loc="outside upper center")
panels[1].set(xlabel="task", xticks=range(len(found)))
plt.show()

# %%
# b grows with the imbalance of training: the fewer exemplars each old class has, the more the network prefers new
# classes.
