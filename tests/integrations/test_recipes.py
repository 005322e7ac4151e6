"""The recipes for FACIL and Mammoth, run inside a checkout where one is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from conftest import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.slow]
DIGITS = """
import numpy as np, random, torch, warnings
from sklearn.datasets import load_digits
warnings.simplefilter("ignore")
torch.manual_seed(0), np.random.seed(0), random.seed(0)  # FACIL shuffles with the last of them
torch.set_num_threads(1)
x, y = load_digits(return_X_y=True)
x = (x.reshape(-1, 8, 8).repeat(4, 1).repeat(4, 2) * 15.9).astype(np.uint8)
"""


def recipe(name: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "recipes" / f"{name}.md").read_text(), re.DOTALL)
    return code


def run_in(variable: str, below: str, code: str, folder: Path) -> str:
    checkout = os.environ.get(variable)
    if not checkout:
        pytest.skip(f"{variable} names no checkout: the recipe is not run")
    place = Path(checkout).resolve() / below
    script = folder / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(place)!r})\n{code}")
    schemas = str(ROOT / "tests" / "integrations")
    settings = {**os.environ, "PYTHONPATH": schemas, "MAMMOTH_TEST": "1"}
    command = [sys.executable, "-c", f"import torchvision_schemas, runpy; runpy.run_path({str(script)!r})"]
    ended = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


FACIL = """
x = np.pad(x[:, ::4, ::4].repeat(3, 1).repeat(3, 2), ((0, 0), (2, 2), (2, 2)))  # 28 x 28, for its LeNet
from torchvision import transforms
from torch.utils.data import DataLoader
from approach.finetuning import Appr
from datasets.exemplars_dataset import ExemplarsDataset
from datasets import memory_dataset as memd
from networks.lenet import LeNet
from networks.network import LLL_Net

class Log:
    def log_scalar(self, **more): pass

even = np.arange(len(y)) % 2 == 0
data, taskcla, classes = memd.get_data({"x": x[even], "y": y[even].tolist()}, {"x": x[~even], "y": y[~even].tolist()},
                                       validation=0.2, num_tasks=5, nc_first_task=None, shuffle_classes=True)
for t, (_, size) in enumerate(taskcla):
    for part in ("trn", "val", "tst"):
        data[t][part]["y"] = [label + sum(n for _, n in taskcla[:t]) for label in data[t][part]["y"]]
usual = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.3,), (0.4,))])
shifted = transforms.Compose([transforms.RandomCrop(28, padding=2), usual])
def loader(part, t, transform, shuffle):
    return DataLoader(memd.MemoryDataset(data[t][part], transform, classes), 32, shuffle=shuffle)
net = LLL_Net(LeNet(), remove_existing_head=True)
appr = Appr(net, "cpu", nepochs=6, lr=0.05, logger=Log(),
            exemplars_dataset=ExemplarsDataset(shifted, classes, num_exemplars=60))
for t in range(3):
    net.add_head(taskcla[t][1])
    train, valid = loader("trn", t, shifted, True), loader("val", t, usual, False)
    appr.train(t, train, valid)
    calibrated = calibrate(appr, t, train, valid)
images = torch.stack([loader("tst", 0, usual, False).dataset[i][0] for i in range(5)])
probs = calibrated.eval()(images).exp()
print("RESULT", tuple(probs.shape), pact.temperature_ > 0, round(pact.result_.imbalance, 2), len(pact.result_.evidence))
"""


def test_facil(tmp_path):
    out = run_in(
        "TCIL_FACIL", "src", DIGITS + FACIL.replace("class Log:", recipe("facil") + "\nclass Log:", 1), tmp_path
    )
    (result,) = [line for line in out.splitlines() if line.startswith("RESULT")]
    shape, positive, imbalance, pieces = re.match(r"RESULT (\(.*?\)) (\w+) (\S+) (\d+)", result).groups()
    assert (shape, positive) == ("(5, 6)", "True")
    assert 3 < float(imbalance) < 7  # about 72 images of a new class, 15 exemplars of an old one
    assert int(pieces) >= 3


MAMMOTH = """
from argparse import Namespace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms
import torch.nn.functional as F

class Dataset:
    N_CLASSES, N_TASKS, N_CLASSES_PER_TASK, SETTING, TRANSFORM = 10, 5, 2, "class-il", None
    def __init__(self): self.c_task, self.test_loaders = -1, []
    def get_offsets(self, task=None):
        task = self.c_task if task is None else task
        return 2 * task, 2 * task + 2
    def get_normalization_transform(self): return transforms.Normalize((0.3,) * 3, (0.4,) * 3)

images = torch.tensor(x).float()[:, None].repeat(1, 3, 1, 1) / 255
labels = torch.tensor(y)
held = torch.arange(len(labels)) % 4 == 0
dataset = Dataset()
args = Namespace(lr=0.05, optimizer="sgd", optim_wd=0.0, optim_mom=0.9, optim_nesterov=False, buffer_size=100,
                 minibatch_size=32, batch_size=32, label_perc=1, nowand=1, device="cpu", debug_mode=0)
net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 10))
model = ErCalibrated(net, F.cross_entropy, args, None, dataset=dataset)
model.device = torch.device("cpu")
normalise = dataset.get_normalization_transform()
for task in range(3):
    dataset.c_task = model._current_task = task
    own = (labels // 2 == task)
    dataset.test_loaders.append(DataLoader(TensorDataset(normalise(images[own & held]), labels[own & held]), 32))
    train = own & ~held
    for epoch in range(3):
        for rows in train.nonzero().squeeze(1)[torch.randperm(int(train.sum()))].split(32):
            model.observe(normalise(images[rows]), labels[rows], images[rows])
    model.end_task(dataset)
probs = model.calibrated.eval()(normalise(images[:5])).exp()
print("RESULT", tuple(probs.shape), model.pact.temperature_ > 0, round(model.pact.result_.imbalance, 3))
"""


def test_mammoth(tmp_path):
    """Its own ER and buffer; the stream of digits is made here, since Mammoth's datasets are downloaded."""
    # Importing its models imports all of its datasets, and some of those download weights for CLIP.
    others = "from unittest.mock import MagicMock; sys.modules['open_clip'] = MagicMock()\n"
    out = run_in("TCIL_MAMMOTH", "", others + DIGITS + recipe("mammoth") + MAMMOTH, tmp_path)
    (result,) = [line for line in out.splitlines() if line.startswith("RESULT")]
    assert result == "RESULT (5, 6) True 4.0"


def test_the_recipes_are_valid_python():
    for name in ("facil", "mammoth"):
        compile(textwrap.dedent(recipe(name)), name, "exec")
