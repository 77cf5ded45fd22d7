"""Speed and memory of the core on this machine's CPU: `make bench`.

Every ratio compares medians of runs that alternate in one process, so that a noisy machine slows
both sides. The results go to results/ with the machine's name; a table is printed.
"""

import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import Tensor

from fastrpb.toeplitz import toeplitz, toeplitz_matmul

SHAPES = [(8, 8, 1024, 64), (4, 8, 4096, 64), (1, 8, 16384, 64), (1, 4, 65536, 64)]
SMALL = [8, 16, 32, 64, 128, 256, 512, 1024]
TOKENS = 8192  # batch x length where the length varies at fixed work

Run = Callable[[], object]


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


def machine() -> dict[str, object]:
    """What the numbers were measured on and with."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": "make bench",
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


def growth() -> list[dict[str, object]]:
    """Time a token when the length doubles at a fixed number of tokens."""
    inputs = {n: random_inputs((65536 // n, 4, n, 64)) for n in (2**k for k in range(10, 17))}
    seconds = medians({str(n): lambda n=n: toeplitz_matmul(*inputs[n]) for n in inputs})
    return [
        {"length": n, "time against half the length": seconds[str(n)] / seconds[str(n // 2)]}
        for n in inputs
        if n // 2 in inputs
    ]


def peak_extra_bytes(shape: tuple[int, ...]) -> int:
    """Measured peak of resident memory above the inputs, in a fresh process (Linux)."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_extra_bytes, (shape,))


def _peak_extra_bytes(shape: tuple[int, ...]) -> int:
    w, v = random_inputs(shape)
    toeplitz_matmul(torch.randn(8, 1023), torch.randn(1, 8, 512, 2), impl="fft")  # load libraries
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    toeplitz_matmul(w, v)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def table(rows: list[dict[str, object]]) -> str:
    """Rows as a Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    for row in rows:
        lines.append([f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(out: str = "results/toeplitz_cpu.json") -> None:
    """Measure, print the tables and write them to `out`."""
    torch.manual_seed(0)
    results: dict[str, object] = {"machine": machine()}
    parts: list[tuple[str, Callable[[], list[dict[str, object]]]]] = [
        ("float32 product", lambda: [against_peers(s) for s in SHAPES]),
        (f"small sizes, {TOKENS} tokens", lambda: [small_sizes(n) for n in SMALL]),
        ("growth with the length, 65536 tokens", growth),
    ]
    for title, measure in parts:
        rows = measure()
        results[title] = rows
        print(f"\n{title}\n\n{table(rows)}", flush=True)
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(path)
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
