"""How things look in a terminal: progress, tables, data."""

import time
from datetime import timedelta
from types import TracebackType
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.status import Status
from rich.table import Column, Table
from rich.text import Text

from fastrpb import progress as runs
from fastrpb.data import Dataset, Split

_LINE_EVERY = 5.0  # seconds, where there is no terminal
_ROOM_FOR_BARS = 120  # columns: a name and the words about its run take up to a hundred


class Display:
    """How runs stand: a bar for each on a terminal, else a line now and then.

    >>> with Display() as display:
    ...     display.say("nothing runs")
    nothing runs
    """

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        name, words = (
            TextColumn(what, table_column=Column(no_wrap=True, overflow="ellipsis"))
            for what in ("{task.description}", "{task.fields[words]}")
        )
        bar = [BarColumn(12)] if self.console.width >= _ROOM_FOR_BARS else []
        self.bars = Progress(name, *bar, words, console=self.console)
        self.tasks: dict[str, TaskID] = {}
        self.last = time.monotonic()

    def __enter__(self) -> "Display":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bars.live.is_started:  # whether or not a bar is left
            self.bars.stop()

    def progress(self, name: str, progress: runs.Progress) -> None:
        words = in_words(progress)
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            if name not in self.tasks:
                self.bars.start()
                self.tasks[name] = self.bars.add_task(name, total=progress.steps, words="")
            self.bars.update(self.tasks[name], completed=progress.step, words=words)
        elif time.monotonic() - self.last > _LINE_EVERY or progress.step == progress.steps:
            self.last = time.monotonic()
            self.say(f"{name}: {words}")

    def done(self, name: str, words: str) -> None:
        """A run has ended: its bar goes, what came of it stays."""
        if name in self.tasks:
            self.bars.remove_task(self.tasks.pop(name))
        self.say(f"{name}: {words}")

    def say(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)


def in_words(progress: runs.Progress) -> str:
    time_left = timedelta(seconds=round(min(progress.seconds_left, 1e10)))  # 300 years
    left = f"{time_left} left" if progress.step < progress.steps else "evaluating"
    return (
        f"{left}  step {progress.step}/{progress.steps}  "
        f"loss {progress.loss:.4f}  accuracy {progress.accuracy:.1%}  "
        f"{progress.tokens_per_second:,.0f} tokens/s"
    )


def outcome_in_words(record: dict[str, Any]) -> str:
    """What a finished run gave, and what it took."""
    test = record["metrics"]["test"]
    return (
        f"test accuracy {test['accuracy']:.2%}, macro F1 {test['f1']:.2%}, "
        f"{record['seconds']:.1f} s of training, {record['tokens_per_second']:,.0f} tokens/s, "
        f"{record['peak_memory_bytes'] / 2**20:,.0f} MiB at the peak"
    )


def waiting(words: str) -> Status:
    """A sign on a terminal that something goes on."""
    return Console(stderr=True).status(words)


def show_table(lines: list[list[str]], title: str) -> None:
    head, *body = lines
    table = Table(*head, title=title)
    for line in body:
        table.add_row(*line)
    Console().print(table)


def show_dataset(dataset: Dataset, samples: int) -> None:
    console = Console()
    facts = dataset.task
    splits = {"train": dataset.train, "validation": dataset.validation, "test": dataset.test}
    table = Table(
        "split", "examples", "shortest", "mean", "longest", "largest class", title=facts.name
    )
    for name, split in splits.items():
        table.add_row(name, *_numbers(split))
    console.print(table)
    shape = (
        f", images of {facts.image_shape[0]}×{facts.image_shape[1]}" if facts.image_shape else ""
    )
    console.print(
        f"{len(facts.classes)} classes, vocabulary {facts.vocabulary}, at most {facts.max_length} "
        f"tokens{' in each of two documents' if facts.pair else ''}{shape}",
        highlight=False,
    )
    # Spread over the split, since many sources are sorted by label.
    samples = min(samples, len(dataset.train))
    panels = [_sample(dataset, i * len(dataset.train) // samples) for i in range(samples)]
    for part in [Columns(panels)] if facts.image_shape else panels:
        console.print(part)


def _numbers(split: Split) -> tuple[str, ...]:
    lengths = split.lengths.float()
    share = split.labels.bincount().max() / len(split)
    return (
        f"{len(split):,}",
        f"{lengths.min():.0f}",
        f"{lengths.mean():.1f}",
        f"{lengths.max():.0f}",
        f"{share:.1%}",
    )


def _sample(dataset: Dataset, row: int) -> Panel:
    sequences, label = dataset.train[row]
    texts = [dataset.task.show(sequence) for sequence in sequences]
    if not dataset.task.image_shape:
        texts = [_snippet(text) for text in texts]
    title = Text(dataset.task.classes[label])
    return Panel(Text("\n\n".join(texts)), title=title, expand=not dataset.task.image_shape)


def _snippet(text: str, length: int = 240) -> str:
    """The beginning, on one line, without the control characters that a terminal would obey."""
    line = "".join(c if c.isprintable() else " " for c in text[: length + 1])
    return line if len(line) <= length else line[:length] + "…"
