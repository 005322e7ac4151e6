"""
Letters, digits and your own images
===================================

Two datasets need no download: letters, drawn from the fonts that matplotlib ships, and scikit-learn's digits. Your own
images need one folder per class.
"""

import os
import shutil
import subprocess
import sys

import matplotlib.pyplot as plt
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
# ``DIR/train/CLASS/*`` and ``DIR/test/CLASS/*`` with PNG, JPEG, BMP, WebP, GIF or TIFF files of any size. Here a few shapes
# stand for your images.

own = CACHE / "shapes"
shutil.rmtree(own, ignore_errors=True)
shapes = {
    "disc": lambda draw, box: draw.ellipse(box, fill="tomato"),
    "ring": lambda draw, box: draw.ellipse(box, outline="royalblue", width=5),
    "square": lambda draw, box: draw.rectangle(box, fill="seagreen"),
    "triangle": lambda draw, box: draw.regular_polygon((box[0] + 12, box[1] + 12, 12), 3, fill="orange"),
}
for part, count in (("train", 24), ("test", 12)):
    for name, paint in shapes.items():
        (own / part / name).mkdir(parents=True)
        for number in range(count):
            image = Image.new("RGB", (40, 40), "white")
            x, y = 2 + number * 7 % 12, 2 + number * 5 % 11
            paint(ImageDraw.Draw(image), (x, y, x + 24, y + 24))
            image.save(own / part / name / f"{number}.png")

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
# ``--data`` names the folder. ``--set`` changes any setting: here so few epochs that this page builds quickly.

command = [
    sys.executable, "-m", "tcil", "run", "--preset", "image-folder", "--data", str(own), "--no-full-data",
    "--set", "image_side=16", "--set", "network=small_resnet", "--set", "tasks=2", "--set", "epochs=4",
    "--set", "memory=16", "--set", "validation=8", "--set", "validation_pool=8", "--set", "lr=0.02", "--set", "batch_size=8",
    "--calibrators", "vanilla,ts,t-cil", "--out", str(CACHE / f"shapes-runs-{EPOCHS}"),
]  # fmt: skip
done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
table, _, _ = done.stdout.partition("One seed.")  # then notes, and the paths of the run and its report
print(table)
