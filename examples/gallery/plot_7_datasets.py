"""
Letters, digits and your own images
===================================

Two datasets need no download: letters, drawn from the fonts that matplotlib ships, and scikit-learn's digits. Your own
images need one folder per class.
"""

import json
import os
import shutil
import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
from letters_tasks import CACHE, EPOCHS
from PIL import Image, ImageDraw

from tcil.extending import load_dataset

# %%
# Letters and digits
# ------------------
# ``train_per_class`` draws as many letters as you ask for.

letters = load_dataset("letters", train_per_class=5, test_per_class=5)
digits = load_dataset("noisy-digits")

# %%
# Your own images
# ---------------
# ``DIR/train/CLASS/*`` and ``DIR/test/CLASS/*`` with PNG, JPEG, BMP, WebP, GIF or TIFF files of any size. Here noisy
# shapes stand for your images.

own = CACHE / "shapes"
shutil.rmtree(own, ignore_errors=True)
shapes = {
    "disc": lambda draw, box: draw.ellipse(box, fill=160),
    "ring": lambda draw, box: draw.ellipse(box, outline=160, width=5),
    "square": lambda draw, box: draw.rectangle(box, fill=160),
    "triangle": lambda draw, box: draw.regular_polygon((box[0] + 12, box[1] + 12, 12), 3, fill=160),
}
random = np.random.default_rng(0)
for part, count in (("train", 40), ("test", 40)):
    for name, paint in shapes.items():
        (own / part / name).mkdir(parents=True)
        for number in range(count):
            image = Image.new("L", (40, 40), 90)
            x, y = random.integers(0, 15, size=2).tolist()
            paint(ImageDraw.Draw(image), (x, y, x + 24, y + 24))
            noisy = np.asarray(image) + random.normal(0, 90, size=(40, 40))
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).convert("RGB").save(
                own / part / name / f"{number}.png"
            )

mine = load_dataset("image-folder", own, image_side=16)
figure, panels = plt.subplots(3, 6, figsize=(8, 4.4), layout="constrained")
for row, dataset in zip(panels, (letters, digits, mine), strict=True):
    places = range(0, len(dataset.train), max(1, len(dataset.train) // 6))
    for panel, place in zip(row, places, strict=False):
        panel.imshow(dataset.train.images[place].permute(1, 2, 0), cmap="gray")
        panel.set(title=dataset.class_names[dataset.train.labels[place]], xticks=[], yticks=[])
    row[0].set_ylabel(dataset.name)
plt.show()

# %%
# Run the benchmark on them
# -------------------------
# ``--data`` names the folder, and ``--set`` changes any setting: here the settings are so small that this page builds
# quickly.

out = CACHE / f"shapes-runs-{EPOCHS}"
shutil.rmtree(out, ignore_errors=True)
calibrators = ("vanilla", "ts", "t-cil", "optimal-ts")
command = [
    sys.executable, "-m", "tcil", "run", "--preset", "image-folder", "--data", str(own), "--no-full-data",
    "--set", "image_side=16", "--set", "network=small_resnet", "--set", "tasks=2",
    "--set", f"epochs={EPOCHS}", "--set", f"milestones=[{EPOCHS // 2}]",
    "--set", "memory=20", "--set", "validation=20", "--set", "validation_pool=20", "--set", "batch_size=16",
    "--calibrators", ",".join(calibrators), "--out", str(out),
]  # fmt: skip
subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})

# %%
# The run folder has ``report.html`` to look at, and ``results.json`` to compute with.

(results,) = out.glob("*/results.json")
for number, task in enumerate(json.loads(results.read_text())["tasks"]):
    errors = (f"{name} {100 * task['calibrators'][name]['ece']:.1f} %" for name in calibrators)
    print(f"ECE after task {number}: ", ", ".join(errors))
