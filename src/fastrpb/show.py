"""How things look in a terminal: progress, tables, data."""

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from fastrpb.config import COLUMNS, ROWS
from fastrpb.data import Dataset, Split

if TYPE_CHECKING:
    from fastrpb import compare, train

_LINE_EVERY = 5.0  # seconds, where there is no terminal


class Display:
    """How runs stand: a bar for each on a terminal, else a line now and then.

    >>> with Display() as display:
    ...     display.say("nothing runs")
    nothing runs
    """

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        words = ("{task.description}", "{task.fields[words]}")
        self.bars = Progress(TextColumn(words[0]), BarColumn(20), TextColumn(words[1]))
        self.tasks: dict[str, TaskID] = {}
        self.last = time.monotonic()

    def __enter__(self) -> "Display":
        if self.console.is_terminal:
            self.bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self.bars.stop()

    def progress(self, name: str, progress: "train.Progress") -> None:
        words = in_words(progress)
        if self.console.is_terminal:
            if name not in self.tasks:
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
        console = self.bars.console if self.console.is_terminal else self.console
        console.print(Text(line), soft_wrap=True)


def in_words(progress: "train.Progress") -> str:
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    return (
        f"step {progress.step}/{progress.steps}  loss {progress.loss:.4f}  "
        f"accuracy {progress.accuracy:.1%}  {progress.tokens_per_second:,.0f} tokens/s  "
        f"{minutes}:{seconds:02} left"
    )


def show_cells(cells: "dict[tuple[str, str], compare.Cell]", title: str) -> None:
    """The table of a comparison; combinations that cannot be, or are not there, are N/A."""
    rows = [row for row in ROWS if any(row == key[0] for key in cells)]
    columns = [column for column in COLUMNS if any(column == key[1] for key in cells)]
    table = Table("", *(COLUMNS[column] for column in columns), title=title)
    for row in rows:
        table.add_row(ROWS[row], *(str(cells.get((row, column), "N/A")) for column in columns))
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
