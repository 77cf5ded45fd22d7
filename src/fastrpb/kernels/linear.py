"""Bidirectional linear attention: sums over the keys, then the queries; no features are stored.

With the keys normalised, a_mf = φ(k_m)_f / z_f for z_f = Σ_m φ(k_m)_f, and the queries as well,
p_nf = φ(q_n)_f z_f / Σ_f φ(q_n)_f z_f, linear attention is

    u_f = Σ_m a_mf v_m,    y_n = Σ_f p_nf u_f,

two averages: every factor is at most 1, whatever the length. φ = exp takes off the largest key of
each feature, which the queries add, and their own largest after that: all exponents are at most 0.
In bfloat16 both weights are rounded before they are summed up: they are averages all the same.
Backward, with g the gradient of y: t = g·uᵀ, d log p = p(t - Σ_f p·t), du = pᵀ·g, and then
d log a_m = a(v_m·duᵀ + c) with c = Σ_n d log p_n - u·du, and dv = a·du. Each tensor is read or
written once, the keys twice where φ is an exponential.

KIND is the number of φ: 0 for exp, -1 for FAVOR+, 1 for ELU + 1, 2 for ReLU, 3 where queries and
keys are features already. What they are made of, x, is the query or the key itself, or, for FAVOR+,
its product with `projection`: a program holds those rows, and x is never stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.launch import launch, power_of_2, tile_width
from fastrpb.kernels.tiles import (
    HIDDEN,
    buffers,
    dot,
    features,
    kept,
    load,
    load_state,
    log_slope,
    parts_of,
    rest,
    rounded,
    sizes,
    store,
    store_state,
    strides,
)

STATE = {"BLOCK": 16, "num_warps": 4, "num_stages": 4}
OUTPUT = {"BLOCK": 64, "num_warps": 4, "num_stages": 2}
GRADIENTS = {"BLOCK": 64, "num_warps": 4, "num_stages": 2}
PROJECTED = {"BLOCK": 32, "num_warps": 8, "num_stages": 1}  # for more features than channels
STATE_PROGRAMS, OUTPUT_PROGRAMS, GRADIENT_PROGRAMS = 528, 2112, 1056  # fill a large GPU


@triton.jit
def _projection(
    rows, FEATURES: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr
):
    """R·dim^(-1/4), a row for two features, and zeros beyond them: (WIDTH/2, INNER)."""
    f, d = tl.arange(0, WIDTH // 2)[:, None], tl.arange(0, INNER)[None, :]
    x = tl.load(rows + f * DIM + d, mask=(f < FEATURES // 2) & (d < DIM), other=0.0)
    return x.to(tl.float32) * DIM**-0.25


@triton.jit
def _lifted(raw, rows, DIM: tl.constexpr, KIND: tl.constexpr, FULL: tl.constexpr):
    """x, of which the features are made: raw, or ±raw·rowsᵀ - |raw|²/(2√dim) for FAVOR+."""
    x = raw.to(tl.float32)
    if KIND == -1:
        square = tl.sum(x * x, 1) * (DIM**-0.5 / 2)
        y = dot(raw, tl.trans(rows), tl.zeros((raw.shape[0], rows.shape[0]), tl.float32), FULL)
        x = tl.interleave(y, -y) - square[:, None]
    return x


@triton.jit
def _lowered(
    change, inner, factor, raw, rows, DIM: tl.constexpr, KIND: tl.constexpr, FULL: tl.constexpr
):
    """The gradient of raw, given d log φ = weight·inner and weight = φ·factor."""
    x = raw.to(tl.float32)
    if KIND == 3:
        gradient = inner * factor
    elif KIND == -1:
        plus, minus = tl.split(tl.reshape(change, (raw.shape[0], rows.shape[0], 2)))
        gradient = dot(plus - minus, rows, tl.zeros(raw.shape, tl.float32), FULL)
        gradient -= x * (tl.sum(change, 1) * DIM**-0.5)[:, None]
    else:
        gradient = change * log_slope(x, KIND)
    return gradient


@triton.jit
def _query_weights(x, z, shift, FEATURES: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """p: of each query over the features, up to a factor."""
    if KIND <= 0:
        x += shift[None, :]
        if FEATURES != WIDTH:
            x = tl.where((tl.arange(0, WIDTH) < FEATURES)[None, :], x, HIDDEN)
        return tl.exp(x - tl.max(x, 1)[:, None]) * z[None, :]
    return features(x, KIND) * z[None, :]


@triton.jit
def _key_features(x, keep, shift, KIND: tl.constexpr):
    if KIND <= 0:
        return tl.exp(tl.where(keep[:, None], x - shift[None, :], HIDDEN))
    return tl.where(keep[:, None], features(x, KIND), 0.0)


@triton.jit
def _inverse(total):
    return 1 / tl.where(total == 0, 1.0, total)


@triton.jit
def _state(
    k,
    v,
    mask,
    projection,
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
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    VDIM: tl.constexpr,
    VWIDTH: tl.constexpr,
    KIND: tl.constexpr,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Σ φ(k)vᵀ and Σ φ(k) over a share of the keys, exponentials less their largest key."""
    part, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    k += b * kb + h * kh
    v += b * vb + h * vh
    mask += b * count
    f = tl.arange(0, WIDTH)
    end = tl.minimum(count, (part + 1) * share)
    rows = _projection(projection, FEATURES, WIDTH, DIM, INNER) if KIND == -1 else 0
    shift = tl.zeros((WIDTH,), tl.float32)
    # A second read is faster than to take the largest so far off, block by block.
    if KIND <= 0:
        highest = tl.full((BLOCK, WIDTH), HIDDEN, tl.float32)
        for start in tl.range(part * share, end, BLOCK):
            n = start + tl.arange(0, BLOCK)
            keep = kept(mask, n, end, MASKED)
            x = _lifted(load(k, kn, n, keep, DIM, INNER), rows, DIM, KIND, FULL)
            highest = tl.maximum(highest, tl.where(keep[:, None], x, HIDDEN))
        shift = tl.max(highest, 0)
    total = tl.zeros((WIDTH, VWIDTH), tl.float32)
    norm = tl.zeros((BLOCK, WIDTH), tl.float32)
    for start in tl.range(part * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        keep = kept(mask, n, end, MASKED)
        x = _lifted(load(k, kn, n, keep, DIM, INNER), rows, DIM, KIND, FULL)
        values = load(v, vn, n, keep, VDIM, VWIDTH)
        phi = rounded(_key_features(x, keep, shift, KIND), values)
        norm += phi.to(tl.float32)
        total = dot(tl.trans(phi), values, total, FULL)
    at = (b * heads + h) * tl.num_programs(0) + part
    norm = tl.where(f < FEATURES, tl.sum(norm, 0), 0.0)  # padding has no weight
    store_state(means, norms, at, total, norm, WIDTH, VWIDTH)
    tl.store(shifts + at * WIDTH + f, shift)


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
    bh = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    p = tl.arange(0, PARTS)
    at = (bh * parts + p)[:, None] * WIDTH + f[None, :]
    there = (p < parts)[:, None]
    norm = tl.load(norms + at, mask=there, other=0.0)
    if MEANS:
        every = tl.load(shifts + at, mask=there, other=HIDDEN)
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
            decay = tl.exp(tl.load(shifts + some, mask=inside, other=HIDDEN) - shift[None, :])
            block *= decay[:, :, None]
        total += tl.sum(block, 0)
    if MEANS:
        total *= _inverse(z)[:, None]
    row = bh * WIDTH + f
    tl.store(means_out + row[:, None] * VWIDTH + tl.arange(0, VWIDTH)[None, :], total)
    tl.store(norms_out + row, z)


@triton.jit
def _output(
    q,
    projection,
    plus,
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
    pb,
    ph,
    pn,
    yb,
    yh,
    yn,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    VDIM: tl.constexpr,
    VWIDTH: tl.constexpr,
    KIND: tl.constexpr,
    FULL: tl.constexpr,
    PLUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = p·u + plus."""
    part, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q += b * qb + h * qh
    plus += b * pb + h * ph
    y += b * yb + h * yh
    u, z = load_state(means, norms, b * heads + h, WIDTH, VWIDTH)
    shift = tl.load(shifts + (b * heads + h) * WIDTH + tl.arange(0, WIDTH))
    rows = _projection(projection, FEATURES, WIDTH, DIM, INNER) if KIND == -1 else 0
    u_high = u.to(tl.bfloat16)
    u_low = rest(u, u_high)
    end = tl.minimum(count, (part + 1) * share)
    for start in tl.range(part * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = _lifted(load(q, qn, n, n < end, DIM, INNER), rows, DIM, KIND, FULL)
        weight = _query_weights(x, z, shift, FEATURES, WIDTH, KIND)
        out = tl.zeros((BLOCK, VWIDTH), tl.float32)
        if y.dtype.element_ty == tl.bfloat16:
            weight = weight.to(tl.bfloat16)
            out = tl.dot(weight, u_high, tl.dot(weight, u_low, out))
        else:
            out = dot(weight, u, out, FULL)
        out *= _inverse(tl.sum(weight.to(tl.float32), 1))[:, None]
        if PLUS:
            out += load(plus, pn, n, n < end, VDIM, VWIDTH).to(tl.float32)
        store(y, yn, n, end, out, VDIM, VWIDTH)


@triton.jit
def _query_gradients(
    q,
    projection,
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
    INNER: tl.constexpr,
    FEATURES: tl.constexpr,
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
    u, z = load_state(means, norms, b * heads + h, WIDTH, VWIDTH)
    shift = tl.load(shifts + (b * heads + h) * WIDTH + tl.arange(0, WIDTH))
    rows = _projection(projection, FEATURES, WIDTH, DIM, INNER) if KIND == -1 else 0
    du = tl.zeros((WIDTH, VWIDTH), tl.float32)
    d_log_z = tl.zeros((BLOCK, WIDTH), tl.float32)
    end = tl.minimum(count, (part + 1) * share)
    for start in tl.range(part * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        raw = load(q, qn, n, n < end, DIM, INNER)
        x = _lifted(raw, rows, DIM, KIND, FULL)
        p = _query_weights(x, z, shift, FEATURES, WIDTH, KIND)
        inverse = _inverse(tl.sum(p, 1))[:, None]
        p *= inverse
        upstream = load(g, gn, n, n < end, VDIM, VWIDTH)
        t = dot(upstream, tl.trans(u), tl.zeros((BLOCK, WIDTH), tl.float32), FULL)
        inner = t - tl.sum(p * t, 1)[:, None]
        change = p * inner
        d_raw = _lowered(change, inner, z[None, :] * inverse, raw, rows, DIM, KIND, FULL)
        store(dq, dn, n, end, d_raw, DIM, INNER)
        d_log_z += change
        du = dot(tl.trans(p), upstream, du, FULL)
    at = (b * heads + h) * tl.num_programs(0) + part
    store_state(d_means, d_norms, at, du, tl.sum(d_log_z, 0), WIDTH, VWIDTH)


@triton.jit
def _key_gradients(
    k,
    v,
    mask,
    projection,
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
    dkb,
    dkh,
    dkn,
    dvb,
    dvh,
    dvn,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    VDIM: tl.constexpr,
    VWIDTH: tl.constexpr,
    KIND: tl.constexpr,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dk and dv, zero where masked."""
    part, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    k += b * kb + h * kh
    v += b * vb + h * vh
    dk += b * dkb + h * dkh
    dv += b * dvb + h * dvh
    mask += b * count
    u, z = load_state(means, norms, b * heads + h, WIDTH, VWIDTH)
    shift = tl.load(shifts + (b * heads + h) * WIDTH + tl.arange(0, WIDTH))
    du, d_log_z = load_state(d_means, d_norms, b * heads + h, WIDTH, VWIDTH)
    rows = _projection(projection, FEATURES, WIDTH, DIM, INNER) if KIND == -1 else 0
    constant = d_log_z - tl.sum(u * du, 1)
    inverse = tl.where(z == 0, 0.0, _inverse(z))
    end = tl.minimum(count, (part + 1) * share)
    for start in tl.range(part * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        keep = kept(mask, n, end, MASKED)
        raw = load(k, kn, n, keep, DIM, INNER)
        x = _lifted(raw, rows, DIM, KIND, FULL)
        a = _key_features(x, keep, shift, KIND) * inverse[None, :]
        values = load(v, vn, n, keep, VDIM, VWIDTH)
        da = dot(values, tl.trans(du), tl.zeros((BLOCK, WIDTH), tl.float32), FULL)
        inner = tl.where(keep[:, None], da + constant[None, :], 0.0)
        d_raw = _lowered(a * inner, inner, inverse[None, :], raw, rows, DIM, KIND, FULL)
        store(dk, dkn, n, end, d_raw, DIM, INNER)
        d_values = dot(a, du, tl.zeros((BLOCK, VWIDTH), tl.float32), FULL)
        store(dv, dvn, n, end, d_values, VDIM, VWIDTH)


def _merged(sums: Tensor, norms: Tensor, shifts: Tensor | None, constants: dict) -> list[Tensor]:
    """(u, z, shift) of the keys, or, without shifts, the sums of the two."""
    batch, heads, parts, width, v_width = sums.shape
    means, z = buffers(sums, 1, constants)
    shift = torch.empty_like(z) if shifts is not None else z
    rows, count = 4, power_of_2(parts)
    tile = {"WIDTH": width, "VWIDTH": v_width, "PARTS": count, "ROWS": rows}
    tile |= {"SOME": min(16, count), "MEANS": shifts is not None}
    inputs = sums, norms, norms if shifts is None else shifts
    launch(_merge, (batch * heads, width // rows), *inputs, means, z, shift, parts, **tile)
    return [x.squeeze(2) for x in ((means, z) if shifts is None else (means, z, shift))]


def _constants(q: Tensor, v: Tensor, kind: int, projection: Tensor | None) -> dict:
    of_all = sizes(q, v, kind)
    features = of_all["DIM"] if projection is None else 2 * len(projection)
    return {
        **{"DIM": of_all.pop("DIM"), "INNER": of_all.pop("WIDTH")},
        **{"FEATURES": features, "WIDTH": tile_width(features)},
        **of_all,
    }


def _tile(usual: dict, projection: Tensor | None) -> dict:
    return usual if projection is None else PROJECTED


def _summed(
    k: Tensor, v: Tensor, mask: Tensor | None, projection: Tensor | None, constants: dict
) -> list[Tensor]:
    """(u, z, shift) of the keys."""
    batch, heads, n, _ = k.shape
    tile = _tile(STATE, projection)
    parts, share = parts_of(n, batch * heads, tile["BLOCK"], STATE_PROGRAMS)
    sums, norms = buffers(k, parts, constants)
    shifts = torch.empty_like(norms)
    tensors = k, v, k if mask is None else mask, k if projection is None else projection
    numbers = heads, n, share, *strides(k, v)
    options = {**constants, "MASKED": mask is not None, **tile}
    launch(_state, (parts, heads, batch), *tensors, sums, norms, shifts, *numbers, **options)
    return _merged(sums, norms, shifts, constants)


def _spread(
    q: Tensor,
    plus: Tensor | None,
    y: Tensor,
    projection: Tensor | None,
    state: list[Tensor],
    constants: dict,
) -> None:
    batch, heads, m, _ = q.shape
    tile = _tile(OUTPUT, projection)
    parts, share = parts_of(m, batch * heads, tile["BLOCK"], OUTPUT_PROGRAMS)
    added = y if plus is None else plus
    tensors = q, q if projection is None else projection, added, y
    numbers = heads, m, share, *strides(q, added, y)
    options = {**constants, "PLUS": plus is not None, **tile}
    launch(_output, (parts, heads, batch), *tensors, *state, *numbers, **options)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    plus: Tensor | None,
    y: Tensor,
    kind: int,
    projection: Tensor | None,
) -> list[Tensor]:
    """Fill y; returns (u, z, shift) of the keys, which the gradients need."""
    constants = _constants(q, v, kind, projection)
    state = _summed(k, v, mask, projection, constants)
    _spread(q, plus, y, projection, state, constants)
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
    projection: Tensor | None,
) -> None:
    """Fill dq, dk and dv."""
    (batch, heads, n, _), m = k.shape, q.shape[2]
    constants, tile = _constants(q, v, kind, projection), _tile(GRADIENTS, projection)
    parts, share = parts_of(m, batch * heads, tile["BLOCK"], GRADIENT_PROGRAMS)
    d_sums, d_norms = buffers(q, parts, constants)
    rows = k if projection is None else projection
    tensors = q, rows, g, dq, *state, d_sums, d_norms
    numbers = heads, m, share, *strides(q, g, dq)
    launch(_query_gradients, (parts, heads, batch), *tensors, *numbers, **constants, **tile)
    d_state = _merged(d_sums, d_norms, None, constants)
    parts, share = parts_of(n, batch * heads, tile["BLOCK"], GRADIENT_PROGRAMS)
    tensors = k, v, k if mask is None else mask, rows, dk, dv, *state, *d_state
    numbers = heads, n, share, *strides(k, v, dk, dv)
    options = {**constants, "MASKED": mask is not None, **tile}
    launch(_key_gradients, (parts, heads, batch), *tensors, *numbers, **options)
