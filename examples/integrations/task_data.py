"""What the scripts beside this file learn from: noisy digits, task by task, and texts in a language that is made up."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits


def digits(task: int, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The digits 2 * task and 2 * task + 1, 64 noisy pixels each: "train", "valid" or "test"."""
    x, y = (torch.tensor(given) for given in load_digits(return_X_y=True))
    x = x.float() / 16 + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    places = {"train": (0, 1), "valid": (2,), "test": (3,)}[part]
    rows = (y // 2 == task) & torch.isin(torch.arange(len(y)) % 4, torch.tensor(places))
    return x[rows], y[rows]


class Pictures:
    """The digits as PyCIL stores a dataset: images in uint8, 32 x 32 x 3."""

    use_path = False
    train_trsf, test_trsf, common_trsf = [], [], []  # as PyCIL writes them; ToTensor is added below
    class_order = [3, 1, 4, 0, 2, 9, 5, 8, 7, 6]  # noqa: RUF012

    def download_data(self):
        from torchvision import transforms

        self.common_trsf = [transforms.ToTensor(), transforms.Normalize((0.3,) * 3, (0.4,) * 3)]
        x, y = load_digits(return_X_y=True)
        x = (x.reshape(-1, 8, 8).repeat(4, 1).repeat(4, 2) * 15.9).astype(np.uint8)[..., None].repeat(3, 3)
        even = np.arange(len(y)) % 2 == 0
        self.train_data, self.train_targets, self.test_data, self.test_targets = x[even], y[even], x[~even], y[~even]


WORDS, LENGTH = 80, 12


def texts(labels, count: int) -> dict[str, torch.Tensor]:
    """Texts as a tokenizer gives them: ids, attention mask, labels. Class c prefers eight words of its own."""
    label = torch.tensor(list(labels)).repeat_interleave(count)[:, None]
    own = 8 + 8 * label + torch.randint(8, (len(label), LENGTH))
    ids = torch.where(torch.rand(own.shape) < 0.2, own, torch.randint(1, WORDS, own.shape))
    mask = (torch.arange(LENGTH) < torch.randint(6, LENGTH + 1, label.shape)).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": label.squeeze(1)}


def joined(*parts):
    """Several batches as one."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def exemplars(batch, per_class: int):
    """The first texts of each class."""
    labels = batch["labels"]
    rows = torch.cat([(labels == label).nonzero().squeeze(1)[:per_class] for label in labels.unique()])
    return {key: value[rows] for key, value in batch.items()}


def learn(model, batch, epochs: int = 40) -> None:
    """Plain training of a Hugging Face classifier."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(batch["labels"])).split(32):
            optimizer.zero_grad()
            model(**{key: value[rows] for key, value in batch.items()}).loss.backward()
            optimizer.step()
