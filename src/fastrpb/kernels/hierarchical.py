"""Y = W·V on tensor cores for long sequences: a DFT over blocks, all of it products of matrices.

Cut N = P·L positions into P blocks of L. Over the blocks W is block-Toeplitz, so that a DFT over
the block index makes it P independent complex L×L Toeplitz matrices A_f:

    X = F·V        (2P × P: real and imaginary parts are rows)
    Z_f = A_f·X_f  (tiles made from the 2L-1 numbers of A_f, as in `direct`)
    Y = Fᵀ·Z

The DFT is that of length 2P at the frequencies ω_f = 2π(2f+1)/4P. It serves as well as the usual
one, since nothing wraps, and none of the frequencies is real: one of each conjugate pair makes P
complex numbers. For long sequences it takes two steps, P = P1·P2: see `Cut`. O(N√N) or O(N∛N)
operations.

X and Z are float16, which is finer than bfloat16: V is scaled by a power of two for each batch
element and head, w for each head, such that no input overflows. Sums are float32. Batch and heads
are cut into chunks that bound the scratch memory.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.direct import COPIES, diagonals
from fastrpb.kernels.launch import ceil_div, launch, tile_width
from fastrpb.kernels.layout import largest, unit
from fastrpb.kernels.spectra import Cut, tabulate, untabulate

MIX_IN = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}
MIX = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}
MIX_FEW = {"BM": 64, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 3}
BLOCKS = {"BM": 128, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3}
BLOCKS_64 = {"BM": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 2}
LAGS = {"BT": 64, "BK": 64, "num_warps": 4, "num_stages": 3}
FEW_LAGS = {"BT": 64, "BK": 64, "num_warps": 2, "num_stages": 1}  # where one step takes all columns
LEAST = 1 << 24  # bytes of scratch memory that are never worth saving


def cut(length: int, dtype: torch.dtype, *, gradients: bool = False) -> Cut:
    """Measured on an NVIDIA H200: the DFT and the blocks should cost about the same.

    The sums over diagonals that dw takes grow with L, so that gradients want shorter blocks.
    float16 takes one step at any length: two would double the error of a dense product.
    """
    one_step = dtype == torch.float16 or length <= (16384 if gradients else 131072)
    if one_step:
        limits = (16384, 65536, 131072) if gradients else (8192, 32768, 131072)
        inner, size = 1, next((64 << i for i, n in enumerate(limits) if length <= n), 1024)
    elif gradients:
        inner, size = 32 if length <= 131072 else 128, 64
    else:
        inner, size = 64, 128
    return Cut(ceil_div(length, inner * size), inner, size)


@triton.jit
def _waves(out, depth, columns, step, offset, period, scale, BLOCK: tl.constexpr):
    """out[e, (f, part), k]: cos θ and -sin θ, or, for complex input, [cos, sin] and [-sin, cos].

    θ = 2π·p·(offset·e + step·f + 1)/period; k is p, or (part of the input, p).
    """
    e, row = tl.program_id(2), tl.program_id(1)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Exact modulo the period, so that the angle is small whatever the length.
    turns = (k % depth) * ((offset * e + step * (row // 2) + 1) % period) % period
    angle = turns.to(tl.float32) * (6.283185307179586 / period)
    second = k // depth  # 1 for the imaginary part of a complex input
    sign = tl.where(row % 2 == 1, tl.where(second == 1, 1.0, -1.0), 1.0)
    wave = scale * sign * tl.where(row % 2 == second, tl.cos(angle), tl.sin(angle))
    at = (e * tl.num_programs(1) + row) * columns + k
    tl.store(out + at, wave.to(out.dtype.element_ty), mask=k < columns)


@triton.jit
def _mix(
    matrix,
    x,
    y,
    top,
    w_top,
    factor,
    groups,
    rows,
    depth,
    L,
    n_in,
    n_out,
    heads,
    mg,
    mr,
    mk,
    xb,
    xh,
    xn,
    xg,
    yb,
    yh,
    yn,
    yg,
    DIM: tl.constexpr,
    STEP: tl.constexpr,
    CAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y[g, r·L+l] = Σ_k matrix[g, r, k]·x[g, k·L+l]: a step of the DFT over blocks.

    STEP 0 scales V into float16, 2 undoes it for Y; 1 is in between.
    """
    tiles = tl.cdiv(rows, BM)
    row = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    c = tl.program_id(0) // tiles * BN + tl.arange(0, BN)
    i, d = c // DIM, c % DIM
    g, b = tl.program_id(1) % groups, (tl.program_id(1) // groups).to(tl.int64)
    h = tl.program_id(2).to(tl.int64)
    matrix += g * mg
    x += b * xb + h * xh + g.to(tl.int64) * xg
    y += b * yb + h * yh + g.to(tl.int64) * yg
    scale = unit(tl.load(top + b * heads + h))
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    inside = (i < L)[None, :]
    for start in tl.range(0, depth, BK):
        at = start + k
        m_tile = tl.load(
            matrix + row[:, None] * mr + at[None, :] * mk,
            mask=(row < rows)[:, None] & (at < depth)[None, :],
            other=0.0,
        )
        n = at[:, None] * L + i[None, :]
        there = inside & (at < depth)[:, None] & (n < n_in)
        x_tile = tl.load(x + n.to(tl.int64) * xn + d[None, :], mask=there, other=0.0)
        if CAST:
            x_tile = (x_tile.to(tl.float32) * scale).to(tl.float16)
        acc = tl.dot(m_tile, x_tile, acc)
    if STEP == 0 and not CAST:
        acc *= scale
    if STEP == 2:
        acc *= factor / scale / unit(tl.load(w_top + h))
    n = row[:, None] * L + i[None, :]
    y_at = y + n.to(tl.int64) * yn + d[None, :]
    there = inside & (row < rows)[:, None] & (n < n_out)
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=there)


@triton.jit
def _blocks(
    table,
    x,
    z,
    columns,
    P,
    xb,
    xh,
    L: tl.constexpr,
    DIM: tl.constexpr,
    COPIES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Z_f = A_f·X_f for BM rows of one frequency and BN columns, which run over (batch, dim)."""
    start = tl.program_id(0) % (L // BM) * BM
    c = tl.program_id(0) // (L // BM) * BN + tl.arange(0, BN)
    b, d = (c // DIM).to(tl.int64), c % DIM
    f, h = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, k = tl.arange(0, BM), tl.arange(0, BK)
    size: tl.constexpr = COPIES * 2 * L
    row_at = row % COPIES * (2 * L) - row // COPIES * COPIES
    a_at = table + (h * P + f) * (2 * size) + L - start + row_at[:, None] + k[None, :]
    inside = (c < columns)[None, :]
    offset = h * xh + f.to(tl.int64) * (2 * L * DIM) + (b * xb + d)[None, :]
    x_at = x + offset + k[:, None] * DIM
    real = tl.zeros((BM, BN), tl.float32)
    minus = tl.zeros((BM, BN), tl.float32)
    imaginary = tl.zeros((BM, BN), tl.float32)
    for j in tl.range(0, L, BK):
        a_real = tl.load(a_at + j)
        a_imaginary = tl.load(a_at + size + j)
        x_real = tl.load(x_at + j * DIM, mask=inside, other=0.0)
        x_imaginary = tl.load(x_at + (L + j) * DIM, mask=inside, other=0.0)
        real = tl.dot(a_real, x_real, real)
        minus = tl.dot(a_imaginary, x_imaginary, minus)
        imaginary = tl.dot(a_real, x_imaginary, imaginary)
        imaginary = tl.dot(a_imaginary, x_real, imaginary)
    z_at = z + offset + (start + row)[:, None] * DIM
    tl.store(z_at, (real - minus).to(tl.float16), mask=inside)
    tl.store(z_at + L * DIM, imaginary.to(tl.float16), mask=inside)


@triton.jit
def _block_lags(
    g,
    x,
    g_top,
    x_top,
    norm,
    sums,
    columns,
    heads,
    P,
    gb,
    gh,
    xb,
    xh,
    L: tl.constexpr,
    DIM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """Diagonals of G_f·X_fᴴ summed over batch and dim, of its real and its imaginary part."""
    delta = tl.program_id(0) - (L // BT - 1)
    f, h = tl.program_id(1), tl.program_id(2).to(tl.int64)
    r, k = tl.arange(0, BT), tl.arange(0, BK)
    low = tl.maximum(0, -delta)
    blocks = L // BT - tl.abs(delta)
    largest = tl.load(norm + h)
    g += h * gh + f.to(tl.int64) * (2 * L * DIM)
    x += h * xh + f.to(tl.int64) * (2 * L * DIM)
    real = tl.zeros((BT, BT), tl.float32)
    plus = tl.zeros((BT, BT), tl.float32)
    minus = tl.zeros((BT, BT), tl.float32)
    for step in tl.range(0, tl.cdiv(columns, BK) * blocks):
        i = ((low + step % blocks) * BT + r)[:, None] * DIM
        c = step // blocks * BK + k
        b, d = (c // DIM).to(tl.int64), c % DIM
        inside = (c < columns)[None, :]
        g_at = g + i + (b * gb + d)[None, :]
        x_at = x + i + delta * BT * DIM + (b * xb + d)[None, :]
        tops = b * heads + h
        g_most = tl.load(g_top + tops, mask=c < columns, other=0.0)
        x_most = tl.load(x_top + tops, mask=c < columns, other=0.0)
        # What is zero has no scale: its share must be 0, and 0·∞ would be NaN.
        empty = g_most * x_most == 0
        factor = 1 / tl.where(empty, 1.0, unit(g_most) * unit(x_most) * largest)
        factor = tl.where(empty, 0.0, factor)[None, :]
        g_real = tl.load(g_at, mask=inside, other=0.0).to(tl.float32) * factor
        g_imaginary = tl.load(g_at + L * DIM, mask=inside, other=0.0).to(tl.float32) * factor
        g_real, g_imaginary = g_real.to(tl.float16), g_imaginary.to(tl.float16)
        x_real = tl.trans(tl.load(x_at, mask=inside, other=0.0))
        x_imaginary = tl.trans(tl.load(x_at + L * DIM, mask=inside, other=0.0))
        real = tl.dot(g_real, x_real, real)
        real = tl.dot(g_imaginary, x_imaginary, real)
        plus = tl.dot(g_imaginary, x_real, plus)
        minus = tl.dot(g_real, x_imaginary, minus)
    ways = tl.num_programs(0)
    out = sums + ((h * P + f) * 2 * ways + tl.program_id(0)) * (2 * BT) + r
    upper, lower = diagonals(real, BT, 1)
    tl.store(out, tl.load(out) + upper)
    tl.store(out + BT, tl.load(out + BT) + lower)
    out += ways * 2 * BT
    upper, lower = diagonals(plus - minus, BT, 1)
    tl.store(out, tl.load(out) + upper)
    tl.store(out + BT, tl.load(out + BT) + lower)


class _Blocked:
    """The launches for sequences of up to P = outer·inner blocks of L positions."""

    def __init__(self, where: Cut, v: Tensor):
        self.inner, self.size, self.blocks = where.inner, where.size, where.blocks
        self.cast = v.dtype == torch.bfloat16
        new = lambda *shape: torch.empty(shape, dtype=torch.float16, device=v.device)  # noqa: E731
        outer, inner = where.outer, where.inner
        self.first = new(1, 2 * outer, outer)
        grid = ceil_div(outer, 256), 2 * outer, 1
        launch(_waves, grid, self.first, outer, outer, 2, 0, 4 * outer, outer**-0.5, BLOCK=256)
        if inner > 1:
            self.second = new(outer, 2 * inner, 2 * inner)
            grid = ceil_div(2 * inner, 256), 2 * inner, outer
            numbers = inner, 2 * inner, 4 * outer, 2, 4 * self.blocks, inner**-0.5
            launch(_waves, grid, self.second, *numbers, BLOCK=256)

    def analyse(self, v: Tensor, top: Tensor) -> Tensor:
        """X = F·V in float16: (batch, heads, 2P·L, dim)."""
        x = self._mix(self.first, v, self._scratch(v), top, step=0)
        return x if self.inner == 1 else self._mix(self.second, x, self._scratch(v), top, step=1)

    def synthesise(self, z: Tensor, y: Tensor, top: Tensor, w_top: Tensor, factor: float) -> None:
        """Y = Fᵀ·Z with the scales undone."""
        if self.inner > 1:
            z = self._mix(self.second.mT, z, torch.empty_like(z), top, step=1)
        self._mix(self.first.mT, z, y, top, w_top, factor, step=2)

    def _scratch(self, v: Tensor) -> Tensor:
        shape = *v.shape[:2], 2 * self.blocks * self.size, v.shape[3]
        return v.new_empty(shape, dtype=torch.float16)

    def _mix(
        self,
        matrix: Tensor,
        x: Tensor,
        y: Tensor,
        top: Tensor,
        w_top: Tensor | None = None,
        factor: float = 1.0,
        *,
        step: int,
    ) -> Tensor:
        (batch, heads, n_in, dim), (groups, rows, depth) = x.shape, matrix.shape
        length = self.size if step == 1 else self.inner * self.size
        tile = MIX_IN if step == 0 else MIX_FEW if rows <= 64 else MIX
        tiles = ceil_div(rows, tile["BM"]) * ceil_div(length * dim, tile["BN"])
        x_strides = *x.stride()[:3], depth * length * x.stride(2)
        y_strides = *y.stride()[:3], rows * length * y.stride(2)
        tensors = matrix, x, y, top, top if w_top is None else w_top
        numbers = factor, groups, rows, depth, length, n_in, y.shape[2], top.stride(0)
        strides = *matrix.stride(), *x_strides, *y_strides
        options = {"DIM": dim, "STEP": step, "CAST": step == 0 and self.cast, **tile}
        launch(_mix, (tiles, groups * batch, heads), *tensors, *numbers, *strides, **options)
        return y

    def multiply(self, table: Tensor, x: Tensor) -> Tensor:
        """Z_f = A_f·X_f, in the place of X where a program reads all that it overwrites."""
        batch, heads, _, dim = x.shape
        tile = (BLOCKS_64 if self.size == 64 else BLOCKS) | {"BN": 64 if batch * dim > 32 else 32}
        z = x if tile["BM"] == self.size else torch.empty_like(x)
        grid = self.size // tile["BM"] * ceil_div(batch * dim, tile["BN"]), self.blocks, heads
        numbers = batch * dim, self.blocks, *x.stride()[:2]
        launch(_blocks, grid, table, x, z, *numbers, L=self.size, DIM=dim, COPIES=COPIES, **tile)
        return z

    def chunks(self, v: Tensor, scratch: float) -> Iterator[tuple[slice, slice]]:
        """Slices of the batch, or of the heads, whose X takes at most `scratch` sizes of v.

        Or LEAST bytes: of small tensors, the launches for each slice cost more than they save.
        """
        batch, heads, _, dim = v.shape
        allowed = max(LEAST, int(scratch * v.numel() * 2))
        room = max(1, allowed // (4 * self.blocks * self.size * dim))
        every = slice(None)
        for b in range(0, batch, max(1, room // heads)):
            if room >= heads:
                yield slice(b, b + room // heads), every
            else:
                for h in range(0, heads, room):
                    yield slice(b, b + 1), slice(h, h + room)


def product(w: Tensor, v: Tensor, y: Tensor, first: int) -> None:
    """y[n] = Σ_d w_d · v[n+d]; v and y (batch, heads, ., dim) with contiguous dim.

    w (heads, K) holds the distances first..first+K-1. Beyond y this takes about half the memory of
    v up to 4096 positions, where speed allows it, and two to four times that of v beyond.
    """
    where = cut(max(v.shape[2], y.shape[2]), v.dtype)
    blocked = _Blocked(where, v)
    table, w_top, factor = tabulate(w, where, first, 1)
    scratch = 0.4 if where.blocks * where.size <= 4096 else 2.1
    top = largest(v)
    for bs, hs in blocked.chunks(v, scratch):
        z = blocked.multiply(table[hs], blocked.analyse(v[bs, hs], top[bs, hs]))
        blocked.synthesise(z, y[bs, hs], top[bs, hs], w_top[hs], factor)
        del z  # before the next one is there


def gradients(w: Tensor, v: Tensor, g: Tensor, dv: Tensor, first: int) -> Tensor:
    """dv[m] = Σ_d w_d · g[m-d], and returned dw_d = Σ_n ⟨g[n], v[n+d]⟩ in float32."""
    heads, distances = w.shape
    where = cut(max(v.shape[2], g.shape[2]), v.dtype, gradients=True)
    blocked = _Blocked(where, v)
    table, w_top, factor = tabulate(w, where, first, -1)
    v_top, g_top = largest(v), largest(g)
    norm = (v_top * g_top).amax(0).clamp(min=torch.finfo(torch.float32).tiny)
    columns = v.shape[0] * v.shape[3]
    tile = LAGS if columns > LAGS["BK"] else FEW_LAGS | {"BK": tile_width(columns)}
    ways = 2 * (where.size // tile["BT"]) - 1
    sums = w.new_zeros(heads, where.blocks, 2, ways, 2, tile["BT"])
    for bs, hs in blocked.chunks(v, 2.1):
        gs = blocked.analyse(g[bs, hs], g_top[bs, hs])
        xs = blocked.analyse(v[bs, hs], v_top[bs, hs])
        batch, some, _, dim = xs.shape
        grid = ways, where.blocks, some
        numbers = batch * dim, heads, where.blocks, *gs.stride()[:2], *xs.stride()[:2]
        tensors = gs, xs, g_top[bs, hs], v_top[bs, hs], norm[hs], sums[hs]
        launch(_block_lags, grid, *tensors, *numbers, L=where.size, DIM=dim, **tile)
        del xs
        z = blocked.multiply(table[hs], gs)
        blocked.synthesise(z, dv[bs, hs], g_top[bs, hs], w_top[hs], factor)
        del gs, z
    return untabulate(sums, norm, where, first, distances)
