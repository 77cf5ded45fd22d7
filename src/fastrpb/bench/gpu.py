"""Speed, memory and error on a GPU: `make bench-gpu`.

All times are medians in one process. "ms" is a replay of a CUDA graph, what the GPU itself takes;
"called ms" is a call from Python, where the CPU may be the slower one. Ratios compare replays.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from fastrpb.attention import linear_attention
from fastrpb.bench.measure import Row, Rows, Run, bar, plain_rfft
from fastrpb.features import sikf
from fastrpb.model import Classifier
from fastrpb.model_config import ModelConfig
from fastrpb.toeplitz import toeplitz, toeplitz_matmul, toeplitz_matmul_2d

TOKENS, HEADS, DIM = 65536, 8, 64
LENGTHS = [1024, 2048, 4096, 16384, 65536]
MILLION = 1 << 20
FLEX = [1024, 4096]  # lengths for which FlexAttention is compiled
FLEX_TILES = [None, {"BLOCK_M": 64, "BLOCK_N": 64}, {"BLOCK_M": 128, "BLOCK_N": 32}]
DENSE = 4096  # the longest W that is formed


def replay_ms(run: Run) -> float:
    """Median milliseconds of a CUDA graph's replay."""
    from triton.testing import do_bench_cudagraph  # noqa: PLC0415  (an extra)

    run()
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(do_bench_cudagraph(run, rep=20, return_mode="median"))  # pyright: ignore[reportArgumentType]


def called_ms(run: Run) -> float:
    """Median milliseconds of calls, one after the other."""
    from triton.testing import do_bench  # noqa: PLC0415

    return float(do_bench(run, warmup=10, rep=30, return_mode="median"))  # pyright: ignore[reportArgumentType]


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> Run:
    """Forward and backward for a random gradient of the output."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    g = torch.randn_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, g)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def inputs(n: int, heads: int = HEADS, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    w = random(heads, 2 * n - 1, dtype=torch.float32)
    return w, random(max(1, tokens // n), heads, n, DIM)


def fft(w: Tensor, v: Tensor) -> Tensor:
    return toeplitz_matmul(w, v, impl="fft")


def dense(w: Tensor, v: Tensor) -> Tensor:
    return toeplitz(w.to(v.dtype)) @ v


def with_bias(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """SIKF linear attention + FastRPB."""
    return linear_attention(q, k, v, phi=sikf, plus=toeplitz_matmul(w, v))


def extra_memory(run: Run, v: Tensor) -> float:
    """Peak memory above that before the call, output included, in sizes of v."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / v.nbytes


def relative_error(y: Tensor, w: Tensor, v: Tensor) -> float:
    """Against float64, over the first batch element and head."""
    exact = fft(w[:1].double(), v[:1, :1].double())
    return float((y[:1, :1].double() - exact).norm() / exact.norm())


def product_row(n: int, heads: int = HEADS, tokens: int = TOKENS) -> Row:
    """W·V forward against its peers."""
    w, v = inputs(n, heads, tokens)
    run = lambda: toeplitz_matmul(w, v)  # noqa: E731
    ms, copy = replay_ms(run), replay_ms(v.clone)
    row: Row = {
        "shape": tuple(v.shape),
        "ms": ms,
        "called ms": called_ms(run),
        "/ copy": ms / copy,
        "fft /": replay_ms(lambda: fft(w, v)) / ms,
        "called fft /": called_ms(lambda: fft(w, v)) / called_ms(run),
        "plain rfft /": replay_ms(lambda: plain_rfft(w, v)) / ms,
        "dense /": replay_ms(lambda: dense(w, v)) / ms if n <= DENSE else "-",
        "extra memory / v": extra_memory(run, v),
        "fft extra memory / v": extra_memory(lambda: fft(w, v), v),
        "error": f"{relative_error(run(), w, v):.1e}",
        "fft error": f"{relative_error(fft(w, v), w, v):.1e}",
    }
    return row


def gradient_row(n: int, heads: int = HEADS, tokens: int = TOKENS) -> Row:
    """W·V forward and backward."""
    w, v = inputs(n, heads, tokens)
    run = with_gradients(toeplitz_matmul, w, v)
    ms = replay_ms(run)
    return {
        "shape": tuple(v.shape),
        "ms": ms,
        "called ms": called_ms(run),
        "fft /": replay_ms(with_gradients(fft, w, v)) / ms,
        "plain rfft /": replay_ms(with_gradients(plain_rfft, w, v)) / ms,
    }


def filters_row(batch: int, n: int) -> Row:
    """One filter per channel: 512 of them, (batch, length, channel) in memory."""
    w, v = random(512, 2 * n - 1, dtype=torch.float32), random(batch, n, 512).unsqueeze(-1)
    v = v.transpose(1, 2)
    run, both = (lambda: toeplitz_matmul(w, v)), with_gradients(toeplitz_matmul, w, v)
    forward_ms, both_ms = replay_ms(run), replay_ms(both)
    return {
        "batch": batch,
        "length": n,
        "forward ms": forward_ms,
        "fft / forward": replay_ms(lambda: fft(w, v)) / forward_ms,
        "plain rfft / forward": replay_ms(lambda: plain_rfft(w, v)) / forward_ms,
        "forward+backward ms": both_ms,
        "fft / forward+backward": replay_ms(with_gradients(fft, w, v)) / both_ms,
        "plain rfft / forward+backward": replay_ms(with_gradients(plain_rfft, w, v)) / both_ms,
    }


@torch.no_grad()
def flex_ms(q: Tensor, k: Tensor, v: Tensor, w: Tensor | None) -> float:
    """Compiled FlexAttention with the relative bias on its logits, the best of some tiles.

    Without gradients, and without its checks of the indices, which only slow it down.
    """
    from torch._inductor import config  # noqa: PLC0415
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415

    last, bias = q.shape[-2] - 1, None if w is None else w.to(torch.bfloat16)

    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score if bias is None else score + bias[h, j - i + last]

    times = []
    for tile in FLEX_TILES:
        torch.compiler.reset()
        run = torch.compile(flex_attention, dynamic=False)
        with config.patch(assert_indirect_indexing=False):
            times.append(replay_ms(lambda: run(q, k, v, score_mod=add, kernel_options=tile)))  # noqa: B023
    return min(times)


def attention_row(n: int) -> Row:
    """SIKF linear attention + FastRPB against softmax attention."""
    w, v = inputs(n)
    q, k = torch.randn_like(v), torch.randn_like(v)
    run, both = (lambda: with_bias(q, k, v, w)), with_gradients(with_bias, q, k, v, w)
    forward_ms, both_ms = replay_ms(run), replay_ms(both)
    sdpa = scaled_dot_product_attention
    row: Row = {
        "length": n,
        "forward ms": forward_ms,
        "called ms": called_ms(run),
        "flash / forward": replay_ms(lambda: sdpa(q, k, v)) / forward_ms,
        "forward+backward ms": both_ms,
        "flash / forward+backward": replay_ms(with_gradients(sdpa, q, k, v)) / both_ms,
    }
    measured = n in FLEX
    row["flex / forward"] = flex_ms(q, k, v, w) / forward_ms if measured else "-"
    row["flex without bias / forward"] = flex_ms(q, k, v, None) / forward_ms if measured else "-"
    return row


def causal_row(n: int) -> Row:
    """Causal SIKF linear attention against plain torch and causal softmax attention."""
    q, k, v = (inputs(n)[1] for _ in range(3))
    ways = {
        "": lambda q, k, v: linear_attention(q, k, v, phi=sikf, causal=True),
        "plain torch / ": lambda q, k, v: linear_attention(
            q, k, v, phi=sikf, causal=True, impl="torch"
        ),
        "flash / ": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    row: Row = {"length": n}
    for what, run in {
        "forward": lambda way: lambda: way(q, k, v),
        "forward+backward": lambda way: with_gradients(way, q, k, v),
    }.items():
        times = {name: replay_ms(run(way)) for name, way in ways.items()}
        ms = times.pop("")
        row[f"{what} ms"] = ms
        row |= {f"{name}{what}": other / ms for name, other in times.items()}
    return row


def copies_row(n: int) -> Row:
    """Kernels whose floor is reading and writing, against `v.clone()`."""
    _, v = inputs(n)
    q, k = torch.randn_like(v), torch.randn_like(v)
    side = int(n**0.5)
    w = random(HEADS, 2 * side - 1, dtype=torch.float32)
    copy = replay_ms(v.clone)
    attention = lambda q, k, v: linear_attention(q, k, v, phi=sikf)  # noqa: E731
    plain = lambda q, k, v: linear_attention(q, k, v, phi=sikf, impl="torch")  # noqa: E731
    image = lambda w, v: toeplitz_matmul_2d(w, v, (side, side))  # noqa: E731
    return {
        "length": n,
        "copy ms": copy,
        "linear attention / copy": replay_ms(lambda: attention(q, k, v)) / copy,
        "forward+backward / copy": replay_ms(with_gradients(attention, q, k, v)) / copy,
        "in plain torch / copy": replay_ms(lambda: plain(q, k, v)) / copy,
        "additive 2D bias / copy": replay_ms(lambda: image(w, v)) / copy,
    }


MODELS = {
    "text": (8, {"vocab_size": 256, "max_length": 1000, "heads": 4, "mlp_dim": 1024}),
    "MNIST": (160, {"vocab_size": 256, "max_length": 784, "num_classes": 10, "layers": 8}),
}


def training_step(name: str, position: str) -> Run:
    """Forward, backward and an SGD step under bfloat16 autocast."""
    torch.manual_seed(0)
    batch, sizes = MODELS[name]
    config = ModelConfig(position=position, **sizes)  # pyright: ignore[reportArgumentType]
    model = Classifier(config).cuda()
    parameters: list[Tensor] = list(model.parameters())
    tokens = torch.randint(256, (batch, config.max_length), device="cuda")
    labels = torch.randint(config.num_classes, (batch,), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = cross_entropy(model(tokens), labels)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(gradient, alpha=-1e-3)

    return step


def model_row(name: str) -> Row:
    """A training step of a model of the paper with the bias and without it."""
    without, biased = (training_step(name, position) for position in ("none", "fastrpb"))
    ms, called = replay_ms(without), called_ms(without)
    return {
        "model": name,
        "batch": MODELS[name][0],
        "without ms": ms,
        "with FastRPB / without": replay_ms(biased) / ms,
        "called without ms": called,
        "called with / without": called_ms(biased) / called,
    }


def bench_gpu() -> dict[str, Rows]:
    """The tensor-core kernels against torch.fft, dense products, attention and copies."""
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU here; `fastrpb bench cpu` measures without one")
    lengths = [(n,) for n in LENGTHS]
    few = [(1024,), (4096,), (65536,)]
    million = (MILLION, 4, MILLION)
    sections: dict[str, tuple[Callable[..., Row], list[tuple]]] = {
        "W·V, forward": (product_row, [*lengths, million]),
        "W·V, forward+backward": (gradient_row, [*lengths, million]),
        "512 filters of one channel": (
            filters_row,
            [(batch, n) for n in (1024, 4096) for batch in (32, 64)],
        ),
        "SIKF linear attention + FastRPB": (attention_row, [(n,) for n in LENGTHS if n != 2048]),
        "causal SIKF linear attention": (causal_row, few),
        "against copies": (copies_row, few),
        "training steps": (model_row, [(name,) for name in MODELS]),
    }
    return {title: rows(title, *section) for title, section in sections.items()}


def rows(title: str, measure: Callable[..., Row], points: list[tuple]) -> Rows:
    """What `measure` gives at each point."""
    found: Rows = []
    for point in bar(points, title):
        found.append(measure(*point))
        torch.cuda.empty_cache()
    return found
