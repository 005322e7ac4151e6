"""
Compare four learners
=====================

ER, EEIL, WA and DER on the same letters, each calibrated by several methods on the same network. A study file lists
the learners; ``tcil run`` does the rest. The settings are tiny, so that this page builds quickly: the bars show
how to compare, not which learner is best.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from letters_tasks import CACHE, EPOCHS

# %%
# The study
# ---------
# Every line is a setting of ``tcil settings``; lists make a grid of runs.

folder = CACHE / f"learners-{EPOCHS}"
folder.mkdir(parents=True, exist_ok=True)
study = folder / "study.toml"
study.write_text(f"""\
preset = "letters"
learners = ["er", "eeil", "wa", "der"]
classes = 9
tasks = 3
epochs = {max(2, EPOCHS * 2 // 3)}
milestones = [{max(1, EPOCHS // 3)}]
memory = 90
validation = 45
validation_pool = 45
train_per_class = {max(30, 5 * EPOCHS)}
test_per_class = 60
""")

# %%
# In a terminal: ``tcil run study.toml --no-full-data --calibrators vanilla,ts,t-cil,pact,optimal-ts``. If the command
# is interrupted, run it again: finished work is not repeated.

names = {"vanilla": "as trained", "ts": "TS", "t-cil": "T-CIL", "pact": "PACT", "optimal-ts": "Optimal TS (oracle)"}
subprocess.run(
    [sys.executable, "-m", "tcil", "run", str(study), "--no-full-data", "--out", str(folder / "runs"),
     "--calibrators", ",".join(names)],
    check=True,
    stdout=subprocess.DEVNULL,
    env={**os.environ, "OMP_NUM_THREADS": "1"},
)  # fmt: skip

# %%
# The results
# -----------
# A run folder has all figures of all calibrators in ``results.json``.


def errors(run: Path) -> dict[str, float]:
    """Mean ECE over tasks of each calibrator, in percent."""
    rows = [task["calibrators"] for task in json.loads((run / "results.json").read_text())["tasks"]]
    return {name: 100 * float(np.mean([row[name]["ece"] for row in rows])) for name in names}


learners = ("er", "eeil", "wa", "der")
found = {learner: errors(next((folder / "runs").glob(f"letters-{learner}-*"))) for learner in learners}
figure, panel = plt.subplots(figsize=(8, 3.8), layout="constrained")
for place, (name, title) in enumerate(names.items()):
    heights = [found[learner][name] for learner in learners]
    panel.bar(np.arange(len(learners)) + 0.16 * (place - 2), heights, width=0.15, label=title)
panel.set(
    xticks=range(len(learners)), xticklabels=[name.upper() for name in learners], ylabel="ECE, mean over tasks, %"
)
panel.legend(ncols=3, fontsize=9)
plt.show()

# %%
# Calibration can also do harm: compare every bar with "as trained".
#
# ``tcil report`` writes the same and much more as a page: ``tcil report runs --out report``. For a fair comparison take
# several seeds and look at paired differences; the guide on comparing methods says how.
