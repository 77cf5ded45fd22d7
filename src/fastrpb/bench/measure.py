"""How things are measured: times that take turns, memory in a process of its own, growth."""

import ctypes
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.progress import track
from torch import Tensor
from torch.nn.functional import pad

from fastrpb.processes import ctrl_c_ignored, fresh_processes

Run = Callable[[], object]
Row = dict[str, object]
Rows = list[Row]
Point = TypeVar("Point")


def plain_rfft(w: Tensor, v: Tensor) -> Tensor:
    """W·v as one would write it first: `rfft` over dim -2 at the length 2N, in float32."""
    n = v.shape[-2]
    column = torch.cat([w[:, :n].flip(-1), pad(w[:, n:].flip(-1), (1, 0))], dim=-1)
    spectrum = torch.fft.rfft(column).unsqueeze(-1)
    y = torch.fft.irfft(torch.fft.rfft(v.float(), 2 * n, dim=-2) * spectrum, 2 * n, dim=-2)
    return y[..., :n, :].to(v.dtype)


def device() -> str:
    """The GPU where there is one; asked for late, since importing must not open it."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def bar(points: Iterable[Point], title: str) -> Iterable[Point]:
    """The points of a section, with a bar of how many are measured; gone with the last one."""
    return track(list(points), title, transient=True)


def medians(runs: dict[str, Run], repeats: int = 9, title: str = "") -> dict[str, float]:
    """Median seconds of each run, the runs taking turns; with a bar if there is a title."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in bar(range(repeats), title) if title else range(repeats):
        for name, run in runs.items():
            _wait()
            start = time.perf_counter()
            run()
            _wait()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(s) for name, s in seconds.items()}


def _wait() -> None:
    if device() == "cuda":
        torch.cuda.synchronize()


def apart(function: Callable, *args: object) -> Any:
    """`function(*args)` in a fresh process: what ran before leaves no memory behind."""
    # Not a Pool: that one waits forever for a process that ran out of memory.
    with ProcessPoolExecutor(1, mp_context=fresh_processes("fastrpb.bench")) as pool:
        with ctrl_c_ignored():
            future = pool.submit(function, *args)
        return future.result()


def peak_of(run: Run, on: str = "cpu") -> int:
    """Measured peak of memory during `run`, above what there was before it.

    On CUDA that of the allocator, on the CPU that of the process (Linux).
    """
    if on == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    # Memory that was freed but kept would be used again unseen.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def against_length(
    cost: Callable[[Any, int, bool], tuple[float, int]],
    what: object,
    lengths: list[int],
    on: str = "cpu",
    patience: float = 3.2,
) -> Rows:
    """Time and peak memory against the length, as far as a run takes under `patience` seconds.

    `cost(what, n, backward)` gives seconds and bytes; on the CPU each call has a process of its
    own, which the allocator of CUDA does not need.
    """
    rows: Rows = []
    call = apart if on == "cpu" else lambda function, *args: function(*args)
    for n in lengths:
        row: Row = {"length": n}
        for name, backward in (("forward", False), ("forward+backward", True)):
            if rows and _expected(rows, f"{name} ms", n) > 1e3 * patience:
                return rows
            try:
                seconds, peak = call(cost, what, n, backward)
            except (BrokenProcessPool, torch.OutOfMemoryError):
                return rows  # it ran out of memory
            row |= {f"{name} ms": 1e3 * seconds, f"{name} MB": peak / 1e6}
        rows.append(row)
    return rows


def _expected(rows: Rows, name: str, n: int) -> float:
    """Milliseconds that a length would take if they grew by four for twice the length."""
    last = rows[-1]
    return last[name] * (n / last["length"]) ** 2  # pyright: ignore[reportOperatorIssue]


def growth(rows: Rows, name: str) -> float | str:
    """The exponent a of time ∝ N^a over the last three lengths, by least squares."""
    points = [(math.log(r["length"]), math.log(r[name])) for r in rows[-3:]]  # pyright: ignore[reportArgumentType]
    return statistics.linear_regression(*zip(*points, strict=True)).slope if points[1:] else "-"


def machine(name: str) -> dict[str, object]:
    """What the numbers were measured on and with."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    gpu = {}
    if device() == "cuda":
        gpu = {"gpu": torch.cuda.get_device_name(), "triton": metadata.version("triton")}
    return {
        **gpu,
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": f"fastrpb bench {name}",
    }


def table(rows: Rows) -> str:
    """Rows as a Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    for row in rows:
        lines.append([f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
