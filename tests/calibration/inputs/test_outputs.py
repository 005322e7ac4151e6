"""What a model returns: heads side by side are logits, other lists are refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from blob_networks import D, HeadList, HeadListInside, HeadTuple, K, Plain, SplitInForward, draw_blobs, fit, trained
from torch import nn

import tcil


@pytest.fixture(scope="module")
def blobs():
    return draw_blobs()


class LogitsAndFeatures(Plain):
    def forward(self, x):
        f = self.backbone(x)
        return self.fc(f), f


class LogitsAndProjection(Plain):
    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(16, 8)

    def forward(self, x):
        f = self.backbone(x)
        return self.fc(f), self.projection(f)


class Exits(nn.Module):
    """Several answers for the same classes, from features of several depths."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D, 16), nn.Linear(16, 16)])
        self.exits = nn.ModuleList([nn.Linear(16, K), nn.Linear(16, K)])

    def forward(self, x):
        answers = []
        for layer, leave in zip(self.layers, self.exits, strict=True):
            x = layer(x).relu()
            answers.append(leave(x))
        return answers


class TestListsOfLogits:
    @pytest.mark.parametrize("kind", [HeadList, HeadTuple, HeadListInside])
    def test_heads_are_put_side_by_side(self, blobs, kind):
        split = trained(SplitInForward, blobs)
        model = kind()
        model.load_state_dict(split.state_dict())
        memory, valid = blobs
        assert torch.equal(tcil.predict_logits(model, valid)[0], tcil.predict_logits(split, valid)[0])
        calibrator, want = fit(model, blobs), fit(split, blobs)
        assert calibrator.temperature_ == want.temperature_
        assert torch.equal(calibrator.wrap(model)(memory[0]), want.wrap(split)(memory[0]))

    def test_new_heads_that_are_all_zero(self, blobs):
        model = HeadTuple()
        for head in model.heads:
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        assert tcil.predict_logits(model, blobs[1])[0].shape == (200, K)

    @pytest.mark.parametrize(
        ("kind", "container"),
        # A list of what two modules make of the same features is taken as heads; a tuple may be anything.
        [(LogitsAndFeatures, tuple), (LogitsAndFeatures, list), (LogitsAndProjection, tuple), (Exits, list)],
    )
    def test_other_things_are_not(self, blobs, kind, container):
        class Model(kind):
            def forward(self, x):
                return container(super().forward(x))

        model = Model()
        for act in (lambda: fit(model, blobs), lambda: tcil.predict_logits(model, blobs[1])):
            with pytest.raises(ValueError, match=r"with 2 matrices of the shapes .*returns the logits only"):
                act()

        class LogitsOnly(nn.Module):  # what the message says works
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, x):
                return self.model(x)[0]

        assert tcil.predict_logits(LogitsOnly(), blobs[1])[0].shape == (200, K)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tcil.CalibrationWarning)
            fit(LogitsOnly(), blobs)

    @pytest.mark.parametrize("output", [(), [], (torch.zeros(200, 2), None), "logits", [torch.zeros(200)]])
    def test_what_holds_no_logits(self, blobs, output):
        class Odd(Plain):
            def forward(self, x):
                return output

        with pytest.raises(ValueError, match="model: got an output of type"):
            tcil.predict_logits(Odd(), blobs[1])
