"""Real tasks as tokens: `load(name)` gives train, validation and test.

Every task is a file of this package, with the facts `TASK` and the function `read`. `digits` needs
torch alone; the others need the packages of `pip install '.[data]'`.
"""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Literal

from fastrpb.checks import nearest
from fastrpb.data.batches import Batch, Batches
from fastrpb.data.dataset import DataError, Dataset, Split, Task, stratified

__all__ = ["TASKS", "Batch", "Batches", "DataError", "Dataset", "Split", "Task", "load", "task"]

TASKS = ("digits", "mnist", "cifar10", "text", "retrieval", "listops")

HELD_OUT = 0.1  # of train, where the source has no validation split


def task(name: str, max_length: int | None = None) -> Task:
    """The facts of a task and its tokenizer, without reading its data.

    Args:
        name: one of `TASKS`.
        max_length: another length than the paper's, for tasks that are not images.

    >>> facts = task("digits")
    >>> facts.vocabulary, len(facts.classes), facts.max_length, facts.image_shape
    (17, 10, 64, (8, 8))
    """
    facts: Task = _module(name).TASK
    if max_length is None:
        return facts
    if facts.image_shape:
        raise DataError(
            f"{name} always has {facts.max_length} pixels; leave max_length={max_length} out"
        )
    if not isinstance(max_length, int) or not 1 <= max_length < 2**31:
        raise DataError(f"max_length={max_length} must be a whole number from 1 to {2**31 - 1}")
    return replace(facts, max_length=max_length)


def load(
    name: str,
    data_dir: str | Path | None = None,
    *,
    max_length: int | None = None,
    validation: Literal["train", "test"] = "train",
) -> Dataset:
    """A task with its splits, tokenised at the first call and memory-mapped from then on.

    Args:
        name: one of `TASKS`.
        data_dir: a folder that holds the files, or a folder of them for each task; default: the
            environment variable `FASTRPB_DATA`; where neither is given, the Hub. `digits` is
            inside the package and ignores it.
        max_length: as in `task`.
        validation: where the source has no validation split (mnist, cifar10, text): "train" holds
            out a fixed tenth of every class of train; "test" trains on all and validates on test,
            as the paper did with IMDB.

    >>> data = load("digits")
    >>> len(data.train), len(data.validation), len(data.test)
    (1259, 269, 269)
    """
    facts = task(name, max_length)
    if validation not in ("train", "test"):
        raise DataError(f'validation={validation!r} must be "train" or "test"')
    splits: dict[str, Split] = _module(name).read(Path(data_dir) if data_dir else None)
    sequences = facts.fit(splits["train"].sequences)  # one for all splits
    splits = {part: replace(split, sequences=sequences) for part, split in splits.items()}
    train, test = splits["train"], splits["test"]
    if "validation" in splits:
        if validation == "test":
            raise DataError(f"{name} has a validation split of its own; leave validation out")
        return Dataset(facts, train, splits["validation"], test)
    if validation == "test":
        return Dataset(facts, train, test, test)
    held_out, rest = stratified(train.labels, [HELD_OUT])
    if not len(held_out):
        raise DataError(
            f"{name}: the {len(train)} examples of train are too few to hold out a tenth of every "
            "class; add some"
        )
    return Dataset(facts, train.take(rest), train.take(held_out), test)


def _module(name: str) -> ModuleType:
    if name not in TASKS:
        raise DataError(f"unknown task={name!r}; {nearest(name, TASKS)}")
    try:
        return import_module(f"fastrpb.data.{name}")
    except ModuleNotFoundError as error:
        raise DataError(
            f"{name} needs the package {error.name}: pip install '.[data]' in a clone of fastrpb"
        ) from error
