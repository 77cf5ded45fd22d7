"""Y = W·V on tensor cores in O(N√N): a block DFT by products of matrices, for long sequences.

Cut N = P·L positions into P blocks of L. Over the blocks W is block-Toeplitz, so that a DFT over
the block index (of length 2P; here the skew one at the P frequencies π(2f+1)/2P, all complex, which
serves as well where nothing wraps) makes it P independent complex L×L Toeplitz matrices A_f:

    X = F·V        (2P × P, real and imaginary parts as rows)
    Z_f = A_f·X_f  (tiles made from the 2L-1 numbers of A_f, as in `direct`)
    Y = Fᵀ·Z

X and Z are float16, which is finer than bfloat16: V is scaled by a power of two for each batch
element and head, w for each head, such that no input can overflow. Sums are float32. The scratch
memory is bounded by cutting batch and heads into chunks.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.direct import COPIES, diagonals
from fastrpb.kernels.layout import largest, unit

MIX = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}
BLOCKS = {"BM": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3}
LAGS = {"BT": 64, "BK": 64, "num_warps": 8, "num_stages": 2}
SPECTRUM = {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2}
CHUNK_BYTES = 32 << 20  # of X: what stays in the cache of a large GPU


def block_length(length: int) -> int:
    """L for a sequence: DFT and blocks cost about the same at L = √N, and tiles want 64 or more."""
    return 64 if length <= 8192 else 128 if length <= 65536 else 256 if length <= 262144 else 1024


@triton.jit
def _waves(out, rows, columns, start, period, scale, sign, BLOCK: tl.constexpr):
    """out[2f] = scale·cos(ω_f·p), out[2f+1] = sign·scale·sin(ω_f·p) for p = start..; ω_f = 2π(2f+1)/period."""
    r = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Exact modulo the period, so that the angle is small whatever the length.
    turns = ((r // 2 * 2 + 1) * (c + start + period)) % period
    angle = turns.to(tl.float32) * (6.283185307179586 / period)
    wave = scale * tl.where(r % 2 == 0, tl.cos(angle), sign * tl.sin(angle))
    tl.store(out + r * columns + c, wave.to(out.dtype.element_ty), mask=c < columns)


def _transform(blocks: int, dtype: torch.dtype, device: torch.device, *, both: bool = False) -> Tensor:
    """F (2P, P): cos and -sin, over √P; or, unscaled, cos and sin over the distances -P..P-1 of blocks."""
    columns = 2 * blocks if both else blocks
    out = torch.empty(2 * blocks, columns, dtype=dtype, device=device)
    start, scale, sign = (-blocks, 1.0, 1.0) if both else (0, blocks**-0.5, -1.0)
    _waves[2 * blocks, triton.cdiv(columns, 256)](
        out, 2 * blocks, columns, start, 4 * blocks, scale, sign, BLOCK=256
    )
    return out


@triton.jit
def _spectrum(
    waves, w, top, table, distances, first, P, extra, L: tl.constexpr, COPIES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    """a_f[δ] = Σ_q w_{qL+δ}·exp(iω_f·q), scaled, as 8 shifted copies: table[h, f, part, r, δ+L+r]."""
    h = tl.program_id(2)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    delta = tl.program_id(1) * BN + tl.arange(0, BN) - L
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for q in tl.range(0, 2 * P, BK):
        wave = tl.load(
            waves + row[:, None] * 2 * P + (q + k)[None, :],
            mask=(row[:, None] < 2 * P) & (q + k < 2 * P)[None, :], other=0.0,
        )
        j = (q + k - P)[:, None] * L + delta[None, :] - first
        block = tl.load(w + h * distances + j, mask=(j >= 0) & (j < distances) & (delta > -L)[None, :], other=0.0)
        acc = tl.dot(wave, block, acc, input_precision="tf32x3")
    acc *= unit(tl.load(top + h)) * extra
    out = table + (h * 2 * P + row).to(tl.int64)[:, None] * (COPIES * 2 * L)
    for r in tl.static_range(COPIES):
        x = (delta + L + r)[None, :]
        tl.store(out + r * 2 * L + x, acc.to(table.dtype.element_ty), mask=(row[:, None] < 2 * P) & (x < 2 * L))


@triton.jit
def _mix(
    matrix, x, y, x_top, y_top, w_top, factor, rows, depth, n_in, n_out, heads,
    xb, xh, xn, yb, yh, yn,
    L: tl.constexpr, DIM: tl.constexpr, SCALE_IN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    """y[r·L+l] = Σ_k matrix[r, k]·x[k·L+l]: the transform over blocks, into and out of float16."""
    tiles = tl.cdiv(rows, BM)
    row = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    c = tl.program_id(0) // tiles * BN + tl.arange(0, BN)
    l, d = c // DIM, c % DIM
    b, h = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    scale = unit(tl.load(x_top + b * heads + h)) if SCALE_IN else 1.0
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    inside = (l < L)[None, :]
    for start in tl.range(0, depth, BK):
        at = start + k
        m_tile = tl.load(
            matrix + row[:, None] * depth + at[None, :],
            mask=(row < rows)[:, None] & (at < depth)[None, :], other=0.0,
        )
        n = at[:, None] * L + l[None, :]
        x_tile = tl.load(x + b * xb + h * xh + n.to(tl.int64) * xn + d[None, :], mask=inside & (n < n_in), other=0.0)
        if SCALE_IN:
            x_tile = (x_tile.to(tl.float32) * scale).to(tl.float16)
        acc = tl.dot(m_tile, x_tile, acc)
    if not SCALE_IN:
        acc *= factor / unit(tl.load(y_top + b * heads + h)) / unit(tl.load(w_top + h))
    n = row[:, None] * L + l[None, :]
    tl.store(y + b * yb + h * yh + n.to(tl.int64) * yn + d[None, :], acc.to(y.dtype.element_ty), mask=inside & (n < n_out))


@triton.jit
def _blocks(
    table, x, z, columns, xb, xh, zb, zh,
    P, L: tl.constexpr, DIM: tl.constexpr, COPIES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
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
    x_at = x + h * xh + f.to(tl.int64) * (2 * L * DIM) + k[:, None] * DIM + (b * xb + d)[None, :]
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
    z_at = z + h * zh + f.to(tl.int64) * (2 * L * DIM) + (start + row)[:, None] * DIM + (b * zb + d)[None, :]
    tl.store(z_at, (real - minus).to(tl.float16), mask=inside)
    tl.store(z_at + L * DIM, imaginary.to(tl.float16), mask=inside)


@triton.jit
def _block_lags(
    g, x, g_top, x_top, norm, sums, columns, heads, gb, gh, xb, xh,
    P, L: tl.constexpr, DIM: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):
    """Diagonals of G_f·X_fᴴ, summed over batch and dim: of its real and of its imaginary part."""
    delta = tl.program_id(0) - (L // BT - 1)
    f, h = tl.program_id(1), tl.program_id(2).to(tl.int64)
    r, k = tl.arange(0, BT), tl.arange(0, BK)
    low = tl.maximum(0, -delta)
    blocks = L // BT - tl.abs(delta)
    largest = tl.load(norm + h)
    at = h * gh + f.to(tl.int64) * (2 * L * DIM)
    x_at = h * xh + f.to(tl.int64) * (2 * L * DIM)
    real = tl.zeros((BT, BT), tl.float32)
    imaginary = tl.zeros((BT, BT), tl.float32)
    for step in tl.range(0, tl.cdiv(columns, BK) * blocks):
        i = ((low + step % blocks) * BT + r)[:, None] * DIM
        c = step // blocks * BK + k
        b, d = (c // DIM).to(tl.int64), c % DIM
        inside = (c < columns)[None, :]
        g_at = g + at + i + (b * gb + d)[None, :]
        x_now = x + x_at + i + delta * BT * DIM + (b * xb + d)[None, :]
        tops = b * heads + h
        scale = unit(tl.load(g_top + tops, mask=c < columns, other=1.0)) * unit(
            tl.load(x_top + tops, mask=c < columns, other=1.0)
        )
        factor = (1 / (scale * largest))[None, :]
        g_real = (tl.load(g_at, mask=inside, other=0.0).to(tl.float32) * factor).to(tl.float16)
        g_imaginary = (tl.load(g_at + L * DIM, mask=inside, other=0.0).to(tl.float32) * factor).to(tl.float16)
        x_real = tl.trans(tl.load(x_now, mask=inside, other=0.0))
        x_imaginary = tl.trans(tl.load(x_now + L * DIM, mask=inside, other=0.0))
        real = tl.dot(g_real, x_real, real)
        real = tl.dot(g_imaginary, x_imaginary, real)
        imaginary = tl.dot(g_imaginary, x_real, imaginary)
        imaginary = tl.dot(-g_real, x_imaginary, imaginary)
    out = sums + (((h * P + f) * 2) * tl.num_programs(0) + tl.program_id(0)) * (2 * BT) + r
    upper, lower = diagonals(real, BT)
    tl.store(out, tl.load(out) + upper)
    tl.store(out + BT, tl.load(out + BT) + lower)
    out += tl.num_programs(0) * (2 * BT)
    upper, lower = diagonals(imaginary, BT)
    tl.store(out, tl.load(out) + upper)
    tl.store(out + BT, tl.load(out + BT) + lower)


class _Blocked:
    """The transforms for sequences of up to P blocks of L positions, and a chunk's launches."""

    def __init__(self, length: int, device: torch.device):
        self.size = block_length(length)
        self.blocks = triton.cdiv(length, self.size)
        self.waves = _transform(self.blocks, torch.float16, device)

    def spectrum(self, w: Tensor, first: int) -> tuple[Tensor, Tensor, float]:
        """The table of all A_f, the largest of w for each head, and the factor to undo."""
        size, blocks = self.size, self.blocks
        heads, distances = w.shape
        # |Z| <= L·|A|·|X| with |A| <= 2P and |X| <= √P must fit float16, whose largest is 65504.
        extra = 2.0 ** min(0, 15 - math.ceil(math.log2(2 * size * blocks**1.5)))
        top = largest(w[None, :, :, None])[0]
        waves = _transform(blocks, torch.float32, w.device, both=True)
        table = torch.empty(heads, blocks, 2, COPIES, 2 * size, dtype=torch.float16, device=w.device)
        grid = triton.cdiv(2 * blocks, SPECTRUM["BM"]), triton.cdiv(2 * size, SPECTRUM["BN"]), heads
        _spectrum[grid](
            waves, w, top, table, distances, first, blocks, extra, L=size, COPIES=COPIES, **SPECTRUM
        )
        return table, top, 1 / extra

    def analyse(self, v: Tensor, top: Tensor) -> Tensor:
        """X = F·V in float16: (batch, heads, 2P·L, dim)."""
        batch, heads, n, dim = v.shape
        x = v.new_empty(batch, heads, 2 * self.blocks * self.size, dim, dtype=torch.float16)
        self._mix(self.waves, v, x, top, top, top, 1.0, 2 * self.blocks, self.blocks, True)
        return x

    def synthesise(self, z: Tensor, y: Tensor, top: Tensor, w_top: Tensor, factor: float) -> None:
        """Y = Fᵀ·Z with the scales undone."""
        waves = self.waves.T.contiguous()
        self._mix(waves, z, y, top, top, w_top, factor, self.blocks, 2 * self.blocks, False)

    def _mix(self, matrix, x, y, x_top, y_top, w_top, factor, rows, depth, scale_in) -> None:
        batch, heads, n_in, dim = x.shape
        tiles = triton.cdiv(rows, MIX["BM"]) * triton.cdiv(self.size * dim, MIX["BN"])
        _mix[tiles, batch, heads](
            matrix, x, y, x_top, y_top, w_top, factor, rows, depth, n_in, y.shape[2], x_top.stride(0),
            *x.stride()[:3], *y.stride()[:3],
            L=self.size, DIM=dim, SCALE_IN=scale_in, **MIX,
        )

    def multiply(self, table: Tensor, x: Tensor) -> Tensor:
        """Z_f = A_f·X_f, in the place of X where a program reads all that it overwrites."""
        batch, heads, _, dim = x.shape
        tile = BLOCKS | {"BM": min(self.size, 128)}
        z = x if tile["BM"] == self.size else torch.empty_like(x)
        grid = self.size // tile["BM"] * triton.cdiv(batch * dim, tile["BN"]), self.blocks, heads
        _blocks[grid](
            table, x, z, batch * dim, *x.stride()[:2], *z.stride()[:2],
            self.blocks, L=self.size, DIM=dim, COPIES=COPIES, **tile,
        )
        return z

    def chunks(self, v: Tensor):
        """Slices of batch and heads whose X stays within CHUNK_BYTES."""
        batch, heads, _, dim = v.shape
        room = max(1, CHUNK_BYTES // (4 * self.blocks * self.size * dim))
        hs = min(heads, room)
        bs = min(batch, max(1, room // heads))
        for b in range(0, batch, bs):
            for h in range(0, heads, hs):
                yield slice(b, b + bs), slice(h, h + hs)


def product(w: Tensor, v: Tensor, y: Tensor, first: int) -> None:
    """y[n] = Σ_j w[j] · v[n+first+j]; v and y (batch, heads, ., dim) with contiguous dim."""
    blocked = _Blocked(max(v.shape[2], y.shape[2]), v.device)
    table, w_top, factor = blocked.spectrum(w, first)
    top = largest(v)
    for bs, hs in blocked.chunks(v):
        z = blocked.multiply(table[hs], blocked.analyse(v[bs, hs], top[bs, hs]))
        blocked.synthesise(z, y[bs, hs], top[bs, hs], w_top[hs], factor)


def gradients(w: Tensor, v: Tensor, g: Tensor, dv: Tensor, first: int) -> Tensor:
    """dv[m] = Σ_j w[j] · g[m-first-j], and returned dw[j] = Σ_n ⟨g[n], v[n+first+j]⟩ in float32."""
    heads, distances = w.shape
    blocked = _Blocked(max(v.shape[2], g.shape[2]), v.device)
    size, blocks = blocked.size, blocked.blocks
    table, w_top, factor = blocked.spectrum(w.flip(-1), 1 - first - distances)
    v_top, g_top = largest(v), largest(g)
    norm = (v_top * g_top).amax(0).clamp(min=torch.finfo(torch.float32).tiny)
    tile = min(size, LAGS["BT"])
    ways = 2 * (size // tile) - 1
    sums = w.new_zeros(heads, blocks, 2, ways, 2, tile, dtype=torch.float32)
    for bs, hs in blocked.chunks(v):
        gs = blocked.analyse(g[bs, hs], g_top[bs, hs])
        xs = blocked.analyse(v[bs, hs], v_top[bs, hs])
        _block_lags[ways, blocks, gs.shape[1]](
            gs, xs, g_top[bs, hs], v_top[bs, hs], norm[hs], sums[hs], gs.shape[0] * gs.shape[3], heads,
            *gs.stride()[:2], *xs.stride()[:2], blocks, L=size, DIM=gs.shape[3],
            **(LAGS | {"BT": tile}),
        )
        del xs
        blocked.synthesise(blocked.multiply(table[hs], gs), dv[bs, hs], g_top[bs, hs], w_top[hs], factor)
    upper, lower = sums.unbind(-2)
    pad = torch.nn.functional.pad
    lags = (pad(upper, (0, 0, 1, 0)) + pad(lower, (0, 0, 0, 1))).flatten(-2).flatten(1, 2)
    waves = _transform(blocks, torch.float32, w.device, both=True)
    by_block = waves.T @ lags  # (heads, 2P, 2L): distances -P..P-1 of blocks, -L..L-1 within
    before, after = by_block.unflatten(-1, (2, size)).unbind(-2)
    found = (after + pad(before[:, 1:], (0, 0, 0, 1))).flatten(1) * norm[:, None]
    return found.narrow(1, first + blocks * size, distances)
