"""A grid of runs: attention × position × seed, every run in a process of its own.

Finished runs are skipped and begun ones go on, so a grid can be stopped and continued, and several
processes can work at the same one: whoever holds a run's lock trains it.
"""

import json
import multiprocessing
import os
import signal
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import torch

from fastrpb.checks import check_choice
from fastrpb.config import RunConfig, override, preset, with_row
from fastrpb.model import Position
from fastrpb.run import BusyError, read_lines
from fastrpb.train import Interruption, Progress, train

Event = Progress | dict[str, Any] | str  # how a run stands, its record, or why there is none


def grid(
    task: str,
    rows: Sequence[str],
    positions: Sequence[str],
    seeds: Sequence[int],
    values: dict[str, Any],
) -> list[RunConfig]:
    """The configs of a grid, without the combinations that cannot be (RPE on linear attention).

    >>> [config.name for config in grid("digits", ["softmax", "sikf"], ["rpe"], [0], {})]
    ['digits-softmax-rpe-s0']
    """
    configs, impossible = [], None
    for name in rows:
        attention, features = with_row(name)
        for position in positions:
            check_choice("position", position, get_args(Position))
            try:
                plain = preset(task, attention, features, position)  # pyright: ignore[reportArgumentType]
            except ValueError as error:
                impossible = error
                continue
            configs += [override(plain, {**values, "seed": seed}) for seed in seeds]
    if not configs and impossible:
        raise impossible
    return configs


def compare(
    configs: Sequence[RunConfig],
    folder: str | Path,
    *,
    jobs: int = 1,
    data_dir: str | Path | None = None,
    cpu: bool = False,
    on_event: Callable[[RunConfig, Event], None] = lambda config, event: None,
) -> list[dict[str, Any]]:
    """Train what is not yet finished, `jobs` runs at a time, and give the records there are.

    Args:
        configs: of the runs, as `grid` makes them.
        folder: of the runs and of their results.jsonl.
        jobs: processes that train at the same time; they share the cores.
        data_dir, cpu: as in `fastrpb.train.train`.
        on_event: called with a config and how its run stands, its record, or why it has none.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    folder = Path(folder)
    done = finished(configs, folder)
    todo = [config for config in configs if config not in done]
    context = multiprocessing.get_context("forkserver")
    # Imported once, before any process starts.
    context.set_forkserver_preload(["fastrpb.train"])
    threads = max(1, torch.get_num_threads() // jobs)
    running: dict[Any, tuple[RunConfig, Any]] = {}  # by pipe
    try:
        while todo or running:
            while todo and len(running) < jobs:
                config, (mine, its) = todo.pop(0), context.Pipe()
                arguments = (its, config, folder / config.name, data_dir, cpu, threads)
                process = context.Process(target=_train_apart, args=arguments)
                process.start()
                its.close()
                running[mine] = config, process
            for pipe in wait(running):
                config, process = running[pipe]
                try:
                    event = cast(Connection, pipe).recv()
                    on_event(config, event)
                except EOFError:
                    process.join()
                    del running[pipe]
                    if process.exitcode:
                        on_event(config, f"its process ended with exit code {process.exitcode}")
    finally:
        # Stopped: what runs saves its state and ends.
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()
    return list(finished(configs, folder).values())


def finished(configs: Sequence[RunConfig], folder: Path) -> dict[RunConfig, dict[str, Any]]:
    """The configs that have a record in the folder's results, with it."""
    records = {_key(r["config"]): r for r in read_lines(folder / "results.jsonl")}
    keys = {config: _key(asdict(config)) for config in configs}
    return {config: records[key] for config, key in keys.items() if key in records}


class Cell(NamedTuple):
    """A cell of a table, over its seeds."""

    mean: float
    std: float
    runs: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.runs < 2 else f"{self.mean:.2f} ± {self.std:.2f}"


Cells = dict[tuple[str, str], Cell]  # by row and column, as `ROWS` and `COLUMNS` have them


def on_test(metric: str) -> Callable[[dict[str, Any]], float]:
    """A metric of a record, in per cent."""
    return lambda record: 100 * record["metrics"]["test"][metric]


def cells(records: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> Cells:
    """Mean and standard deviation of a value of the records, for each row and column."""
    values: dict[tuple[str, str], list[float]] = {}
    for record in records:
        model = record["config"]["model"]
        row = "softmax" if model["attention"] == "softmax" else model["features"]
        values.setdefault((row, model["position"]), []).append(value(record))
    return {
        key: Cell(statistics.mean(x), statistics.stdev(x) if len(x) > 1 else 0.0, len(x))
        for key, x in values.items()
    }


def _key(config: dict[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def _train_apart(
    pipe: Connection,
    config: RunConfig,
    folder: Path,
    data_dir: str | Path | None,
    cpu: bool,
    threads: int,
) -> None:
    """What a process of the grid does: train, and tell how it goes."""
    os.setsid()  # Ctrl-C reaches the grid alone, which then ends its processes once
    torch.set_num_threads(threads)

    def tell(event: Event) -> None:
        try:
            pipe.send(event)
        except OSError:  # the grid was killed
            os.kill(os.getpid(), signal.SIGTERM)

    with suppress(Interruption, KeyboardInterrupt):
        try:
            tell(train(config, folder, data_dir=data_dir, cpu=cpu, on_progress=tell))
        except BusyError:
            tell("another process trains it")
        except ValueError as error:
            tell(str(error))
