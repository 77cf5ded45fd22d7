"""Softmax and linear attention, at once or step by step (Eq. 1-3).

All take q (batch, heads, M, dim), k (batch, heads, N, dim), v (batch, heads, N, dim_v) and give
(batch, heads, M, dim_v). Masks are (batch, N) bool over the keys, True = keep; a query that sees no
key gives zeros. Causal means that output n sees the inputs m <= n, also where M and N differ.
Linear attention computes in float32 inside for half precisions, also under autocast.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastrpb.checks import check_flag, check_floating, check_mask, check_number, check_values, kept
from fastrpb.features import HIDDEN, ExpFeatureMap, Phi
from fastrpb.fused_attention import AttentionImpl, fused_attention, use_triton
from fastrpb.modes import exact
from fastrpb.plain_attention import add_shifted, divide, plain_attention, widened, with_ones


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
    check_flag("causal", causal)
    check_number("dropout", dropout)
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
    check_flag("causal", causal)
    visible, dtype = _visible(q, k, mask, causal), q.dtype
    with exact(q):
        q, k = widened(q, kept(k, mask))
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
        return divide(sim, sim.sum(-1, keepdim=True)).to(dtype)


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
        impl: "triton": one fused kernel on a GPU. `sikf`, `elu1`, `relu`: up to 128 channels (64 in
            float32); not causal also `FavorPlus` (as many) and `DPFP` (as many features; not in
            float16). Half of that on GPUs with less than 160 KB of shared memory. "torch": anything
            anywhere. "auto": fused where possible.

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
    if not use_triton(impl, phi, q, k, v, causal):
        y = plain_attention(phi, q, k, v, mask, causal)
        return y if plus is None else y + plus
    return fused_attention(phi, q, k, v, mask, plus, causal)


class LinearState(NamedTuple):
    """What causal linear attention remembers: O(features · dim_v), whatever the length."""

    sums: Tensor  # (batch, heads, features, dim_v + 1): Σ φ(k)·[v, 1]ᵀ
    shift: Tensor  # (batch, heads, features, 1): log factor taken off them (exponential features)


def linear_attention_init_state(k: Tensor, v: Tensor, *, phi: Phi) -> LinearState:
    """The state before the first token; k and v (batch, heads, ..., dim) only give the sizes."""
    _check_phi(phi)
    _check(k, k, v, None)
    k, v = widened(k[..., :1, :], v)
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
        k, v = widened(kept(k, mask), v)
        values = with_ones(v, mask)
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
        return divide(y[..., :-1], y[..., -1:]).to(v.dtype), after


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
        raise TypeError(
            f"phi must be a feature map such as fastrpb.sikf, got {phi!r}; one of your own is a "
            "subclass of fastrpb.FeatureMap"
        )


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
