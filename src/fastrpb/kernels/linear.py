"""Bidirectional linear attention: sums over the keys, then the queries; no features are stored.

With the keys normalised, a_mf = φ(k_m)_f / z_f for z_f = Σ_m φ(k_m)_f, and the queries as well,
p_nf = φ(q_n)_f z_f / Σ_f φ(q_n)_f z_f, linear attention is

    u_f = Σ_m a_mf v_m,    y_n = Σ_f p_nf u_f,

two averages: every factor is at most 1, whatever the length. φ = exp takes off the largest key of
each feature, which the queries add, and their own largest after that: all exponents are at most 0.
In bfloat16 both weights are rounded before they are summed up: they are averages all the same.
Backward, with g the gradient of y: t = g·uᵀ, d log p = p(t - Σ_f p·t), du = pᵀ·g, and then
d log a_m = a(v_m·duᵀ + c) with c = Σ_n d log p_n - u·du, and dv = a·du. Each tensor is read or
written once, the keys twice where φ = exp.

KIND is the number of φ: 0 for exp, 1 for ELU + 1, 2 for ReLU, 3 where queries and keys are features
already. These may be zero and have no logarithm: their gradients are (t - Σ_f p·t)·p/φ(q), with
p/φ(q) = z_f / Σ_f φ(q_n)_f z_f, and (v_m·duᵀ + c)/z, or 0 for a feature that no key has.
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
STATE_PROGRAMS, OUTPUT_PROGRAMS, GRADIENT_PROGRAMS = 528, 2112, 1056  # fill a large GPU


@triton.jit
def _query_weights(q, z, shift, DIM: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """p: of each query over the features, up to a factor."""
    if KIND == 0:
        x = q + shift[None, :]
        if DIM != WIDTH:
            x = tl.where((tl.arange(0, WIDTH) < DIM)[None, :], x, HIDDEN)
        return tl.exp(x - tl.max(x, 1)[:, None]) * z[None, :]
    return features(q, KIND) * z[None, :]


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
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VDIM: tl.constexpr,
    VWIDTH: tl.constexpr,
    KIND: tl.constexpr,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Σ φ(k)vᵀ and Σ φ(k) over a share of the keys, φ = exp less its largest key."""
    part, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    k += b * kb + h * kh
    v += b * vb + h * vh
    mask += b * count
    f = tl.arange(0, WIDTH)
    end = tl.minimum(count, (part + 1) * share)
    shift = tl.zeros((WIDTH,), tl.float32)
    if KIND == 0:  # a second read is faster than to take the largest so far off, block by block
        highest = tl.full((BLOCK, WIDTH), HIDDEN, tl.float32)
        for start in tl.range(part * share, end, BLOCK):
            n = start + tl.arange(0, BLOCK)
            keep = kept(mask, n, end, MASKED)
            x = load(k, kn, n, keep, DIM, WIDTH).to(tl.float32)
            highest = tl.maximum(highest, tl.where(keep[:, None], x, HIDDEN))
        shift = tl.max(highest, 0)
    total = tl.zeros((WIDTH, VWIDTH), tl.float32)
    norm = tl.zeros((BLOCK, WIDTH), tl.float32)
    for start in tl.range(part * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        keep = kept(mask, n, end, MASKED)
        x = load(k, kn, n, keep, DIM, WIDTH).to(tl.float32)
        values = load(v, vn, n, keep, VDIM, VWIDTH)
        if KIND == 0:
            phi = tl.exp(tl.where(keep[:, None], x - shift[None, :], HIDDEN))
        else:
            phi = tl.where(keep[:, None], features(x, KIND), 0.0)
        phi = rounded(phi, values)
        norm += phi.to(tl.float32)
        total = dot(tl.trans(phi), values, total, FULL)
    at = (b * heads + h) * tl.num_programs(0) + part
    norm = tl.where(f < DIM, tl.sum(norm, 0), 0.0)  # padding has no weight
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
        total *= (1 / divisor(z))[:, None]
    row = bh * WIDTH + f
    tl.store(means_out + row[:, None] * VWIDTH + tl.arange(0, VWIDTH)[None, :], total)
    tl.store(norms_out + row, z)


@triton.jit
def _output(
    q,
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
    u_high = u.to(tl.bfloat16)
    u_low = rest(u, u_high)
    end = tl.minimum(count, (part + 1) * share)
    for start in tl.range(part * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = load(q, qn, n, n < end, DIM, WIDTH).to(tl.float32)
        weight = _query_weights(x, z, shift, DIM, WIDTH, KIND)
        out = tl.zeros((BLOCK, VWIDTH), tl.float32)
        if y.dtype.element_ty == tl.bfloat16:
            weight = weight.to(tl.bfloat16)
            out = tl.dot(weight, u_high, tl.dot(weight, u_low, out))
        else:
            out = dot(weight, u, out, FULL)
        out *= (1 / divisor(tl.sum(weight.to(tl.float32), 1)))[:, None]
        if PLUS:
            out += load(plus, pn, n, n < end, VDIM, VWIDTH).to(tl.float32)
        store(y, yn, n, end, out, VDIM, VWIDTH)


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
    u, z = load_state(means, norms, b * heads + h, WIDTH, VWIDTH)
    shift = tl.load(shifts + (b * heads + h) * WIDTH + tl.arange(0, WIDTH))
    du = tl.zeros((WIDTH, VWIDTH), tl.float32)
    d_log_z = tl.zeros((BLOCK, WIDTH), tl.float32)
    end = tl.minimum(count, (part + 1) * share)
    for start in tl.range(part * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = load(q, qn, n, n < end, DIM, WIDTH).to(tl.float32)
        p = _query_weights(x, z, shift, DIM, WIDTH, KIND)
        inverse = (1 / divisor(tl.sum(p, 1)))[:, None]
        p *= inverse
        upstream = load(g, gn, n, n < end, VDIM, VWIDTH)
        t = dot(upstream, tl.trans(u), tl.zeros((BLOCK, WIDTH), tl.float32), FULL)
        inner = t - tl.sum(p * t, 1)[:, None]
        change = p * inner
        d_x = inner * z[None, :] * inverse if KIND == 3 else change * log_slope(x, KIND)
        store(dq, dn, n, end, d_x, DIM, WIDTH)
        d_log_z += change
        du = dot(tl.trans(p), upstream, du, FULL)
    at = (b * heads + h) * tl.num_programs(0) + part
    store_state(d_means, d_norms, at, du, tl.sum(d_log_z, 0), WIDTH, VWIDTH)


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
    constant = d_log_z - tl.sum(u * du, 1)
    inverse = tl.where(z == 0, 0.0, 1 / divisor(z))
    end = tl.minimum(count, (part + 1) * share)
    for start in tl.range(part * share, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        keep = kept(mask, n, end, MASKED)
        x = load(k, kn, n, keep, DIM, WIDTH).to(tl.float32)
        if KIND == 0:
            a = tl.exp(tl.where(keep[:, None], x - shift[None, :], HIDDEN)) * inverse[None, :]
        else:
            a = tl.where(keep[:, None], features(x, KIND), 0.0) * inverse[None, :]
        values = load(v, vn, n, keep, VDIM, VWIDTH)
        da = dot(values, tl.trans(du), tl.zeros((BLOCK, WIDTH), tl.float32), FULL)
        inner = da + constant[None, :]
        if KIND == 3:
            d_x = tl.where(keep[:, None], inner * inverse[None, :], 0.0)
        else:
            d_x = a * inner * log_slope(x, KIND)
        store(dk, dkn, n, end, d_x, DIM, WIDTH)
        d_values = dot(a, du, tl.zeros((BLOCK, VWIDTH), tl.float32), FULL)
        store(dv, dvn, n, end, d_values, VDIM, VWIDTH)


def merged(sums: Tensor, norms: Tensor, shifts: Tensor | None, constants: dict) -> list[Tensor]:
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


def summed(k: Tensor, v: Tensor, mask: Tensor | None, constants: dict) -> list[Tensor]:
    """(u, z, shift) of the keys."""
    batch, heads, n, _ = k.shape
    parts, share = parts_of(n, batch * heads, STATE["BLOCK"], STATE_PROGRAMS)
    sums, norms = buffers(k, parts, constants)
    shifts = torch.empty_like(norms)
    tensors = k, v, k if mask is None else mask, sums, norms, shifts
    numbers = heads, n, share, *strides(k, v)
    options = {**constants, "MASKED": mask is not None, **STATE}
    launch(_state, (parts, heads, batch), *tensors, *numbers, **options)
    return merged(sums, norms, shifts, constants)


def spread(q: Tensor, plus: Tensor | None, y: Tensor, state: list[Tensor], constants: dict) -> None:
    batch, heads, m, _ = q.shape
    parts, share = parts_of(m, batch * heads, OUTPUT["BLOCK"], OUTPUT_PROGRAMS)
    added = y if plus is None else plus
    numbers = heads, m, share, *strides(q, added, y)
    options = {**constants, "PLUS": plus is not None, **OUTPUT}
    launch(_output, (parts, heads, batch), q, added, y, *state, *numbers, **options)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    plus: Tensor | None,
    y: Tensor,
    kind: int,
) -> list[Tensor]:
    """Fill y; returns (u, z, shift) of the keys, which the gradients need."""
    constants = sizes(q, v, kind)
    state = summed(k, v, mask, constants)
    spread(q, plus, y, state, constants)
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
    constants = sizes(q, v, kind)
    parts, share = parts_of(m, batch * heads, GRADIENTS["BLOCK"], GRADIENT_PROGRAMS)
    d_sums, d_norms = buffers(q, parts, constants)
    tensors = q, g, dq, *state, d_sums, d_norms
    numbers = heads, m, share, *strides(q, g, dq)
    options = {**constants, **GRADIENTS}
    launch(_query_gradients, (parts, heads, batch), *tensors, *numbers, **options)
    d_state = merged(d_sums, d_norms, None, constants)
    parts, share = parts_of(n, batch * heads, GRADIENTS["BLOCK"], GRADIENT_PROGRAMS)
    tensors = k, v, k if mask is None else mask, dk, dv, *state, *d_state
    numbers = heads, n, share, *strides(k, v, dk, dv)
    options = {**constants, "MASKED": mask is not None, **GRADIENTS}
    launch(_key_gradients, (parts, heads, batch), *tensors, *numbers, **options)
