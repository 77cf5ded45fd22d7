"""Y = W·V by FFT, for any device: the operators `fastrpb::toeplitz_fft` and its backward.

A Toeplitz product is a slice of a circular convolution (Prop. 1), so with K the spectrum of the
weights Y = ifft(K · fft(V)). What makes it fast:

- two channels travel as one complex number: W is real, so W(a + ib) = Wa + i·Wb;
- the transforms run over a contiguous axis, at an even length with small factors;
- the work is cut into chunks that stay in the cache, which bounds the extra memory as well.

Operators, not an `autograd.Function`: `torch.compile` and `torch.export` then see one node instead
of unrolled chunks of complex arithmetic. The two are closed under differentiation.
"""

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

# Working set of a chunk. On the CPU it should stay in the shared cache: of 256 KiB to 32 MiB, 8 MiB
# was the fastest or within 10% of it from N = 256 to 65536. A GPU wants few, large launches.
_CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}


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
            x = x.contiguous()
        x = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return x.transpose(-1, -2)


def _transforms(signals: Tensor, size: int) -> tuple[Callable, Callable]:
    """Forward and inverse transform for these signals: complex, or real where dim is odd."""
    if signals.is_complex():
        return (lambda x: torch.fft.fft(x, n=size)), torch.fft.ifft
    return (lambda x: torch.fft.rfft(x, n=size)), (lambda f: torch.fft.irfft(f, n=size))


def _kernel(w: Tensor, m: int, n: int, size: int) -> Tensor:
    """First column of the circulant matrix that holds W: entry j, modulo size, is w_{-j}."""
    kernel = w.new_zeros(w.shape[0], size)
    kernel[:, :m] = w[:, :m].flip(-1)
    kernel[:, size - n + 1 :] = w[:, m:].flip(-1)
    return kernel


def _chunks(signals: Tensor, size: int) -> Iterator[tuple[slice, slice, slice]]:
    """Cut (batch, heads, signals) into blocks whose transforms fit the working set."""
    limit = _CHUNK_BYTES.get(signals.device.type, _CHUNK_BYTES["cpu"])
    room = max(1, limit // (size * signals.element_size()))
    ranges = []
    for total in reversed(signals.shape[:3]):
        step = max(1, min(total, room))
        ranges.append([slice(i, i + step) for i in range(0, total, step)])
        room //= max(1, total)
    for cs, hs, bs in product(*ranges):
        yield bs, hs, cs


@torch.library.custom_op("fastrpb::toeplitz_fft", mutates_args=())
def toeplitz_fft(w: Tensor, v: Tensor, out_length: int) -> Tensor:
    """Y[n] = Σ_m w[M-1+m-n] · v[m] for n < M = out_length.

    w (heads, M+N-1), v (batch, heads, N, dim), both float32 or float64 → (batch, heads, M, dim).
    O((M+N) log(M+N)) time a channel; beyond the result, one chunk of extra memory.
    """
    m, n = out_length, v.shape[-2]
    size = _fast_length(m + n - 1)
    y = v.new_empty(*v.shape[:2], m, v.shape[-1])
    source, target = _as_signals(v), _as_signals(y)
    forward, inverse = _transforms(source, size)
    spectrum = forward(_kernel(w, m, n, size)).unsqueeze(-2)
    for bs, hs, cs in _chunks(source, size):
        f = forward(source[bs, hs, cs]).mul_(spectrum[hs])
        target[bs, hs, cs] = inverse(f)[..., :m]
    return y


@torch.library.custom_op("fastrpb::toeplitz_fft_backward", mutates_args=())
def toeplitz_fft_backward(g: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ⟨g, W·v⟩ for w and v, sharing the transform of g.

    dv = Wᵀ·g and dw[i] = Σ_n ⟨g[n], v[n+i-(M-1)]⟩, where ⟨·,·⟩ sums over batch and dim.
    """
    m, n = g.shape[-2], v.shape[-2]
    size = _fast_length(m + n - 1)
    dv = torch.empty_like(v, memory_format=torch.contiguous_format)
    upstream, source, target = _as_signals(g), _as_signals(v), _as_signals(dv)
    forward, inverse = _transforms(source, size)
    spectrum = forward(_kernel(w, m, n, size)).unsqueeze(-2).conj()
    correlation = torch.zeros_like(spectrum.squeeze(-2))
    for bs, hs, cs in _chunks(source, size):
        f = forward(upstream[bs, hs, cs])
        correlation[hs] += (f * forward(source[bs, hs, cs]).conj()).sum((0, 2))
        target[bs, hs, cs] = inverse(f.mul_(spectrum[hs]))[..., :n]
    # Of paired channels the real part adds up the two products; the imaginary part crosses them.
    lag = inverse(correlation).real
    return torch.cat([lag[:, :m].flip(-1), lag[:, size - n + 1 :].flip(-1)], dim=-1), dv


@toeplitz_fft.register_fake
def _(w: Tensor, v: Tensor, out_length: int) -> Tensor:
    return v.new_empty(*v.shape[:2], out_length, v.shape[-1])


@toeplitz_fft_backward.register_fake
def _(g: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(w, memory_format=torch.contiguous_format), torch.empty_like(
        v, memory_format=torch.contiguous_format
    )


def _save(ctx, inputs, output):
    w, v, ctx.out_length = inputs
    ctx.save_for_backward(w, v)


def _differentiate(ctx, g):
    w, v = ctx.saved_tensors
    if not ctx.needs_input_grad[0]:
        return None, toeplitz_fft(w.flip(-1), g, v.shape[-2]), None
    return *toeplitz_fft_backward(g, w, v), None


def _save_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate_backward(ctx, dw, dv):
    """Both results are bilinear in (g, w, v), so every derivative is again one of the two."""
    g, w, v = ctx.saved_tensors
    m, n = g.shape[-2], v.shape[-2]
    grad_g = toeplitz_fft(dw, v, m) + toeplitz_fft(w, dv, m)
    grad_w, _ = toeplitz_fft_backward(g, w, dv)
    grad_v = toeplitz_fft(dw.flip(-1), g, n)
    return grad_g, grad_w, grad_v


toeplitz_fft.register_autograd(_differentiate, setup_context=_save)
toeplitz_fft_backward.register_autograd(_differentiate_backward, setup_context=_save_backward)


def _into_heads(x: Tensor, mapped: int | None, count: int, axis: int) -> Tensor:
    """Merge the axis that `torch.func.vmap` maps over, or `count` copies, into the heads axis."""
    x = (
        x.unsqueeze(axis).repeat_interleave(count, axis)
        if mapped is None
        else x.movedim(mapped, axis)
    )
    return x.flatten(axis, axis + 1)


@toeplitz_fft.register_vmap
def _(info, in_dims, w, v, out_length):
    w = _into_heads(w, in_dims[0], info.batch_size, 0)
    v = _into_heads(v, in_dims[1], info.batch_size, 1)
    return toeplitz_fft(w, v, out_length).unflatten(1, (info.batch_size, -1)), 1


@toeplitz_fft_backward.register_vmap
def _(info, in_dims, g, w, v):
    g = _into_heads(g, in_dims[0], info.batch_size, 1)
    w = _into_heads(w, in_dims[1], info.batch_size, 0)
    v = _into_heads(v, in_dims[2], info.batch_size, 1)
    dw, dv = toeplitz_fft_backward(g, w, v)
    return (dw.unflatten(0, (info.batch_size, -1)), dv.unflatten(1, (info.batch_size, -1))), (0, 1)
