"""examples/photos.py: own folders of photos, new ones later, a service that answers a real request."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import threading
import urllib.error
import urllib.request

import pytest
import torch
from torch import nn

from conftest import ROOT
from tcil.extending import Backbone
from tcil.incremental.pretrained import backbones

Image = pytest.importorskip("PIL.Image", reason="photos are read with Pillow (tcil[bench])")
COLOURS = {"ash": (120, 120, 120), "beech": (200, 40, 40), "cedar": (30, 160, 60), "date": (40, 60, 200)}
SIDE = 16


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def tiny_backbone() -> Backbone:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU())
        last = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Backbone("tiny", trunk, last, (0.5,) * 3, (0.5,) * 3, multiple=1)


def photo(colour, generator) -> bytes:
    noise = torch.randint(-100, 100, (20, 24, 3), generator=generator)
    pixels = (torch.tensor(colour) + noise).clamp(0, 255).byte().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def add_folder(root, name, generator, count=25):
    (root / name).mkdir(parents=True)
    for number in range(count):
        (root / name / f"{number:02d}.png").write_bytes(photo(COLOURS[name], generator))


@pytest.fixture
def photos(monkeypatch):
    monkeypatch.setitem(backbones.BACKBONES, "tiny", tiny_backbone)
    return example("photos")


@pytest.mark.training
def test_folders_are_added_and_served(photos, tmp_path, monkeypatch):
    needs = "the exported network needs onnx, onnxscript and onnxruntime"
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason=needs)
    onnxruntime = pytest.importorskip("onnxruntime", reason=needs)
    generator = torch.Generator().manual_seed(0)
    folders, state = tmp_path / "photos", tmp_path / "state"
    for name in ("ash", "beech"):
        add_folder(folders, name, generator)
    with monkeypatch.context() as patched:
        patched.setattr(photos, "export", lambda *args: None)  # it takes seconds, and is done again below
        first = photos.learn(folders, state, "tiny", SIDE)
    assert first.names == ["ash", "beech"]
    for name in ("cedar", "date"):
        add_folder(folders, name, generator)
    for path in (folders / "ash").iterdir():
        path.unlink()  # photos of learned classes are not needed any more
    exported, own = [], photos.export
    monkeypatch.setattr(photos, "export", lambda network, *rest: (exported.append(network), own(network, *rest)))
    second = photos.learn(folders, state, "tiny", SIDE)
    assert second.names == ["ash", "beech", "cedar", "date"]
    assert torch.bincount(second.tensors["labels"]).tolist() == [20, 20, 20, 20]
    session = onnxruntime.InferenceSession(state / "photos.onnx")
    batch = torch.randint(0, 256, (5, 3, SIDE, SIDE), generator=generator).float()
    served = session.run(None, {"photos": batch.numpy()})[0]
    assert torch.allclose(torch.from_numpy(served), exported[0](batch), atol=1e-5)
    again = photos.learn(folders, state, "tiny", SIDE)
    assert again.names == second.names

    service = example("photos_service").serve(state, port=0)
    thread = threading.Thread(target=service.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{service.server_port}/"
        right = 0
        for name, colour in COLOURS.items():
            request = urllib.request.Request(address, data=photo(colour, generator), method="POST")
            with urllib.request.urlopen(request) as answer:
                probabilities = json.loads(answer.read())
            assert list(probabilities) == second.names
            assert sum(probabilities.values()) == pytest.approx(1.0, abs=1e-4)
            right += max(probabilities, key=probabilities.get) == name
        assert right >= 3
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(urllib.request.Request(address, data=b"no photo", method="POST"))
    finally:
        service.shutdown()
        thread.join()
        service.server_close()


def test_the_service_is_as_short_as_it_is_said_to_be():
    lines = (ROOT / "examples" / "photos_service.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 34  # thirty lines, and those that begin it


def test_too_few_photos_are_refused(photos, tmp_path):
    generator = torch.Generator().manual_seed(0)
    add_folder(tmp_path / "photos", "ash", generator, count=1)
    add_folder(tmp_path / "photos", "beech", generator, count=3)
    with pytest.raises(SystemExit, match="holds 1 photos"):
        photos.learn(tmp_path / "photos", tmp_path / "state", "tiny", SIDE)
