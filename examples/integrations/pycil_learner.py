"""PyCIL: WA on digits, calibrated after each task; run with the checkout on the path.

PYTHONPATH=PyCIL python examples/integrations/pycil_learner.py      (a checkout of github.com/LAMDA-CL/PyCIL)
"""

import torch
from models import wa
from task_data import Pictures
from utils import data_manager

import tcil
from tcil.integrations import pycil

data_manager._get_idata = lambda name: Pictures()  # or a dataset of PyCIL's own
wa.init_epoch, wa.epochs, wa.batch_size, wa.num_workers = 4, 4, 16, 0
data = data_manager.DataManager("digits", shuffle=False, seed=1, init_cls=2, increment=2)
learner = wa.WA({"memory_size": 60, "device": [torch.device("cpu")], "convnet_type": "resnet32"})
held_out, pact = pycil.hold_out(data, per_class=20), tcil.PACT()  # before the first task: PyCIL has no validation set
for _ in range(2):
    learner.incremental_train(data)
    learner.after_task()  # aligns the weights; calibrate after it
    pycil.calibrate(learner, data, held_out, pact)
print(pycil.dataset_labels(data, pact), round(pact.temperature_, 3))
calibrated = pact.wrap(learner._network).eval()
