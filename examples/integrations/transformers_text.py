"""Hugging Face: text classes that arrive over time, calibrated by perturbing the embeddings of exemplars.

python examples/integrations/transformers_text.py       (pip install -c constraints.txt ".[transformers]" scikit-learn)

The model is a tiny BERT with random weights, and the language made up.
"""

import torch
from task_data import WORDS, exemplars, joined, learn, texts
from transformers import BertConfig, BertForSequenceClassification

import tcil
from tcil.integrations import transformers as tcil_transformers

size = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = BertForSequenceClassification(BertConfig(**size, intermediate_size=64, num_labels=6))
pact, memory = tcil.PACT(), []
for new in (range(3), range(3, 6)):
    train, held_out = texts(new, 120), texts(new, 60)
    learn(model, joined(*memory, train))
    memory.append(exemplars(train, 15))
    imbalance = 120 / 15 if new[0] else None  # the first task has no old classes
    tcil_transformers.fit(pact, model, memory, [held_out], new_classes=new, imbalance=imbalance)
calibrated, test = pact.wrap(model).eval(), texts(range(6), 100)
with torch.no_grad():  # the calibrated model takes what the model takes
    probs = calibrated(input_ids=test["input_ids"], attention_mask=test["attention_mask"]).exp()
    plain = tcil_transformers.predict_logits(model, [test])[0].softmax(dim=1)
before, after = (tcil.metrics.expected_calibration_error(part, test["labels"]) for part in (plain, probs))
print(f"ECE {before:.3f} before, {after:.3f} after")
