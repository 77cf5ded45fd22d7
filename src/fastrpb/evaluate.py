"""What the model of a run gives: the metrics of a split, the classes of a new input.

And what training shares with it: a run's model, data and device, random numbers, clear errors.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fastrpb.config import RunConfig
from fastrpb.data import Batch, Batches, Dataset, Split, Task, load, task
from fastrpb.files import shipped_or
from fastrpb.model import Classifier, PairClassifier
from fastrpb.run import Run

_TIMES = 4  # as many sequences as training holds at once: no gradients are held
_PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


class Metrics(NamedTuple):
    """Of a split: mean cross-entropy, accuracy, and the mean of the classes' F1."""

    loss: float
    accuracy: float
    f1: float


def evaluate(
    model: nn.Module,
    split: Split,
    config: RunConfig,
    accelerator: Accelerator,
    between: Callable[[], None] = lambda: None,
) -> Metrics:
    """Loss, accuracy and macro F1 over a split, by all processes together."""
    facts = task_of(config)
    classes = len(facts.classes)
    confusion = torch.zeros(classes, classes, dtype=torch.int64, device=accelerator.device)
    loss = torch.zeros((), device=accelerator.device)
    batches = Batches(
        split,
        evaluation_batch(config, accelerator.num_processes),
        pad_id=facts.pad_id,
        shuffle=False,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    model.eval()
    seed_from("evaluate")  # for encodings that draw noise
    with torch.no_grad():
        for batch in batches:
            labels, *inputs = to_device(batch, accelerator.device)
            logits = classify(model, *inputs)
            loss += cross_entropy(logits, labels, reduction="sum")
            pairs = classes * labels + logits.argmax(-1)
            confusion += pairs.bincount(minlength=classes**2).view(classes, classes)
            between()
    model.train()
    confusion, loss = accelerator.reduce((confusion, loss), reduction="sum")
    return Metrics(loss.item() / len(split), *_scores(confusion.cpu()))


def evaluation_batch(config: RunConfig, processes: int) -> int:
    """Sequences of a batch of evaluation, by all processes together."""
    size = _TIMES * config.batch_size // config.accumulate
    return -(-size // processes) * processes


def to_device(batch: Batch, device: torch.device, masked: bool = False) -> list[Tensor]:
    """Labels, tokens and, if some of them are padding or `masked` says so, their mask."""
    parts = [batch.labels, batch.tokens]
    if masked or not batch.mask.all():  # without a mask attention is faster
        parts.append(batch.mask)
    if device.type == "cuda":  # pinned, so that the copy need not wait for the kernels before it
        parts = [x.pin_memory() for x in parts]
    return [x.to(device, non_blocking=True) for x in parts]


def classify(model: nn.Module, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits (batch, classes) of tokens (batch, length), or of pairs (batch, 2, length)."""
    inputs = [tokens] if mask is None else [tokens, mask]
    if tokens.dim() == 3:
        inputs = [part for x in inputs for part in x.unbind(1)]
    return model(*inputs)


def load_run(folder: str | Path) -> tuple[RunConfig, nn.Module]:
    """Config and model of a run in eval mode: the trained one, or that of the last checkpoint.

    Args:
        folder: of a run, or the name of one that comes with the package: "mnist".
    """
    run = Run(shipped_or(folder))
    config = run.config()
    with own_random_numbers(torch.device("cpu")):  # a new model draws its first weights
        steps = run.steps()  # before it looks for the model: they go when that is there
        if run.model_file.exists():
            return config, trained(run, config)
        if not steps:
            raise ValueError(f"{folder} has no weights; train with: {run.resume_command}")
        tensors, state = run.load(steps[-1])
        run.check(state["config"], config)
        model = build(config)
        model.load_state_dict(under("model.", tensors))
        return config, model.eval()


def trained(run: Run, config: RunConfig) -> nn.Module:
    """The model of a finished run, which must be that of its config."""
    model = run.model()
    if type(model) is not _kind(config) or model.config != config.model:
        raise ValueError(
            f"{run.model_file} is not the model of {run.config_file}; put back the one that was "
            "there, or remove it and resume to train it again"
        )
    return model


def evaluate_run(
    folder: str | Path,
    split: Literal["train", "validation", "test"] = "test",
    *,
    data_dir: str | Path | None = None,
    cpu: bool = False,
) -> Metrics:
    """The metrics of a run's model on a split of its task."""
    config, model = load_run(folder)
    data = load_data(config, data_dir)
    accelerator = make_accelerator(config, cpu)
    rows: Split = getattr(data, split)
    with clear_errors(config, accelerator), own_random_numbers(accelerator.device):
        return evaluate(accelerator.prepare(model), rows, config, accelerator)


def predict(folder: str | Path, items: Sequence[str]) -> list[tuple[str, float]]:
    """The classes of a new input with their probabilities, the likeliest first.

    Args:
        folder: of a run, or the name of one that comes with the package: "mnist".
        items: the path of an image, a text, or an expression; two documents for retrieval.
    """
    config, model = load_run(folder)
    facts = task_of(config)
    what = "the path of an image" if facts.image_shape else "two texts" if facts.pair else "a text"
    if len(items) != 1 + facts.pair:
        raise ValueError(f"{facts.name} takes {what}, got {len(items)} inputs")
    if not all(item.strip() for item in items):
        raise ValueError(f"{facts.name} takes {what}, but an input is empty")
    with torch.no_grad(), own_random_numbers(torch.device("cpu")):
        seed_from("evaluate")
        logits = model(*(facts.encode(item).unsqueeze(0) for item in items))
    probabilities = logits.softmax(-1).squeeze(0).tolist()
    return sorted(zip(facts.classes, probabilities, strict=True), key=lambda pair: -pair[1])


def make_accelerator(config: RunConfig, cpu: bool, **options: Any) -> Accelerator:
    """Of accelerate, in the precision of a run."""
    # One process may train several configs, one after another, in other precisions.
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision=_PRECISIONS[config.precision], cpu=cpu, **options)
    accelerator.gradient_accumulation_steps = 1  # whatever the environment says: it is the config's
    return accelerator


def build(config: RunConfig) -> nn.Module:
    """A new model for the task of a run."""
    return _kind(config)(config.model)


def _kind(config: RunConfig) -> type[Classifier] | type[PairClassifier]:
    return PairClassifier if task_of(config).pair else Classifier


def task_of(config: RunConfig) -> Task:
    """The task of a run, at the length of its config."""
    return task(config.task, None if config.model.image else config.model.max_length)


def load_data(config: RunConfig, data_dir: str | Path | None) -> Dataset:
    """The data of a run, at the length and with the validation split of its config."""
    length = None if config.model.image else config.model.max_length
    return load(config.task, data_dir, max_length=length, validation=config.validation)


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, without that beginning."""
    return {name[len(prefix) :]: x for name, x in tensors.items() if name.startswith(prefix)}


def seed_from(*values: object) -> None:
    """Random numbers that depend on these values alone."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=7).digest()
    seed = int.from_bytes(digest, "big")
    random.seed(seed)
    torch.manual_seed(seed)


def _scores(confusion: Tensor) -> tuple[float, float]:
    """Accuracy and macro F1 of the counts [label, prediction]; classes that never occur are out.

    >>> _scores(torch.tensor([[2, 0, 0], [1, 1, 0], [0, 0, 0]]))
    (0.75, 0.733...)
    """
    hits = confusion.diagonal().double()
    occurs = (confusion.sum(0) + confusion.sum(1)).double()
    f1 = (2 * hits / occurs)[occurs > 0].mean()
    return (hits.sum() / confusion.sum()).item(), f1.item()


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """The caller's generators are afterwards what they were before."""
    before = random.getstate()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(before)


@contextmanager
def clear_errors(config: RunConfig, accelerator: Accelerator) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one, and the CPU's has no name
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"torch.compile cannot compile the model here: {reason}; remove the run's folder "
                "and begin again with --no-compile"
            ) from error
        too_large = any(word in str(error) for word in ("alloc", "size calculation overflow"))
        if not isinstance(error, torch.OutOfMemoryError) and not too_large:
            raise
        raise ValueError(
            f"{accelerator.device} has too little memory for this model at batch_size="
            f"{config.batch_size}; try a smaller batch or model, accumulate=4, or checkpoint=true"
        ) from error
