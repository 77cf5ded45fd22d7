"""Y = W·V by FFT, for any device: the operators `fastrpb::toeplitz_fft` and its backward.

A Toeplitz product is a slice of a circular convolution (Prop. 1), so with K the spectrum of the
weights Y = ifft(K · fft(V)). What makes it fast:

- two channels travel as one complex number: W is real, so W(a + ib) = Wa + i·Wb;
- the transforms run over a contiguous axis, at an even length with small factors;
- the work is cut into chunks that stay in the cache, which bounds the extra memory as well.

Operators: `torch.compile` and `torch.export` see one node instead of unrolled chunks of complex
arithmetic.
"""

from collections.abc import Callable
from itertools import product as combinations

import torch
from torch import Tensor

from fastrpb.kernels.product import product
from fastrpb.kernels.registry import operator

# The least and the most bytes of a chunk's signals; a quarter of the values' bytes between them. On
# the CPU a chunk should stay in the shared cache (of 1 to 16 MiB, 2 was the best on the whole); a
# GPU wants few, large launches. Eight signals fill a cache line where they are read.
_CHUNK_BYTES = {"cpu": (1 << 20, 2 << 20), "cuda": (64 << 20, 1 << 30)}
_CHUNK_SIGNALS = 8


def _fast_length(n: int) -> int:
    """A length >= n that transforms fast: a power of two, or one of the shorter ones that pay."""
    power = 1 << max(1, (n - 1).bit_length())
    sixteenths = (9, 10, 12, 14) if power >= 1024 else (12,) if power >= 32 else ()
    return next((power * s // 16 for s in sixteenths if power * s // 16 >= n), power)


def _as_signals(x: Tensor) -> Tensor:
    """(batch, heads, length, dim) to (batch, heads, signals, length): channel pairs as complex."""
    if x.shape[-1] % 2 == 0:
        *outer, inner = x.stride()
        if inner != 1 or any(s % 2 for s in (*outer, x.storage_offset())):
            x = x.clone(memory_format=torch.contiguous_format)
        x = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return x.transpose(-1, -2)


def _transforms(signals: Tensor, size: int) -> tuple[Callable, Callable]:
    """Forward and inverse transform for these signals: complex, or real where dim is odd."""
    if signals.is_complex():
        return torch.fft.fft, torch.fft.ifft
    return torch.fft.rfft, lambda f: torch.fft.irfft(f, n=size)


def _kernel(w: Tensor, m: int, n: int, size: int) -> Tensor:
    """First column of the circulant matrix that holds W: entry j, modulo size, is w_{-j}."""
    kernel = w.new_zeros(w.shape[0], size)
    kernel[:, :m] = w[:, :m].flip(-1)
    kernel[:, size - n + 1 :] = w[:, m:].flip(-1)
    return kernel


def _chunks(signals: Tensor, size: int) -> list[tuple[slice, slice, slice]]:
    """Cut (batch, heads, signals) into blocks whose transforms fit the working set."""
    least, most = _CHUNK_BYTES.get(signals.device.type, _CHUNK_BYTES["cpu"])
    limit = min(most, max(least, signals.nbytes // 4))
    room = max(_CHUNK_SIGNALS, limit // (size * signals.element_size()))
    ranges = []
    for total in reversed(signals.shape[:3]):
        step = max(1, min(total, room))
        ranges.append([slice(i, i + step) for i in range(0, total, step)])
        room //= total
    return [(bs, hs, cs) for cs, hs, bs in combinations(*ranges)]


def _padder(first: Tensor, size: int) -> Callable[[Tensor], Tensor]:
    """Pads chunks with zeros up to `size`, all in one buffer: the zeros are written once.

    The first chunk is the largest.
    """
    buffer = first.new_zeros(*first.shape[:3], size)

    def pad(chunk: Tensor) -> Tensor:
        b, h, c, length = chunk.shape
        padded = buffer[:b, :h, :c]
        padded[..., :length] = chunk
        return padded

    return pad


@operator("toeplitz_fft")
def _forward(w: Tensor, v: Tensor, out_length: int) -> Tensor:
    m, n = out_length, v.shape[-2]
    size = _fast_length(m + n - 1)
    y = v.new_empty(*v.shape[:2], m, v.shape[-1])
    if not v.numel():
        return y
    source, target = _as_signals(v), _as_signals(y)
    forward, inverse = _transforms(source, size)
    spectrum = forward(_kernel(w, m, n, size)).unsqueeze(-2)
    chunks = _chunks(source, size)
    pad = _padder(source[chunks[0]], size)
    for bs, hs, cs in chunks:
        f = forward(pad(source[bs, hs, cs])).mul_(spectrum[hs])
        target[bs, hs, cs] = inverse(f)[..., :m]
    return y


@operator("toeplitz_fft_backward")
def _backward(g: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ⟨g, W·v⟩ for w and v, sharing the transform of g.

    dv = Wᵀ·g and dw[i] = Σ_n ⟨g[n], v[n+i-(M-1)]⟩, where ⟨·,·⟩ sums over batch and dim.
    """
    m, n = g.shape[-2], v.shape[-2]
    size = _fast_length(m + n - 1)
    dv = v.new_empty(v.shape)
    if not v.numel():
        return torch.zeros_like(w), dv
    upstream, source, target = _as_signals(g), _as_signals(v), _as_signals(dv)
    forward, inverse = _transforms(source, size)
    # conj_physical: a lazy conjugate is not resolved where compilers run an operator.
    spectrum = forward(_kernel(w, m, n, size)).conj_physical().unsqueeze(-2)
    correlation = torch.zeros_like(spectrum.squeeze(-2))
    chunks = _chunks(source, size)
    pad_g, pad_v = (_padder(x[chunks[0]], size) for x in (upstream, source))
    for bs, hs, cs in chunks:
        f = forward(pad_g(upstream[bs, hs, cs]))
        correlation[hs] += (f * forward(pad_v(source[bs, hs, cs])).conj_physical()).sum((0, 2))
        target[bs, hs, cs] = inverse(f.mul_(spectrum[hs]))[..., :n]
    # Of paired channels the real part adds up the two products; the imaginary part crosses them.
    lag = inverse(correlation).real
    return torch.cat([lag[:, :m].flip(-1), lag[:, size - n + 1 :].flip(-1)], dim=-1), dv


@_forward
def _(w: Tensor, v: Tensor, out_length: int) -> Tensor:
    return v.new_empty(*v.shape[:2], out_length, v.shape[-1])


@_backward
def _(g: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return w.new_empty(w.shape), v.new_empty(v.shape)


def toeplitz_fft(w: Tensor, v: Tensor, out_length: int) -> Tensor:
    """Y[n] = Σ_m w[M-1+m-n] · v[m] for n < M = out_length, differentiable any number of times.

    w (heads, M+N-1), v (batch, heads, N, dim), both float32 or float64 → (batch, heads, M, dim).
    O((M+N) log(M+N)) time a channel; beyond the result, one chunk of extra memory.
    """
    return product(w, v, 1 - out_length, out_length, "fft")
