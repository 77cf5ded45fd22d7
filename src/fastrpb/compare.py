"""A grid of runs: attention × position × seed, every run in a process of its own.

Finished runs are skipped and begun ones go on, so a grid can be stopped and continued, and several
processes can work at the same one: whoever holds a run's lock trains it.
"""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, cast, get_args

import torch

from fastrpb.checks import check_choice, check_size
from fastrpb.config import RunConfig, override
from fastrpb.files import reason_of
from fastrpb.model_config import Position
from fastrpb.parts import load_data
from fastrpb.presets import COLUMNS, ROWS, best, name_of, preset, row, with_row
from fastrpb.processes import fresh_processes, keep_freed_memory, start
from fastrpb.progress import Progress
from fastrpb.records import read_records, same_config
from fastrpb.run import BusyError, Run, refuse_runs_in
from fastrpb.train import Interruption, train

_LOOK_AGAIN = 1.0  # seconds between looks at the runs of other processes

Event = Progress | dict[str, Any] | str  # how a run stands, its record, or why there is none


def grid(
    task: str,
    rows: Sequence[str],
    positions: Sequence[str],
    seeds: Sequence[int],
    values: dict[str, Any],
    strongest: bool = False,
) -> list[RunConfig]:
    """The configs of a grid, without the combinations that cannot be (RPE on linear attention).

    The cells are those of the paper's set-up, or of the strongest one, which is the same for all.

    >>> [name_of(config) for config in grid("digits", ["softmax", "sikf"], ["rpe"], [0], {})]
    ['digits-softmax-rpe-s0']
    """
    configs, impossible = [], None
    for name in rows:
        attention, features = with_row(name)
        for position in positions:
            check_choice("position", position, get_args(Position))
            try:
                if strongest:
                    cell = {"attention": attention, "features": features, "position": position}
                    plain = override(best(task), cell)
                else:
                    plain = preset(task, attention, features, position)  # pyright: ignore[reportArgumentType]
            except ValueError as error:
                impossible = error
                continue
            configs += [override(plain, {**values, "seed": seed}) for seed in seeds]
    if not configs and impossible:
        raise impossible
    for config in configs:
        config.check_bias_is_read()
    return list(dict.fromkeys(configs))


def left_out(
    rows: Sequence[str], positions: Sequence[str], configs: Sequence[RunConfig]
) -> list[str]:
    """The cells that a grid was asked for and cannot have, in words."""
    there = {(row(c.model.attention, c.model.features), c.model.position) for c in configs}
    asked = dict.fromkeys((name, position) for name in rows for position in positions)
    return [f"{ROWS[x]} with {COLUMNS[y]}" for x, y in asked if (x, y) not in there]


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
        jobs: processes that train at the same time; they share the cores, or take GPUs in turn.
        data_dir, cpu: as in `fastrpb.train.train`.
        on_event: called with a config and how its run stands, its record, or why it has none.

    Runs that other processes are training are waited for. A script that calls this needs
    `if __name__ == "__main__":`, as any that starts processes.
    """
    check_size("jobs", jobs)
    if not configs:
        raise ValueError("there are no configs to compare")
    folder = Path(folder)
    refuse_runs_in(folder)
    done = finished(configs, folder)
    todo = [config for config in dict.fromkeys(configs) if config not in done]
    has_data = bool(todo) or data_dir is not None  # a table alone needs none
    digests = _digests(configs, data_dir) if has_data else {}
    _check_data(finished(configs, folder, digests), folder, digests)
    jobs = max(1, min(jobs, len(todo)))
    places = _places(jobs)
    running: dict[Any, tuple[RunConfig, Any, str]] = {}  # by pipe
    ended = set()  # pipes whose processes said how
    try:
        while todo or running:
            free = (x for x in todo.copy() if not Run(folder / name_of(x)).busy())
            for place, config in zip(places.copy(), free, strict=False):  # no more than there are
                todo.remove(config)
                places.remove(place)
                mine, its = Pipe()
                arguments = (its, config, folder / name_of(config), data_dir, cpu, place, jobs)
                running[mine] = config, _start(arguments), place
                its.close()
            for pipe in wait(running, timeout=_LOOK_AGAIN):
                config, process, place = running[pipe]
                try:
                    event = cast(Connection, pipe).recv()
                except EOFError:
                    process.join()
                    del running[pipe]
                    places.append(place)
                    if pipe in ended:
                        continue
                    event = f"its process ended with code {process.exitcode}"
                if not isinstance(event, Progress):
                    ended.add(pipe)
                if isinstance(event, BusyError):
                    todo.append(config)  # another process was quicker
                else:
                    on_event(config, event)
            if todo and places:  # what other processes have finished meanwhile
                done = finished(todo, folder)
                todo = [config for config in todo if config not in done]
    finally:
        _stop({pipe: process for pipe, (_, process, _) in running.items()})
    done = finished(configs, folder, digests)
    _check_data(done, folder, digests)  # what other processes have finished, too
    return list(done.values())


def _start(arguments: tuple) -> Any:
    """A process that trains."""
    process = fresh_processes("fastrpb.train").Process(target=_train_apart, args=arguments)
    try:
        start(process)
    except (EOFError, OSError) as error:
        raise ValueError(
            "no process could be started, perhaps for want of memory; give the command again"
        ) from error
    return process


def _stop(running: dict[Any, Any]) -> None:
    """Let processes save their state and end, by their pipes.

    The end of its pipe tells that a process has ended; `join` may be wrong, where the signal that
    stopped us has ended the server that had started it, too.
    """
    for process in running.values():
        process.terminate()
    for pipe in running:
        with suppress(EOFError):
            while True:
                pipe.recv()


def _places(jobs: int) -> list[str]:
    """The GPU that each job may see, taken in turn; nothing where there is none."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return [visible[job % count] if count else "" for job in range(jobs)]


def finished(
    configs: Sequence[RunConfig], folder: Path, digests: Mapping[tuple, str] | None = None
) -> dict[RunConfig, dict[str, Any]]:
    """The configs that have a record in the folder's results, with it.

    Of several, the one on the data of these digests, else the last.
    """
    records: dict[str, list[dict[str, Any]]] = {}
    for record in read_records(folder / "results.jsonl"):
        records.setdefault(same_config(record["config"]), []).append(record)
    done = {}
    for config in configs:
        of_it = records.get(same_config(asdict(config)), [])
        wanted = (digests or {}).get(_data_of(config))
        of_it.sort(key=lambda record: record.get("data") == wanted)
        if of_it:
            done[config] = of_it[-1]
    return done


def _digests(configs: Sequence[RunConfig], data_dir: str | Path | None) -> dict[tuple, str]:
    """Of the data of each config: what is missing is told once, and prepared for all processes."""
    one_of_each = {_data_of(config): config for config in configs}
    return {what: load_data(config, data_dir).digest() for what, config in one_of_each.items()}


def _data_of(config: RunConfig) -> tuple:
    return config.task, config.model.max_length, config.validation


def _check_data(
    done: dict[RunConfig, dict[str, Any]], folder: Path, digests: dict[tuple, str]
) -> None:
    """Raise unless finished runs were trained and tested with the data of these digests."""
    for config, record in done.items():
        digest = digests.get(_data_of(config))
        if None not in (digest, record.get("data")) and record["data"] != digest:
            raise ValueError(
                f"{folder} has results of other data: {name_of(config)}; use the original "
                "--data-dir, or choose another folder by --out"
            )


def _train_apart(
    pipe: Connection,
    config: RunConfig,
    folder: Path,
    data_dir: str | Path | None,
    cpu: bool,
    place: str,
    jobs: int,
) -> None:
    """What a process of the grid does: train, and tell how it goes."""
    keep_freed_memory()
    os.setsid()  # Ctrl-C reaches the grid alone, which then ends its processes once
    if place:
        os.environ["CUDA_VISIBLE_DEVICES"] = place
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))

    def tell(event: Event | BusyError) -> None:
        try:
            pipe.send(event)
        except OSError:  # the grid was killed
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        tell(train(config, folder, data_dir=data_dir, cpu=cpu, on_progress=tell))
    except BusyError as busy:
        tell(busy)
    except Interruption as stop:
        tell(str(stop))
    except (OSError, ValueError) as error:
        tell(reason_of(error))
