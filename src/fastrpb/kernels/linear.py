"""Bidirectional linear attention in two passes over the data each way, the features never stored.

With the keys normalised, a_mf = φ(k_m)_f / z_f for z_f = Σ_m φ(k_m)_f, and the queries as well,
p_nf = φ(q_n)_f z_f / Σ_f φ(q_n)_f z_f, linear attention is

    u_f = Σ_m a_mf v_m,    y_n = Σ_f p_nf u_f,

two averages: every factor is at most 1, whatever the length. φ = exp takes off the largest key of
each feature, which the queries add, and their own largest after that: all exponents are at most 0.
Backward, with g the gradient of y: t = g·uᵀ, d log p = p(t - Σ_f p·t), du = pᵀ·g, and then
d log a_m = a(v_m·duᵀ + c) with c = Σ_n d log p_n - u·du, and dv = a·du. Each tensor is read or
written once, the keys twice where φ = exp.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.launch import launch

EXP, ELU1, RELU = 0, 1, 2
STATE = {"BLOCK": 32, "num_warps": 4, "num_stages": 4}
OUTPUT = {"BLOCK": 64, "num_warps": 4, "num_stages": 3}
GRADIENTS = {"BLOCK": 64, "num_warps": 4, "num_stages": 2}
PROGRAMS = 1056  # fill a large GPU
_HIDDEN = tl.constexpr(-1e30)  # below any logarithm of a feature, yet finite


@triton.jit
def _rest(x, high):
    """What bfloat16 leaves of x."""
    return (x.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _dot(a, b, acc, FULL: tl.constexpr):
    """acc + a·b to float32, or to 16 bits of mantissa by products of bfloat16."""
    if FULL:
        return tl.dot(a, b, acc, input_precision="tf32x3")
    a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
    if a.dtype != tl.bfloat16:
        acc = tl.dot(_rest(a, a_high), b_high, acc)
    if b.dtype != tl.bfloat16:
        acc = tl.dot(a_high, _rest(b, b_high), acc)
    return tl.dot(a_high, b_high, acc)


@triton.jit
def _load(x, sn, n, keep, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows n of x (., DIM), zero where not `keep` and beyond DIM columns."""
    d = tl.arange(0, WIDTH)[None, :]
    inside = keep[:, None]
    if DIM != WIDTH:
        inside = inside & (d < DIM)
    return tl.load(x + n[:, None].to(tl.int64) * sn + d, mask=inside, other=0.0)


@triton.jit
def _store(x, sn, n, end, value, DIM: tl.constexpr, WIDTH: tl.constexpr):
    d = tl.arange(0, WIDTH)[None, :]
    inside = (n < end)[:, None] & (d < DIM)
    tl.store(x + n[:, None].to(tl.int64) * sn + d, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _kept(mask, n, end, MASKED: tl.constexpr):
    keep = n < end
    if MASKED:
        keep = keep & (tl.load(mask + n, mask=keep, other=0) != 0)
    return keep


@triton.jit
def _features(x, KIND: tl.constexpr):
    """φ(x) of the maps that are no exponentials."""
    positive = tl.maximum(x, 0.0)
    return positive + (tl.exp(tl.minimum(x, 0.0)) if KIND == 1 else 1e-3)


@triton.jit
def _log_slope(x, KIND: tl.constexpr):
    """d log φ(x) / dx."""
    slope = tl.full(x.shape, 1.0, tl.float32)
    if KIND == 1:
        slope = 1 / (1 + tl.maximum(x, 0.0))
    if KIND == 2:
        slope = tl.where(x > 0, 1 / (tl.maximum(x, 0.0) + 1e-3), 0.0)
    return slope


@triton.jit
def _query_weights(q, z, shift, DIM: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """p: of each query over the features."""
    if KIND == 0:
        x = tl.where((tl.arange(0, WIDTH) < DIM)[None, :], q + shift[None, :], _HIDDEN)
        weight = tl.exp(x - tl.max(x, 1)[:, None]) * z[None, :]
    else:
        weight = _features(q, KIND) * z[None, :]
    total = tl.sum(weight, 1)
    return weight * (1 / tl.where(total == 0, 1.0, total))[:, None]


@triton.jit
def _state(
    k,
    v,
    mask,
    means,
    norms,
    shifts,
    heads,
    count,
    share,
    kb,
    kh,
    kn,
    vb,
    vh,
    vn,
    mb,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VDIM: tl.constexpr,
    VWIDTH: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Σ φ(k)vᵀ and Σ φ(k) over a share of the keys, φ = exp less its largest key."""
    part, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    k += b * kb + h * kh
    v += b * vb + h * vh
    mask += b * mb
    f = tl.arange(0, WIDTH)
    end = tl.minimum(count, (part + 1) * share)
    shift = tl.zeros((WIDTH,), tl.float32)
    if KIND == 0:
        highest = tl.full((BLOCK, WIDTH), _HIDDEN, tl.float32)
        for start in tl.range(part * share, end, BLOCK):
            n = start + tl.arange(0, BLOCK)
            keep = _kept(mask, n, end, MASKED)
            x = _load(k, kn, n, keep, DIM, WIDTH).to(tl.float32)
            highest = tl.maximum(highest, tl.where(keep[:, None], x, _HIDDEN))
        shift = tl.max(highest, 0)
    total = tl.zeros((WIDTH, VWIDTH), tl.float32)
    norm = tl.zeros((BLOCK, WIDTH), tl.float32)
    for start in tl.range(part * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        keep = _kept(mask, n, end, MASKED)
        x = _load(k, kn, n, keep, DIM, WIDTH).to(tl.float32)
        if KIND == 0:
            phi = tl.exp(tl.where(keep[:, None], x - shift[None, :], _HIDDEN))
        else:
            phi = tl.where(keep[:, None], _features(x, KIND), 0.0)
        values = _load(v, vn, n, keep, VDIM, VWIDTH)
        norm += phi
        total = _dot(tl.trans(phi), values, total, FULL)
    row = ((b * heads + h) * tl.num_programs(0) + part) * WIDTH + f
    tl.store(means + row[:, None] * VWIDTH + tl.arange(0, VWIDTH)[None, :], total)
    tl.store(norms + row, tl.where(f < DIM, tl.sum(norm, 0), 0.0))  # padding has no weight
    tl.store(shifts + row, shift)


@triton.jit
def _merge(
    sums,
    norms,
    shifts,
    means_out,
    norms_out,
    shifts_out,
    parts,
    WIDTH: tl.constexpr,
    VWIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    SOME: tl.constexpr,
    MEANS: tl.constexpr,
):
    """The parts as one: u and z at the largest shift, or plain sums."""
    bh = tl.program_id(1).to(tl.int64)
    f = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    p = tl.arange(0, PARTS)
    at = (bh * parts + p)[:, None] * WIDTH + f[None, :]
    there = (p < parts)[:, None]
    norm = tl.load(norms + at, mask=there, other=0.0)
    if MEANS:
        every = tl.load(shifts + at, mask=there, other=_HIDDEN)
        shift = tl.max(every, 0)
        norm *= tl.exp(every - shift[None, :])
        tl.store(shifts_out + bh * WIDTH + f, shift)
    z = tl.sum(norm, 0)
    total = tl.zeros((ROWS, VWIDTH), tl.float32)
    d = tl.arange(0, VWIDTH)[None, None, :]
    for start in tl.range(0, PARTS, SOME):
        part = start + tl.arange(0, SOME)
        some = (bh * parts + part)[:, None] * WIDTH + f[None, :]
        inside = (part < parts)[:, None]
        block = tl.load(sums + some[:, :, None] * VWIDTH + d, mask=inside[:, :, None], other=0.0)
        if MEANS:
            decay = tl.exp(tl.load(shifts + some, mask=inside, other=_HIDDEN) - shift[None, :])
            block *= decay[:, :, None]
        total += tl.sum(block, 0)
    if MEANS:
        total /= tl.where(z == 0, 1.0, z)[:, None]
    row = bh * WIDTH + f
    tl.store(means_out + row[:, None] * VWIDTH + tl.arange(0, VWIDTH)[None, :], total)
    tl.store(norms_out + row, z)


@triton.jit
def _load_state(means, norms, bh, WIDTH: tl.constexpr, VWIDTH: tl.constexpr):
    row = bh * WIDTH + tl.arange(0, WIDTH)
    return tl.load(means + row[:, None] * VWIDTH + tl.arange(0, VWIDTH)[None, :]), tl.load(
        norms + row
    )


@triton.jit
def _output(
    q,
    y,
    means,
    norms,
    shifts,
    heads,
    count,
    share,
    qb,
    qh,
    qn,
    yb,
    yh,
    yn,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VDIM: tl.constexpr,
    VWIDTH: tl.constexpr,
    KIND: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = p·u."""
    part, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q += b * qb + h * qh
    y += b * yb + h * yh
    u, z = _load_state(means, norms, b * heads + h, WIDTH, VWIDTH)
    shift = tl.load(shifts + (b * heads + h) * WIDTH + tl.arange(0, WIDTH))
    end = tl.minimum(count, (part + 1) * share)
    for start in tl.range(part * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = _load(q, qn, n, n < end, DIM, WIDTH).to(tl.float32)
        p = _query_weights(x, z, shift, DIM, WIDTH, KIND)
        out = _dot(p, u, tl.zeros((BLOCK, VWIDTH), tl.float32), FULL)
        _store(y, yn, n, end, out, VDIM, VWIDTH)


@triton.jit
def _query_gradients(
    q,
    g,
    dq,
    means,
    norms,
    shifts,
    d_means,
    d_norms,
    heads,
    count,
    share,
    qb,
    qh,
    qn,
    gb,
    gh,
    gn,
    db,
    dh,
    dn,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VDIM: tl.constexpr,
    VWIDTH: tl.constexpr,
    KIND: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dq, and du and Σ dℓ over a share of the queries."""
    part, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q += b * qb + h * qh
    g += b * gb + h * gh
    dq += b * db + h * dh
    u, z = _load_state(means, norms, b * heads + h, WIDTH, VWIDTH)
    shift = tl.load(shifts + (b * heads + h) * WIDTH + tl.arange(0, WIDTH))
    f = tl.arange(0, WIDTH)
    du = tl.zeros((WIDTH, VWIDTH), tl.float32)
    d_log_z = tl.zeros((BLOCK, WIDTH), tl.float32)
    end = tl.minimum(count, (part + 1) * share)
    for start in tl.range(part * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = _load(q, qn, n, n < end, DIM, WIDTH).to(tl.float32)
        p = _query_weights(x, z, shift, DIM, WIDTH, KIND)
        upstream = _load(g, gn, n, n < end, VDIM, VWIDTH)
        t = _dot(upstream, tl.trans(u), tl.zeros((BLOCK, WIDTH), tl.float32), FULL)
        change = p * (t - tl.sum(p * t, 1)[:, None])
        _store(dq, dn, n, end, change * _log_slope(x, KIND), DIM, WIDTH)
        d_log_z += change
        du = _dot(tl.trans(p), upstream, du, FULL)
    row = ((b * heads + h) * tl.num_programs(0) + part) * WIDTH + f
    tl.store(d_means + row[:, None] * VWIDTH + tl.arange(0, VWIDTH)[None, :], du)
    tl.store(d_norms + row, tl.sum(d_log_z, 0))


@triton.jit
def _key_gradients(
    k,
    v,
    mask,
    dk,
    dv,
    means,
    norms,
    shifts,
    d_means,
    d_norms,
    heads,
    count,
    share,
    kb,
    kh,
    kn,
    vb,
    vh,
    vn,
    mb,
    dkb,
    dkh,
    dkn,
    dvb,
    dvh,
    dvn,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VDIM: tl.constexpr,
    VWIDTH: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dk and dv, zero where masked."""
    part, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    k += b * kb + h * kh
    v += b * vb + h * vh
    dk += b * dkb + h * dkh
    dv += b * dvb + h * dvh
    mask += b * mb
    u, z = _load_state(means, norms, b * heads + h, WIDTH, VWIDTH)
    shift = tl.load(shifts + (b * heads + h) * WIDTH + tl.arange(0, WIDTH))
    du, d_log_z = _load_state(d_means, d_norms, b * heads + h, WIDTH, VWIDTH)
    constant = d_log_z - tl.sum(u * du, 1)
    inverse = tl.where(z == 0, 0.0, 1 / tl.where(z == 0, 1.0, z))
    end = tl.minimum(count, (part + 1) * share)
    for start in tl.range(part * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        keep = _kept(mask, n, end, MASKED)
        x = _load(k, kn, n, keep, DIM, WIDTH).to(tl.float32)
        if KIND == 0:
            a = tl.exp(tl.where(keep[:, None], x - shift[None, :], _HIDDEN)) * inverse[None, :]
        else:
            a = tl.where(keep[:, None], _features(x, KIND), 0.0) * inverse[None, :]
        values = _load(v, vn, n, keep, VDIM, VWIDTH)
        da = _dot(values, tl.trans(du), tl.zeros((BLOCK, WIDTH), tl.float32), FULL)
        change = a * (da + constant[None, :]) * _log_slope(x, KIND)
        _store(dk, dkn, n, end, change, DIM, WIDTH)
        d_values = _dot(a, du, tl.zeros((BLOCK, VWIDTH), tl.float32), FULL)
        _store(dv, dvn, n, end, d_values, VDIM, VWIDTH)


def _sizes(q: Tensor, v: Tensor, kind: int) -> dict:
    dim, v_dim = q.shape[-1], v.shape[-1]
    return {
        "DIM": dim,
        "WIDTH": max(16, triton.next_power_of_2(dim)),
        "VDIM": v_dim,
        "VWIDTH": max(16, triton.next_power_of_2(v_dim)),
        "KIND": kind,
    }


def _parts(length: int, batch_heads: int, block: int) -> tuple[int, int]:
    """Into how many parts of how many positions to cut a sequence."""
    wanted = max(1, min(PROGRAMS // batch_heads, triton.cdiv(length, 2 * block)))
    share = triton.cdiv(triton.cdiv(length, wanted), block) * block
    return triton.cdiv(length, share), share


def _buffers(x: Tensor, parts: int, sizes: dict) -> tuple[Tensor, Tensor]:
    shape = *x.shape[:2], parts, sizes["WIDTH"]
    means = torch.empty(*shape, sizes["VWIDTH"], dtype=torch.float32, device=x.device)
    return means, torch.empty(shape, dtype=torch.float32, device=x.device)


def _merged(sums: Tensor, norms: Tensor, shifts: Tensor | None, sizes: dict) -> list[Tensor]:
    """(u, z, shift) of the keys, or, without shifts, the sums of the two."""
    batch, heads, parts, width, v_width = sums.shape
    means, z = _buffers(sums, 1, sizes)
    shift = torch.empty_like(z) if shifts is not None else z
    rows, count = 4, triton.next_power_of_2(parts)
    launch(
        _merge,
        (
            width // rows,
            batch * heads,
        ),
        sums,
        norms,
        norms if shifts is None else shifts,
        means,
        z,
        shift,
        parts,
        WIDTH=width,
        VWIDTH=v_width,
        PARTS=count,
        ROWS=rows,
        SOME=min(16, count),
        MEANS=shifts is not None,
    )
    return [x.squeeze(2) for x in ((means, z) if shifts is None else (means, z, shift))]


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, y: Tensor, kind: int
) -> list[Tensor]:
    """Fill y; returns (u, z, shift) of the keys, which the gradients need."""
    (batch, heads, n, _), m = k.shape, q.shape[2]
    sizes, full = _sizes(q, v, kind), v.dtype == torch.float32
    parts, share = _parts(n, batch * heads, STATE["BLOCK"])
    sums, norms = _buffers(k, parts, sizes)
    shifts = torch.empty_like(norms)
    launch(
        _state,
        (
            parts,
            heads,
            batch,
        ),
        k,
        v,
        k if mask is None else mask,
        sums,
        norms,
        shifts,
        heads,
        n,
        share,
        *k.stride()[:3],
        *v.stride()[:3],
        0 if mask is None else mask.stride(0),
        MASKED=mask is not None,
        FULL=full,
        **sizes,
        **STATE,
    )
    state = _merged(sums, norms, shifts, sizes)
    parts, share = _parts(m, batch * heads, OUTPUT["BLOCK"])
    launch(
        _output,
        (
            parts,
            heads,
            batch,
        ),
        q,
        y,
        *state,
        heads,
        m,
        share,
        *q.stride()[:3],
        *y.stride()[:3],
        FULL=full,
        **sizes,
        **OUTPUT,
    )
    return state


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    state: list[Tensor],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    kind: int,
) -> None:
    """Fill dq, dk and dv."""
    (batch, heads, n, _), m = k.shape, q.shape[2]
    sizes, full = _sizes(q, v, kind), v.dtype == torch.float32
    parts, share = _parts(m, batch * heads, GRADIENTS["BLOCK"])
    d_sums, d_norms = _buffers(q, parts, sizes)
    launch(
        _query_gradients,
        (
            parts,
            heads,
            batch,
        ),
        q,
        g,
        dq,
        *state,
        d_sums,
        d_norms,
        heads,
        m,
        share,
        *q.stride()[:3],
        *g.stride()[:3],
        *dq.stride()[:3],
        FULL=full,
        **sizes,
        **GRADIENTS,
    )
    d_state = _merged(d_sums, d_norms, None, sizes)
    parts, share = _parts(n, batch * heads, GRADIENTS["BLOCK"])
    launch(
        _key_gradients,
        (
            parts,
            heads,
            batch,
        ),
        k,
        v,
        k if mask is None else mask,
        dk,
        dv,
        *state,
        *d_state,
        heads,
        n,
        share,
        *k.stride()[:3],
        *v.stride()[:3],
        0 if mask is None else mask.stride(0),
        *dk.stride()[:3],
        *dv.stride()[:3],
        MASKED=mask is not None,
        FULL=full,
        **sizes,
        **GRADIENTS,
    )
