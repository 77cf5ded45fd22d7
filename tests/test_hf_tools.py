"""The models of `fastrpb.hf` in Transformers' Trainer and pipelines, and on its Hub."""

import json
import shutil
import types

import tokenizers
import torch
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

from fastrpb.hf import FastRPBForSequenceClassification
from small_models import causal, config, tokens


def tokenizer():
    words = ["[PAD]", "[UNK]", "good", "bad", *(f"word{i}" for i in range(20))]
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]")


def reviews(count):
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        fill = torch.randint(20, (i % 7 + 3,), generator=generator).tolist()
        words = [f"word{j}" for j in fill]
        words.insert(i % 3, "bad" if i % 2 else "good")
        yield " ".join(words), i % 2


def test_trainer_and_pipeline(tmp_path):
    coder = tokenizer()
    data = [{**coder(text), "labels": label} for text, label in reviews(64)]
    model = FastRPBForSequenceClassification(
        config(id2label={0: "GOOD", 1: "BAD"}, label2id={"GOOD": 0, "BAD": 1})
    )
    arguments = TrainingArguments(
        output_dir=tmp_path / "run",
        num_train_epochs=12,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        gradient_checkpointing=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model, arguments, train_dataset=data, eval_dataset=data[:16], processing_class=coder
    )
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.1
    trainer.save_model(tmp_path / "best")
    classify = pipeline("text-classification", model=tmp_path / "best", device="cpu")
    texts, labels = zip(*reviews(10), strict=True)
    answers = classify(list(texts), batch_size=4)
    assert [answer["label"] for answer in answers] == [("GOOD", "BAD")[i] for i in labels]


def test_text_generation_pipeline():
    model, coder = causal(vocab_size=24), tokenizer()
    texts = ["good word1", "word2 word3 word4"]
    settings = {"max_new_tokens": 30, "do_sample": False}
    answers = pipeline("text-generation", model=model, tokenizer=coder, device="cpu")(
        texts, **settings
    )
    for text, (answer,) in zip(texts, answers, strict=True):
        ids = torch.tensor([coder(text)["input_ids"]])
        wanted = model.generate(ids, use_cache=False, **settings)[0, ids.shape[1] :]
        assert answer["generated_text"].removeprefix(text).split() == coder.decode(wanted).split()


def test_push_to_hub(tmp_path, monkeypatch):
    """The whole code path of Transformers; a folder stands in for the Hub's two calls."""

    class Folder:
        def create_repo(self, repo_id, **kwargs):
            (tmp_path / repo_id).mkdir(parents=True)
            return types.SimpleNamespace(repo_id=repo_id)

        def create_commit(self, repo_id, operations, **kwargs):
            for operation in operations:
                shutil.copy(operation.path_or_fileobj, tmp_path / repo_id / operation.path_in_repo)

    monkeypatch.setattr("transformers.utils.hub.hf_api", Folder)
    monkeypatch.setattr(
        "transformers.utils.hub.create_and_tag_model_card",
        lambda *_, **__: types.SimpleNamespace(save=lambda path: None),
    )
    model = FastRPBForSequenceClassification(config(num_labels=3)).eval()
    model.push_to_hub("someone/model")
    other = AutoModelForSequenceClassification.from_pretrained(tmp_path / "someone/model")
    x = tokens()
    assert torch.equal(other(x).logits, model(x).logits)
    assert (
        json.loads((tmp_path / "someone/model/config.json").read_text())["model_type"] == "fastrpb"
    )
