"""Speed and memory on this machine: `make bench` for the core, `make bench-model` for layers.

Ratios compare medians of runs that alternate in one process, so that a noisy machine slows both
sides. Peak memory is measured, each point in a process of its own. The results go to results/ with
the machine's name; tables are printed.
"""

import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from fastrpb.bench_gpu import bench_gpu
from fastrpb.bias import FastRPB
from fastrpb.model import ON_LOGITS, Attention, Block, Features, ModelConfig, Position
from fastrpb.toeplitz import toeplitz, toeplitz_matmul

SHAPES = [(8, 8, 1024, 64), (4, 8, 4096, 64), (1, 8, 16384, 64), (1, 4, 65536, 64)]
SMALL = [8, 16, 32, 64, 128, 256, 512, 1024]
TOKENS = 8192  # batch x length where the length varies at fixed work

LENGTHS = [256, 512, 1024, 2048, 4096, 8192]  # of an attention layer

Run = Callable[[], object]
Rows = list[dict[str, object]]


def medians(runs: dict[str, Run], repeats: int = 9) -> dict[str, float]:
    """Median seconds of each run, the runs taking turns."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(s) for name, s in seconds.items()}


def machine(name: str) -> dict[str, object]:
    """What the numbers were measured on and with."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    gpu = {"gpu": torch.cuda.get_device_name()} if name == "gpu" else {}
    return {
        **gpu,
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": f"fastrpb bench {name}",
    }


def plain_fft(w: Tensor, v: Tensor) -> Tensor:
    """What one would write first: `rfft` over dim -2 at the length 2N-1 of Prop. 1."""
    n = v.shape[-2]
    size = 2 * n - 1
    column = torch.cat([w[:, :n].flip(-1), w[:, n:].flip(-1)], dim=-1)
    spectrum = torch.fft.rfft(column).unsqueeze(-1)
    return torch.fft.irfft(torch.fft.rfft(v, size, dim=-2) * spectrum, size, dim=-2)[..., :n, :]


def scipy_product(w: Tensor, v: Tensor) -> None:
    """`scipy.linalg.matmul_toeplitz` head by head, with all its workers."""
    from scipy.linalg import matmul_toeplitz  # noqa: PLC0415  (an extra)

    n = v.shape[-2]
    for values in v.numpy():
        for weights, x in zip(w.numpy(), values, strict=True):
            matmul_toeplitz((weights[n - 1 :: -1], weights[n - 1 :]), x, workers=-1)


def random_inputs(shape: tuple[int, ...], grad: bool = False) -> tuple[Tensor, Tensor]:
    _, heads, n, _ = shape
    w = torch.randn(heads, 2 * n - 1, requires_grad=grad)
    return w, torch.randn(shape, requires_grad=grad)


def against_peers(shape: tuple[int, int, int, int]) -> dict[str, object]:
    """Forward against scipy and a plain FFT, forward+backward against forward, extra memory."""
    w, v = random_inputs(shape)
    wg, vg = random_inputs(shape, grad=True)
    g = torch.randn_like(v)
    runs = {
        "forward": lambda: toeplitz_matmul(w, v),
        "scipy": lambda: scipy_product(w, v),
        "plain fft": lambda: plain_fft(w, v),
        "forward+backward": lambda: torch.autograd.grad(toeplitz_matmul(wg, vg), (wg, vg), g),
    }
    seconds = medians(runs)
    forward = seconds["forward"]
    return {
        "shape": shape,
        "forward ms": 1e3 * forward,
        "scipy / forward": seconds["scipy"] / forward,
        "plain fft / forward": seconds["plain fft"] / forward,
        "forward+backward / forward": seconds["forward+backward"] / forward,
        "extra memory / v": peak_extra_bytes(shape) / (4 * v.numel()),
    }


def small_sizes(n: int) -> dict[str, object]:
    """`auto` against the dense product where that is the one to beat."""
    shape = (TOKENS // n, 8, n, 64)
    w, v = random_inputs(shape)
    seconds = medians(
        {"auto": lambda: toeplitz_matmul(w, v), "dense": lambda: toeplitz(w) @ v}, repeats=25
    )
    return {
        "shape": shape,
        "auto ms": 1e3 * seconds["auto"],
        "auto / dense": seconds["auto"] / seconds["dense"],
    }


def growth() -> Rows:
    """Time a token when the length doubles at a fixed number of tokens."""
    inputs = {n: random_inputs((65536 // n, 4, n, 64)) for n in (2**k for k in range(10, 17))}
    seconds = medians({str(n): lambda n=n: toeplitz_matmul(*inputs[n]) for n in inputs})
    return [
        {"length": n, "time against half the length": seconds[str(n)] / seconds[str(n // 2)]}
        for n in inputs
        if n // 2 in inputs
    ]


def streaming(n: int) -> dict[str, object]:
    """A causal bias token by token: relaxed products against a sum over the history each time."""
    rpb = FastRPB(8, n, causal=True)
    v = torch.randn(1, 8, n, 64)

    def relaxed() -> None:
        state = rpb.init_state(v)
        for t in range(n):
            rpb.step(v[:, :, t : t + 1], state)

    @torch.no_grad()
    def history() -> None:
        for t in range(n):
            _ = rpb.w[:, None, n - 1 - t :] @ v[:, :, : t + 1]

    seconds = medians(
        {"relaxed": relaxed, "history": history, "parallel": lambda: rpb(v)}, repeats=3
    )
    return {
        "length": n,
        "relaxed us/token": 1e6 * seconds["relaxed"] / n,
        "history / relaxed": seconds["history"] / seconds["relaxed"],
        "full recompute / relaxed": seconds["parallel"] * n / seconds["relaxed"],
    }


def peak_extra_bytes(shape: tuple[int, ...]) -> int:
    """Memory of a forward product above its inputs."""
    return apart(_product_memory, shape)


def _product_memory(shape: tuple[int, ...]) -> int:
    w, v = random_inputs(shape)
    _load_libraries()
    return peak_of(lambda: toeplitz_matmul(w, v))


def apart(function: Callable, *args: object):
    """`function(*args)` in a fresh process: what ran before leaves no memory behind."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fastrpb.bench"])
    # Not a Pool: that one waits forever for a process that ran out of memory.
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def peak_of(run: Run) -> int:
    """Measured peak of resident memory during `run`, above what there was before it (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _load_libraries() -> None:
    """What a first FFT and a first product bring into memory, in either direction."""
    w, v = random_inputs((1, 8, 512, 2), grad=True)
    (toeplitz_matmul(w, v, impl="fft") + toeplitz_matmul(w, v, impl="dense")).sum().backward()


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def pairs() -> list[dict[str, str]]:
    """Every attention with every positional encoding that it can have."""
    found = []
    for attention, features, position in product(
        get_args(Attention), get_args(Features), get_args(Position)
    ):
        once = attention == "linear" or features == "sikf"  # softmax has no features
        possible = attention == "softmax" or position not in ON_LOGITS
        if once and possible and position != "fastrpb2d":
            found.append({"attention": attention, "features": features, "position": position})
    return found


def layer_cost(pair: dict[str, str], n: int) -> tuple[float, int]:
    """Seconds and peak bytes of forward+backward of one attention layer, 8 heads of 32."""
    _load_libraries()
    _layer_run(pair, 16)()
    run = _layer_run(pair, n)
    peak = peak_of(run)  # of the first run: later ones find the memory of earlier ones
    return medians({"run": run}, repeats=3)["run"], peak


def _layer_run(pair: dict[str, str], n: int) -> Run:
    config = ModelConfig(vocab_size=1, max_length=n, pooling="mean", **pair)  # pyright: ignore[reportArgumentType]
    layer = Block(config).attention
    x = torch.randn(1, n, config.dim, requires_grad=True)

    def run() -> None:
        layer.zero_grad()
        layer(x).sum().backward()

    return run


def layer_costs(pair: dict[str, str], patience: float = 3.2) -> dict[str, object]:
    """A row of the table: costs against the length, as far as a run takes under `patience`."""
    seconds: list[float] = []
    row: dict[str, object] = dict(pair)
    if pair["attention"] == "softmax":
        row["features"] = "-"
    for n in LENGTHS:
        if seconds and seconds[-1] * (2 * n / LENGTHS[len(seconds) - 1]) > patience:
            row |= {f"{n}: ms": "-", f"{n}: MB": "-"}
            continue
        second, peak = apart(layer_cost, pair, n)
        seconds.append(second)
        row |= {f"{n}: ms": 1e3 * second, f"{n}: MB": peak / 1e6}
    row["time ~ N^"] = _exponent(LENGTHS[: len(seconds)][-3:], seconds[-3:]) if seconds[1:] else "-"
    print(*pair.values(), f"up to {LENGTHS[len(seconds) - 1]}", file=sys.stderr)
    return row


def _exponent(lengths: list[int], seconds: list[float]) -> float:
    """The slope of log time against log length, by least squares."""
    x = torch.tensor(lengths, dtype=torch.float64).log()
    y = torch.tensor(seconds, dtype=torch.float64).log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def crossings(rows: Rows) -> Rows:
    """From which measured length on each linear pair is faster than softmax without positions."""
    base = next(r for r in rows if (r["attention"], r["position"]) == ("softmax", "none"))
    found = []
    for row in rows:
        if row["attention"] == "linear":
            wins = [n for n in LENGTHS if _milliseconds(row, n) < _milliseconds(base, n)]
            first = next((n for i, n in enumerate(LENGTHS) if wins == LENGTHS[i:]), "-")
            name = f"{row['features']} + {row['position']}"
            found.append({"pair": name, "faster than softmax from N =": first})
    return found


def _milliseconds(row: dict[str, object], n: int) -> float:
    """Infinite where the run would have taken too long to measure."""
    value = row[f"{n}: ms"]
    return value if isinstance(value, float) else torch.inf


def table(rows: Rows) -> str:
    """Rows as a Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    for row in rows:
        lines.append([f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def bench_cpu() -> dict[str, Rows]:
    """The core: against its peers, at small sizes, against the length, as a stream."""
    return {
        "float32 product": [against_peers(s) for s in SHAPES],
        f"small sizes, {TOKENS} tokens": [small_sizes(n) for n in SMALL],
        "growth with the length, 65536 tokens": growth(),
        "causal bias, token by token": [streaming(n) for n in (256, 1024, 4096, 16384)],
    }


def bench_model() -> dict[str, Rows]:
    """Forward+backward of an attention layer for every attention and positional encoding."""
    rows = [layer_costs(pair) for pair in pairs()]
    return {"attention layer, forward+backward": rows, "linear against softmax": crossings(rows)}


BENCHES = {"cpu": bench_cpu, "model": bench_model, "gpu": bench_gpu}


def bench(name: str) -> Path:
    """Measure, print the tables and write them to results/NAME.json."""
    if name not in BENCHES:
        raise ValueError(f"unknown benchmark {name!r}; there are {', '.join(BENCHES)}")
    torch.manual_seed(0)
    tables = BENCHES[name]()
    for title, rows in tables.items():
        print(f"\n{title}\n\n{table(rows)}")
    path = Path("results") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({"machine": machine(name), **tables}, indent=1) + "\n")
    part.replace(path)
    return path
