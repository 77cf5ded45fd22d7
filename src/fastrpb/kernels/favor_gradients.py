"""Gradients of `favor`, with its names; features are computed anew.

With g the gradient of y: t = g·uᵀ, e_n = Σ_f p·t, d log p = p(t - e), dq = Σ_f d log p·f,
du = pᵀ·g, dc = Σ_n d log p; then d log a = a(v·duᵀ + dc - u·du), dv = a·du and
dk = Σ_f d log a·f - k·Σ_f d log a.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.favor import (
    FEATURES,
    TOKENS,
    constants_of,
    half_square,
    load_scaled,
    load_values,
    projection_rows,
    shares,
)
from fastrpb.kernels.launch import ceil_div, launch
from fastrpb.kernels.linear import merged
from fastrpb.kernels.tiles import HIDDEN, buffers, dot, kept, load, store, strides


@triton.jit
def _seen(along, upstream, level, means, offsets, at, VWIDTH: tl.constexpr, FULL: tl.constexpr):
    """The weights p of some features, and t."""
    p = tl.exp(along + tl.load(offsets + at)[None, :] - level)
    u = load_values(means, at, VWIDTH)
    return p, dot(upstream, tl.trans(u), tl.zeros(along.shape, tl.float32), FULL)


@triton.jit
def _query_gradients(
    q,
    projection,
    g,
    dq,
    means,
    offsets,
    levels,
    inner,
    heads,
    count,
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
    INNER: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    VDIM: tl.constexpr,
    VWIDTH: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
):
    """dq and e, which takes a first round over the features."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    line = b * heads + h
    x = load_scaled(q + b * qb + h * qh, qn, n, n < count, DIM, INNER, FULL)
    upstream = load(g + b * gb + h * gh, gn, n, n < count, VDIM, VWIDTH)
    level = tl.load(levels + line * count + n, mask=n < count, other=-HIDDEN)[:, None]
    e = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, ROWS, SOME):
        j = first + tl.arange(0, SOME)
        rows = projection_rows(projection, j, COUNT, DIM, INNER)
        along = dot(x, tl.trans(rows), tl.zeros((BLOCK, SOME), tl.float32), FULL)
        at = line * 2 * ROWS + j
        p, t = _seen(along, upstream, level, means, offsets, at, VWIDTH, FULL)
        e += tl.sum(p * t, 1)
        at += ROWS
        p, t = _seen(-along, upstream, level, means, offsets, at, VWIDTH, FULL)
        e += tl.sum(p * t, 1)
    gradient = tl.zeros((BLOCK, INNER), tl.float32)
    for first in tl.range(0, ROWS, SOME):
        j = first + tl.arange(0, SOME)
        rows = projection_rows(projection, j, COUNT, DIM, INNER)
        along = dot(x, tl.trans(rows), tl.zeros((BLOCK, SOME), tl.float32), FULL)
        at = line * 2 * ROWS + j
        p, t = _seen(along, upstream, level, means, offsets, at, VWIDTH, FULL)
        change = p * (t - e[:, None])
        at += ROWS
        p, t = _seen(-along, upstream, level, means, offsets, at, VWIDTH, FULL)
        gradient = dot(change - p * (t - e[:, None]), rows, gradient, FULL)
    store(dq + b * db + h * dh, dn, n, count, gradient, DIM, INNER)
    tl.store(inner + line * count + n, e, mask=n < count)


@triton.jit
def _feature_gradients(
    q,
    projection,
    g,
    means,
    offsets,
    levels,
    inner,
    d_means,
    d_offsets,
    heads,
    count,
    share,
    qb,
    qh,
    qn,
    gb,
    gh,
    gn,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    VDIM: tl.constexpr,
    VWIDTH: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
):
    """du and dc of some features over a share of the queries."""
    part, some = tl.program_id(0) // (ROWS // SOME), tl.program_id(0) % (ROWS // SOME)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    line = b * heads + h
    q += b * qb + h * qh
    g += b * gb + h * gh
    j = some * SOME + tl.arange(0, SOME)
    rows = projection_rows(projection, j, COUNT, DIM, INNER)
    at = line * 2 * ROWS + j
    u, u2 = load_values(means, at, VWIDTH), load_values(means, at + ROWS, VWIDTH)
    c = tl.load(offsets + at)[:, None]
    c2 = tl.load(offsets + at + ROWS)[:, None]
    du, du2 = tl.zeros((SOME, VWIDTH), tl.float32), tl.zeros((SOME, VWIDTH), tl.float32)
    dc, dc2 = tl.zeros((SOME,), tl.float32), tl.zeros((SOME,), tl.float32)
    nothing = tl.zeros((SOME, BLOCK), tl.float32)
    end = tl.minimum(count, (part + 1) * share)
    for start in tl.range(part * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = load_scaled(q, qn, n, n < end, DIM, INNER, FULL)
        upstream = load(g, gn, n, n < end, VDIM, VWIDTH)
        # Of what is beyond the end, p is 0.
        level = tl.load(levels + line * count + n, mask=n < end, other=-HIDDEN)[None, :]
        e = tl.load(inner + line * count + n, mask=n < end, other=0.0)[None, :]
        along = dot(rows, tl.trans(x), nothing, FULL)
        p = tl.exp(along + c - level)
        dc += tl.sum(p * (dot(u, tl.trans(upstream), nothing, FULL) - e), 1)
        du = dot(p, upstream, du, FULL)
        p = tl.exp(c2 - along - level)
        dc2 += tl.sum(p * (dot(u2, tl.trans(upstream), nothing, FULL) - e), 1)
        du2 = dot(p, upstream, du2, FULL)
    parts = tl.num_programs(0) // (ROWS // SOME)
    at = (line * parts + part) * 2 * ROWS + j
    column = tl.arange(0, VWIDTH)[None, :]
    tl.store(d_means + at[:, None] * VWIDTH + column, du)
    tl.store(d_means + (at + ROWS)[:, None] * VWIDTH + column, du2)
    tl.store(d_offsets + at, dc)
    tl.store(d_offsets + at + ROWS, dc2)


@triton.jit
def _key_changes(
    logs,
    values,
    offsets,
    d_means,
    d_log,
    at,
    real,
    keep,
    dv,
    VWIDTH: tl.constexpr,
    FULL: tl.constexpr,
):
    """d log a of some features, and dv gone on with."""
    du = load_values(d_means, at, VWIDTH)
    counts = keep[:, None] & real[None, :]
    a = tl.exp(tl.where(counts, logs - tl.load(offsets + at)[None, :], HIDDEN))
    da = dot(values, tl.trans(du), tl.zeros(logs.shape, tl.float32), FULL)
    return a * (da + tl.load(d_log + at)[None, :]), dot(a, du, dv, FULL)


@triton.jit
def _key_gradients(
    k,
    v,
    mask,
    projection,
    dk,
    dv,
    offsets,
    d_means,
    d_log,
    heads,
    count,
    kb,
    kh,
    kn,
    vb,
    vh,
    vn,
    dkb,
    dkh,
    dkn,
    dvb,
    dvh,
    dvn,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    VDIM: tl.constexpr,
    VWIDTH: tl.constexpr,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
):
    """dk and dv, zero where masked."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    line = b * heads + h
    keep = kept(mask + b * count, n, count, MASKED)
    x = load_scaled(k + b * kb + h * kh, kn, n, keep, DIM, INNER, FULL)
    values = load(v + b * vb + h * vh, vn, n, keep, VDIM, VWIDTH)
    half = half_square(x, DIM)[:, None]
    gradient = tl.zeros((BLOCK, INNER), tl.float32)
    d_values = tl.zeros((BLOCK, VWIDTH), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, ROWS, SOME):
        j = first + tl.arange(0, SOME)
        real, at = j < COUNT, line * 2 * ROWS + j
        rows = projection_rows(projection, j, COUNT, DIM, INNER)
        along = dot(x, tl.trans(rows), tl.zeros((BLOCK, SOME), tl.float32), FULL)
        change, d_values = _key_changes(
            *(along - half, values, offsets, d_means, d_log),
            *(at, real, keep, d_values, VWIDTH, FULL),
        )
        change2, d_values = _key_changes(
            *(-along - half, values, offsets, d_means, d_log),
            *(at + ROWS, real, keep, d_values, VWIDTH, FULL),
        )
        gradient = dot(change - change2, rows, gradient, FULL)
        total += tl.sum(change + change2, 1)
    gradient -= x.to(tl.float32) * (total * DIM**-0.5)[:, None]
    store(dk + b * dkb + h * dkh, dkn, n, count, gradient, DIM, INNER)
    store(dv + b * dvb + h * dvh, dvn, n, count, d_values, VDIM, VWIDTH)


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
    projection: Tensor,
) -> None:
    """Fill dq, dk and dv."""
    (batch, heads, n, _), m = k.shape, q.shape[2]
    constants, sizes = constants_of(q, v, projection)
    means, offsets, levels = state
    inner = torch.empty_like(levels)
    tensors = q, projection, g, dq, *state, inner
    numbers = heads, m, *strides(q, g, dq)
    grid = ceil_div(m, TOKENS["BLOCK"]), heads, batch
    launch(_query_gradients, grid, *tensors, *numbers, **constants, **TOKENS)
    parts, share, programs = shares(m, batch * heads, constants)
    d_sums, d_parts = buffers(q, parts, sizes)
    tensors = q, projection, g, *state, inner, d_sums, d_parts
    numbers = heads, m, share, *strides(q, g)
    grid = programs, heads, batch
    launch(_feature_gradients, grid, *tensors, *numbers, **constants, **FEATURES)
    d_means, d_offsets = merged(d_sums, d_parts, None, sizes)
    d_log = d_offsets - (means * d_means).sum(-1)
    tensors = k, v, k if mask is None else mask, projection, dk, dv, offsets, d_means, d_log
    numbers = heads, n, *strides(k, v, dk, dv)
    options = {**constants, "MASKED": mask is not None, **TOKENS}
    grid = ceil_div(n, TOKENS["BLOCK"]), heads, batch
    launch(_key_gradients, grid, *tensors, *numbers, **options)
