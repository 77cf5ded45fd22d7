"""A run as a frozen config, and the set-ups of the paper as functions that return one.

`preset(task, attention, features, position)` is a cell of the paper's tables: the task chooses the
set-up (Table 2 for mnist, Tables 1 and 3 for the Long Range Arena), the other words its row and
column. `best(task)` is the strongest set-up known here. `override` changes single fields by their
names.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from fastrpb.checks import check_choice, check_size, nearest
from fastrpb.data import TASKS, task
from fastrpb.files import shipped_or
from fastrpb.model_config import ON_OUTPUT, Attention, Features, ModelConfig, Position

Schedule = Literal["constant", "linear", "cosine", "rsqrt"]
Precision = Literal["fp32", "bf16", "fp16"]
Validation = Literal["train", "test"]
Keep = Literal["last", "best"]

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

_NUMBERS = ("learning_rate", "weight_decay", "bias_rate", "bias_decay", "beta2", "eps", "clip")

# What the task decides about the model.
OF_THE_TASK = ("vocab_size", "num_classes", "image")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes. Impossible values raise ValueError.

    >>> config = preset("digits", position="none")
    >>> config.model.position, config.model.num_classes
    ('none', 10)
    >>> override(config, {"seed": 3, "layers": 1}).model.layers
    1
    """

    task: str
    model: ModelConfig
    seed: Annotated[int, "of the first weights, the order of the data and the dropout"] = 0
    batch_size: Annotated[int, "examples of a step, over all processes"] = 32
    epochs: Annotated[int | None, "of training; or give steps"] = None
    steps: Annotated[int | None, "of training; or give epochs"] = None
    learning_rate: Annotated[float, "at its peak, or the factor of rsqrt"] = 1e-3
    schedule: Annotated[Schedule, "of the learning rate after the warm-up"] = "linear"
    warmup: Annotated[int, "steps of a linear rise"] = 0
    weight_decay: Annotated[float, "of AdamW"] = 0.0
    bias_rate: Annotated[float, "learning rate of FastRPB's w, in those of the rest"] = 1.0
    bias_decay: Annotated[float | None, "weight decay of FastRPB's w; default: as the rest"] = None
    beta2: Annotated[float, "of AdamW; the first is 0.9"] = 0.999
    eps: Annotated[float, "of AdamW"] = 1e-8
    clip: Annotated[float | None, "norm at which gradients are cut; default: never"] = None
    validation: Annotated[Validation, "split it is taken from, where the source has none"] = "train"
    keep: Annotated[Keep, "weights to keep: the last, or those of the best validation"] = "last"
    eval_every: Annotated[int | None, "steps between validations; default: an epoch"] = None
    save_every: Annotated[int, "steps between checkpoints"] = 500
    accumulate: Annotated[int, "parts in which a batch passes, to save memory"] = 1
    precision: Annotated[Precision, "of the products"] = "fp32"
    compile: Annotated[bool, "by torch.compile, and replayed by a GPU"] = False

    def __post_init__(self):
        for name, kind in (
            ("schedule", Schedule),
            ("precision", Precision),
            ("validation", Validation),
            ("keep", Keep),
        ):
            check_choice(name, getattr(self, name), get_args(kind))
        self._check_numbers()
        if self.schedule == "rsqrt" and not self.warmup:
            raise ValueError("schedule='rsqrt' divides by √warmup at first: give warmup ≥ 1")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size={self.batch_size} does not part into accumulate={self.accumulate}"
            )
        if self.model.head_norm and self.batch_size == self.accumulate:
            raise ValueError(
                "head_norm compares the examples of a pass: batch_size/accumulate must be at least "
                f"2, got {self.batch_size}/{self.accumulate}"
            )
        if self.keep == "best" and self.validation == "test":
            raise ValueError(
                "keep='best' with validation='test' would choose the weights by the test split; "
                "use validation='train'"
            )
        model = self.model
        if model.layers == 1 and model.pooling == "cls" and model.position in ON_OUTPUT:
            raise ValueError(
                "in the only layer CLS alone is read, which gets no bias: FastRPB would do "
                "nothing; use pooling='mean' or two layers"
            )
        self._check_task()

    def _check_numbers(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                "give the length of the training as epochs or as steps, "
                f"got epochs={self.epochs} and steps={self.steps}"
            )
        for name in ("batch_size", "save_every", "accumulate"):
            check_size(name, getattr(self, name))
        for name in ("epochs", "steps", "eval_every"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        for name in ("seed", "warmup"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < 2**31:
                raise ValueError(f"{name}={value!r} must be a whole number from 0 to {2**31 - 1}")
        for name in _NUMBERS:
            value = getattr(self, name)
            below = 1 if name == "beta2" else math.inf
            if value is None and name in ("clip", "bias_decay"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name}={value!r} must be a number")
            if not 0 <= value < below:
                raise ValueError(f"{name}={value} must be from 0 to below {below}")
            if name in ("clip", "eps") and not value:
                raise ValueError(f"{name}=0 leaves nothing of the gradients; give more")
        if not isinstance(self.compile, bool):
            raise ValueError(f"compile={self.compile!r} must be true or false")

    def _check_task(self) -> None:
        facts = task(self.task)
        expected = (facts.vocabulary, len(facts.classes), facts.image_shape)
        got = tuple(getattr(self.model, name) for name in OF_THE_TASK)
        if got != expected:
            raise ValueError(
                f"{self.task} has (vocab_size, num_classes, image) = {expected}, "
                f"but the model has {got}"
            )
        if facts.image_shape and self.model.max_length != facts.max_length:
            raise ValueError(
                f"{self.task} always has {facts.max_length} pixels, "
                f"but max_length={self.model.max_length}"
            )

    @property
    def name(self) -> str:
        """Task, attention, position, seed, and a mark of the config where it is no preset.

        >>> preset("digits").name
        'digits-sikf-fastrpb-s0'
        """
        model = self.model
        if self.task in BEST and self == replace(best(self.task), seed=self.seed):
            return f"{self.task}-best-s{self.seed}"
        name = f"{self.task}-{row(model.attention, model.features)}-{model.position}-s{self.seed}"
        plain = preset(self.task, model.attention, model.features, model.position)
        if self == replace(plain, seed=self.seed):
            return name
        # The differences alone, so that fields that are yet to come leave the mark as it is.
        changed = ";".join(differences(replace(plain, seed=self.seed), self))
        return f"{name}-{hashlib.blake2b(changed.encode(), digest_size=3).hexdigest()}"

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate of step 1..steps.

        With r = min(1, step/warmup): linear r·(1 - p) and cosine r·(1 + cos πp)/2, where p is the
        part of the steps after the warm-up that is over; rsqrt r/√max(step, warmup).
        """
        rise = min(1.0, step / self.warmup) if self.warmup else 1.0
        # At the last step the rate is not yet zero, so that the step counts.
        over = max(0, step - 1 - self.warmup) / max(1, steps - self.warmup)
        fall = {
            "constant": lambda: 1.0,
            "linear": lambda: 1.0 - over,
            "cosine": lambda: (1 + math.cos(math.pi * over)) / 2,
            "rsqrt": lambda: max(step, self.warmup) ** -0.5,
        }[self.schedule]()
        return self.learning_rate * rise * fall


def with_row(row: str) -> tuple[Attention, Features]:
    """The attention and the features of a row; softmax attention has none and says "sikf"."""
    check_choice("features", row, tuple(ROWS))
    return ("softmax", "sikf") if row == "softmax" else ("linear", row)  # pyright: ignore[reportReturnType]


def row(attention: str, features: str) -> str:
    """The row of a table: the feature map, or "softmax"."""
    return "softmax" if attention == "softmax" else features


def override(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """The config with other values of some fields, of the run's or of the model's."""
    run = {f.name for f in fields(RunConfig)} - {"task", "model"}
    model = {f.name for f in fields(ModelConfig)} - set(OF_THE_TASK)
    _check_names(values, run | model)
    mine = {name: value for name, value in values.items() if name in run}
    for length, other in (("epochs", "steps"), ("steps", "epochs")):
        if mine.get(length) is not None:
            mine.setdefault(other, None)
    its = {name: value for name, value in values.items() if name in model}
    return replace(config, model=replace(config.model, **its), **mine)


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
    if task not in TASKS:
        raise _unknown(task)
    return _SETUPS[task](attention, features, position)


def _unknown(task: str) -> ValueError:
    return ValueError(f"unknown task {task!r}; {nearest(task, TASKS)}")


def digits(attention: Attention, features: Features, position: Position) -> RunConfig:
    """The shipped digits on a laptop, not in the paper.

    There are no absolute positions: without `position` the model sees a bag of pixels.
    """
    size = {"dim": 64, "layers": 2, "heads": 4, "mlp_dim": 128, "dropout": 0.0}
    bias: dict[str, Any] = {"filters": 64, "bias_reach": 8.0, "bias_kind": "full"}
    model = _model("digits", attention, features, position, **size, **bias)
    model = replace(model, absolute="none", pooling="mean", norm="batch")
    return RunConfig("digits", model, epochs=12, batch_size=32, learning_rate=4e-3, warmup=40)


# Table 5: the learning rates that a search found without and with FastRPB.
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

    Where it has FastRPB it takes the mean of all pixels: the CLS token that it has otherwise gets
    no bias, and in the only layer nobody reads what the pixels get.
    """
    size = {"dim": 128, "layers": 1, "heads": 8, "qkv_dim": 64, "mlp_dim": 128, "realizations": 32}
    drop = {"dropout": 0.3, "attention_dropout": 0.2}
    pooling = "mean" if position in ON_OUTPUT else "cls"
    model = _model("cifar10", attention, features, position, **size, **drop, pooling=pooling)
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
    """Wider and deeper than MNIST's, far weights small; near grey levels begin alike."""
    return _best(
        cifar10("linear", "sikf", "fastrpb2d"),
        **{"dim": 256, "qkv_dim": 256, "layers": 6, "heads": 8, "mlp_dim": 512, "dropout": 0.2},
        **{"filters": 256, "bias_kind": "full", "bias_reach": 3.0, "bias_envelope": True},
        **{"head_norm": True, "embedding_init": "smooth", "weight_decay": 0.1},
        **{"epochs": 44, "batch_size": 64, "learning_rate": 2e-3, "warmup": 700},
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
    """Small, and filters of up to 128 tokens: wider or deeper models did not learn the brackets."""
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
    if task not in TASKS:
        raise _unknown(task)
    if task not in BEST:
        raise ValueError(f"there is a best set-up for {', '.join(BEST)}, not for {task!r}")
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


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config as JSON has it, those of the run and of its model in one dict."""
    return {**config["model"], **{name: x for name, x in config.items() if name != "model"}}


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """A config as JSON has it, with the defaults of fields that came after it was written.

    >>> completed({"task": "digits", "model": {"layers": 1}})["model"]["norm"]
    'layer'
    """
    own, model = (
        {f.name: f.default for f in fields(kind) if f.default is not MISSING}
        for kind in (RunConfig, ModelConfig)
    )
    return {**own, **config, "model": {**model, **config["model"]}}


def differences(saved: RunConfig, asked: RunConfig) -> list[str]:
    """The fields in which two configs differ.

    >>> differences(preset("digits"), override(preset("digits"), {"seed": 1}))
    ['seed 0 → 1']
    """
    old, new = (flat(json.loads(to_json(config))) for config in (saved, asked))
    return changes(old, new)


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The same of `flat` configs.

    >>> changes({"seed": 0, "layers": 2}, {"seed": 0, "layers": 3})
    ['layers 2 → 3']
    """
    return [f"{name} {old.get(name)} → {x}" for name, x in new.items() if old.get(name) != x]


def to_json(config: RunConfig) -> str:
    return json.dumps(asdict(config), indent=2) + "\n"


def from_json(content: str, where: object) -> RunConfig:
    """The config that `to_json` wrote; `where` names it in an error."""
    try:
        values = json.loads(content)
        if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
            raise ValueError("it needs the objects of a run and of its model")
        model = values.pop("model")
        for given, kind in ((values, RunConfig), (model, ModelConfig)):
            _check_names(given, {f.name for f in fields(kind)})
        if isinstance(model.get("image"), list):
            model["image"] = tuple(model["image"])
        return RunConfig(model=ModelConfig(**model), **values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} is not the config of a run: {error}") from None


def load_config(path: str | Path) -> RunConfig:
    """The config of a file, or of a run's folder."""
    path = shipped_or(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        return from_json(path.read_text(), path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"cannot read the config {path}: {reason}") from None


def _check_names(values: dict[str, Any], names: set[str]) -> None:
    for name in values:
        if name not in names:
            raise ValueError(f"there is no field {name!r}; {nearest(name, sorted(names))}")
