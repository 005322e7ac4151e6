"""A LightningModule as users write one; nothing in it knows of tcil."""

import lightning
import torch


class Digits(lightning.LightningModule):
    """A small network for 64 pixels and ten classes."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch, index):
        return {"logits": self(batch[0])}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
