"""ONNX: calibrate, export, compare with PyTorch, serve.

python examples/integrations/onnx_export.py MODEL.onnx      (pip install -c constraints.txt ".[onnx]" scikit-learn)
"""

import sys

import onnxruntime
import torch
from task_data import digits

import tcil
from tcil.integrations import onnx as tcil_onnx

model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
(x, y), (x_val, y_val) = digits(0, "train"), digits(0, "valid")
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(300):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
scaling = tcil.TemperatureScaling().fit(*tcil.predict_logits(model, (x_val, y_val)))
calibrated = scaling.wrap(model, dtype=torch.float32)
path = tcil_onnx.export(calibrated, sys.argv[1], example=x_val[:2])
print(tcil_onnx.verify(calibrated, path, x_val))
session = onnxruntime.InferenceSession(path)
probabilities, label = session.run(["probabilities", "label"], {"input": x_val[:3].numpy()})
print(probabilities.max(axis=1), label)
