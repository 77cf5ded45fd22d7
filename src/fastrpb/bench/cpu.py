"""`make bench`: the core on the CPU, against its peers, at small sizes, against the length."""

from collections.abc import Callable
from math import isqrt

import torch
from torch import Tensor

from fastrpb.attention import linear_attention, softmax_attention
from fastrpb.bench.measure import (
    Row,
    Rows,
    Run,
    against_length,
    apart,
    bar,
    growth,
    medians,
    peak_of,
    plain_rfft,
)
from fastrpb.bias import FastRPB
from fastrpb.features import sikf
from fastrpb.toeplitz import toeplitz, toeplitz_matmul, toeplitz_matmul_2d

SHAPES = [(8, 8, 1024, 64), (4, 8, 4096, 64), (1, 8, 16384, 64), (1, 4, 65536, 64)]
SMALL = [8, 16, 32, 64, 128, 256, 512, 1024]
TOKENS = 8192  # batch x length where the length varies at fixed work

STREAMS = [256, 1024, 4096, 16384]
LENGTHS = [256, 1024, 4096, 16384, 65536]  # of an operation


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


def against_peers(shape: tuple[int, int, int, int]) -> Row:
    """Forward against scipy and a plain `rfft`, forward+backward against forward, extra memory."""
    w, v = random_inputs(shape)
    wg, vg = random_inputs(shape, grad=True)
    g = torch.randn_like(v)
    runs = {
        "forward": lambda: toeplitz_matmul(w, v),
        "scipy": lambda: scipy_product(w, v),
        "plain rfft": lambda: plain_rfft(w, v),
        "forward+backward": lambda: torch.autograd.grad(toeplitz_matmul(wg, vg), (wg, vg), g),
    }
    seconds = medians(runs)
    forward = seconds["forward"]
    return {
        "shape": shape,
        "forward ms": 1e3 * forward,
        "scipy / forward": seconds["scipy"] / forward,
        "plain rfft / forward": seconds["plain rfft"] / forward,
        "forward+backward / forward": seconds["forward+backward"] / forward,
        "extra memory / v": peak_extra_bytes(shape) / (4 * v.numel()),
    }


def small_sizes(n: int) -> Row:
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


def doublings() -> Rows:
    """Time a token when the length doubles at a fixed number of tokens."""
    inputs = {n: random_inputs((65536 // n, 4, n, 64)) for n in (2**k for k in range(10, 17))}
    runs: dict[str, Run] = {str(n): lambda n=n: toeplitz_matmul(*inputs[n]) for n in inputs}
    seconds = medians(runs, title="doublings")
    return [
        {"length": n, "time against half the length": seconds[str(n)] / seconds[str(n // 2)]}
        for n in inputs
        if n // 2 in inputs
    ]


def streaming(n: int) -> Row:
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
    load_libraries()
    return peak_of(lambda: toeplitz_matmul(w, v))


def load_libraries() -> None:
    """What a first FFT and a first product bring into memory, in either direction."""
    w, v = random_inputs((1, 8, 512, 2), grad=True)
    (toeplitz_matmul(w, v, impl="fft") + toeplitz_matmul(w, v, impl="dense")).sum().backward()


def _line(n: int) -> tuple[int, ...]:
    return 8, 2 * n - 1


def _over_image(w: Tensor, v: Tensor) -> Tensor:
    side = isqrt(v.shape[-2])
    return toeplitz_matmul_2d(w, v, (side, side))


# The shape of w for a length, and the operation on (w, v) with v (1, 8, N, 64).
OPERATIONS: dict[str, tuple[Callable[[int], tuple[int, ...]], Callable[[Tensor, Tensor], Tensor]]]
OPERATIONS = {
    "W·V": (_line, toeplitz_matmul),
    "W·V, dense": (_line, lambda w, v: toeplitz_matmul(w, v, impl="dense")),
    "W·V, causal": (_line, lambda w, v: toeplitz_matmul(w, v, causal=True)),
    "W·V over an image, additive": (lambda n: (8, 2 * isqrt(n) - 1), _over_image),
    "W·V over an image, full": (lambda n: (8, 2 * isqrt(n) - 1, 2 * isqrt(n) - 1), _over_image),
    "linear attention, SIKF": (_line, lambda w, v: linear_attention(v, v, v, phi=sikf)),
    "softmax attention": (_line, lambda w, v: softmax_attention(v, v, v)),
}


def operation_cost(name: str, n: int, backward: bool) -> tuple[float, int]:
    """Seconds and peak bytes of an operation."""
    load_libraries()
    shape, operation = OPERATIONS[name]
    w = torch.randn(shape(n), requires_grad=backward)
    v = torch.randn(1, 8, n, 64, requires_grad=backward)

    def run() -> None:
        y = operation(w, v)
        if backward:
            y.sum().backward()

    peak = peak_of(run)
    return medians({"run": run}, repeats=3)["run"], peak


def bench_cpu() -> dict[str, Rows]:
    """The core: against its peers, at small sizes, against the length, as a stream."""
    rows = {
        name: against_length(operation_cost, name, LENGTHS)
        for name in bar(OPERATIONS, "operations")
    }
    return {
        "float32 product": [against_peers(shape) for shape in bar(SHAPES, "peers")],
        f"small sizes, {TOKENS} tokens": [small_sizes(n) for n in bar(SMALL, "small sizes")],
        "time at twice the length, 65536 tokens": doublings(),
        "causal bias, token by token": [streaming(n) for n in bar(STREAMS, "streaming")],
        "operations": [{"operation": k, **row} for k, part in rows.items() for row in part],
        "time ~ N^a": [
            {
                "operation": name,
                "forward": growth(part, "forward ms"),
                "forward+backward": growth(part, "forward+backward ms"),
            }
            for name, part in rows.items()
        ],
    }
