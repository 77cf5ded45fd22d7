"""What the model of a run gives: the metrics of a split, the classes of a new input."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fastrpb.config import RunConfig
from fastrpb.data import Batches, Split
from fastrpb.files import shipped_or
from fastrpb.parts import (
    build,
    classify,
    clear_errors,
    kind_of,
    load_data,
    make_accelerator,
    own_random_numbers,
    seed_from,
    task_of,
    to_device,
    under,
)
from fastrpb.run import Run

_TIMES = 4  # as many sequences as training holds at once: no gradients are held


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
    if type(model) is not kind_of(config) or model.config != config.model:
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


def _scores(confusion: Tensor) -> tuple[float, float]:
    """Accuracy and macro F1 of the counts [label, prediction]; classes that never occur are out.

    >>> _scores(torch.tensor([[2, 0, 0], [1, 1, 0], [0, 0, 0]]))
    (0.75, 0.733...)
    """
    hits = confusion.diagonal().double()
    occurs = (confusion.sum(0) + confusion.sum(1)).double()
    f1 = (2 * hits / occurs)[occurs > 0].mean()
    return (hits.sum() / confusion.sum()).item(), f1.item()
