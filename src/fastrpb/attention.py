"""Softmax and linear attention, at once or step by step (Eq. 1-3).

All take q (batch, heads, M, dim), k (batch, heads, N, dim), v (batch, heads, N, dim_v) and give
(batch, heads, M, dim_v). Masks are (batch, N) bool over the keys, True = keep; a query that sees no
key gives zeros. Causal means that output n sees the inputs m <= n, also where M and N differ.
Linear attention computes in float32 inside for half precisions, also under autocast.
"""

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fastrpb.causal import add_shifted, causal_sums
from fastrpb.checks import (
    check_choice,
    check_flag,
    check_floating,
    check_mask,
    check_values,
    compute_dtype,
    kept,
)
from fastrpb.features import (
    DPFP,
    ELU1,
    HIDDEN,
    SIKF,
    ExpFeatureMap,
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
from fastrpb.modes import exact

AttentionImpl = Literal["auto", "torch", "triton"]

# The maps that the kernels know, by number; those of a class of one's own are plain torch.
_GIVEN, _PROJECTED = 3, 4
_KINDS = {SIKF: 0, ELU1: 1, ReLU: 2, DPFP: _GIVEN, FavorPlus: _PROJECTED}
_PROJECTION = 5  # its place among the inputs of the functions below
_MOST_SEQUENCES = 65_535  # CUDA takes no more along the last axes of a grid
_FUSED_DIM, _FUSED_DIM_FLOAT32 = 128, 64  # the most channels that fit into `ops.ROOMY`


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    logits: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """y_n = Σ_m softmax_m(q_n·k_m/√dim + logits[n, m])·v_m: O(MN), by the fused kernels of torch.

    Args:
        q, k, v, mask, causal: see the module.
        logits: added to the scores, broadcasting to (batch, heads, M, N) (relative positions).
        dropout: of the attention weights; pass 0 outside training.

    >>> q = k = v = torch.randn(2, 4, 10, 8)
    >>> softmax_attention(q, k, v, causal=True).shape
    torch.Size([2, 4, 10, 8])
    """
    _check(q, k, v, mask)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must be from 0 to below 1")
    one_dtype = q.dtype == k.dtype == v.dtype
    if not one_dtype and not torch.is_autocast_enabled(q.device.type):  # it makes them one
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if mask is None and logits is None:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=causal
        )
    visible = _visible(q, k, mask, causal)
    k, v = kept(k, mask), kept(v, mask)
    if logits is None:
        attn_mask = visible
    else:
        _check_logits(logits, q, k)
        attn_mask = logits.to(q.dtype)
        if visible is not None:
            attn_mask = attn_mask.masked_fill(~visible, -torch.inf)
    y = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout
    )
    return y if visible is None else y.masked_fill(~visible.any(-1, keepdim=True), 0)


def linear_attention_weights(
    q: Tensor, k: Tensor, *, phi: Phi, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """A[n, m] = φ(q_n)ᵀφ(k_m) / Σ_m' φ(q_n)ᵀφ(k_m'): the definition, O(MN·features).

    `linear_attention(q, k, v, ...) == linear_attention_weights(q, k, ...) @ v`; for tests, plots.
    """
    _check(q, k, k, mask)
    _check_phi(phi)
    visible, dtype = _visible(q, k, mask, causal), q.dtype
    with exact(q):
        q, k = _widened(q, kept(k, mask))
        if isinstance(phi, ExpFeatureMap):
            log_q, log_k = phi.logs(q, k)
            log_sim = torch.logsumexp(log_q.unsqueeze(-2) + log_k.unsqueeze(-3), dim=-1)
            if visible is not None:
                log_sim = log_sim.masked_fill(~visible, HIDDEN)
            sim = torch.exp(log_sim - log_sim.amax(-1, keepdim=True))
        else:
            phi_q, phi_k = phi(q, k)
            sim = phi_q @ phi_k.mT
        if visible is not None:
            sim = sim.masked_fill(~visible, 0)
        return _divide(sim, sim.sum(-1, keepdim=True)).to(dtype)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    phi: Phi,
    mask: Tensor | None = None,
    causal: bool = False,
    plus: Tensor | None = None,
    impl: AttentionImpl = "auto",
) -> Tensor:
    """y_n = φ(q_n)ᵀ Σ_m φ(k_m)v_mᵀ / φ(q_n)ᵀ Σ_m φ(k_m) + plus_n: O(N) time and memory.

    Args:
        q, k, v, mask, causal: see the module.
        phi: a feature map, such as `fastrpb.sikf`.
        plus: of the shape and dtype of the result, to be added to it, such as the W·V of
            `FastRPB`; what is fused saves a read and a write that way.
        impl: "triton" fuses it all on a GPU, for `sikf`, `elu1` and `relu` up to 128 channels (64
            in float32), and where not causal for `FavorPlus` and, up to as many features and not in
            float16, `DPFP`; up to half as many where a GPU has less than 160 KB of shared memory.
            "torch" computes anything anywhere; "auto" fuses what it can.

    The causal form works in chunks: within one by the quadratic definition, across them by the
    sums so far, one a chunk.

    >>> from fastrpb import sikf
    >>> q, k, v = torch.randn(3, 2, 4, 100, 8)
    >>> y = linear_attention(q, k, v, phi=sikf, causal=True)
    >>> definition = linear_attention_weights(q, k, phi=sikf, causal=True) @ v
    >>> torch.allclose(y, definition, atol=1e-5)
    True
    >>> torch.equal(linear_attention(q, k, v, phi=sikf, causal=True, plus=v), y + v)
    True
    """
    _check(q, k, v, mask)
    _check_phi(phi)
    check_flag("causal", causal)
    if plus is not None:
        _check_plus(plus, q, v)
    if not _use_triton(impl, phi, q, k, v, causal):
        y = _plain(phi, q, k, v, mask, causal)
        return y if plus is None else y + plus
    kind = _KINDS[type(phi)]
    projection = phi.projection if isinstance(phi, FavorPlus) else None
    if isinstance(phi, DPFP):  # its features are few, and the kernel takes them as they are
        q, k = (phi.features(x).to(v.dtype) for x in _widened(q, kept(k, mask)))
    lead = v.shape[:-3]
    q, k, v = (x.reshape(lead.numel(), *x.shape[-3:]) for x in (q, k, v))
    mask = None if mask is None else mask.reshape(lead.numel(), -1)
    plus = None if plus is None else plus.reshape(lead.numel(), *plus.shape[-3:])
    y, *_ = apply(_Fused, q, k, v, mask, plus, projection, kind, causal)
    return y.reshape(*lead, *y.shape[1:])


def _plain(phi: Phi, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    dtype = v.dtype
    with exact(v):
        q, k, v = _widened(q, kept(k, mask), v)
        values = _with_ones(v, mask)
        if not causal:
            phi_q, phi_k = phi(q, k, mask)
            sums = phi_q @ (phi_k.mT @ values)
        else:
            sums = causal_sums(phi, q, k, values, mask)
        return _divide(sums[..., :-1], sums[..., -1:]).to(dtype)


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


def _use_triton(impl: str, phi: Phi, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
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


class _Fused(torch.autograd.Function):
    """The operator `fastrpb::linear_attention_triton`; gradients of gradients by plain torch."""

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
        saved = *ctx.saved_tensors, *(8 - len(ctx.saved_tensors)) * [None]
        gradients = [None] * 3
        if any(ctx.needs_input_grad[:3]):
            gradients = apply(_FusedGradients, g, *saved, ctx.kind, ctx.causal)
        return *gradients, None, g if ctx.plus else None, None, None, None

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
        phi = Given() if projection is None else Projected(projection)
        phi = {0: sikf, 1: elu1, 2: relu}.get(ctx.kind, phi)

        def gradients(g, q, k, v):
            def attention(q, k, v):
                return _plain(phi, q, k, v, mask, ctx.causal)

            return torch.func.vjp(attention, q, k, v)[1](g)

        second = torch.func.vjp(gradients, *tensors)[1](upstream)
        return *second, *7 * [None]

    @staticmethod
    def vmap(info, in_dims, *inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _mapped(_FusedGradients, info.batch_size, in_dims, inputs)


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


class LinearState(NamedTuple):
    """What causal linear attention remembers: O(features · dim_v), whatever the length."""

    sums: Tensor  # (batch, heads, features, dim_v + 1): Σ φ(k)·[v, 1]ᵀ
    shift: Tensor  # (batch, heads, features, 1): log factor taken off them (exponential features)


def linear_attention_init_state(k: Tensor, v: Tensor, *, phi: Phi) -> LinearState:
    """The state before the first token; k and v (batch, heads, ..., dim) only give the sizes."""
    _check_phi(phi)
    _check(k, k, v, None)
    k, v = _widened(k[..., :1, :], v)
    features = phi.log_features(k) if isinstance(phi, ExpFeatureMap) else phi.features(k)
    lead, count = features.shape[:-2], features.shape[-1]
    return LinearState(
        features.new_zeros(*lead, count, v.shape[-1] + 1),
        features.new_full((*lead, count, 1), HIDDEN),
    )


def linear_attention_state(
    k: Tensor, v: Tensor, *, phi: Phi, mask: Tensor | None = None
) -> LinearState:
    """The state after the tokens of k and v, at once: O(N). It is that of N steps.

    >>> from fastrpb import sikf
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)
    >>> state = linear_attention_state(k[:, :, :9], v[:, :, :9], phi=sikf)
    >>> y, state = linear_attention_step(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], state, phi=sikf)
    >>> torch.allclose(y, linear_attention(q, k, v, phi=sikf, causal=True)[:, :, 9:], atol=1e-5)
    True
    """
    _check(k, k, v, mask)
    _check_phi(phi)
    with exact(v):
        k, v = _widened(kept(k, mask), v)
        values = _with_ones(v, mask)
        if not isinstance(phi, ExpFeatureMap):
            sums = phi.features(k).mT @ values
            return LinearState(sums, sums.new_full((*sums.shape[:-1], 1), HIDDEN))
        log_k = kept(phi.log_features(k), mask, HIDDEN).mT
        shift = log_k.detach().amax(-1, keepdim=True)
        return LinearState(torch.exp(log_k - shift) @ values, shift)


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: LinearState, *, phi: Phi, mask: Tensor | None = None
) -> tuple[Tensor, LinearState]:
    """The next output of causal linear attention, and the state after it: O(features · dim_v).

    q, k (batch, heads, 1, dim) and v (batch, heads, 1, dim_v) are those of one token; mask
    (batch, 1) says which streams of the batch it belongs to.

    >>> from fastrpb import sikf
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)
    >>> state, ys = linear_attention_init_state(k, v, phi=sikf), []
    >>> for t in range(10):
    ...     here = slice(t, t + 1)
    ...     y, state = linear_attention_step(
    ...         q[:, :, here], k[:, :, here], v[:, :, here], state, phi=sikf
    ...     )
    ...     ys.append(y)
    >>> whole = linear_attention(q, k, v, phi=sikf, causal=True)
    >>> torch.allclose(torch.cat(ys, 2), whole, atol=1e-5)
    True
    """
    _check(q, k, v, mask)
    _check_phi(phi)
    if q.shape[-2] != 1 or k.shape[-2] != 1:
        raise ValueError(f"a step takes one token, got {q.shape[-2]} queries, {k.shape[-2]} keys")
    token = linear_attention_state(k, v, phi=phi, mask=mask)
    if state.sums.shape != token.sums.shape:
        raise ValueError(
            f"the state {tuple(state.sums.shape)} is of another stream or phi: those of these "
            f"tokens are {tuple(token.sums.shape)}, (batch, heads, features, dim_v + 1)"
        )
    after = LinearState(*add_shifted(*state, *token))
    with exact(v):
        q = q.to(after.sums.dtype)
        if isinstance(phi, ExpFeatureMap):
            log_q = phi.log_features(q) + after.shift.mT
            phi_q = torch.exp(log_q - log_q.amax(-1, keepdim=True))
        else:
            phi_q = phi.features(q)
        y = phi_q @ after.sums
        return _divide(y[..., :-1], y[..., -1:]).to(v.dtype), after


def _with_ones(v: Tensor, mask: Tensor | None) -> Tensor:
    """[v, 1], so that one product gives numerator and denominator; zero where masked."""
    return kept(torch.nn.functional.pad(v, (0, 1), value=1.0), mask)


def _divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where there is nothing to attend to."""
    return numerator / denominator.masked_fill(denominator == 0, 1)


def _widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = compute_dtype(*tensors)
    return tuple(x.to(dtype) for x in tensors)


def _visible(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """(batch, 1, M, N) or (M, N) bool: which keys each query sees; None: all."""
    m, n = q.shape[-2], k.shape[-2]
    visible = None
    if causal:
        visible = torch.ones(m, n, dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        keys = mask[..., None, None, :]
        visible = keys.expand(*keys.shape[:-2], m, n) if visible is None else visible & keys
    return visible


def _check_logits(logits: Tensor, q: Tensor, k: Tensor) -> None:
    check_floating("logits", logits)
    shape = (*q.shape[:-1], k.shape[-2])
    if logits.dim() > len(shape) or any(
        size not in (1, full)
        for size, full in zip(reversed(logits.shape), reversed(shape), strict=False)
    ):
        raise ValueError(f"logits {tuple(logits.shape)} must broadcast to {tuple(shape)}")


def _check_plus(plus: Tensor, q: Tensor, v: Tensor) -> None:
    shape = *q.shape[:-1], v.shape[-1]
    if plus.shape != shape:
        raise ValueError(f"plus {tuple(plus.shape)} must have the shape of the result, {shape}")
    if plus.dtype != v.dtype:
        raise TypeError(f"plus must have the dtype of v, got {plus.dtype} and {v.dtype}")
    if plus.device != v.device:
        raise ValueError(f"plus is on {plus.device} and v on {v.device}; use one device")


def _check_phi(phi: object) -> None:
    if not isinstance(phi, Phi):
        raise TypeError(f"phi must be a feature map such as fastrpb.sikf, got {phi!r}")


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_values(name, x)
        if x.dim() < 3:
            raise ValueError(f"{name} must be (batch, heads, length, dim), got {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"q is on {q.device} and {name} on {x.device}; use one device")
    if q.shape[-1] != k.shape[-1] or not q.shape[-1]:
        raise ValueError(
            f"q has dim {q.shape[-1]} and k has {k.shape[-1]}; they must be equal and at least 1"
        )
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k has {k.shape[-2]} positions and v has {v.shape[-2]}")
    if q.shape[:-2] != k.shape[:-2] or k.shape[:-2] != v.shape[:-2]:
        leads = ", ".join(str(tuple(x.shape[:-2])) for x in (q, k, v))
        raise ValueError(f"(batch, heads) of q, k and v must be equal, got {leads}")
    check_mask(mask, (*k.shape[:-3], k.shape[-2]))
