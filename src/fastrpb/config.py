"""A run as a frozen config; `override` changes single fields by their names."""

import json
import math
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from fastrpb.checks import check_choice, check_flag, check_number, check_size, nearest
from fastrpb.data import task
from fastrpb.files import shipped_or
from fastrpb.model_config import ON_OUTPUT, ModelConfig

Schedule = Literal["constant", "linear", "cosine", "rsqrt"]
Precision = Literal["fp32", "bf16", "fp16"]
Validation = Literal["train", "test"]
Keep = Literal["last", "best"]

_NUMBERS = ("learning_rate", "weight_decay", "bias_rate", "bias_decay", "beta2", "eps", "clip")

# What the task decides about the model.
OF_THE_TASK = ("vocab_size", "num_classes", "image")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes. Impossible values raise ValueError or TypeError.

    >>> from fastrpb.presets import preset
    >>> config = preset("digits", position="none")
    >>> config.model.position, config.model.num_classes
    ('none', 10)
    >>> override(config, {"seed": 3, "layers": 1}).model.layers
    1
    """

    task: str
    model: ModelConfig
    seed: Annotated[int, "seed of the initial weights, the order of the data and the dropout"] = 0
    batch_size: Annotated[int, "examples a step, over all processes"] = 32
    epochs: Annotated[int | None, "passes over the training data; or give --steps"] = None
    steps: Annotated[int | None, "steps of the optimiser; or give --epochs"] = None
    learning_rate: Annotated[float, "peak learning rate; of schedule rsqrt, its factor"] = 1e-3
    schedule: Annotated[Schedule, "how the learning rate falls after the warm-up"] = "linear"
    warmup: Annotated[int, "steps over which the learning rate rises"] = 0
    weight_decay: Annotated[float, "weight decay of AdamW"] = 0.0
    bias_rate: Annotated[
        float, "learning rate of FastRPB's w, as a multiple of that of the rest"
    ] = 1.0
    bias_decay: Annotated[
        float | None, "weight decay of FastRPB's w; default: that of the rest"
    ] = None
    beta2: Annotated[float, "second beta of AdamW; the first is 0.9"] = 0.999
    eps: Annotated[float, "epsilon of AdamW"] = 1e-8
    clip: Annotated[float | None, "largest norm of the gradients; default: no limit"] = None
    validation: Annotated[
        Validation, "split that validation is taken from, where the source has none of its own"
    ] = "train"
    keep: Annotated[Keep, "which weights to keep: the last, or the best by validation"] = "last"
    eval_every: Annotated[int | None, "steps between validations; default: an epoch"] = None
    save_every: Annotated[int, "steps between checkpoints"] = 500
    accumulate: Annotated[int, "parts that a batch is computed in, to save memory"] = 1
    precision: Annotated[Precision, "number format of matrix products"] = "fp32"
    compile: Annotated[bool, "use torch.compile and, on a GPU, replay recorded steps"] = False

    def __post_init__(self):
        if not isinstance(self.model, ModelConfig):
            raise TypeError(f"model must be a ModelConfig, got {self.model!r}")
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
        self.check_parts()
        if self.keep == "best" and self.validation == "test":
            raise ValueError(
                "keep='best' with validation='test' would choose the weights by the test split; "
                "use validation='train'"
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
            if name in ("clip", "bias_decay") and getattr(self, name) is None:
                continue
            value = getattr(self, name)
            below = 1 if name == "beta2" else 1e300  # whole numbers can be too large for a float
            check_number(name, value)
            if not 0 <= value < below:
                raise ValueError(f"{name}={value} must be from 0 to below {below}")
            if name in ("clip", "eps") and not value:
                raise ValueError(f"{name}=0 leaves nothing of the gradients; give more")
            object.__setattr__(self, name, float(value))  # 1 and 1.0 are equal, but not as JSON
        check_flag("compile", self.compile)

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

    def check_parts(self, processes: int = 1) -> None:
        """That a batch parts evenly, into passes that have the examples that a norm compares."""
        parts, words = processes * self.accumulate, f"accumulate={self.accumulate}"
        words = words if processes == 1 else f"{processes} processes times {words}"
        if self.batch_size % parts:
            raise ValueError(f"batch_size={self.batch_size} is not divisible by {words}")
        if self.model.head_norm and self.batch_size == parts:
            raise ValueError(
                f"head_norm is a batch norm and needs two examples a pass: batch_size="
                f"{self.batch_size} leaves one for each of {words}; use at least {2 * parts}"
            )

    def check_bias_is_read(self) -> None:
        """Refuse to train a bias that changes nothing; such a run can still be read."""
        model = self.model
        if model.layers == 1 and model.pooling == "cls" and model.position in ON_OUTPUT:
            raise ValueError(
                "with one layer and pooling='cls' only CLS is read, which gets no bias: FastRPB "
                "would change nothing; use pooling='mean' or at least two layers"
            )

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


def override(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """The config with other values of some fields, of the run's or of the model's."""
    run = {f.name for f in fields(RunConfig)} - {"task", "model"}
    model = {f.name for f in fields(ModelConfig)} - set(OF_THE_TASK)
    for name in OF_THE_TASK:
        if name in values:
            raise ValueError(f"{name} is decided by the task {config.task}")
    _check_names(values, run | model)
    mine = {name: value for name, value in values.items() if name in run}
    for length, other in (("epochs", "steps"), ("steps", "epochs")):
        if mine.get(length) is not None:
            mine.setdefault(other, None)
    its = {name: value for name, value in values.items() if name in model}
    return replace(config, model=replace(config.model, **its), **mine)


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
    model |= config["model"]
    if model.get("attention") == "softmax":  # of which older ones named features
        model["features"] = ModelConfig.features
    return {**own, **config, "model": model}


def differences(saved: RunConfig, asked: RunConfig) -> list[str]:
    """The fields in which two configs differ.

    >>> from fastrpb.presets import preset
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
    except (TypeError, ValueError, RecursionError) as error:
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
