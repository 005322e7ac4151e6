"""Hugging Face models: dict inputs, `.logits`, and exemplars of text perturbed in their embeddings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tcil
from integrations.conftest import need, seed_everything

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def bert():
    """A tiny BERT, trained on a made-up language in which class c prefers the words 4c + 4 to 4c + 7."""
    need("transformers")
    from transformers import BertConfig, BertForSequenceClassification

    seed_everything()
    size = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(**size, intermediate_size=16, num_labels=4))
    batch = texts(range(4), 40, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return model.eval()


def texts(labels, count, seed):
    generator = torch.Generator().manual_seed(seed)
    label = torch.tensor(list(labels)).repeat_interleave(count)[:, None]
    own = 4 + 4 * label + torch.randint(4, (len(label), 8), generator=generator)
    other = torch.randint(1, 24, own.shape, generator=generator)
    ids = torch.where(torch.rand(own.shape, generator=generator) < 0.3, own, other)
    mask = (torch.arange(8) < torch.randint(4, 9, label.shape, generator=generator)).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": label.squeeze(1)}


def module():
    from tcil.integrations import transformers

    return transformers


def test_logits_of_dict_batches(bert):
    batch = texts(range(4), 10, 1)
    logits, labels = module().predict_logits(bert, [batch, batch])
    with torch.no_grad():
        expected = bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert torch.allclose(logits, torch.cat([expected, expected]), atol=1e-6)
    assert torch.equal(labels[:40], batch["labels"])
    scaling = module().fit(tcil.TemperatureScaling(), bert, None, [texts([2, 3], 40, 2)], [2, 3])
    valid = module().predict_logits(bert, [texts([2, 3], 40, 2)])
    assert scaling.temperature_ == pytest.approx(tcil.fit_temperature(*valid).temperature, abs=1e-9)


def test_embeddings_give_the_same_logits_and_padding_is_never_perturbed(bert):
    embedded, batch = module().EmbeddingClassifier(bert), texts(range(4), 10, 3)
    x = embedded.embed(batch).requires_grad_()
    logits = embedded(x)
    assert torch.allclose(logits, module().predict_logits(bert, [batch])[0], atol=1e-5)
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(logits, batch["labels"]), x)
    assert float(gradient[..., -1].abs().max()) == 0  # the mask
    assert float(gradient[batch["attention_mask"] == 0].abs().max()) == 0
    assert float(gradient[batch["attention_mask"] == 1][:, :-1].abs().min(dim=1).values.max()) > 0


def untrained(name, **more):
    """A tiny classifier of four classes, whose logits differ clearly."""
    transformers = need("transformers")
    seed_everything()
    size = {"vocab_size": 24, "num_labels": 4, "pad_token_id": 0, "initializer_range": 0.5}
    config = getattr(transformers, f"{name}Config")(**size, **more)
    return getattr(transformers, f"{name}ForSequenceClassification")(config).eval()


LAYERS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
DECODERS = [("GPT2", {"n_embd": 16, "n_layer": 1, "n_head": 2}), ("Llama", LAYERS)]


def pairs_of(labels, count, seed):
    """Texts of two segments."""
    batch = texts(labels, count, seed)
    return {**batch, "token_type_ids": (torch.arange(8) >= 3).long() * batch["attention_mask"]}


def test_the_segments_of_a_text_reach_the_model():
    """What T-CIL is fitted on are the logits of `model(**batch)`, and segments are not perturbed."""
    model, batch = untrained("Bert", **LAYERS), pairs_of(range(4), 10, 3)
    embedded = module().EmbeddingClassifier(model)
    x = embedded.embed(batch).requires_grad_()
    logits, expected = embedded(x), module().predict_logits(model, [batch])[0]
    assert torch.allclose(logits, expected, atol=1e-4)
    without = {key: value for key, value in batch.items() if key != "token_type_ids"}
    assert not torch.allclose(module().predict_logits(model, [without])[0], expected, atol=0.1)
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(logits, batch["labels"]), x)
    assert float(gradient[..., -2:].abs().max()) == 0
    noise = 100 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    assert embedded(x.detach() + noise).shape == (40, 4)  # PerturbTS: segments remain among those that there are
    calibrator = module().fit(tcil.TCIL(), model, [batch], [pairs_of([2, 3], 20, 5)], [2, 3])
    own = tcil.TCIL().fit(
        embedded, *((embedded.embed(b), b["labels"]) for b in (batch, pairs_of([2, 3], 20, 5))), new_classes=[2, 3]
    )
    assert calibrator.temperature_ == pytest.approx(own.temperature_, abs=1e-6)


def test_arguments_that_are_not_of_tokens_are_left_out(bert):
    embedded, batch = module().EmbeddingClassifier(bert), texts(range(4), 2, 3)
    assert torch.equal(embedded.embed({**batch, "index": torch.arange(8)}), embedded.embed(batch))
    with pytest.raises(ValueError, match=r"batch: got the arguments .*'token_type_ids'\]; expected those of the first"):
        embedded.embed(pairs_of(range(4), 2, 3))


@pytest.mark.parametrize(("name", "more"), DECODERS)
def test_decoders_need_padding_on_the_left(name, more):
    """They find the last token by the ids of padding, so embeddings would give the logits of padding."""
    model, calibrator = untrained(name, **more), tcil.TCIL()
    memory, valid = texts(range(4), 6, 4), texts([2, 3], 20, 5)
    with pytest.raises(ValueError, match=r"memory: got texts whose logits .* pad on the left \(tokenizer\."):
        module().fit(calibrator, model, [memory], [valid], [2, 3])
    assert not hasattr(calibrator, "temperature_")
    flipped = [{k: v.flip(1) if v.ndim > 1 else v for k, v in batch.items()} for batch in (memory, valid)]
    embedded = module().EmbeddingClassifier(model)
    for batch in flipped:
        assert torch.allclose(embedded(embedded.embed(batch)), module().predict_logits(model, [batch])[0], atol=1e-4)
    module().fit(calibrator, model, *([batch] for batch in flipped), new_classes=[2, 3])
    assert calibrator.temperature_ > 0


def test_padding_is_looked_for_in_all_batches():
    model = untrained("Llama", **LAYERS)
    whole = {**texts(range(4), 6, 4), "attention_mask": torch.ones(24, 8).long()}
    whole["input_ids"] = whole["input_ids"].clamp(min=1)
    with pytest.raises(ValueError, match=r"valid: got texts whose logits .*padding_side = 'left'"):
        module().fit(tcil.TCIL(), model, [whole], [whole, texts([2, 3], 20, 5)], [2, 3])


def test_models_that_count_positions_by_padding_need_it_on_the_right():
    model, batch = untrained("Roberta", **LAYERS), texts(range(4), 6, 4)
    module().fit(tcil.TCIL(), model, [batch], [texts([2, 3], 20, 5)], [2, 3])
    flipped = {k: v.flip(1) if v.ndim > 1 else v for k, v in batch.items()}
    with pytest.raises(ValueError, match=r"memory: got texts .*padding_side = 'right'"):
        module().fit(tcil.TCIL(), model, [flipped], [texts([2, 3], 20, 5)], [2, 3])


@pytest.mark.parametrize("kind", [tcil.TCIL, tcil.PACT])
def test_text_classes_that_arrive_over_time(bert, kind):
    """The same as T-CIL on tensors of embeddings; the answer belongs to the model that takes token ids."""
    memory, valid = texts(range(4), 6, 4), texts([2, 3], 40, 5)
    more = {"imbalance": 4.0} if kind is tcil.PACT else {}
    before = {name: value.clone() for name, value in bert.state_dict().items()}
    calibrator = module().fit(kind(), bert, [memory], [valid], new_classes=[2, 3], **more)
    embedded = module().EmbeddingClassifier(bert)
    pairs = [(embedded.embed(batch), batch["labels"]) for batch in (memory, valid)]
    own = kind().fit(embedded, *pairs, new_classes=[2, 3], **more)
    assert calibrator.temperature_ == pytest.approx(own.temperature_, abs=1e-6)
    t_cil = calibrator.result_ if kind is tcil.TCIL else calibrator.result_.t_cil
    assert t_cil.n_valid == 80
    assert all(torch.equal(value, before[name]) for name, value in bert.state_dict().items())
    test = {key: value for key, value in texts(range(4), 5, 6).items() if key != "labels"}
    with torch.no_grad():
        answer = calibrator.wrap(bert).eval()(**test)
        assert torch.allclose(answer, calibrator.transform(bert(**test).logits))


def test_a_calibrator_of_text_is_saved_with_its_model(bert, tmp_path):
    calibrator = module().fit(tcil.TCIL(), bert, [texts(range(4), 6, 4)], [texts([2, 3], 40, 5)], [2, 3])
    again = tcil.load(calibrator.save(tmp_path / "c.json"), model=bert)
    assert again.temperature_ == calibrator.temperature_


@pytest.mark.parametrize(
    ("memory", "valid", "message"),
    [
        (None, [texts([2, 3], 4, 0)], "the exemplars that TCIL perturbs"),
        ([], [texts([2, 3], 4, 0)], "memory: got no batches"),
        (texts(range(4), 4, 0), [texts([2, 3], 4, 0)], r"memory: got a single batch .* a list of batches: \[batch\]"),
        ([texts(range(4), 4, 0)], texts([2, 3], 4, 0), r"valid: got a single batch"),
        ([{"input_ids": torch.zeros(2, 8).long()}], [], "labels under 'labels'"),
        ([texts([0, 1, 2, 3], 4, 0), {k: v[..., :6] if v.ndim > 1 else v for k, v in texts([0], 4, 0).items()}], [],
         "batches of 6 and 8 tokens"),
    ],
)  # fmt: skip
def test_odd_batches_are_refused(bert, memory, valid, message):
    with pytest.raises(ValueError, match=message):
        module().fit(tcil.TCIL(), bert, memory, valid, [2, 3])


def test_one_batch_in_place_of_several(bert):
    with pytest.raises(ValueError, match=r"batches: got a single batch .* a list of batches: \[batch\]"):
        module().predict_logits(bert, texts(range(4), 4, 0))


def test_plain_fit_on_token_ids_names_the_function_for_text(bert):
    with pytest.raises(ValueError, match=r"tcil\.integrations\.transformers\.fit"):
        tcil.TCIL().fit(bert, [texts(range(4), 6, 4)], [texts([2, 3], 40, 5)], new_classes=[2, 3])


def test_models_of_timm_are_plain_networks():
    timm = need("timm")
    seed_everything()
    model = timm.create_model("resnet10t", pretrained=False, num_classes=4).eval()
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(8, 3, 32, 32, generator=generator), torch.arange(8) % 4
    valid = torch.randn(12, 3, 32, 32, generator=generator), 2 + torch.arange(12) % 2
    calibrator = tcil.TCIL().fit(model, memory, valid, [2, 3])
    assert calibrator.wrap(model).eval()(memory[0]).shape == (8, 4)
