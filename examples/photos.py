"""Teach a pre-trained backbone your own folders of photos, add folders later, and export calibrated probabilities.

    python examples/photos.py PHOTOS STATE

PHOTOS holds a folder of photos for each class. Each call learns the folders that STATE does not know yet as one new
task, calibrates, and writes STATE/photos.onnx and STATE/classes.json, which examples/photos_service.py serves. Add
folders to PHOTOS and call it again: photos of earlier classes are not read any more, only a few features are kept.

See docs/photos.md for the whole path.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tcil
from tcil.extending import Backbone, load_backbone

EXEMPLARS = 20  # features kept of each class
VALID = 5  # every fifth photo is held out, for the calibration


@dataclass
class State:
    """What is kept from call to call: names, head, exemplars (features and labels), what the calibrator remembers."""

    names: list[str] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    history: dict[str, Any] | None = None
    backbone: str = "efficientnet_lite0"
    side: int = 128

    @classmethod
    def read(cls, folder: Path, backbone: str, side: int) -> State:
        """The state in a folder; a new one where there is none."""
        if not (folder / "state.json").exists():
            return cls(backbone=backbone, side=side)
        return cls(**json.loads((folder / "state.json").read_text()), tensors=load_file(folder / "state.safetensors"))

    def write(self, folder: Path) -> None:
        """Store it."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, folder / "state.safetensors")
        plain = {name: getattr(self, name) for name in ("names", "history", "backbone", "side")}
        (folder / "state.json").write_text(json.dumps(plain))


class Served(nn.Module):
    """From photos (N, 3, side, side) with values from 0 to 255 to calibrated probabilities."""

    def __init__(self, backbone: Backbone, scale: Tensor, calibrated: nn.Module) -> None:
        super().__init__()
        self.trunk, self.last, self.calibrated = backbone.trunk, backbone.last, calibrated
        self.register_buffer("scale", scale)
        self.register_buffer("mean", torch.tensor(backbone.mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(backbone.std).view(1, -1, 1, 1))

    def forward(self, photos: Tensor) -> Tensor:
        """Calibrated probabilities, (N, classes)."""
        features = self.last(self.trunk((photos / 255 - self.mean) / self.std))
        return self.calibrated(features / self.scale).exp().float()


def read_photos(folder: Path, side: int) -> Tensor:
    """All photos of a folder, cut to a square of that side, as bytes (N, 3, side, side)."""
    photos = []
    for path in sorted(folder.iterdir()):
        with Image.open(path) as photo:
            square = ImageOps.fit(photo.convert("RGB"), (side, side), Image.Resampling.BICUBIC)
        photos.append(torch.from_numpy(np.array(square)).permute(2, 0, 1))
    if len(photos) < 2:
        raise SystemExit(f"{folder} holds {len(photos)} photos; at least two are needed, better fifty")
    return torch.stack(photos)


def learn(photos: Path, folder: Path, backbone_name: str = "efficientnet_lite0", side: int = 128) -> State:
    """Learn the folders that are new as one task, calibrate, export. Without new folders, nothing is done."""
    state = State.read(folder, backbone_name, side)
    new_names = [path.name for path in sorted(photos.iterdir()) if path.is_dir() and path.name not in state.names]
    if not new_names:
        print("no new folders")
        return state
    backbone = load_backbone(state.backbone)
    first, state.names = len(state.names), state.names + new_names
    if len(state.names) < 2:
        raise SystemExit("at least two folders are needed to begin with")

    # 1. Features of the new photos. The backbone is frozen, so they are computed once.
    features, labels = [], []
    for label, name in enumerate(new_names, start=first):
        pixels = read_photos(photos / name, state.side)
        features.append(torch.cat([backbone.features(some, state.side) for some in pixels.split(32)]))
        labels.append(torch.full((len(pixels),), label))
    x, y = torch.cat(features), torch.cat(labels)
    scale = state.tensors.get("scale", x.square().mean().sqrt())
    x = x / scale
    held_out = torch.cat([torch.arange(len(some)) % VALID == VALID - 1 for some in labels])
    held_out |= torch.cat([(torch.arange(len(some)) == len(some) - 1) for some in labels])  # at least one of each
    valid = x[held_out], y[held_out]

    # 2. A head for all classes so far, trained on the new photos and the exemplars of earlier classes together.
    old_x = state.tensors.get("exemplars", torch.zeros(0, x.shape[1]))
    old_y = state.tensors.get("labels", torch.zeros(0, dtype=torch.long))
    train = torch.cat([x[~held_out], old_x]), torch.cat([y[~held_out], old_y])
    head = grown_head(state.tensors, x.shape[1], len(state.names))
    train_head(head, *train)

    # 3. A few exemplars of the new classes, and the calibration: this is all that is tcil.
    kept = [(y[~held_out] == label).nonzero().squeeze(1)[:EXEMPLARS] for label in range(first, len(state.names))]
    memory = torch.cat([old_x, x[~held_out][torch.cat(kept)]]), torch.cat([old_y, y[~held_out][torch.cat(kept)]])
    new_classes = range(first, len(state.names))
    presented = Counter(train[1].tolist())
    pact = tcil.PACT().fit(head, memory, valid, new_classes, imbalance=presented, history=state.history)

    # 4. Keep what the next call needs, and export backbone, head and calibration as one network.
    state.history = pact.history_
    state.tensors = {
        "scale": scale, "exemplars": memory[0], "labels": memory[1], "weight": head.weight.data, "bias": head.bias.data
    }  # fmt: skip
    state.write(folder)
    served = Served(backbone, scale, pact.wrap(head)).eval()
    export(served, folder / "photos.onnx", torch.zeros(2, 3, state.side, state.side))
    (folder / "classes.json").write_text(json.dumps({"names": state.names, "side": state.side}))
    right = float((head(valid[0]).argmax(dim=1) == valid[1]).float().mean())
    print(f"learned {', '.join(new_names)}: {len(valid[1])} held-out photos, {right:.0%} correct, {pact.result_}")
    return state


def grown_head(tensors: dict[str, Tensor], n_features: int, n_classes: int) -> nn.Linear:
    """A linear head whose first rows are those of the head so far; new ones start at 0."""
    head = nn.Linear(n_features, n_classes)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
        if "weight" in tensors:
            head.weight[: len(tensors["weight"])] = tensors["weight"]
            head.bias[: len(tensors["bias"])] = tensors["bias"]
    return head


def train_head(head: nn.Linear, x: Tensor, y: Tensor, epochs: int = 30) -> None:
    """An ordinary training loop."""
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01, momentum=0.9, weight_decay=2e-4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.randperm(len(y), generator=generator).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(x[rows]), y[rows]).backward()
            optimizer.step()
    head.eval()


def export(network: nn.Module, path: Path, example: Tensor) -> None:
    """Write a network as ONNX, with any number of photos in a batch."""
    torch.onnx.export(
        network, (example,), str(path), dynamo=True, external_data=False, verbose=False,
        dynamic_shapes={"photos": {0: torch.export.Dim("batch")}}, input_names=["photos"],
        output_names=["probabilities"],
    )  # fmt: skip


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, help="a folder with a folder of photos for each class")
    parser.add_argument("state", type=Path, help="where the head, the calibration and photos.onnx go")
    parser.add_argument("--backbone", default="efficientnet_lite0", help="efficientnet_lite0, or timm/NAME")
    parser.add_argument("--side", type=int, default=128, help="pixels to which photos are scaled")
    given = parser.parse_args()
    learn(given.photos, given.state, given.backbone, given.side)


if __name__ == "__main__":
    main()
