"""The Toeplitz product as a differentiable function, whichever operator computes it.

An operator's own autograd registration refuses `torch.func.grad`, so functions stand around the
operators. The product and its gradients are bilinear, and closed under differentiation.
"""

import torch
from torch import Tensor


def product(w: Tensor, v: Tensor, first: int, out_length: int, kernel: str) -> Tensor:
    """Y[n] = Σ_d w_d · v[n+d] for n < out_length, differentiable any number of times.

    w (heads, K) holds the distances d = first..first+K-1, v is (batch, heads, N, dim). `kernel` is
    "fft", which takes all M+N-1 distances, or "triton".
    """
    return _Product.apply(w, v, first, out_length, kernel)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(w, v, first, out_length, kernel):
        if kernel == "fft":
            return torch.ops.fastrpb.toeplitz_fft(w, v, out_length)
        return torch.ops.fastrpb.toeplitz_triton(w, v, first, out_length)

    @staticmethod
    def setup_context(ctx, inputs, output):
        w, v, ctx.first, _, ctx.kernel = inputs
        ctx.save_for_backward(w, v)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        w, v = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, _transposed(w, g, ctx.first, v.shape[-2], ctx.kernel), None, None, None
        return *_Gradients.apply(g, w, v, ctx.first, ctx.kernel), None, None, None

    @staticmethod
    def vmap(info, in_dims, w, v, first, out_length, kernel):  # pyright: ignore[reportIncompatibleMethodOverride]
        w = _into_heads(w, in_dims[0], info.batch_size, 0)
        v = _into_heads(v, in_dims[1], info.batch_size, 1)
        y = _Product.apply(w, v, first, out_length, kernel)
        return y.unflatten(1, (info.batch_size, -1)), 1


class _Gradients(torch.autograd.Function):
    """(dw, dv) of ⟨g, W·v⟩."""

    @staticmethod
    def forward(g, w, v, first, kernel):
        if kernel == "fft":
            return torch.ops.fastrpb.toeplitz_fft_backward(g, w, v)
        return torch.ops.fastrpb.toeplitz_triton_backward(g, w, v, first)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.first, ctx.kernel = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, dw, dv):  # pyright: ignore[reportIncompatibleMethodOverride]
        g, w, v = ctx.saved_tensors
        (m, n), rest = (g.shape[-2], v.shape[-2]), (ctx.first, ctx.kernel)
        grad_g = product(dw, v, ctx.first, m, ctx.kernel) + product(w, dv, ctx.first, m, ctx.kernel)
        grad_w, _ = _Gradients.apply(g, w, dv, *rest)
        return grad_g, grad_w, _transposed(dw, g, ctx.first, n, ctx.kernel), None, None

    @staticmethod
    def vmap(info, in_dims, g, w, v, first, kernel):  # pyright: ignore[reportIncompatibleMethodOverride]
        count = info.batch_size
        g = _into_heads(g, in_dims[0], count, 1)
        w = _into_heads(w, in_dims[1], count, 0)
        v = _into_heads(v, in_dims[2], count, 1)
        dw, dv = _Gradients.apply(g, w, v, first, kernel)
        return (dw.unflatten(0, (count, -1)), dv.unflatten(1, (count, -1))), (0, 1)


def _transposed(w: Tensor, g: Tensor, first: int, out_length: int, kernel: str) -> Tensor:
    """Wᵀ·g: the weights reversed."""
    return product(w.flip(-1), g, 1 - first - w.shape[-1], out_length, kernel)


def _into_heads(x: Tensor, mapped: int | None, count: int, axis: int) -> Tensor:
    """Merge the axis that `torch.func.vmap` maps over, or `count` copies, into the heads axis."""
    if mapped is None:
        x = x.unsqueeze(axis).repeat_interleave(count, axis)
    else:
        x = x.movedim(mapped, axis)
    return x.flatten(axis, axis + 1)
