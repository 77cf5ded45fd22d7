"""The commands of `fastrpb`: each calls a function of the library and shows what it gives."""

import functools
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fastrpb import __version__
from fastrpb.config import RunConfig, override
from fastrpb.data import DataError, load
from fastrpb.options import (
    ONE_TASK,
    Cpu,
    DataDir,
    Metric,
    RunFolder,
    Strongest,
    TaskName,
    config_options,
    resolve,
    whole_number,
)
from fastrpb.presets import CELL, COLUMNS, ROWS, best, name_of, row
from fastrpb.processes import keep_freed_memory
from fastrpb.show import Display, outcome_in_words, show_dataset, show_table, waiting

# Commands import what they need, so that the others start quickly and without its packages.
# ruff: noqa: PLC0415

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def _code(stop: BaseException) -> int | str | None:
    """What a command exits with that was stopped."""
    if isinstance(stop, SystemExit):
        return stop.code
    return 128 + getattr(stop, "number", signal.SIGINT)


def _is_main() -> bool:
    """The first of the processes that train together speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def _alone(command: str) -> None:
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(f"{command} starts its own processes; give it without a launcher")


def complain(sentence: str) -> None:
    """What went wrong, once on each machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"fastrpb: {sentence}", file=sys.stderr)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _app(
    context: typer.Context,
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Relative positions for long sequences."""
    if context.invoked_subcommand != "bench":  # which measures what others would
        keep_freed_memory()


@app.command()
def demo(
    *,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/demo"),
) -> None:
    """Train linear attention without and with FastRPB on the shipped digits, and compare.

    Three seeds each, at most 3 minutes on two cores. What is finished is not trained again.

    Example:
    - `fastrpb demo`
    """
    from fastrpb.compare import grid
    from fastrpb.report import write_report

    configs = grid("digits", ["sikf"], ["none", "fastrpb", "fastrpb2d"], [0, 1, 2], {})
    _compare(configs, out, "accuracy", jobs=min(2, os.cpu_count() or 1), cpu=True)
    print(f"look at {write_report([out], out / 'report', pixel=(4, 3))}")


@app.command()
def data(
    task: TaskName,
    *,
    data_dir: DataDir = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a sequence. Default: the paper's.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Examples to show.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="listops: generate the files into this folder.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="listops: seed of the generator.")] = None,
    sizes: Annotated[
        tuple[int, int, int] | None,
        typer.Option(help="listops: train validation test. Default: Long Range Arena's."),
    ] = None,
) -> None:
    """Fetch or prepare a task and show what is in it.

    Examples:
    - `fastrpb data digits`: shipped with the package
    - `fastrpb data mnist`: from the Hub
    - `fastrpb data text --data-dir ~/data --max-length 4096`: from your files
    - `fastrpb data listops --out ~/data/listops --seed 0`: generated
    - `fastrpb data listops --out ~/data/few --sizes 1000 100 100`: fewer
    """
    if out is not None:
        if task != "listops":
            raise DataError(f"--out generates listops only; {task} is read, see --data-dir")
        if data_dir is not None:
            raise DataError("--out writes the files and --data-dir reads them; give one of the two")
        from fastrpb.data.listops import SIZES, generate

        generate(out, seed or 0, sizes or SIZES)
        data_dir = out
    elif seed is not None or sizes is not None:
        raise DataError("--seed and --sizes are of listops that is generated; give --out too")
    show_dataset(load(task, data_dir, max_length=max_length), samples)


@app.command()
@config_options()
def train(
    task: Annotated[str | None, ONE_TASK] = None,
    *,
    config: Annotated[
        Path | None, typer.Option(help="A config.json, or the folder of a run, instead of TASK.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="The folder of a run to continue.")] = None,
    strongest: Strongest = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: in runs/.")] = None,
    data_dir: DataDir = None,
    trackers: Annotated[
        list[str] | None,
        typer.Option(
            "--tracker", help="tensorboard, wandb or none. Default: tensorboard where installed."
        ),
    ] = None,
    cpu: Cpu = False,
    values: dict[str, Any],
) -> None:
    """Train a model: the paper's set-up of a task, changed by any option.

    Examples:
    - `fastrpb train mnist --features sikf --position fastrpb --seed 1`
    - `fastrpb train text --data-dir ~/data --max-length 4096 --precision bf16 --compile`
    - `fastrpb train mnist --best`
    - `fastrpb train --config runs/mnist-sikf-fastrpb-s1 --learning-rate 2e-4`
    - `fastrpb train --resume runs/mnist-sikf-fastrpb-s1`: go on, whatever ended it
    - `accelerate launch --num_processes 8 -m fastrpb train text --precision bf16`
    """
    from fastrpb.run import Run
    from fastrpb.train import TRACKERS, Interruption
    from fastrpb.train import train as run_training

    if resume is not None:
        if config is not None or out is not None or strongest:
            raise ValueError(
                "--resume takes config and folder from the run: drop --config, --best and --out"
            )
        run = Run(resume)
        resolved = override(run.config(), values)
        if task not in (None, resolved.task):
            raise ValueError(f"{resume} is a run of {resolved.task}, not of {task}")
    else:
        resolved = resolve(task, config, values, strongest)
        run = Run(out or Path("runs", name_of(resolved)))
    kept = ["--data-dir", str(data_dir)] if data_dir else []
    kept += [word for name in trackers or [] for word in ("--tracker", name)] + ["--cpu"] * cpu
    again = f"{run.resume_command} {shlex.join(kept)}".rstrip()
    if resume is None and run.exists():  # looked at by all, before any of them can have made it
        raise ValueError(
            f"{run.folder} has a run already; continue it with: {again}, or choose another folder "
            "by --out"
        )
    if trackers is None:
        trackers = [name for name in TRACKERS[:1] if find_spec(name)]
    try:
        with Display() as display:
            record = run_training(
                resolved,
                run.folder,
                data_dir=data_dir,
                trackers=[name for name in trackers if name != "none"],
                cpu=cpu,
                on_progress=functools.partial(display.progress, run.folder.name),
            )
    except Interruption as interruption:
        complain(f"{interruption}; go on with: {again}")
        sys.exit(128 + interruption.number)
    if _is_main():
        print(f"{run.folder}: {outcome_in_words(record)}")


@app.command()
@config_options("seed", *CELL)
def compare(
    task: TaskName,
    *,
    features: Annotated[
        str | None,
        typer.Option(
            help=f"Rows, separated by commas: {', '.join(ROWS)}. "
            "Default: softmax,sikf, or that of --best."
        ),
    ] = None,
    position: Annotated[
        str | None,
        typer.Option(
            help=f"Columns, separated by commas: {', '.join(COLUMNS)}. "
            "Default: none,fastrpb, or that of --best."
        ),
    ] = None,
    strongest: Strongest = False,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    metric: Metric = "accuracy",
    out: Annotated[Path, typer.Option(help="Folder of the runs and results.jsonl.")] = Path("runs"),
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    data_dir: DataDir = None,
    cpu: Cpu = False,
    values: dict[str, Any],
) -> None:
    """Train a grid of attentions, positions and seeds; print mean ± standard deviation.

    Finished runs are skipped and begun ones go on: give the same command again after a stop, or
    in several terminals at once.

    Examples:
    - `fastrpb compare mnist --features softmax,sikf,dpfp,elu1,favor --metric f1`
    - `fastrpb compare cifar10 --position none,fastrpb,sinespe --seeds 0,1,2,3,4 --jobs 4`
    - `fastrpb compare cifar10 --best --position none,fastrpb2d`: against no positions at all
    """
    from fastrpb.compare import grid, left_out

    _alone("compare")
    numbers = [whole_number("seeds", word) for word in seeds.split(",")]
    model = best(task).model if strongest else None
    if features is None:
        features = row(model.attention, model.features) if model else "softmax,sikf"
    if position is None:
        position = model.position if model else "none,fastrpb"
    rows, columns = ([word.strip() for word in x.split(",")] for x in (features, position))
    configs = grid(task, rows, columns, numbers, values, strongest)
    if missing := left_out(rows, columns, configs):
        print(f"skipped, not possible for {task}: {', '.join(missing)}")
    _compare(configs, out, metric, jobs=jobs, data_dir=data_dir, cpu=cpu)


@app.command()
@config_options()
def sweep(
    task: Annotated[str | None, ONE_TASK] = None,
    *,
    trials: Annotated[int, typer.Option(min=1, help="Trials, of all workers together.")] = 20,
    low: Annotated[float | None, typer.Option(help="Lowest rate. Default: a tenth.")] = None,
    high: Annotated[float | None, typer.Option(help="Highest rate. Default: ten times.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A config.json, or the folder of a run, instead of TASK.")
    ] = None,
    strongest: Strongest = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the study, shared by its workers.")
    ] = None,
    data_dir: DataDir = None,
    cpu: Cpu = False,
    values: dict[str, Any],
) -> None:
    """Search the learning rate by Bayesian optimisation, on the validation split.

    Workers that are given the same folder, on one machine or many, share one study. Give the same
    command again to go on.

    Examples:
    - `fastrpb sweep mnist --trials 20 --epochs 5 --out runs/search`
    - `fastrpb sweep mnist --out /shared/study` on every machine
    - `fastrpb train --config runs/search/best.json --epochs 25`: with the rate it found
    """
    from fastrpb.sweep import sweep as search
    from fastrpb.train import Interruption

    _alone("sweep")
    resolved = resolve(task, config, values, strongest)
    folder = out or Path("runs", f"sweep-{name_of(resolved)}")
    try:
        with Display() as display:
            best = search(
                resolved,
                folder,
                trials=trials,
                low=low,
                high=high,
                data_dir=data_dir,
                cpu=cpu,
                on_progress=display.progress,
                on_trial=display.done,
            )
    except (Interruption, KeyboardInterrupt, SystemExit) as stop:
        complain(f"stopped; the same command goes on with the study in {folder}")
        sys.exit(_code(stop))
    print(f"best learning rate {best.learning_rate:.3g}; its config is {folder / 'best.json'}")


@app.command()
def evaluate(
    run: RunFolder,
    *,
    split: Annotated[Literal["train", "validation", "test"], typer.Option()] = "test",
    data_dir: DataDir = None,
    cpu: Cpu = False,
) -> None:
    """Loss, accuracy and macro F1 of a run's model, or of its newest checkpoint.

    Examples:
    - `fastrpb evaluate runs/mnist-sikf-fastrpb-s0`
    - `fastrpb evaluate runs/mnist-sikf-fastrpb-s0 --split validation`
    """
    from fastrpb.evaluate import evaluate_run

    with waiting("evaluating"):
        metrics = evaluate_run(run, split, data_dir=data_dir, cpu=cpu)
    if not _is_main():
        return
    print(
        f"{run}, {split}: accuracy {metrics.accuracy:.2%}, macro F1 {metrics.f1:.2%}, "
        f"loss {metrics.loss:.4f}"
    )


@app.command()
def predict(
    run: RunFolder,
    item: Annotated[
        str,
        typer.Argument(
            metavar="INPUT", help="An image file (a digit: white on black), a text; - reads it."
        ),
    ],
    second: Annotated[str | None, typer.Argument(help="The other document, for retrieval.")] = None,
) -> None:
    """The classes of a new input by a run's model, the likeliest first.

    Examples:
    - `fastrpb predict mnist seven.png`: by the model that comes with the package
    - `fastrpb predict runs/cifar10-sikf-fastrpb-s0 frog.png`
    - `fastrpb predict runs/text-sikf-fastrpb-s0 "A wonderful film."`
    - `fastrpb predict runs/text-sikf-fastrpb-s0 - < review.txt`
    - `fastrpb predict runs/listops-sikf-fastrpb-s0 "[MAX 4 [MIN 2 3 ] ]"`
    """
    from fastrpb.evaluate import predict as classes_of
    from fastrpb.files import shipped_or
    from fastrpb.run import Run

    items = [x for x in (item, second) if x is not None]
    config = Run(shipped_or(run)).config()
    image = config.model.image
    for file in (x for x in items if not image and os.path.isfile(x)):
        read = f"fastrpb predict {shlex.quote(str(run))} - < {shlex.quote(file)}"
        raise ValueError(f"{file} is a file, not a text; to read it: {read}")
    if "-" in items:
        if image:
            raise ValueError(f"{config.task} takes the path of an image; - reads texts only")
        if sys.stdin is None:
            raise ValueError("there is nothing to read: the standard input is closed")
        items = [sys.stdin.read() if x == "-" else x for x in items]
    for name, probability in classes_of(run, items)[:5]:
        print(f"{probability:7.2%}  {name}")


@app.command()
def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of runs, or that hold runs; files of records. Default: runs."),
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("report"),
    pixel: Annotated[
        str | None, typer.Option(help="Row,column in the pictures of images. Default: 12,10.")
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(help="A file of `fastrpb bench model`, for time and memory.")
    ] = None,
) -> None:
    """Write a page to look at: tables, training curves, the learned weights; and figures.

    Examples:
    - `fastrpb report`: all of runs/
    - `fastrpb report runs/mnist-sikf-fastrpb2d-s0 --pixel 12,10 --out report/mnist`
    - `fastrpb report --bench results/model.json`
    """
    from fastrpb.report import write_report

    numbers = [whole_number("pixel", word) for word in pixel.split(",")] if pixel else None
    if numbers is not None and len(numbers) != 2:
        raise ValueError(f"--pixel takes a row and a column, as 12,10; got {pixel!r}")
    where = (numbers[0], numbers[1]) if numbers else None
    folders = runs or [Path("runs")]
    page = write_report(
        folders,
        out,
        pixel=where,
        bench=bench,
        on_damaged=lambda error: complain(f"left out: {error}"),
    )
    print(f"look at {page}")


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
    from fastrpb.bench import bench as run

    print(f"\nwritten to {run(what)}")


@app.command()
def export(
    run: Annotated[
        Path, typer.Argument(help="Folder of a run or of model.safetensors, that file, or mnist.")
    ],
    out: Annotated[Path, typer.Argument(help="The ONNX file to write, NAME.onnx.")],
) -> None:
    """Write a trained model as an ONNX file, for any batch, and any length up to the model's.

    Example: `fastrpb export runs/text model.onnx`
    """
    from fastrpb.evaluate import load_run
    from fastrpb.onnx import export as write

    whole = run.is_file() or (run / "model.safetensors").exists()
    try:
        print(f"written to {write(run if whole else load_run(run)[1], out)}")
    except ImportError as error:
        raise ValueError(error) from None


def _compare(configs: Sequence[RunConfig], folder: Path, metric: str, **options: Any) -> None:
    """Run a grid, show it going on and its table at the end."""
    from fastrpb.compare import compare as run_grid
    from fastrpb.compare import finished
    from fastrpb.tables import cells, lines, on_test

    before = finished(configs, folder)
    if before:
        print(f"{len(before)} of {len(configs)} runs are finished already")
    failed: dict[RunConfig, str] = {}
    with Display() as display:

        def tell(config: RunConfig, event: Any) -> None:
            if isinstance(event, str):
                failed[config] = event
                display.done(name_of(config), event)
            elif isinstance(event, dict):
                display.done(name_of(config), outcome_in_words(event))
            else:
                display.progress(name_of(config), event)

        try:
            records = run_grid(configs, folder, on_event=tell, **options)
        except (KeyboardInterrupt, SystemExit) as stop:
            complain("stopped, and saved; the same command goes on")
            sys.exit(_code(stop))
    if records:
        show_table(lines(cells(records, on_test(metric))), f"{configs[0].task}: test {metric}, %")
    print(f"{len(records)} of {len(configs)} runs are finished; their records are in {folder}")
    if failed:
        raise ValueError(f"{len(failed)} of {len(configs)} runs gave no result, see above")
