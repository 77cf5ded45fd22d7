"""Causal linear attention in parts: their sums, a scan over them, then chunk after chunk in each.

A row n sees the columns m <= n, with the weights w_nm = Σ_f φ(a_n)_f φ(b_m)_f: those of its own
chunk one by one, those before it by sums over all earlier columns,

    X_f = Σ_m φ(b_m)_f x_m,    z_f = Σ_m φ(b_m)_f e_m.

φ = exp takes off the largest column so far, s_f, which the rows add, less what they see at most:
exp(a_nf + s_f - top_n). Only columns of its own chunk that a row does not see can make that large;
a chunk where they do is taken one column at a time. Then nothing overflows, and no key is lost
because a later one is larger.

Forward, rows are queries and columns are keys, x = v and e = 1; top_n is kept. In bfloat16 the
weights of a chunk are rounded before they are summed up. O(N) operations; each pass reads its
columns twice. `causal_gradients` goes back by the same parts and scan.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.launch import launch, power_of_2
from fastrpb.kernels.tiles import (
    HIDDEN,
    buffers,
    divisor,
    dot,
    features,
    kept,
    load,
    load_state,
    parts_of,
    rounded,
    sizes,
    store,
    store_state,
    strides,
)

CHUNK = 64
SUMS = {"num_warps": 4, "num_stages": 3}
CHUNKS = {"num_stages": 1}
PROGRAMS = 528
SCANNED = 8192  # numbers that a program of the scan holds
_SAFE = tl.constexpr(40.0)  # exponents far from those that overflow


@triton.jit
def is_real(keep, DIM: tl.constexpr, WIDTH: tl.constexpr):
    return keep[:, None] & (tl.arange(0, WIDTH) < DIM)[None, :]


@triton.jit
def column_features(x, real, shift, KIND: tl.constexpr):
    """φ of columns, less the largest so far; that; and what it makes of earlier ones."""
    if KIND != 0:
        return tl.where(real, features(x, KIND), 0.0), shift, tl.full(shift.shape, 1.0, tl.float32)
    x = tl.where(real, x, HIDDEN)
    largest = tl.maximum(shift, tl.max(x, 0))
    return tl.where(real, tl.exp(x - largest[None, :]), 0.0), largest, tl.exp(shift - largest)


@triton.jit
def is_large(lift, KIND: tl.constexpr):
    """Whether an exponent of the rows could overflow."""
    return tl.max(tl.max(lift, 1), 0) > _SAFE if KIND == 0 else False


@triton.jit
def row_features(lift, real, KIND: tl.constexpr):
    return tl.where(real, tl.exp(lift) if KIND == 0 else features(lift, KIND), 0.0)


@triton.jit
def _sums(
    b,
    x,
    mask,
    tops,
    wholes,
    weights,
    sums,
    norms,
    shifts,
    heads,
    columns,
    share,
    bb,
    bh,
    bn,
    xb,
    xh,
    xn,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VDIM: tl.constexpr,
    VWIDTH: tl.constexpr,
    KIND: tl.constexpr,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    REVERSE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """X, z and s of one part."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    line = batch * heads + head
    b += batch * bb + head * bh
    x += batch * xb + head * xh
    mask += batch * columns
    tops += line * columns
    wholes += line * columns
    weights += line * columns
    total = tl.zeros((WIDTH, VWIDTH), tl.float32)
    norm = tl.zeros((WIDTH,), tl.float32)
    shift = tl.full((WIDTH,), HIDDEN if KIND == 0 else 0.0, tl.float32)
    end = tl.minimum(columns, (part + 1) * share)
    for start in tl.range(part * share, end, CHUNK):
        n = start + tl.arange(0, CHUNK)
        keep = kept(mask, n, end, MASKED and not REVERSE)
        right = load(b, bn, n, keep, DIM, WIDTH).to(tl.float32)
        theirs = load(x, xn, n, keep, VDIM, VWIDTH)
        if REVERSE:
            right -= tl.load(tops + n, mask=keep, other=0.0)[:, None]
        phi, shift, decay = column_features(right, is_real(keep, DIM, WIDTH), shift, KIND)
        if REVERSE:
            phi *= (1 / tl.load(wholes + n, mask=keep, other=1.0))[:, None]
        weighted = phi
        if REVERSE:
            weighted *= tl.load(weights + n, mask=keep, other=0.0)[:, None]
        norm = norm * decay + tl.sum(weighted, 0)
        total = dot(tl.trans(phi), theirs, total * decay[:, None], FULL)
    at = line * tl.num_programs(0) + part
    store_state(sums, norms, at, total, norm, WIDTH, VWIDTH)
    tl.store(shifts + at * WIDTH + tl.arange(0, WIDTH), shift)


@triton.jit
def _add(shift_a, x_a, shift_b, x_b):
    shift = tl.maximum(shift_a, shift_b)
    return shift, x_a * tl.exp(shift_a - shift) + x_b * tl.exp(shift_b - shift)


@triton.jit
def _scan(
    sums,
    norms,
    shifts,
    sums_out,
    norms_out,
    shifts_out,
    parts,
    WIDTH: tl.constexpr,
    VWIDTH: tl.constexpr,
    REVERSE: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """X, z and s of all that comes before each part, for one feature and some columns."""
    line, f = tl.program_id(0).to(tl.int64), tl.program_id(2)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    p = tl.arange(0, PARTS)
    source = p + 1 if REVERSE else p - 1
    there = (source >= 0) & (source < parts)
    at = (line * parts + source) * WIDTH + f
    shift = tl.load(shifts + at, mask=there, other=HIDDEN)
    norm = tl.load(norms + at, mask=there, other=0.0)
    total = tl.load(sums + at[:, None] * VWIDTH + d, mask=there[:, None], other=0.0)
    wide = tl.broadcast_to(shift[:, None], (PARTS, COLUMNS))
    _, total = tl.associative_scan((wide, total), 0, _add, reverse=REVERSE)
    shift, norm = tl.associative_scan((shift, norm), 0, _add, reverse=REVERSE)
    at = (line * parts + p) * WIDTH + f
    tl.store(sums_out + at[:, None] * VWIDTH + d, total, mask=(p < parts)[:, None])
    if tl.program_id(1) == 0:
        tl.store(norms_out + at, norm, mask=p < parts)
        tl.store(shifts_out + at, shift, mask=p < parts)


@triton.jit
def _output_by_columns(
    rows,
    total,
    norm,
    shift,
    k,
    kn,
    v,
    vn,
    mask,
    start,
    columns,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VDIM: tl.constexpr,
    VWIDTH: tl.constexpr,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """w·v, Σ w and top of a chunk, φ = exp, one column after the other."""
    far = rows + shift[None, :]
    top = tl.maximum(tl.max(far, 1), HIDDEN / 2)  # above what is hidden
    far = tl.exp(far - top[:, None])
    out = dot(far, total, tl.zeros((CHUNK, VWIDTH), tl.float32), FULL)
    whole = tl.sum(far * norm[None, :], 1)
    for m in tl.range(0, CHUNK):
        n = start + m + tl.arange(0, 1)
        keep = kept(mask, n, columns, MASKED)
        sees = (tl.arange(0, CHUNK) >= m)[:, None] & keep[:, None]
        x = tl.where(sees, rows + load(k, kn, n, keep, DIM, WIDTH).to(tl.float32), HIDDEN)
        higher = tl.maximum(top, tl.max(x, 1))
        weight, decay = tl.sum(tl.exp(x - higher[:, None]), 1), tl.exp(top - higher)
        values = load(v, vn, n, keep, VDIM, VWIDTH).to(tl.float32)
        out = out * decay[:, None] + weight[:, None] * values
        whole = whole * decay + weight
        top = higher
    return out, whole, top


@triton.jit
def _output(
    q,
    k,
    v,
    mask,
    plus,
    y,
    tops,
    sums,
    norms,
    shifts,
    heads,
    rows,
    columns,
    share,
    qb,
    qh,
    qn,
    kb,
    kh,
    kn,
    vb,
    vh,
    vn,
    pb,
    ph,
    pn,
    yb,
    yh,
    yn,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VDIM: tl.constexpr,
    VWIDTH: tl.constexpr,
    KIND: tl.constexpr,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    PLUS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Of one part y = w·v / Σ w + plus, and top."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    line = batch * heads + head
    q += batch * qb + head * qh
    k += batch * kb + head * kh
    v += batch * vb + head * vh
    plus += batch * pb + head * ph
    y += batch * yb + head * yh
    mask += batch * columns
    tops += line * rows
    at = line * tl.num_programs(0) + part
    total, norm = load_state(sums, norms, at, WIDTH, VWIDTH)
    shift = tl.load(shifts + at * WIDTH + tl.arange(0, WIDTH))
    i = tl.arange(0, CHUNK)
    visible = i[:, None] >= i[None, :]
    for start in tl.range(part * share, tl.minimum(rows, (part + 1) * share), CHUNK):
        n = start + i
        left = load(q, qn, n, n < rows, DIM, WIDTH).to(tl.float32)
        keep = kept(mask, n, columns, MASKED)
        right = load(k, kn, n, keep, DIM, WIDTH).to(tl.float32)
        values = load(v, vn, n, keep, VDIM, VWIDTH)
        mine, theirs = is_real(n < rows, DIM, WIDTH), is_real(keep, DIM, WIDTH)
        phi, largest, decay = column_features(right, theirs, shift, KIND)
        top = tl.zeros((CHUNK,), tl.float32)
        lift = left
        if KIND == 0:
            left = tl.where(mine, left, HIDDEN)
            seen = tl.maximum(shift[None, :], tl.where(theirs, right, HIDDEN))
            top = tl.maximum(tl.max(left + seen, 1), HIDDEN / 2)  # above what is hidden
            lift = left + largest[None, :] - top[:, None]
        phi = rounded(phi, values)
        if is_large(lift, KIND):
            out, whole, top = _output_by_columns(
                left,
                total,
                norm,
                shift,
                k,
                kn,
                v,
                vn,
                mask,
                start,
                columns,
                DIM,
                WIDTH,
                VDIM,
                VWIDTH,
                FULL,
                MASKED,
                CHUNK,
            )
        else:
            queries = rounded(row_features(lift, mine, KIND), values)
            weight = dot(queries, tl.trans(phi), tl.zeros((CHUNK, CHUNK), tl.float32), FULL)
            weight = rounded(tl.where(visible, weight, 0.0), values)
            out = dot(queries, total * decay[:, None], tl.zeros((CHUNK, VWIDTH), tl.float32), FULL)
            out = dot(weight, values, out, FULL)
            whole = tl.sum(queries.to(tl.float32) * (norm * decay)[None, :], 1)
            whole += tl.sum(weight.to(tl.float32), 1)
        out *= (1 / divisor(whole))[:, None]
        if PLUS:
            out += load(plus, pn, n, n < rows, VDIM, VWIDTH).to(tl.float32)
        store(y, yn, n, rows, out, VDIM, VWIDTH)
        tl.store(tops + n, tl.where(whole == 0, 0.0, top), mask=n < rows)
        norm = norm * decay + tl.sum(phi.to(tl.float32), 0)
        total = dot(tl.trans(phi), values, total * decay[:, None], FULL)
        shift = largest


def sums_before(
    b: Tensor,
    x: Tensor,
    mask: Tensor | None,
    queries: list[Tensor],
    cut: tuple[int, int],
    options: dict,
) -> list[Tensor]:
    """X, z and s of all that comes before each part."""
    (batch, heads, columns, _), (parts, share) = b.shape, cut
    sums, norms = buffers(b, parts, options)
    shifts = torch.empty_like(norms)
    if parts == 1:
        return [sums.zero_(), norms.zero_(), shifts.fill_(HIDDEN.value)]
    tensors = b, x, b if mask is None else mask, *queries, sums, norms, shifts
    numbers = heads, columns, share, *strides(b, x)
    launch(_sums, (parts, heads, batch), *tensors, *numbers, **options, **SUMS)
    count = power_of_2(parts)
    tile = {name: options[name] for name in ("WIDTH", "VWIDTH", "REVERSE")}
    tile |= {"PARTS": count, "COLUMNS": min(tile["VWIDTH"], max(1, SCANNED // count))}
    grid = batch * heads, tile["VWIDTH"] // tile["COLUMNS"], tile["WIDTH"]
    out = [torch.empty_like(x) for x in (sums, norms, shifts)]
    launch(_scan, grid, sums, norms, shifts, *out, parts, **tile)
    return out


def chunk_options(q: Tensor, v: Tensor) -> dict:
    wide = max(q.shape[3], v.shape[3]) > 64
    return CHUNKS | {"num_warps": 8 if wide else 4}


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    plus: Tensor | None,
    y: Tensor,
    kind: int,
) -> list[Tensor]:
    """Fill y; returns top (batch, heads, M), which the gradients need."""
    (batch, heads, m, _), n = q.shape, k.shape[2]
    tops = torch.empty(batch, heads, m, dtype=torch.float32, device=q.device)
    options = sizes(q, v, kind) | {"MASKED": mask is not None, "CHUNK": CHUNK}
    cut = parts_of(m, batch * heads, CHUNK, PROGRAMS)
    before = sums_before(k, v, mask, 3 * [tops], cut, options | {"REVERSE": False})
    added = y if plus is None else plus
    tensors = q, k, v, k if mask is None else mask, added, y, tops, *before
    numbers = heads, m, n, cut[1], *strides(q, k, v, added, y)
    options |= {"PLUS": plus is not None, **chunk_options(q, v)}
    launch(_output, (cut[0], heads, batch), *tensors, *numbers, **options)
    return [tops]
