"""The command `fastrpb`: each command calls a function of the library and shows what it gives."""

import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.columns import Columns
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as missing:
    message = f"fastrpb: the command needs the package {missing.name}: pip install 'fastrpb[cli]'"
    print(message, file=sys.stderr)
    sys.exit(2)

from fastrpb.data import TASKS, DataError, Dataset, Split, load

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def main() -> None:
    """Runs a command; a mistake of the user's is one sentence and exit code 2, no traceback."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    # Ended by a signal, as by Ctrl-C: half-written files go, and so do the workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app()
    except ValueError as error:
        print(f"fastrpb: {error}", file=sys.stderr)
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version("fastrpb"))
        raise typer.Exit


@app.callback()
def _app(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Relative positions for long sequences."""


@app.command()
def data(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")],
    *,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder that has the files. Default: FASTRPB_DATA, else the Hub."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a sequence. Default: the paper's.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Examples to show.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="listops: generate the files into this folder.")
    ] = None,
    seed: Annotated[int, typer.Option(help="listops: seed of the generator.")] = 0,
    sizes: Annotated[
        tuple[int, int, int], typer.Option(help="listops: train, validation, test.")
    ] = (96_000, 2_000, 2_000),
) -> None:
    """Fetch or prepare a task and show what is in it.

    Examples:
    - `fastrpb data digits`: shipped with the package
    - `fastrpb data mnist`: from the Hub
    - `fastrpb data text --data-dir ~/data --max-length 4096`: from your files
    - `fastrpb data listops --out ~/data/listops --seed 0`: generated
    """
    if out is not None:
        if task != "listops":
            raise DataError(f"--out generates listops only; {task} is read, see --data-dir")
        if data_dir is not None:
            raise DataError("--out writes the files and --data-dir reads them; give one of the two")
        from fastrpb.data.listops import generate  # noqa: PLC0415, it needs the data extra

        generate(out, seed, sizes)
        data_dir = out
    _show(load(task, data_dir, max_length=max_length), samples)


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="cpu: the core; model: layers; gpu: kernels.")],
) -> None:
    """Measure speed and memory here, print tables, write results/WHAT.json.

    Examples:
    - `fastrpb bench cpu`: W·V against its peers, about 3 minutes
    - `fastrpb bench model`: every attention with every positional encoding, about 10 minutes
    - `fastrpb bench gpu`: the kernels on this machine's GPU, about 3 minutes
    """
    from fastrpb.bench import bench as run  # noqa: PLC0415, quick start of other commands

    print(f"\nwritten to {run(what)}")


def _show(dataset: Dataset, samples: int) -> None:
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
