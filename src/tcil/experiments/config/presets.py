"""Presets: the paper's settings for each of its datasets, and smaller ones for a single machine."""

from __future__ import annotations

from typing import Any

from tcil.foundation.errors import unknown_name

_SHORT_TUNING = {
    "eeil": {"finetune_epochs": 10, "finetune_milestones": [4, 7]},
    "der": {"finetune_epochs": 10, "finetune_milestones": [5]},
}
_WA = {"restrict_head": True}  # as in the original; runs whose settings lack this option were trained without it
_SHORT_LEARNERS = {
    "eeil": {"learner_options": _SHORT_TUNING["eeil"]},
    "wa": {"learner_options": _WA},
    "der": {"learner_options": {"finetune_epochs": 30, "finetune_milestones": [15]}},
}
_PAPER = {"epochs": 200, "milestones": [100, 150], "lr": 0.1, "weight_decay": 2e-4, "validation_seed": "seed"}
_RESNET32 = {**_PAPER, "network": "resnet32", "batch_size": 128}

_LONG_TUNING = {
    "eeil": {"finetune_epochs": 100, "finetune_milestones": [33, 67]},
    "der": {"finetune_epochs": 100, "finetune_milestones": [50]},
}
_MANY_TASKS = {
    "validation": 100, "validation_pool": 100,
    "by_learner": {k: {"learner_options": v} for k, v in _LONG_TUNING.items()},
}  # fmt: skip

_MINI = {
    # 20 exemplars per class at the end, as in the paper, and 25 validation images per class, the paper's smallest set.
    # Without crops, thirty epochs are enough to memorise the exemplars, like the paper's 200 epochs with crops.
    "dataset": "cifar100", "classes": 20, "tasks": 5, "network": "small_resnet", "memory": 400,
    "validation": 100, "validation_pool": 200, "epochs": 30, "milestones": [15, 22], "lr": 0.05,
    "batch_size": 32, "crop": 0,
}  # fmt: skip

_PRETRAINED = {
    "network": "pretrained:efficientnet_lite0,side=96", "validation": 500, "validation_pool": 500, "reserve": 0.1,
    "epochs": 20, "milestones": [10, 15], "lr": 0.01, "weight_decay": 2e-4, "batch_size": 128,
    "validation_seed": "seed", "by_learner": {"wa": {"learner_options": _WA}},
}  # fmt: skip

# A preset may have changes for a learner under "by_learner", and for 20 tasks under "at_20_tasks".
# "validation_seed": "seed" draws different validation images for each seed, as the authors do.
DEFAULT_PRESET = "letters"  # if neither a preset nor a dataset is given
PRESETS: dict[str, dict[str, Any]] = {
    "letters": {
        # 20 exemplars per class at the end, as in the paper. The weight decay follows from the number of steps of a
        # task: with the paper's schedules, the sum of lr * weight_decay / (1 - momentum) over the steps is 0.8 to 1.1.
        # Here the first task has 25 steps per epoch and the other four 38, and lr adds up to 1.055 over the epochs:
        # the sums are 0.6 and 0.9, 0.8 on average.
        "dataset": "letters", "network": "tiny_resnet", "tasks": 5, "memory": 400,
        "validation": 80, "validation_pool": 80, "epochs": 20, "milestones": [10, 15], "weight_decay": 2.2e-3,
        "validation_seed": "seed", "by_learner": _SHORT_LEARNERS,
    },
    "letters-large": {
        # By the same rule: 25 steps per epoch in the first task and 50 later, sums of 0.5 and 1.0.
        "dataset": "letters-large", "network": "tiny_resnet", "tasks": 10, "memory": 800,
        "validation": 80, "validation_pool": 80, "epochs": 20, "milestones": [10, 15], "weight_decay": 2e-3,
        "validation_seed": "seed", "by_learner": _SHORT_LEARNERS,
    },
    "digits": {
        "dataset": "noisy-digits", "memory": 100,
        "by_learner": {k: {"learner_options": v} for k, v in _SHORT_TUNING.items()},
    },
    "cifar10": {
        **_RESNET32, "dataset": "cifar10", "tasks": 5, "memory": 200, "validation": 500, "validation_pool": 500,
        "by_learner": {
            "eeil": {"validation": 300, "validation_pool": 300},
            "wa": {"validation": 100, "validation_pool": 100, "learner_options": _WA},
        },
    },
    "cifar100": {
        **_RESNET32, "dataset": "cifar100", "tasks": 10, "memory": 2000, "validation": 500, "validation_pool": 500,
        "at_20_tasks": _MANY_TASKS,
        "by_learner": {
            "eeil": {"validation": 300, "validation_pool": 300},
            "wa": {"learner_options": _WA},
            "der": {"validation": 1000, "validation_pool": 1000},
        },
    },
    "tiny-imagenet": {
        **_PAPER, "network": "resnet18", "batch_size": 256, "dataset": "tiny-imagenet", "tasks": 10, "memory": 4000,
        "validation": 100, "validation_pool": 100, "at_20_tasks": _MANY_TASKS,
        "by_learner": {"eeil": {"validation": 200, "validation_pool": 200}, "wa": {"learner_options": _WA}},
    },
    "image-folder": {
        **_PAPER, "network": "resnet18", "batch_size": 64, "dataset": "image-folder", "tasks": 5, "memory": 1000,
        "validation": 100, "validation_pool": 200, "by_learner": {"wa": {"learner_options": _WA}},
    },
    "cifar100-mini": {
        **_MINI, "weight_decay": 2e-3, "validation_seed": "seed",  # as much decay in a task as the paper's cifar100
        "by_learner": _SHORT_LEARNERS,
    },
    # Heads on frozen features of a pre-trained backbone; a run takes about a minute.
    "cifar100-pretrained": {**_PRETRAINED, "dataset": "cifar100", "tasks": 10, "memory": 2000},
    "tiny-imagenet-pretrained": {
        **_PRETRAINED, "dataset": "tiny-imagenet", "tasks": 5, "memory": 400, "validation": 80, "validation_pool": 80,
    },
    # cifar100-mini of version 0.2.0, used for the runs in docs/results/runs and docs/results/beyond.
    "cifar100-mini-0.2": {
        **_MINI, "weight_decay": 2e-4,
        "by_learner": {k: {"learner_options": v} for k, v in _SHORT_TUNING.items()},
    },
}  # fmt: skip


def preset_values(name: str, learner: str, tasks: object) -> dict[str, Any]:
    """The settings of a preset for a learner and a number of tasks.

    >>> [preset_values("cifar100", learner, 10)["validation"] for learner in ("er", "eeil", "der")]
    [500, 300, 1000]
    """
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    base = dict(PRESETS[name])
    many = base.pop("at_20_tasks", {})
    values = {**base, **base.get("by_learner", {}).get(learner, {})}
    if tasks == 20:
        values |= {**many, **many.get("by_learner", {}).get(learner, {})}
    values.pop("by_learner", None)
    return values
