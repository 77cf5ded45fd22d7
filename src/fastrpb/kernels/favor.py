"""Bidirectional linear attention with FAVOR+ features: two softmax attentions, nothing stored.

The features of x are exp(±x·r - |x|²/2) for the rows r of a projection, x scaled by dim^(-1/4): the
kernels scale r instead. Normalised as in `linear`, with f for a row and a sign, x·f for ±x·r:

    a_mf = exp(k_m·f - |k_m|²/2 - c_f),  c_f = log Σ_m exp(k_m·f - |k_m|²/2),  u_f = Σ_m a_mf v_m,
    p_nf = exp(q_n·f + c_f - s_n),        s_n = log Σ_f exp(q_n·f + c_f),        y_n = Σ_f p_nf u_f:

features attend to the keys, then queries to the features; |q|² cancels. Each takes its largest
logarithm off as it goes, along the rows of a tile, be they features or queries. There are many
features, so that programs take SOME rows of the projection at a time, for both signs.
`favor_gradients` goes back.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.launch import FAVOR_ROWS, ceil_div, favor_features, launch, tile_width
from fastrpb.kernels.linear import merged
from fastrpb.kernels.tiles import (
    HIDDEN,
    buffers,
    dot,
    kept,
    load,
    parts_of,
    rounded,
    store,
    strides,
)

FEATURES = {"BLOCK": 32, "SOME": FAVOR_ROWS, "num_warps": 4, "num_stages": 2}  # as rows of tiles
TOKENS = {"BLOCK": 64, "SOME": 32, "num_warps": 4, "num_stages": 1}
PROGRAMS = 1056  # fill a large GPU


@triton.jit
def projection_rows(projection, j, COUNT: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr):
    """Rows j of R·dim^(-1/4): (SOME, INNER), zeros beyond."""
    d = tl.arange(0, INNER)[None, :]
    inside = (j < COUNT)[:, None] & (d < DIM)
    rows = tl.load(projection + j[:, None] * DIM + d, mask=inside, other=0.0)
    return rows.to(tl.float32) * DIM**-0.25


@triton.jit
def load_scaled(x, sn, n, keep, DIM: tl.constexpr, INNER: tl.constexpr, FULL: tl.constexpr):
    """Queries or keys, as precise as the values are to be."""
    rows = load(x, sn, n, keep, DIM, INNER)
    return rows.to(tl.float32) if FULL else rows


@triton.jit
def half_square(x, DIM: tl.constexpr):
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, 1) * (DIM**-0.5 / 2)


@triton.jit
def load_values(means, at, VWIDTH: tl.constexpr):
    """Rows of u or du: (SOME, VWIDTH)."""
    return tl.load(means + at[:, None] * VWIDTH + tl.arange(0, VWIDTH)[None, :])


@triton.jit
def _add_keys(logs, keep, values, top, norm, total, FULL: tl.constexpr):
    """Go on with some keys: the largest logarithm, Σ φ and Σ φ·v of each feature, a row of logs."""
    logs = tl.where(keep[None, :], logs, HIDDEN)
    highest = tl.maximum(top, tl.max(logs, 1))
    phi = tl.where(keep[None, :], tl.exp(logs - highest[:, None]), 0.0)
    phi = rounded(phi, values)
    decay = tl.exp(top - highest)
    norm = norm * decay + tl.sum(phi.to(tl.float32), 1)
    return highest, norm, dot(phi, values, total * decay[:, None], FULL)


@triton.jit
def _keys(
    k,
    v,
    mask,
    projection,
    sums,
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
    """Σ φ(k)vᵀ, Σ φ(k) and what is taken off, of some features over a share of the keys."""
    part, some = tl.program_id(0) // (ROWS // SOME), tl.program_id(0) % (ROWS // SOME)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    k += b * kb + h * kh
    v += b * vb + h * vh
    mask += b * count
    j = some * SOME + tl.arange(0, SOME)
    rows = projection_rows(projection, j, COUNT, DIM, INNER)
    top = tl.full((SOME,), HIDDEN, tl.float32)
    norm = tl.zeros((SOME,), tl.float32)
    total = tl.zeros((SOME, VWIDTH), tl.float32)
    top2, norm2, total2 = top, norm, total  # of the negative ones
    end = tl.minimum(count, (part + 1) * share)
    for start in tl.range(part * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        keep = kept(mask, n, end, MASKED)
        x = load_scaled(k, kn, n, keep, DIM, INNER, FULL)
        values = load(v, vn, n, keep, VDIM, VWIDTH)
        along = dot(rows, tl.trans(x), tl.zeros((SOME, BLOCK), tl.float32), FULL)
        half = half_square(x, DIM)[None, :]
        top, norm, total = _add_keys(along - half, keep, values, top, norm, total, FULL)
        top2, norm2, total2 = _add_keys(-along - half, keep, values, top2, norm2, total2, FULL)
    parts = tl.num_programs(0) // (ROWS // SOME)
    at = ((b * heads + h) * parts + part) * 2 * ROWS + j
    column = tl.arange(0, VWIDTH)[None, :]
    real = j < COUNT  # what pads has no weight
    tl.store(sums + at[:, None] * VWIDTH + column, total)
    tl.store(sums + (at + ROWS)[:, None] * VWIDTH + column, total2)
    tl.store(norms + at, tl.where(real, norm, 0.0))
    tl.store(norms + at + ROWS, tl.where(real, norm2, 0.0))
    tl.store(shifts + at, top)
    tl.store(shifts + at + ROWS, top2)


@triton.jit
def _add_features(logs, u, top, norm, out, FULL: tl.constexpr, ROUND: tl.constexpr):
    """Go on with some features: the largest logarithm, Σ p and Σ p·u of each query."""
    highest = tl.maximum(top, tl.max(logs, 1))
    p = tl.exp(logs - highest[:, None])
    if ROUND:
        p = p.to(tl.bfloat16)
    decay = tl.exp(top - highest)
    norm = norm * decay + tl.sum(p.to(tl.float32), 1)
    return highest, norm, dot(p, u, out * decay[:, None], FULL)


@triton.jit
def _queries(
    q,
    projection,
    plus,
    y,
    means,
    offsets,
    levels,
    heads,
    count,
    qb,
    qh,
    qn,
    pb,
    ph,
    pn,
    yb,
    yh,
    yn,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    VDIM: tl.constexpr,
    VWIDTH: tl.constexpr,
    FULL: tl.constexpr,
    PLUS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
):
    """y = p·u + plus, and s."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    line = b * heads + h
    x = load_scaled(q + b * qb + h * qh, qn, n, n < count, DIM, INNER, FULL)
    ROUND: tl.constexpr = y.dtype.element_ty == tl.bfloat16
    top = tl.full((BLOCK,), HIDDEN, tl.float32)
    norm = tl.zeros((BLOCK,), tl.float32)
    out = tl.zeros((BLOCK, VWIDTH), tl.float32)
    for first in tl.range(0, ROWS, SOME):
        j = first + tl.arange(0, SOME)
        rows = projection_rows(projection, j, COUNT, DIM, INNER)
        along = dot(x, tl.trans(rows), tl.zeros((BLOCK, SOME), tl.float32), FULL)
        at = line * 2 * ROWS + j
        logs = along + tl.load(offsets + at)[None, :]
        u = load_values(means, at, VWIDTH)
        top, norm, out = _add_features(logs, u, top, norm, out, FULL, ROUND)
        logs = tl.load(offsets + at + ROWS)[None, :] - along
        u = load_values(means, at + ROWS, VWIDTH)
        top, norm, out = _add_features(logs, u, top, norm, out, FULL, ROUND)
    out /= norm[:, None]
    if PLUS:
        out += load(plus + b * pb + h * ph, pn, n, n < count, VDIM, VWIDTH).to(tl.float32)
    store(y + b * yb + h * yh, yn, n, count, out, VDIM, VWIDTH)
    tl.store(levels + line * count + n, top + tl.log(norm), mask=n < count)


def constants_of(q: Tensor, v: Tensor, projection: Tensor) -> tuple[dict, dict]:
    """Those that all kernels take, and the sizes of what they hold of the features."""
    dim, v_dim, features = q.shape[-1], v.shape[-1], favor_features(len(projection))
    constants = {
        **{"DIM": dim, "INNER": tile_width(dim)},
        **{"COUNT": len(projection), "ROWS": features // 2},
        **{"VDIM": v_dim, "VWIDTH": tile_width(v_dim), "FULL": v.dtype == torch.float32},
    }
    return constants, {"WIDTH": features, "VWIDTH": constants["VWIDTH"]}


def shares(length: int, batch_heads: int, constants: dict) -> tuple[int, int, int]:
    """Parts of a sequence, their length, and the programs of one sequence."""
    blocks = constants["ROWS"] // FEATURES["SOME"]
    parts, share = parts_of(length, batch_heads * blocks, FEATURES["BLOCK"], PROGRAMS)
    return parts, share, parts * blocks


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    plus: Tensor | None,
    y: Tensor,
    projection: Tensor,
) -> list[Tensor]:
    """Fill y; returns u, c and s, which the gradients need."""
    (batch, heads, n, _), m = k.shape, q.shape[2]
    constants, sizes = constants_of(q, v, projection)
    parts, share, programs = shares(n, batch * heads, constants)
    sums, norms = buffers(k, parts, sizes)
    shifts = torch.empty_like(norms)
    tensors = k, v, k if mask is None else mask, projection, sums, norms, shifts
    numbers = heads, n, share, *strides(k, v)
    options = {**constants, "MASKED": mask is not None, **FEATURES}
    launch(_keys, (programs, heads, batch), *tensors, *numbers, **options)
    means, z, shift = merged(sums, norms, shifts, sizes)
    offsets = torch.where(z > 0, shift + z.log(), HIDDEN.value)  # what no key has is below all
    levels = torch.empty(batch, heads, m, dtype=torch.float32, device=q.device)
    added = y if plus is None else plus
    tensors = q, projection, added, y, means, offsets, levels
    numbers = heads, m, *strides(q, added, y)
    options = {**constants, "PLUS": plus is not None, **TOKENS}
    launch(_queries, (ceil_div(m, TOKENS["BLOCK"]), heads, batch), *tensors, *numbers, **options)
    return [means, offsets, levels]
