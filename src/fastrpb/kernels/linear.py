"""Bidirectional linear attention in two passes over the keys and queries, three launches each way.

Forward: S = Σ φ(k)vᵀ and z = Σ φ(k) over the keys, then φ(q)S / φ(q)z for the queries: q, k, v are
read once and the output is written once. Backward: dq, dS and dz from q and the gradient, then dk
and dv from k and v. The features are taken in the kernels and never stored. Those of φ = exp take
off their largest key so far, as softmax does in flash attention: all exponents are at most 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

EXP, ELU1, RELU = 0, 1, 2
LOOP = {"BLOCK": 64, "num_warps": 4, "num_stages": 2}
ONCE = {"BLOCK": 64, "num_warps": 4, "num_stages": 1}
PROGRAMS = 528  # fill a large GPU
_HIDDEN = tl.constexpr(-1e30)  # below any logarithm of a feature, yet finite


@triton.jit
def _load(x, sn, n, count, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows n of x (., DIM) as float32, zero beyond `count` rows and DIM columns."""
    d = tl.arange(0, WIDTH)[None, :]
    at = x + n[:, None].to(tl.int64) * sn + d
    return tl.load(at, mask=(n < count)[:, None] & (d < DIM), other=0.0).to(tl.float32)


@triton.jit
def _store(x, sn, n, count, value, DIM: tl.constexpr, WIDTH: tl.constexpr):
    d = tl.arange(0, WIDTH)[None, :]
    at = x + n[:, None].to(tl.int64) * sn + d
    tl.store(at, value.to(x.dtype.element_ty), mask=(n < count)[:, None] & (d < DIM))


@triton.jit
def _features(x, real, KIND: tl.constexpr):
    """φ(x) of the maps that need no shift; zero where not `real`."""
    if KIND == 1:
        x = tl.exp(tl.minimum(x, 0.0)) + tl.maximum(x, 0.0)
    else:
        x = tl.maximum(x, 0.0) + 1e-3
    return tl.where(real, x, 0.0)


@triton.jit
def _slope(x, phi, KIND: tl.constexpr):
    """φ'(x)."""
    if KIND == 0:
        return phi
    return tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0.0)) if KIND == 1 else 0.0)


@triton.jit
def _query_features(q, shift, DIM: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """φ(q), up to a factor for each query where φ = exp."""
    real = (tl.arange(0, WIDTH) < DIM)[None, :]
    if KIND == 0:
        x = tl.where(real, q + shift[None, :], _HIDDEN)
        return tl.where(real, tl.exp(x - tl.max(x, 1)[:, None]), 0.0)
    return _features(q, real, KIND)


@triton.jit
def _kept(mask, n, count, MASKED: tl.constexpr):
    keep = n < count
    if MASKED:
        keep = keep & (tl.load(mask + n, mask=keep, other=0) != 0)
    return keep


@triton.jit
def _state(
    k, v, mask, sums, norms, shifts, heads, count, share, kb, kh, kn, vb, vh, vn, mb,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VDIM: tl.constexpr, VWIDTH: tl.constexpr,
    KIND: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):
    """S, z and the shift over a share of the keys."""
    part, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    k += b * kb + h * kh
    v += b * vb + h * vh
    mask += b * mb
    f = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH, VWIDTH), tl.float32)
    norm = tl.zeros((WIDTH,), tl.float32)
    shift = tl.full((WIDTH,), _HIDDEN, tl.float32)
    end = tl.minimum(count, (part + 1) * share)
    for start in tl.range(part * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        keep = _kept(mask, n, end, MASKED)
        real = keep[:, None] & (f < DIM)[None, :]
        x = _load(k, kn, n, end, DIM, WIDTH)
        if KIND == 0:
            x = tl.where(real, x, _HIDDEN)
            higher = tl.maximum(shift, tl.max(x, 0))
            phi = tl.where(real, tl.exp(x - higher[None, :]), 0.0)
            decay = tl.exp(shift - higher)
            total *= decay[:, None]
            norm *= decay
            shift = higher
        else:
            phi = _features(x, real, KIND)
        values = tl.where(keep[:, None], _load(v, vn, n, end, VDIM, VWIDTH), 0.0)
        total = tl.dot(tl.trans(phi), values, total, input_precision=PRECISION)
        norm += tl.sum(phi, 0)
    row = ((b * heads + h) * tl.num_programs(0) + part) * WIDTH + f
    tl.store(sums + row[:, None] * VWIDTH + tl.arange(0, VWIDTH)[None, :], total)
    tl.store(norms + row, norm)
    tl.store(shifts + row, shift)


@triton.jit
def _merge(
    sums, norms, shifts, sums_out, norms_out, shifts_out, parts,
    WIDTH: tl.constexpr, VWIDTH: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):
    """The parts of `_state` as one: all of them brought to the largest shift."""
    bh = tl.program_id(1).to(tl.int64)
    f = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    p = tl.arange(0, PARTS)
    at = (bh * parts + p)[:, None] * WIDTH + f[None, :]
    every = tl.load(shifts + at, mask=(p < parts)[:, None], other=_HIDDEN)
    shift = tl.max(every, 0)
    norm = tl.load(norms + at, mask=(p < parts)[:, None], other=0.0) * tl.exp(every - shift[None, :])
    total = tl.zeros((ROWS, VWIDTH), tl.float32)
    d = tl.arange(0, VWIDTH)[None, :]
    for part in tl.range(0, parts, num_stages=4):
        row = (bh * parts + part) * WIDTH + f
        decay = tl.exp(tl.load(shifts + row) - shift)
        total += tl.load(sums + row[:, None] * VWIDTH + d) * decay[:, None]
    row = bh * WIDTH + f
    tl.store(sums_out + row[:, None] * VWIDTH + d, total)
    tl.store(norms_out + row, tl.sum(norm, 0))
    tl.store(shifts_out + row, shift)


@triton.jit
def _load_state(sums, norms, bh, WIDTH: tl.constexpr, VWIDTH: tl.constexpr):
    row = bh * WIDTH + tl.arange(0, WIDTH)
    total = tl.load(sums + row[:, None] * VWIDTH + tl.arange(0, VWIDTH)[None, :])
    return total, tl.load(norms + row)


@triton.jit
def _output(
    q, y, sums, norms, shifts, heads, count, qb, qh, qn, yb, yh, yn,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VDIM: tl.constexpr, VWIDTH: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):
    """y = φ(q)S / φ(q)z, zero where no key is seen."""
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total, norm = _load_state(sums, norms, b * heads + h, WIDTH, VWIDTH)
    shift = tl.load(shifts + (b * heads + h) * WIDTH + tl.arange(0, WIDTH))
    x = _load(q + b * qb + h * qh, qn, n, count, DIM, WIDTH)
    phi = _query_features(x, shift, DIM, WIDTH, KIND)
    weight = tl.sum(phi * norm[None, :], 1)
    out = tl.dot(phi, total, input_precision=PRECISION) / tl.where(weight == 0, 1.0, weight)[:, None]
    _store(y + b * yb + h * yh, yn, n, count, out, VDIM, VWIDTH)


@triton.jit
def _query_gradients(
    q, g, dq, sums, norms, shifts, d_sums, d_norms, d_shifts, heads, count, share,
    qb, qh, qn, gb, gh, gn, db, dh, dn,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VDIM: tl.constexpr, VWIDTH: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):
    """dq, and dS and dz over a share of the queries."""
    part, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q += b * qb + h * qh
    g += b * gb + h * gh
    dq += b * db + h * dh
    total, norm = _load_state(sums, norms, b * heads + h, WIDTH, VWIDTH)
    f = tl.arange(0, WIDTH)
    shift = tl.load(shifts + (b * heads + h) * WIDTH + f)
    d_total = tl.zeros((WIDTH, VWIDTH), tl.float32)
    d_norm = tl.zeros((WIDTH,), tl.float32)
    end = tl.minimum(count, (part + 1) * share)
    for start in tl.range(part * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = _load(q, qn, n, end, DIM, WIDTH)
        phi = _query_features(x, shift, DIM, WIDTH, KIND)
        weight = tl.sum(phi * norm[None, :], 1)
        inverse = tl.where((weight == 0) | (n >= end), 0.0, 1 / tl.where(weight == 0, 1.0, weight))
        upstream = _load(g, gn, n, end, VDIM, VWIDTH)
        along = tl.dot(upstream, tl.trans(total), input_precision=PRECISION)
        change = tl.sum(phi * along, 1) * inverse
        d_phi = (along - norm[None, :] * change[:, None]) * inverse[:, None]
        _store(dq, dn, n, end, d_phi * _slope(x, phi, KIND), DIM, WIDTH)
        share_of = phi * inverse[:, None]
        d_total = tl.dot(tl.trans(share_of), upstream, d_total, input_precision=PRECISION)
        d_norm -= tl.sum(share_of * change[:, None], 0)
    row = ((b * heads + h) * tl.num_programs(0) + part) * WIDTH + f
    tl.store(d_sums + row[:, None] * VWIDTH + tl.arange(0, VWIDTH)[None, :], d_total)
    tl.store(d_norms + row, d_norm)
    tl.store(d_shifts + row, tl.zeros((WIDTH,), tl.float32))


@triton.jit
def _key_gradients(
    k, v, mask, dk, dv, d_sums, d_norms, shifts, heads, count,
    kb, kh, kn, vb, vh, vn, mb, dkb, dkh, dkn, dvb, dvh, dvn,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VDIM: tl.constexpr, VWIDTH: tl.constexpr,
    KIND: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):
    """dk and dv, zero where masked."""
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d_total, d_norm = _load_state(d_sums, d_norms, b * heads + h, WIDTH, VWIDTH)
    f = tl.arange(0, WIDTH)
    keep = _kept(mask + b * mb, n, count, MASKED)[:, None]
    real = keep & (f < DIM)[None, :]
    x = _load(k + b * kb + h * kh, kn, n, count, DIM, WIDTH)
    if KIND == 0:
        shift = tl.load(shifts + (b * heads + h) * WIDTH + f)
        phi = tl.where(real, tl.exp(tl.where(real, x - shift[None, :], 0.0)), 0.0)
    else:
        phi = _features(x, real, KIND)
    values = tl.where(keep, _load(v + b * vb + h * vh, vn, n, count, VDIM, VWIDTH), 0.0)
    d_phi = tl.dot(values, tl.trans(d_total), input_precision=PRECISION) + d_norm[None, :]
    slope = tl.where(real, d_phi * _slope(x, phi, KIND), 0.0)
    _store(dk + b * dkb + h * dkh, dkn, n, count, slope, DIM, WIDTH)
    d_values = tl.dot(phi, d_total, input_precision=PRECISION)
    _store(dv + b * dvb + h * dvh, dvn, n, count, d_values, VDIM, VWIDTH)


def _sizes(q: Tensor, v: Tensor) -> dict:
    dim, v_dim = q.shape[-1], v.shape[-1]
    return {
        "DIM": dim,
        "WIDTH": max(16, triton.next_power_of_2(dim)),
        "VDIM": v_dim,
        "VWIDTH": max(16, triton.next_power_of_2(v_dim)),
        "PRECISION": "tf32x3" if v.dtype == torch.float32 else "tf32",
    }


def _parts(length: int, batch_heads: int) -> tuple[int, int]:
    """Into how many parts of how many positions to cut a sequence."""
    block = LOOP["BLOCK"]
    wanted = max(1, min(triton.cdiv(PROGRAMS, batch_heads), triton.cdiv(length, 4 * block)))
    share = triton.cdiv(triton.cdiv(length, wanted), block) * block
    return triton.cdiv(length, share), share


def _buffers(x: Tensor, parts: int, sizes: dict) -> list[Tensor]:
    """Sums, norms and shifts for each part."""
    shape = *x.shape[:2], parts, sizes["WIDTH"]
    sums = x.new_empty(*shape, sizes["VWIDTH"], dtype=torch.float32)
    return [sums, *(x.new_empty(shape, dtype=torch.float32) for _ in range(2))]


def _merged(buffers: list[Tensor], sizes: dict) -> list[Tensor]:
    batch, heads, parts, width, _ = buffers[0].shape
    if parts > 1:
        out = _buffers(buffers[0], 1, sizes)
        _merge[width // 16, batch * heads](
            *buffers, *out, parts, WIDTH=width, VWIDTH=sizes["VWIDTH"],
            PARTS=triton.next_power_of_2(parts), ROWS=16,
        )
        buffers = out
    return [x.squeeze(2) for x in buffers]


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, y: Tensor, kind: int) -> list[Tensor]:
    """Fill y; returns the sums, norms and shifts of the keys, which the gradients need."""
    batch, heads, n, _ = k.shape
    sizes = _sizes(q, v)
    parts, share = _parts(n, batch * heads)
    buffers = _buffers(k, parts, sizes)
    _state[parts, heads, batch](
        k, v, k if mask is None else mask, *buffers, heads, n, share,
        *k.stride()[:3], *v.stride()[:3], 0 if mask is None else mask.stride(0),
        KIND=kind, MASKED=mask is not None, **sizes, **LOOP,
    )
    state = _merged(buffers, sizes)
    m = q.shape[2]
    _output[triton.cdiv(m, ONCE["BLOCK"]), heads, batch](
        q, y, *state, heads, m, *q.stride()[:3], *y.stride()[:3], KIND=kind, **sizes, **ONCE
    )
    return state


def backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: list[Tensor],
    dq: Tensor, dk: Tensor, dv: Tensor, kind: int,
) -> None:
    """Fill dq, dk and dv."""
    batch, heads, m, _ = q.shape
    sizes = _sizes(q, v)
    parts, share = _parts(m, batch * heads)
    buffers = _buffers(q, parts, sizes)
    _query_gradients[parts, heads, batch](
        q, g, dq, *state, *buffers, heads, m, share,
        *q.stride()[:3], *g.stride()[:3], *dq.stride()[:3], KIND=kind, **sizes, **LOOP,
    )
    d_sums, d_norms, _ = _merged(buffers, sizes)
    n = k.shape[2]
    _key_gradients[triton.cdiv(n, ONCE["BLOCK"]), heads, batch](
        k, v, k if mask is None else mask, dk, dv, d_sums, d_norms, state[2], heads, n,
        *k.stride()[:3], *v.stride()[:3], 0 if mask is None else mask.stride(0),
        *dk.stride()[:3], *dv.stride()[:3], KIND=kind, MASKED=mask is not None, **sizes, **ONCE,
    )
