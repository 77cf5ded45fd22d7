"""Causal linear attention in parts: their sums, a scan over them, then chunk after chunk in each.

Every elementwise map is φ = exp(log φ). A row n sees the columns m <= n with the weights

    w_nm = Σ_f exp(a_nf + b_mf),

of which those of its own chunk are taken one by one, and those before it as sums: of all earlier
columns X_f = Σ_m exp(b_mf - s_f) x_m and z_f = Σ_m exp(b_mf - s_f) e_m, with s_f the largest so far,
which the row adds. All exponents are at most 0 once the row has taken off its largest: nothing
overflows, and no key is lost because a later one is larger.

Forward, a and b are of queries and keys, x = v, e = 1, and log Σ_m w_nm is kept. With it taken off
the queries w is normalised, and with g the gradient of y and c_n = g_n·y_n,

    d log φ(q_n)_f = Σ_{m<=n} w_nmf (g_n·v_m - c_n),    dv_m = Σ_{n>=m} w_nm g_n,
    d log φ(k_m)_f = Σ_{n>=m} w_nmf (v_m·g_n - c_n),

the first of them as before, the others with the time reversed: keys are rows, queries columns,
x = g and e = c. O(N) operations; each pass reads its tensors twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.launch import launch
from fastrpb.kernels.tiles import (
    HIDDEN,
    PROGRAMS,
    buffers,
    dot,
    kept,
    load,
    load_state,
    log_slope,
    parts_of,
    sizes,
    store,
    store_state,
    strides,
)

CHUNK = 16  # the least that tensor cores take
SUMS = {"CHUNK": 32, "num_warps": 4, "num_stages": 3}
SCANNED = 8192  # numbers that a program of the scan holds


@triton.jit
def _logs(
    x,
    sn,
    n,
    count,
    mask,
    tops,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
    LESS: tl.constexpr,
):
    """Rows n of x, log φ of them, less their tops if LESS, and which there are."""
    keep = kept(mask, n, count, MASKED)
    rows = load(x, sn, n, keep, DIM, WIDTH).to(tl.float32)
    logs = rows
    if KIND == 1:
        logs = tl.where(rows > 0, tl.log(1 + tl.maximum(rows, 0.0)), rows)
    if KIND == 2:
        logs = tl.log(tl.maximum(rows, 0.0) + 1e-3)
    if LESS:
        logs -= tl.load(tops + n, mask=keep, other=0.0)[:, None]
    there = keep[:, None] & (tl.arange(0, WIDTH) < DIM)[None, :]
    return rows, tl.where(there, logs, HIDDEN), keep


@triton.jit
def _extend(total, norm, shift, logs, scale, x, e, FULL: tl.constexpr):
    """X, z and s with some more columns, each times its scale."""
    largest = tl.maximum(shift, tl.max(logs, 0))
    decay = tl.exp(shift - largest)
    phi = tl.where(logs > HIDDEN / 2, tl.exp(logs - largest[None, :]), 0.0) * scale[:, None]
    total = dot(tl.trans(phi), x, total * decay[:, None], FULL)
    return total, norm * decay + tl.sum(phi * e[:, None], 0), largest


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
    shift = tl.full((WIDTH,), HIDDEN, tl.float32)
    end = tl.minimum(columns, (part + 1) * share)
    for start in tl.range(part * share, end, CHUNK):
        n = start + tl.arange(0, CHUNK)
        _, logs, keep = _logs(b, bn, n, end, mask, tops, DIM, WIDTH, KIND, MASKED, REVERSE)
        scale = tl.full((CHUNK,), 1.0, tl.float32)
        e = scale
        if REVERSE:
            scale = 1 / tl.load(wholes + n, mask=keep, other=1.0)
            e = tl.load(weights + n, mask=keep, other=0.0)
        values = load(x, xn, n, keep, VDIM, VWIDTH)
        total, norm, shift = _extend(total, norm, shift, logs, scale, values, e, FULL)
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
    f, line = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
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
    if tl.program_id(0) == 0:
        tl.store(norms_out + at, norm, mask=p < parts)
        tl.store(shifts_out + at, shift, mask=p < parts)


@triton.jit
def _output(
    q,
    k,
    v,
    mask,
    plus,
    y,
    tops,
    wholes,
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
    """Of one part y = w·v / Σ w + plus, and Σ w with the logarithm taken off it."""
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
    wholes += line * rows
    at = line * tl.num_programs(0) + part
    total, norm = load_state(sums, norms, at, WIDTH, VWIDTH)
    shift = tl.load(shifts + at * WIDTH + tl.arange(0, WIDTH))
    i = tl.arange(0, CHUNK)
    visible = (i[:, None] >= i[None, :])[:, :, None]
    one = tl.full((CHUNK,), 1.0, tl.float32)
    for start in tl.range(part * share, tl.minimum(rows, (part + 1) * share), CHUNK):
        n = start + i
        _, a, _ = _logs(q, qn, n, rows, mask, tops, DIM, WIDTH, KIND, False, False)
        _, b, keep = _logs(k, kn, n, columns, mask, tops, DIM, WIDTH, KIND, MASKED, False)
        values = load(v, vn, n, keep, VDIM, VWIDTH)
        near = tl.where(visible, a[:, None, :] + b[None, :, :], HIDDEN)
        far = a + shift[None, :]
        top = tl.maximum(tl.max(tl.max(near, 2), 1), tl.max(far, 1))
        top = tl.maximum(top, HIDDEN / 2)  # above what is hidden
        weight = tl.sum(tl.exp(near - top[:, None, None]), 2)
        far = tl.exp(far - top[:, None])
        out = dot(far, total, tl.zeros((CHUNK, VWIDTH), tl.float32), FULL)
        out = dot(weight, values, out, FULL)
        whole = tl.sum(far * norm[None, :], 1) + tl.sum(weight, 1)
        sees = whole > 0
        whole = tl.where(sees, whole, 1.0)
        out *= (1 / whole)[:, None]
        if PLUS:
            out += load(plus, pn, n, n < rows, VDIM, VWIDTH).to(tl.float32)
        store(y, yn, n, rows, out, VDIM, VWIDTH)
        tl.store(tops + n, tl.where(sees, top, 0.0), mask=n < rows)
        tl.store(wholes + n, whole, mask=n < rows)
        total, norm, shift = _extend(total, norm, shift, b, one, values, one, FULL)


@triton.jit
def _gradients(
    a,
    u,
    b,
    x,
    mask,
    tops,
    wholes,
    weights,
    da,
    dx,
    sums,
    norms,
    shifts,
    heads,
    rows,
    columns,
    share,
    length,
    ab,
    ah,
    an,
    ub,
    uh,
    un,
    bb,
    bh,
    bn,
    xb,
    xh,
    xn,
    dab,
    dah,
    dan,
    dxb,
    dxh,
    dxn,
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
    """Of one part dq and c, or, REVERSE, dk and dv."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    line = batch * heads + head
    a += batch * ab + head * ah
    u += batch * ub + head * uh
    b += batch * bb + head * bh
    x += batch * xb + head * xh
    da += batch * dab + head * dah
    dx += batch * dxb + head * dxh
    mask += batch * (rows if REVERSE else columns)
    queries = columns if REVERSE else rows
    tops += line * queries
    wholes += line * queries
    weights += line * queries
    at = line * tl.num_programs(0) + part
    total, norm = load_state(sums, norms, at, WIDTH, VWIDTH)
    shift = tl.load(shifts + at * WIDTH + tl.arange(0, WIDTH))
    i = tl.arange(0, CHUNK)
    visible = i[:, None] <= i[None, :] if REVERSE else i[:, None] >= i[None, :]
    begin = part * share
    chunks = tl.cdiv(tl.minimum(share, length - begin), CHUNK)
    for step in tl.range(0, chunks):
        n = begin + (chunks - 1 - step if REVERSE else step) * CHUNK + i
        raw, left, keep = _logs(
            a, an, n, rows, mask, tops, DIM, WIDTH, KIND, MASKED and REVERSE, not REVERSE
        )
        _, right, there = _logs(
            b, bn, n, columns, mask, tops, DIM, WIDTH, KIND, MASKED and not REVERSE, REVERSE
        )
        mine = load(u, un, n, keep, VDIM, VWIDTH)
        theirs = load(x, xn, n, there, VDIM, VWIDTH)
        scale = 1 / tl.load(wholes + n, mask=n < queries, other=1.0)
        e = tl.full((CHUNK,), 1.0, tl.float32)
        near = tl.exp(tl.where(visible[:, :, None], left[:, None, :] + right[None, :, :], HIDDEN))
        far = tl.exp(left + shift[None, :])
        if REVERSE:
            e = tl.load(weights + n, mask=there, other=0.0)
            near *= scale[None, :, None]
        else:
            near *= scale[:, None, None]
            far *= scale[:, None]
            scale = e
        products = dot(mine, tl.trans(theirs), tl.zeros((CHUNK, CHUNK), tl.float32), FULL)
        across = dot(mine, tl.trans(total), tl.zeros((CHUNK, WIDTH), tl.float32), FULL)
        change = tl.sum(near * products[:, :, None], 1) + far * across
        mean = tl.sum(near * e[None, :, None], 1) + far * norm[None, :]
        if REVERSE:
            out = dot(far, total, tl.zeros((CHUNK, VWIDTH), tl.float32), FULL)
            out = dot(tl.sum(near, 2), theirs, out, FULL)
            store(dx, dxn, n, rows, out, VDIM, VWIDTH)
        else:
            c = tl.sum(change, 1)
            tl.store(weights + n, c, mask=n < rows)
            mean *= c[:, None]
        store(da, dan, n, rows, (change - mean) * log_slope(raw, KIND), DIM, WIDTH)
        total, norm, shift = _extend(total, norm, shift, right, scale, theirs, e, FULL)


def _before(
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
    tensors = b, x, b if mask is None else mask, *queries, sums, norms, shifts
    numbers = heads, columns, share, *strides(b, x)
    launch(_sums, (parts, heads, batch), *tensors, *numbers, **options, **SUMS)
    count = triton.next_power_of_2(parts)
    tile = {name: options[name] for name in ("WIDTH", "VWIDTH", "REVERSE")}
    tile |= {"PARTS": count, "COLUMNS": min(tile["VWIDTH"], max(1, SCANNED // count))}
    grid = tile["VWIDTH"] // tile["COLUMNS"], tile["WIDTH"], batch * heads
    out = [torch.empty_like(x) for x in (sums, norms, shifts)]
    launch(_scan, grid, sums, norms, shifts, *out, parts, **tile)
    return out


def _tile(options: dict) -> dict:
    return {"CHUNK": CHUNK, "num_warps": 4 if options["WIDTH"] <= 64 else 8, "num_stages": 2}


def _cut(length: int, batch_heads: int) -> tuple[int, int]:
    return parts_of(length, batch_heads, max(CHUNK, SUMS["CHUNK"]), PROGRAMS)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    plus: Tensor | None,
    y: Tensor,
    kind: int,
) -> list[Tensor]:
    """Fill y; returns two (batch, heads, M) of which Σ w is the product, exp of the first."""
    (batch, heads, m, _), n = q.shape, k.shape[2]
    state = [torch.empty(batch, heads, m, dtype=torch.float32, device=q.device) for _ in range(2)]
    options = sizes(q, v, kind) | {"MASKED": mask is not None}
    cut = _cut(m, batch * heads)
    before = _before(k, v, mask, [*state, state[0]], cut, options | {"REVERSE": False})
    added = y if plus is None else plus
    tensors = q, k, v, k if mask is None else mask, added, y, *state, *before
    numbers = heads, m, n, cut[1], *strides(q, k, v, added, y)
    options |= {"PLUS": plus is not None, **_tile(options)}
    launch(_output, (cut[0], heads, batch), *tensors, *numbers, **options)
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
    options = sizes(q, v, kind)
    queries = [*state, torch.empty_like(state[0])]
    _half(q, g, k, v, mask, queries, dq, dv, options | {"REVERSE": False})
    _half(k, v, q, g, mask, queries, dk, dv, options | {"REVERSE": True})


def _half(
    a: Tensor,
    u: Tensor,
    b: Tensor,
    x: Tensor,
    mask: Tensor | None,
    queries: list[Tensor],
    da: Tensor,
    dx: Tensor,
    options: dict,
) -> None:
    (batch, heads, rows, _), columns = a.shape, b.shape[2]
    length = max(rows, columns)
    cut = _cut(length, batch * heads)
    masked = {"MASKED": mask is not None}
    seen = masked | {"MASKED": mask is not None and not options["REVERSE"]}
    before = _before(b, x, mask, queries, cut, options | seen)
    tensors = a, u, b, x, a if mask is None else mask, *queries, da, dx, *before
    numbers = heads, rows, columns, cut[1], length, *strides(a, u, b, x, da, dx)
    tile = masked | _tile(options)
    launch(_gradients, (cut[0], heads, batch), *tensors, *numbers, **options, **tile)
