"""The Toeplitz product as a differentiable function, whichever operator computes it.

An operator's own autograd registration refuses `torch.func.grad`, so functions stand around the
operators. The product and its gradients are bilinear, and closed under differentiation.
"""

import torch
from torch import Tensor

from fastrpb.kernels.autograd import apply, into_axis
from fastrpb.kernels.ops import heads_inside


def product(
    w: Tensor,
    v: Tensor,
    first: int,
    out_length: int,
    kernel: str,
    prefix: int = 0,
    line: int = 0,
) -> Tensor:
    """Y[n] = Σ_d w_d · v[n+d] for n < out_length, differentiable any number of times.

    w (heads, K) holds the distances d = first..first+K-1, v is (batch, heads, N, dim). `kernel` is
    "fft", which takes all M+N-1 distances, or "triton", which may leave out the first `prefix`
    positions of v and puts as many zeros before Y. It may also take images in rows of `line`
    pixels: distances are then those of rows padded to 2·line-1.
    """
    return apply(_Product, w, v, first, out_length, kernel, prefix, line)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(w, v, first, out_length, kernel, prefix, line):
        if kernel == "fft":
            return torch.ops.fastrpb.toeplitz_fft(w, v, out_length)
        inside = heads_inside(v)
        return torch.ops.fastrpb.toeplitz_triton(w, v, first, out_length, prefix, line, inside)

    @staticmethod
    def setup_context(ctx, inputs, output):
        w, v, ctx.first, _, *ctx.rest = inputs
        ctx.save_for_backward(w, v)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        w, v = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, _transposed(w, g, v, ctx.first, *ctx.rest), *5 * [None]
        return *apply(_Gradients, g, w, v, ctx.first, *ctx.rest), *5 * [None]

    @staticmethod
    def tangent(tangents, w, v, *rest):
        dw, dv, *_ = tangents
        return product(dw, v, *rest) + product(w, dv, *rest)

    @staticmethod
    def vmap(info, in_dims, w, v, *rest):  # pyright: ignore[reportIncompatibleMethodOverride]
        w = into_axis(w, in_dims[0], info.batch_size, 0)
        v = into_axis(v, in_dims[1], info.batch_size, 1)
        return apply(_Product, w, v, *rest).unflatten(1, (info.batch_size, -1)), 1


class _Gradients(torch.autograd.Function):
    """(dw, dv) of ⟨g, W·v⟩."""

    @staticmethod
    def forward(g, w, v, first, kernel, prefix, line):
        if kernel == "fft":
            return torch.ops.fastrpb.toeplitz_fft_backward(g, w, v)
        inside = heads_inside(v)
        return torch.ops.fastrpb.toeplitz_triton_backward(g, w, v, first, prefix, line, inside)

    @staticmethod
    def setup_context(ctx, inputs, output):
        g, w, v, ctx.first, *ctx.rest = inputs
        ctx.save_for_backward(g, w, v)

    @staticmethod
    def backward(ctx, dw, dv):  # pyright: ignore[reportIncompatibleMethodOverride]
        g, w, v = ctx.saved_tensors
        _, prefix, _ = rest = ctx.rest
        m = g.shape[-2] - prefix
        grad_g = product(dw, v, ctx.first, m, *rest) + product(w, dv, ctx.first, m, *rest)
        grad_w, _ = apply(_Gradients, g, w, dv, ctx.first, *rest)
        return grad_g, grad_w, _transposed(dw, g, v, ctx.first, *rest), *4 * [None]

    @staticmethod
    def tangent(tangents, g, w, v, *rest):
        dg, dw, dv, *_ = tangents
        parts = apply(_Gradients, dg, w, v, *rest), apply(_Gradients, g, dw, dv, *rest)
        return tuple(a + b for a, b in zip(*parts, strict=True))

    @staticmethod
    def vmap(info, in_dims, g, w, v, *rest):  # pyright: ignore[reportIncompatibleMethodOverride]
        count = info.batch_size
        g = into_axis(g, in_dims[0], count, 1)
        w = into_axis(w, in_dims[1], count, 0)
        v = into_axis(v, in_dims[2], count, 1)
        dw, dv = apply(_Gradients, g, w, v, *rest)
        return (dw.unflatten(0, (count, -1)), dv.unflatten(1, (count, -1))), (0, 1)


def _transposed(
    w: Tensor, g: Tensor, v: Tensor, first: int, kernel: str, prefix: int, line: int
) -> Tensor:
    """Wᵀ·g, the gradient of v: the weights reversed."""
    n, first = v.shape[-2] - prefix, 1 - first - w.shape[-1]
    return product(w.flip(-1), g, first, n, kernel, prefix, line)
