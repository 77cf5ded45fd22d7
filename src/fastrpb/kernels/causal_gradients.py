"""Gradients of causal linear attention, by the parts and the scan of `causal`.

With w normalised to Σ_m w_nm = 1, g the gradient of y and c_n = g_n·y_n,

    d log φ(q_n)_f = Σ_{m<=n} w_nmf (g_n·v_m - c_n),    dv_m = Σ_{n>=m} w_nm g_n,
    d log φ(k_m)_f = Σ_{n>=m} w_nmf (v_m·g_n - c_n),

the first of them as the output, the others with the time reversed (REVERSE): keys are rows, queries
columns, x = g and e = c. O(N) operations; each pass reads its columns twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.causal import (
    PROGRAMS,
    chunk_options,
    column_features,
    is_large,
    is_real,
    row_features,
    sums_before,
)
from fastrpb.kernels.launch import launch
from fastrpb.kernels.tiles import (
    HIDDEN,
    divisor,
    dot,
    kept,
    load,
    load_state,
    log_slope,
    parts_of,
    sizes,
    store,
    strides,
)

CHUNK = 32


@triton.jit
def _gradients_by_columns(
    rows,
    mine,
    total,
    norm,
    shift,
    b,
    bn,
    x,
    xn,
    mask,
    tops,
    wholes,
    weights,
    start,
    columns,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VDIM: tl.constexpr,
    VWIDTH: tl.constexpr,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    REVERSE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """d log φ·Σ w, w·x, Σ w and c of a chunk, φ = exp, one column after the other."""
    far = tl.exp(rows + shift[None, :])
    across = dot(mine, tl.trans(total), tl.zeros((CHUNK, WIDTH), tl.float32), FULL)
    if REVERSE:
        across -= norm[None, :]
    change, mean = far * across, far * norm[None, :]
    out = dot(far, total, tl.zeros((CHUNK, VWIDTH), tl.float32), FULL)
    i = tl.arange(0, CHUNK)
    for m in tl.range(0, CHUNK):
        n = start + m + tl.arange(0, 1)
        keep = kept(mask, n, columns, MASKED and not REVERSE)
        right = load(b, bn, n, keep, DIM, WIDTH).to(tl.float32)
        theirs = load(x, xn, n, keep, VDIM, VWIDTH).to(tl.float32)
        product = tl.sum(mine.to(tl.float32) * theirs, 1)[:, None]
        if REVERSE:
            right -= tl.load(tops + n, mask=keep, other=0.0)[:, None]
            product -= tl.load(weights + n, mask=keep, other=0.0)[:, None]
        sees = (i <= m if REVERSE else i >= m)[:, None] & keep[:, None]
        weight = tl.exp(tl.where(sees, rows + right, HIDDEN))
        if REVERSE:
            weight *= 1 / tl.load(wholes + n, mask=keep, other=1.0)[:, None]
        change += weight * product
        mean += weight
        out += tl.sum(weight, 1)[:, None] * theirs
    whole = divisor(tl.sum(mean, 1))
    c = tl.sum(change, 1) / whole
    if not REVERSE:
        change -= mean * c[:, None]
    return change, out, whole, c


@triton.jit
def _gradients_at_once(
    near,
    mine,
    phi,
    theirs,
    c,
    total,
    norm,
    visible,
    FULL: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The same by products of matrices."""
    weight = tl.where(
        visible, dot(near, tl.trans(phi), tl.zeros(visible.shape, tl.float32), FULL), 0.0
    )
    products = dot(mine, tl.trans(theirs), tl.zeros(visible.shape, tl.float32), FULL)
    across = dot(mine, tl.trans(total), tl.zeros(near.shape, tl.float32), FULL)
    out = tl.zeros(mine.shape, tl.float32)
    whole = tl.sum(weight, 1) + tl.sum(near * norm[None, :], 1)
    if REVERSE:
        products -= c[None, :]
        across -= norm[None, :]
        out = dot(weight, theirs, dot(near, total, out, FULL), FULL)
    else:
        whole = divisor(whole)
        c = (tl.sum(weight * products, 1) + tl.sum(near * across, 1)) / whole
        products -= c[:, None]
        across -= c[:, None] * norm[None, :]
    change = near * dot(tl.where(visible, products, 0.0), phi, across, FULL)
    return change, out, whole, c


@triton.jit
def _gradients(  # noqa: PLR0915  (a kernel is one function)
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
    """Of one part dq, Σ w and c, or, REVERSE, dk and dv."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    line = batch * heads + head
    a, u = a + batch * ab + head * ah, u + batch * ub + head * uh
    b, x = b + batch * bb + head * bh, x + batch * xb + head * xh
    da, dx = da + batch * dab + head * dah, dx + batch * dxb + head * dxh
    keys, queries = (rows, columns) if REVERSE else (columns, rows)
    mask += batch * keys
    tops, wholes, weights = tops + line * queries, wholes + line * queries, weights + line * queries
    at = line * tl.num_programs(0) + part
    total, norm = load_state(sums, norms, at, WIDTH, VWIDTH)
    shift = tl.load(shifts + at * WIDTH + tl.arange(0, WIDTH))
    i = tl.arange(0, CHUNK)
    visible = i[:, None] <= i[None, :] if REVERSE else i[:, None] >= i[None, :]
    begin = part * share
    chunks = tl.cdiv(tl.minimum(share, length - begin), CHUNK)
    for step in tl.range(0, chunks):
        start = begin + (chunks - 1 - step if REVERSE else step) * CHUNK
        n = start + i
        keep = kept(mask, n, rows, MASKED and REVERSE)
        there = kept(mask, n, columns, MASKED and not REVERSE)
        raw = load(a, an, n, keep, DIM, WIDTH).to(tl.float32)
        right = load(b, bn, n, there, DIM, WIDTH).to(tl.float32)
        mine = load(u, un, n, keep, VDIM, VWIDTH)
        theirs = load(x, xn, n, there, VDIM, VWIDTH)
        top = tl.load(tops + n, mask=n < queries, other=0.0)[:, None]
        left = raw
        if KIND == 0:
            if REVERSE:
                right -= top
            else:
                left -= top
        phi, largest, decay = column_features(right, is_real(there, DIM, WIDTH), shift, KIND)
        real = is_real(keep, DIM, WIDTH)
        lift = left
        if KIND == 0:
            left = tl.where(real, left, HIDDEN)
            lift = left + largest[None, :]
        c = tl.full((CHUNK,), 1.0, tl.float32)
        if REVERSE:
            phi *= 1 / tl.load(wholes + n, mask=there, other=1.0)[:, None]
            c = tl.load(weights + n, mask=there, other=0.0)
        weighted = phi * c[:, None]
        if is_large(lift, KIND):
            change, out, whole, c = _gradients_by_columns(
                left,
                mine,
                total,
                norm,
                shift,
                b,
                bn,
                x,
                xn,
                mask,
                tops,
                wholes,
                weights,
                start,
                columns,
                DIM,
                WIDTH,
                VDIM,
                VWIDTH,
                FULL,
                MASKED,
                REVERSE,
                CHUNK,
            )
        else:
            change, out, whole, c = _gradients_at_once(
                row_features(lift, real, KIND),
                mine,
                phi,
                theirs,
                c,
                total * decay[:, None],
                norm * decay,
                visible,
                FULL,
                REVERSE,
            )
        if REVERSE:
            store(dx, dxn, n, rows, out, VDIM, VWIDTH)
        else:
            change /= whole[:, None]
            tl.store(wholes + n, whole, mask=n < rows)
            tl.store(weights + n, c, mask=n < rows)
        store(da, dan, n, rows, change * log_slope(raw, KIND), DIM, WIDTH)
        norm = norm * decay + tl.sum(weighted, 0)
        total = dot(tl.trans(phi), theirs, total * decay[:, None], FULL)
        shift = largest


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
    options = sizes(q, v, kind) | {"MASKED": mask is not None, "CHUNK": CHUNK}
    queries = [*state, *(torch.empty_like(state[0]) for _ in range(2))]
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
    cut = parts_of(length, batch * heads, CHUNK, PROGRAMS)
    before = sums_before(b, x, mask, queries, cut, options)
    tensors = a, u, b, x, a if mask is None else mask, *queries, da, dx, *before
    numbers = heads, rows, columns, cut[1], length, *strides(a, u, b, x, da, dx)
    launch(_gradients, (cut[0], heads, batch), *tensors, *numbers, **options, **chunk_options(a, u))
