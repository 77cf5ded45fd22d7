"""Linear attention by the fused kernels of a GPU, and which calls they take."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fastrpb.checks import check_choice, kept
from fastrpb.features import (
    DPFP,
    ELU1,
    SIKF,
    FavorPlus,
    Given,
    Phi,
    Projected,
    ReLU,
    elu1,
    relu,
    sikf,
)
from fastrpb.kernels import ops
from fastrpb.kernels.autograd import apply, into_axis
from fastrpb.plain_attention import plain_attention, widened

AttentionImpl = Literal["auto", "torch", "triton"]

# The maps that the kernels know, by number; those of a class of one's own are plain torch.
_GIVEN, _PROJECTED = 3, 4
_KINDS = {SIKF: 0, ELU1: 1, ReLU: 2, DPFP: _GIVEN, FavorPlus: _PROJECTED}
_PROJECTION = 5  # its place among the inputs of the functions below
_MOST_SEQUENCES = 65_535  # CUDA takes no more along the last axes of a grid
_FUSED_DIM, _FUSED_DIM_FLOAT32 = 128, 64  # the most channels that fit into `ops.ROOMY`


def _fits(phi: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether the kernels know the map, and have room for that many channels."""
    kind, dim, v_dim = _KINDS.get(type(phi)), q.shape[-1], v.shape[-1]
    most = _most_channels(v)
    fits = kind is not None
    if kind == _PROJECTED:
        fits = dim == phi.dim and not phi.projection.requires_grad
    if kind == _GIVEN:  # products of two may leave the range of float16
        fits = phi.nu < 2 * dim and 2 * dim * phi.nu <= most and v.dtype != torch.float16
    if causal and kind in (_GIVEN, _PROJECTED):
        fits = False
    return (
        fits
        and v.shape[:-3].numel() <= _MOST_SEQUENCES
        and all(x.dtype in (*ops.HALF, torch.float32) for x in (q, k, v))
        and 1 <= min(dim, v_dim) <= max(dim, v_dim) <= most
    )


def _most_channels(v: Tensor) -> int:
    most = _FUSED_DIM if v.dtype in ops.HALF else _FUSED_DIM_FLOAT32
    return most if ops.room(v) >= ops.ROOMY else most // 2


def use_triton(impl: str, phi: Phi, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether `impl` and the inputs are for the kernels; refuses "triton" where they cannot."""
    check_choice("impl", impl, get_args(AttentionImpl))
    if impl != "triton":
        there = impl == "auto" and v.is_cuda and ops.runs_on(v) and bool(v.numel())
        return there and _fits(phi, q, k, v, causal)
    if not ops.runs_on(v):
        raise ValueError(f"impl='triton' needs {ops.NEEDS}, v is on {v.device}; use impl='auto'")
    if not _fits(phi, q, k, v, causal):
        most = _most_channels(v)
        raise ValueError(
            f"impl='triton' is for sikf, elu1, relu and FavorPlus up to {most} channels, for DPFP "
            f"up to {most} features and not in float16, the last two not causal, no float64, and "
            f"up to {_MOST_SEQUENCES} sequences; got "
            f"{'causal ' if causal else ''}{type(phi).__name__}, {q.shape[-1]} and {v.shape[-1]} "
            f"channels, {v.dtype}; use impl='auto'"
        )
    return True


def fused_attention(
    phi: Phi,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    plus: Tensor | None,
    causal: bool,
) -> Tensor:
    """Linear attention + plus, of inputs that `use_triton` accepts."""
    kind = _KINDS[type(phi)]
    projection = phi.projection if isinstance(phi, FavorPlus) else None
    if isinstance(phi, DPFP):  # its features are few, and the kernel takes them as they are
        q, k = (phi.features(x).to(v.dtype) for x in widened(q, kept(k, mask)))
    lead = v.shape[:-3]
    q, k, v = (x.reshape(lead.numel(), *x.shape[-3:]) for x in (q, k, v))
    mask = None if mask is None else mask.reshape(lead.numel(), -1)
    plus = None if plus is None else plus.reshape(lead.numel(), *plus.shape[-3:])
    y, *_ = apply(_Fused, q, k, v, mask, plus, projection, kind, causal)
    return y.reshape(*lead, *y.shape[1:])


class _Fused(torch.autograd.Function):
    """The operator `fastrpb::linear_attention_triton`.

    Gradients of gradients, and tangents in forward mode, are by plain torch.
    """

    @staticmethod
    def forward(q, k, v, mask, plus, projection, kind, causal):
        y, state = torch.ops.fastrpb.linear_attention_triton(
            q, k, v, mask, plus, projection, kind, causal, ops.heads_inside(v)
        )
        return y, *state

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, plus, projection, ctx.kind, ctx.causal = inputs
        _, *state = output
        ctx.mark_non_differentiable(*state)
        ctx.save_for_backward(*tensors, projection, *state)
        ctx.plus = plus is not None

    @staticmethod
    def backward(ctx, g, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        # Eight, since what has a *state in its signature cannot be compiled.
        saved = *ctx.saved_tensors, *(8 - len(ctx.saved_tensors)) * [None]
        gradients = [None] * 3
        if any(ctx.needs_input_grad[:3]):
            gradients = apply(_FusedGradients, g, *saved, ctx.kind, ctx.causal)
        return *gradients, None, g if ctx.plus else None, None, None, None

    @staticmethod
    def tangent(tangents, q, k, v, mask, plus, projection, kind, causal):
        attention = _plain(mask, projection, kind, causal)
        dy = torch.func.jvp(attention, (q, k, v), tangents[:3])[1]
        dy = dy if plus is None else dy + tangents[4]
        return dy, *(None for _ in range(1 if causal else 3))  # as many as the state has

    @staticmethod
    def vmap(info, in_dims, *inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _mapped(_Fused, info.batch_size, in_dims, inputs)


class _FusedGradients(torch.autograd.Function):
    """(dq, dk, dv) of ⟨g, attention⟩, given the state that the forward left."""

    @staticmethod
    def forward(g, q, k, v, mask, projection, first, second, third, kind, causal):
        state = [x for x in (first, second, third) if x is not None]  # one if causal
        return torch.ops.fastrpb.linear_attention_triton_backward(
            g, q, k, v, mask, projection, state, kind, causal, ops.heads_inside(v)
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:6])
        ctx.kind, ctx.causal = inputs[-2:]

    @staticmethod
    def backward(ctx, *upstream):
        *tensors, mask, projection = ctx.saved_tensors
        gradients = _plain_gradients(mask, projection, ctx.kind, ctx.causal)
        second = torch.func.vjp(gradients, *tensors)[1](upstream)
        return *second, *7 * [None]

    @staticmethod
    def tangent(tangents, g, q, k, v, mask, projection, *rest):
        gradients = _plain_gradients(mask, projection, *rest[-2:])
        return torch.func.jvp(gradients, (g, q, k, v), tangents[:4])[1]

    @staticmethod
    def vmap(info, in_dims, *inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _mapped(_FusedGradients, info.batch_size, in_dims, inputs)


def _plain(mask: Tensor | None, projection: Tensor | None, kind: int, causal: bool) -> Callable:
    """The same attention of (q, k, v) in plain torch."""
    phi = Given() if projection is None else Projected(projection)
    phi = {0: sikf, 1: elu1, 2: relu}.get(kind, phi)
    return lambda q, k, v: plain_attention(phi, q, k, v, mask, causal)


def _plain_gradients(*call: Any) -> Callable:
    """Of (g, q, k, v), for the arguments of `_plain`: the gradients of ⟨g, attention⟩."""
    return lambda g, *tensors: torch.func.vjp(_plain(*call), *tensors)[1](g)


def _mapped(function: type[torch.autograd.Function], count: int, in_dims, inputs):
    """`function` under `torch.func.vmap`: what is mapped over joins the batch.

    But for the projection: models with others each come one by one.
    """
    pairs = list(zip(inputs, in_dims, strict=True))
    if in_dims[_PROJECTION] is not None:
        each = [
            apply(function, *(x if d is None else x.select(d, i) for x, d in pairs))
            for i in range(count)
        ]
        return tuple(torch.stack(x) for x in zip(*each, strict=True)), (0,) * len(each[0])
    inputs = [
        into_axis(x, d, count, 0) if isinstance(x, Tensor) and i != _PROJECTION else x
        for i, (x, d) in enumerate(pairs)
    ]
    outputs = apply(function, *inputs)
    return tuple(x.unflatten(0, (count, -1)) for x in outputs), (0,) * len(outputs)
