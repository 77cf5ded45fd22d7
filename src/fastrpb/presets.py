"""The set-ups of the paper, and better ones, as functions that return a config.

`preset(task, attention, features, position)` is a cell of the paper's tables: the task chooses the
set-up (Table 2 for mnist, Tables 1 and 3 for the Long Range Arena), the other words its row and
column. `best(task)` is the strongest set-up known here. `name_of` says which of them a config is.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastrpb.checks import check_choice
from fastrpb.config import RunConfig, differences, override
from fastrpb.data import TASKS, task
from fastrpb.model_config import ON_OUTPUT, Attention, Features, ModelConfig, Position

CELL = ("attention", "features", "position")  # of a table: the first two are its row
# What the rows and columns of the paper's tables are called.
ROWS = {
    "softmax": "Original",
    "dpfp": "Linear, DPFP",
    "sikf": "Linear, SIKF",
    "elu1": "Linear, ELU+1",
    "relu": "Linear, ReLU",
    "favor": "Performer",
}
COLUMNS = {
    "none": "None",
    "fastrpb": "FastRPB",
    "fastrpb2d": "FastRPB 2D",
    "sinespe": "sineSPE",
    "convspe": "convSPE",
    "rpe": "RPE",
    "rope": "RoPE",
    "t5": "T5",
    "alibi": "ALiBi",
}


def with_row(row: str) -> tuple[Attention, Features]:
    """The attention and the features of a row; softmax attention has none and says "sikf"."""
    check_choice("features", row, tuple(ROWS))
    return ("softmax", "sikf") if row == "softmax" else ("linear", row)  # pyright: ignore[reportReturnType]


def row(attention: str, features: str) -> str:
    """The row of a table: the feature map, or "softmax"."""
    return "softmax" if attention == "softmax" else features


def preset(
    task: str,
    attention: Attention = "linear",
    features: Features = "sikf",
    position: Position = "fastrpb",
) -> RunConfig:
    """The paper's set-up of a cell: a task, an attention and a positional encoding.

    >>> preset("mnist", features="dpfp").learning_rate
    7e-05
    """
    check_choice("task", task, TASKS)
    return _SETUPS[task](attention, features, position)


def digits(attention: Attention, features: Features, position: Position) -> RunConfig:
    """The shipped digits on a laptop, not in the paper.

    There are no absolute positions: without `position` the model sees a bag of pixels.
    """
    size = {"dim": 64, "layers": 2, "heads": 4, "mlp_dim": 128, "dropout": 0.0}
    bias: dict[str, Any] = {"filters": 64, "bias_reach": 8.0, "bias_kind": "full"}
    model = _model("digits", attention, features, position, **size, **bias)
    model = replace(model, absolute="none", pooling="mean", norm="batch")
    return RunConfig("digits", model, epochs=12, batch_size=32, learning_rate=4e-3, warmup=40)


# Table 4: the learning rates that a search found without and with FastRPB.
_MNIST_RATES = {
    "softmax": (1.05e-4, 1.35e-4),
    "dpfp": (1.3e-4, 0.7e-4),
    "sikf": (1.25e-4, 1.45e-4),
    "elu1": (1.3e-4, 1.25e-4),
    "favor": (1.2e-4, 1.0e-4),
}


def mnist(attention: Attention, features: Features, position: Position) -> RunConfig:
    """Table 2. ReLU, which that table lacks, takes the learning rates of ELU+1."""
    model = _model("mnist", attention, features, position, dim=256, layers=8, heads=8)
    kind = row(attention, features).replace("relu", "elu1")
    rate = _MNIST_RATES[kind][position in ON_OUTPUT]
    return RunConfig(
        "mnist", model, epochs=25, batch_size=160, learning_rate=rate, weight_decay=0.01
    )


def listops(attention: Attention, features: Features, position: Position) -> RunConfig:
    """Table 1, ListOps; with the brackets that the paper's runs lost."""
    size = {"dim": 512, "layers": 6, "heads": 8, "mlp_dim": 2048}
    model = _model("listops", attention, features, position, **size, attention_dropout=0.1)
    return _lra("listops", model, steps=10_000, learning_rate=0.0125, warmup=1000, eval_every=1000)


def text(attention: Attention, features: Features, position: Position) -> RunConfig:
    """Table 1, TC: trained on all of train and validated on test, as the paper did."""
    size = {"dim": 256, "layers": 4, "heads": 4, "mlp_dim": 1024}
    model = _model("text", attention, features, position, **size, attention_dropout=0.1)
    return _lra("text", model, steps=30_000, learning_rate=0.0125, warmup=8000, validation="test")


def retrieval(attention: Attention, features: Features, position: Position) -> RunConfig:
    """Table 1, AAN."""
    size = {"dim": 128, "layers": 4, "heads": 4, "mlp_dim": 512}
    model = _model("retrieval", attention, features, position, **size, attention_dropout=0.1)
    return _lra("retrieval", model, steps=15_000, learning_rate=0.005, warmup=3000, eval_every=1500)


def cifar10(attention: Attention, features: Features, position: Position) -> RunConfig:
    """Table 1, CIFAR10: one layer.

    It takes the mean of all pixels: a CLS token gets no bias, and what the pixels get in an only
    layer nobody would read.
    """
    size = {"dim": 128, "layers": 1, "heads": 8, "qkv_dim": 64, "mlp_dim": 128, "realizations": 32}
    drop = {"dropout": 0.3, "attention_dropout": 0.2}
    model = _model("cifar10", attention, features, position, **size, **drop, pooling="mean")
    return RunConfig(
        "cifar10",
        model,
        steps=93_600,
        batch_size=96,
        learning_rate=2.5e-4,
        schedule="cosine",
        warmup=468,
        beta2=0.98,
        eps=1e-9,
    )


_SETUPS: dict[str, Callable[[Attention, Features, Position], RunConfig]] = {
    "digits": digits,
    "mnist": mnist,
    "cifar10": cifar10,
    "text": text,
    "retrieval": retrieval,
    "listops": listops,
}


def best_mnist() -> RunConfig:
    """Local 2D filters, one for each channel; small enough to ship."""
    return _best(
        mnist("linear", "sikf", "fastrpb2d"),
        **{"dim": 64, "layers": 4, "heads": 4, "mlp_dim": 128, "dropout": 0.2},
        **{"filters": 64, "bias_kind": "full", "bias_reach": 3.0, "bias_threshold": 1e-3},
        **{"bias_rate": 0.3, "weight_decay": 0.1},
        **{"epochs": 15, "batch_size": 128, "learning_rate": 4e-3, "warmup": 300},
    )


def best_cifar10() -> RunConfig:
    """Deep, mirror images alike, a GELU after every bias; near grey levels begin alike."""
    return _best(
        cifar10("linear", "sikf", "fastrpb2d"),
        **{"dim": 192, "qkv_dim": 192, "layers": 10, "heads": 6, "mlp_dim": 384, "dropout": 0.2},
        **{"filters": 48, "bias_kind": "full", "bias_reach": 3.0, "bias_envelope": True},
        **{"bias_symmetric": True, "attention_gelu": True},
        **{"head_norm": True, "embedding_init": "smooth", "weight_decay": 0.1},
        **{"epochs": 36, "batch_size": 64, "learning_rate": 2e-3, "warmup": 700},
        **{"eval_every": 1406},  # two epochs
    )


def best_text() -> RunConfig:
    """4096 bytes; filters of 1 to 16, one for each channel, whose far weights stay small."""
    return _best(
        text("linear", "sikf", "fastrpb"),
        **{"max_length": 4096, "dim": 256, "layers": 4, "heads": 4, "mlp_dim": 512},
        **{"filters": 256, "bias_reach": 16.0, "bias_envelope": True, "head_norm": True},
        **{"dropout": 0.25, "weight_decay": 0.1, "validation": "train"},
        **{"epochs": 18, "batch_size": 32, "learning_rate": 1e-3, "warmup": 400},
    )


def best_retrieval() -> RunConfig:
    """Filters of 1 to 8 bytes; the head sees product and difference of the two documents."""
    return _best(
        retrieval("linear", "sikf", "fastrpb"),
        **{"dim": 128, "layers": 4, "heads": 4, "mlp_dim": 256, "pairing": "interact"},
        **{"filters": 128, "bias_reach": 8.0, "bias_envelope": True, "head_norm": True},
        **{"dropout": 0.1, "weight_decay": 0.05, "eval_every": None},
        **{"epochs": 6, "batch_size": 64, "learning_rate": 2e-3, "warmup": 300},
    )


def best_listops() -> RunConfig:
    """Small, filters of up to 128 tokens; no wider or deeper one that was tried did as well."""
    return _best(
        listops("linear", "sikf", "fastrpb"),
        **{"dim": 64, "layers": 4, "heads": 4, "mlp_dim": 128},
        **{"filters": 64, "bias_reach": 128.0, "bias_envelope": True, "head_norm": True},
        **{"dropout": 0.1, "weight_decay": 0.05, "eval_every": None},
        **{"epochs": 8, "batch_size": 32, "learning_rate": 2e-3, "warmup": 500},
    )


def _best(config: RunConfig, **values: Any) -> RunConfig:
    """What all of them share: no absolute positions, batch norm, the mean of all tokens."""
    model = {"absolute": "none", "norm": "batch", "pooling": "mean", "attention_dropout": 0.0}
    run = {"schedule": "cosine", "keep": "best", "precision": "bf16", "compile": True}
    return override(config, {**model, **run, "beta2": 0.999, "eps": 1e-8, **values})


BEST: dict[str, Callable[[], RunConfig]] = {
    "mnist": best_mnist,
    "cifar10": best_cifar10,
    "text": best_text,
    "retrieval": best_retrieval,
    "listops": best_listops,
}


def best(task: str) -> RunConfig:
    """The strongest set-up of a task that was found here: linear attention with FastRPB.

    >>> best("mnist").model.filters
    64
    """
    check_choice("task", task, TASKS)
    if task not in BEST:
        raise ValueError(f"there is no best set-up for {task!r}, only for {', '.join(BEST)}")
    return BEST[task]()


def _model(
    name: str, attention: Attention, features: Features, position: Position, **size: Any
) -> ModelConfig:
    """Absolute positions: learned for pixels, sinusoids for text, none beside SPE, as published."""
    facts = task(name)
    spe = position in ("sinespe", "convspe")
    return ModelConfig(
        vocab_size=facts.vocabulary,
        max_length=facts.max_length,
        num_classes=len(facts.classes),
        image=facts.image_shape,
        attention=attention,
        features=features,
        position=position,
        absolute="none" if spe else "learned" if facts.image_shape else "sinusoidal",
        **size,
    )


def _lra(name: str, model: ModelConfig, **values: Any) -> RunConfig:
    shared = {"batch_size": 8, "schedule": "rsqrt", "weight_decay": 0.1, "beta2": 0.98, "eps": 1e-9}
    return RunConfig(name, model, **shared, **values)


def name_of(config: RunConfig) -> str:
    """Task, attention, position, seed, and a mark of the config where it is no preset.

    >>> name_of(preset("digits"))
    'digits-sikf-fastrpb-s0'
    """
    task, model, seed = config.task, config.model, config.seed
    if task in BEST and config == replace(best(task), seed=seed):
        return f"{task}-best-s{seed}"
    name = f"{task}-{row(model.attention, model.features)}-{model.position}-s{seed}"
    plain = replace(preset(task, model.attention, model.features, model.position), seed=seed)
    if config == plain:
        return name
    # The differences alone, so that fields that are yet to come leave the mark as it is.
    changed = ";".join(differences(plain, config))
    return f"{name}-{hashlib.blake2b(changed.encode(), digest_size=3).hexdigest()}"
