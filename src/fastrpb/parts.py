"""What training and evaluation share: a run's model, data, device, random numbers and errors."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from fastrpb.config import RunConfig
from fastrpb.data import Batch, Dataset, Task, load, task
from fastrpb.files import first_line
from fastrpb.model import Classifier, PairClassifier

_PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def make_accelerator(config: RunConfig, cpu: bool, **options: Any) -> Accelerator:
    """Of accelerate, in the precision of a run.

    Without a GPU several processes would each train alone, unless it is told that there is none.
    """
    cpu = cpu or not torch.accelerator.is_available()
    # One process may train several configs, one after another, in other precisions.
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision=_PRECISIONS[config.precision], cpu=cpu, **options)
    accelerator.gradient_accumulation_steps = 1  # whatever the environment says: it is the config's
    return accelerator


def build(config: RunConfig) -> nn.Module:
    """A new model for the task of a run."""
    return kind_of(config)(config.model)


def kind_of(config: RunConfig) -> type[Classifier] | type[PairClassifier]:
    return PairClassifier if task_of(config).pair else Classifier


def task_of(config: RunConfig) -> Task:
    """The task of a run, at the length of its config."""
    return task(config.task, None if config.model.image else config.model.max_length)


def load_data(config: RunConfig, data_dir: str | Path | None) -> Dataset:
    """The data of a run, at the length and with the validation split of its config."""
    length = None if config.model.image else config.model.max_length
    return load(config.task, data_dir, max_length=length, validation=config.validation)


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


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, without that beginning."""
    return {name[len(prefix) :]: x for name, x in tensors.items() if name.startswith(prefix)}


def seed_from(*values: object) -> None:
    """Random numbers that depend on these values alone."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=7).digest()
    seed = int.from_bytes(digest, "big")
    random.seed(seed)
    torch.manual_seed(seed)


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
            raise ValueError(
                f"torch.compile cannot compile the model here: {first_line(error)}; remove the "
                "run's folder and begin again with --no-compile"
            ) from error
        too_large = any(word in str(error) for word in ("alloc", "size calculation overflow"))
        if not isinstance(error, torch.OutOfMemoryError) and not too_large:
            raise
        raise ValueError(
            f"{accelerator.device} has too little memory for this model at batch_size="
            f"{config.batch_size}; try a smaller batch or model, accumulate=4, or checkpoint=true"
        ) from error
