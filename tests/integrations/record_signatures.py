"""Writes signatures.json: the parts of each framework that tcil.integrations builds on, as the real one has them.

    build/integrations/bin/python tests/integrations/record_signatures.py      (TCIL_PYCIL names a checkout of PyCIL)

Tests compare tcil with the record where a framework is not installed, and the record with the framework where it is.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import json
import os
from pathlib import Path

RECORD = Path(__file__).with_name("signatures.json")
INSTALLED = {
    "avalanche": (
        "avalanche-lib",
        "avalanche.training.plugins:SupervisedPlugin",
        "before_training_exp after_training_iteration after_training_epoch after_training_exp before_eval"
        " before_eval_exp after_eval_forward after_eval_exp after_eval",
        {
            "avalanche.evaluation.metric_utils:get_metric_name": None,
            "avalanche.evaluation.metric_results:MetricValue": None,
            "avalanche.training.plugins:EvaluationPlugin.publish_metric_value": None,
        },
    ),
    "lightning": (
        "lightning",
        "lightning.pytorch:Callback",
        "on_train_start on_train_batch_end on_train_end on_test_epoch_start on_test_batch_end on_test_epoch_end",
        {"lightning.pytorch:LightningModule.log": None},
    ),
    "transformers": (
        "transformers",
        "transformers:PreTrainedModel",
        "get_input_embeddings",
        {"transformers:BertForSequenceClassification.forward": None},
    ),
}
OF_PYCIL = {
    "utils/data_manager.py:DataManager": ["get_dataset", "get_task_size"],
    "models/base.py:BaseLearner": ["_get_memory", "after_task"],
}
ATTRIBUTES = {
    "utils/data_manager.py:DataManager": ["_train_data", "_train_targets", "_class_order"],
    "models/base.py:BaseLearner": [
        "_cur_task", "_known_classes", "_total_classes", "_network", "_memory_size", "_memory_per_class",
        "_fixed_memory",
    ],
}  # fmt: skip


def found(name: str) -> object:
    """What a name such as package.module:Class.method stands for."""
    module, _, path = name.partition(":")
    thing: object = importlib.import_module(module)
    for part in path.split("."):
        thing = getattr(thing, part)
    return thing


def parameters(thing: object) -> list[str]:
    return list(inspect.signature(thing).parameters)  # type: ignore[arg-type]


def of_installed(framework: str) -> dict:
    package, base, hooks, more = INSTALLED[framework]
    names = [f"{base}.{hook}" for hook in hooks.split()] + list(more)
    return {"version": importlib.metadata.version(package), "signatures": {n: parameters(found(n)) for n in names}}


def of_pycil(folder: Path) -> dict:
    """Read from its source: PyCIL is not imported."""
    signatures, attributes = {}, {}
    for name, methods in OF_PYCIL.items():
        path, _, kind = name.partition(":")
        nodes = ast.walk(ast.parse((folder / path).read_text()))
        (own,) = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == kind]
        for node in own.body:
            if isinstance(node, ast.FunctionDef) and node.name in methods:
                signatures[f"{name}.{node.name}"] = [argument.arg for argument in node.args.args]
        assigned = {part.attr for part in ast.walk(own) if isinstance(part, ast.Attribute)}
        attributes[name] = [attribute for attribute in ATTRIBUTES[name] if attribute in assigned]
    return {"version": "a checkout of January 2026", "signatures": signatures, "attributes": attributes}


def main() -> None:
    record = {framework: of_installed(framework) for framework in INSTALLED}
    record["pycil"] = of_pycil(Path(os.environ["TCIL_PYCIL"]))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
