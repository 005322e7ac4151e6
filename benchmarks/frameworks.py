"""Images per second of training beside the loops of Avalanche and PyCIL.

    python -m benchmarks.frameworks --pycil DIR --out docs/results/frameworks.json        (ten minutes)

All train the same networks on the same random images of CIFAR's size, with batches of 128, crops, flips, SGD with
momentum and one thread. Each loop runs as its framework has it: ours in the layout that `tcil run` takes by default
(channels last), Avalanche's `Naive` and `Replay` strategies, and the update loop of PyCIL's `Replay`, both with
torchvision's transforms of PIL images in a `DataLoader` without workers. PyCIL's brightness jitter is left out, since
the others have none; so are evaluation and logging. Times are processor time, the best of several turns taken side by
side; images are counted at the network.

Neither framework is a dependency. Needed are `pip install --no-deps avalanche-lib==0.6.0 torchvision==0.28.0` with
what these import, and a checkout of github.com/LAMDA-CL/PyCIL, named by --pycil or TCIL_PYCIL. What is not there is
left out, which the table says.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from torch import Tensor, nn

from benchmarks import ledger
from benchmarks.training import BATCH, MEAN, STD, dataset, loop
from tcil.incremental.data.layout import Layout
from tcil.incremental.networks import resnet32, small_resnet

ROUNDS = 8
NETWORKS = {"ResNet-32": (resnet32, 2), "small ResNet": (small_resnet, 6)}  # and batches of a turn
OURS, GOAL = "tcil", 1.5
Contestant = Callable[[nn.Module, int], Callable[[], Any]]  # of a network and batches of an epoch; trains one epoch


class Missing(Exception):
    """Why a framework cannot be measured here."""


class Pictures(torch.utils.data.Dataset[tuple[Any, int]]):
    """The images as PIL has them, with torchvision's transforms: what Avalanche reads."""

    def __init__(self, batches: int, transform: Callable[[Any], Tensor], classes: int = 10) -> None:
        train = dataset(Layout.CONTIGUOUS, batches).train
        self.images = train.images.permute(0, 2, 3, 1).contiguous().numpy()
        self.targets = (torch.arange(len(self.images)) % classes).tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(self.images[index])), self.targets[index]


def torchvision_transform() -> Callable[[Any], Tensor]:
    """Crop, flip and normalisation of CIFAR as both frameworks write them."""
    _import_torchvision()
    transforms: Any = importlib.import_module("torchvision.transforms")
    steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    composed: Callable[[Any], Tensor] = transforms.Compose([*steps, transforms.Normalize(MEAN, STD)])
    return composed


OPERATORS = (  # that torchvision 0.28 asks for when it is imported
    "nms qnms roi_align _roi_align_backward ps_roi_align _ps_roi_align_backward roi_pool _roi_pool_backward ps_roi_pool"
    " _ps_roi_pool_backward qroi_align deform_conv2d _deform_conv2d_backward"
)
_schemas: list[Any] = []  # they last as long as this holds them


def _import_torchvision() -> None:
    """torchvision imports beside a build of torch that is not its own once its operators have a schema each."""
    if "torchvision" in sys.modules:
        return
    if importlib.util.find_spec("torchvision") is None:
        raise Missing("torchvision is not installed")
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _schemas.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in OPERATORS.split():
            with contextlib.suppress(RuntimeError):  # declared already
                _schemas[0].define(f"{name}(Tensor x) -> Tensor")
        importlib.import_module("torchvision")


def ours(model: nn.Module, batches: int) -> Callable[[], Any]:
    """The library's own loop."""
    layout = Layout.CHANNELS_LAST
    data = dataset(layout, batches)
    model.to(memory_format=layout.form)  # type: ignore[call-overload]
    return lambda: loop(model, data)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-4)


def avalanche(model: nn.Module, batches: int, *, memory: bool = False) -> Callable[[], Any]:
    """Avalanche's strategy on one experience; with a memory, on the second of two."""
    transform = torchvision_transform()
    try:
        benchmarks: Any = importlib.import_module("avalanche.benchmarks")
        plugins: Any = importlib.import_module("avalanche.training.plugins")
        strategies: Any = importlib.import_module("avalanche.training.supervised")
    except ImportError as error:
        raise Missing(f"Avalanche: {error}") from None
    pictures = Pictures(batches, lambda image: image)
    plain = {"train_transform": transform, "eval_transform": transform, "shuffle": False}
    scenario = benchmarks.nc_benchmark(pictures, pictures, 2 if memory else 1, task_labels=False, **plain)
    experiences = list(scenario.train_stream)
    kind, size, more = strategies.Naive, BATCH, dict[str, int]()
    if memory:  # which adds as many exemplars to a batch as it has new images
        kind, size, more = strategies.Replay, BATCH // 2, {"mem_size": BATCH * batches // 2}
    strategy = kind(
        model=model, optimizer=sgd(model), criterion=nn.CrossEntropyLoss(), train_mb_size=size, train_epochs=1,
        device="cpu", evaluator=plugins.EvaluationPlugin(), **more,
    )  # fmt: skip
    if memory:
        strategy.train(experiences[0], num_workers=0)
    return lambda: strategy.train(experiences[-1], num_workers=0)


def avalanche_replay(model: nn.Module, batches: int) -> Callable[[], Any]:
    return avalanche(model, batches, memory=True)


class WithLogits(nn.Module):
    """A network as PyCIL calls it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.network(x)}


class Checkout(MetaPathFinder):
    """Finds the modules of a checkout, which import each other by their names in its folder."""

    def __init__(self, folder: Path) -> None:
        self._path = [str(folder)]

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Where a module is; those inside packages are found through their packages."""
        return PathFinder.find_spec(name, self._path, target) if path is None else None


def pycil_at(folder: Path | None) -> Contestant:
    """PyCIL's replay loop, from a checkout."""

    def pycil(model: nn.Module, batches: int) -> Callable[[], Any]:
        if folder is None or not (folder / "models" / "replay.py").is_file():
            raise Missing("no checkout of PyCIL (--pycil DIR or TCIL_PYCIL)")
        transform = torchvision_transform()
        sys.meta_path.append(Checkout(folder))
        try:
            replay: Any = importlib.import_module("models.replay")
            manager: Any = importlib.import_module("utils.data_manager")
        except ImportError as error:
            raise Missing(f"PyCIL: {error}") from None
        replay.epochs = 1
        pictures = Pictures(batches, transform)
        images = manager.DummyDataset(pictures.images, pictures.targets, transform)
        loader = torch.utils.data.DataLoader(images, BATCH, shuffle=True)
        few = [(torch.arange(2), torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.long))]  # to be evaluated on

        class OneEpoch(replay.Replay):  # type: ignore[misc]
            """PyCIL's learner with a network that it is given, and the update loop of its second task alone."""

            def __init__(self) -> None:
                self._network, self._device, self._cur_task = WithLogits(model), torch.device("cpu"), 1

            def epoch(self) -> None:
                optimizer = sgd(model)
                scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30])
                self._update_representation(loader, few, optimizer, scheduler)

        epoch: Callable[[], None] = OneEpoch().epoch
        return epoch

    return pycil


def versions(folder: Path | None) -> dict[str, str]:
    """What was measured: versions of packages, and the commit of the checkout."""
    named = {}
    for package in ("avalanche-lib", "torchvision"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            named[package] = metadata.version(package)
    if folder is not None:
        asked = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        answer = subprocess.run(asked, capture_output=True, text=True, check=False)
        named["PyCIL"] = answer.stdout.strip() or "a folder without a commit"
    return named


def measure(contestants: dict[str, Contestant], rounds: int, names: Sequence[str]) -> dict[str, Any]:
    """Images per second of each framework by network, or why it has none."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names:
        factory, batches = NETWORKS[name]
        counts: dict[str, int] = {}
        ready: dict[str, Callable[[], Any]] = {}
        absent: dict[str, str] = {}
        for who, contestant in contestants.items():
            torch.manual_seed(0)
            model, seen = factory(10), list[int]()
            model.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(len(args[0])))
            try:
                epoch = contestant(model, batches)
                with quiet():
                    epoch()  # warm up
                    seen.clear()
                    epoch()
            except Missing as reason:
                absent[who] = str(reason)
                continue
            counts[who], ready[who] = sum(seen), epoch
        with quiet():
            times = ledger.best(ready, rounds)
        speeds = {who: counts[who] / times[who].cpu for who in ready}
        ratios = {who: round(speeds[OURS] / speed, 2) for who, speed in speeds.items() if who != OURS}
        found[name] = {
            "images_per_second": {who: round(speed, 1) for who, speed in speeds.items()},
            "ours_over_theirs": ratios,
            "missing": absent,
        }
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of others."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pycil", type=Path, default=os.environ.get("TCIL_PYCIL"), help="a checkout of PyCIL")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="JSON file for the speeds")
    options = parser.parse_args()
    folder = Path(options.pycil) if options.pycil else None
    contestants: dict[str, Contestant] = {
        OURS: ours,
        "Avalanche naive": avalanche,
        "Avalanche replay": avalanche_replay,
        "PyCIL replay": pycil_at(folder),
    }
    record = {
        "command": f"python -m benchmarks.frameworks --pycil DIR --rounds {options.rounds}",
        "machine": ledger.machine(),
        "versions": versions(folder),
        "batch": BATCH,
        "threads": 1,
        "goal": GOAL,
        "networks": measure(contestants, options.rounds, list(NETWORKS)),
    }
    Console(soft_wrap=True).print_json(json.dumps(record))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
