"""Lightning: digits in five tasks with a replayed memory, calibrated at the end of each `Trainer.fit`.

python examples/integrations/lightning_callback.py      (pip install -c constraints.txt ".[lightning]" scikit-learn)
"""

import lightning
from lightning_module import Digits
from task_data import digits
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import tcil
from tcil.integrations.lightning import CalibrationCallback

module, pact, memory, seen = Digits(), tcil.PACT(), [], []
for task in range(5):
    new = TensorDataset(*digits(task, "train"))
    loader = DataLoader(ConcatDataset([*memory, new]), 32, shuffle=True)
    memory.append(TensorDataset(*new[:16]))  # as many of each class, more or less
    callback = CalibrationCallback(
        pact, new_classes=[2 * task, 2 * task + 1], valid=digits(task, "valid"), memory=ConcatDataset(memory)
    )
    trainer = lightning.Trainer(max_epochs=20, callbacks=[callback], logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")  # fmt: skip
    trainer.fit(module, loader)
    seen.append(TensorDataset(*digits(task, "test")))
    (scores,) = trainer.test(module, DataLoader(ConcatDataset(seen), 64), verbose=False)
print({name: round(value, 3) for name, value in scores.items()})
