"""Y = W·V on tensor cores, the tiles of W made from w: the fastest way for a few 1000 positions.

Each row of W is w shifted by one element. In a table of 8 copies of w, each shifted by one more,
every row of a tile is a contiguous piece that starts at 16 bytes: loads are wide, and the rest is
an ordinary product of matrices. O(MN) operations, one read and one write of V, a small table.

The weights w (heads, K) are those of the distances first..first+K-1; tiles without any are skipped.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.launch import ceil_div, launch, power_of_2, tile_width
from fastrpb.kernels.layout import largest_weight, unit

PRODUCT = {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 4}
NARROW = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 3}
LAGS = {"BT": 128, "BW": 128, "BK": 64, "num_warps": 4, "num_stages": 3}
FLOAT32 = {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3}
FEW = {"BM": 64, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 4}
NARROW_LAGS = {"BT": 64, "BW": 256, "BK": 32, "num_warps": 4, "num_stages": 3}
FLOAT32_LAGS = {"BT": 64, "BW": 64, "BK": 32, "num_warps": 4, "num_stages": 3}
COPIES = 8
ENOUGH, PROGRAMS = 132, 1024  # to occupy a large GPU, and to fill it several times


@triton.jit
def _shift(
    w,
    top,
    table,
    distances,
    first,
    sign,
    zero,
    width,
    COPIES: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """table[h, r, x] = w_d at the distance d = sign·(x - zero - r), scaled to fit float16."""
    h, r = tl.program_id(1), tl.program_id(2)
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = sign * (x - zero - r) - first
    row = tl.load(w + h * distances + j, mask=(j >= 0) & (j < distances), other=0.0)
    if SCALE:
        row *= unit(tl.load(top + h))
    at = table + (h * COPIES + r).to(tl.int64) * width + x
    tl.store(at, row.to(table.dtype.element_ty), mask=x < width)


@triton.jit
def split(c, DIM: tl.constexpr, WIDE: tl.constexpr):
    """The batch element and the channel of columns c, which run on WIDE at a time."""
    run: tl.constexpr = min(WIDE, DIM & -DIM)
    # Neighbours in memory, which Triton does not see; without, every number is loaded by itself.
    b = tl.max_constancy((c // DIM).to(tl.int64), run)
    return b, tl.max_contiguous(tl.multiple_of(c % DIM, run), run)


@triton.jit
def _product(
    table,
    top,
    v,
    y,
    width,
    zero,
    first,
    last,
    n_in,
    n_out,
    columns,
    vb,
    vh,
    vn,
    yb,
    yh,
    yn,
    DIM: tl.constexpr,
    COPIES: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """A tile of Y: BM positions by WIDE columns, which run over (batch, dim).

    Where those are few, BN/WIDE blocks of BM positions stand side by side: a tile of W is the same
    for all of them.
    """
    last_block: tl.constexpr = BN // WIDE - 1
    tiles = tl.cdiv(n_out, BM * (last_block + 1))
    start = (tl.program_id(0) % tiles * (last_block + 1) + last_block) * BM  # of the last block
    h = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BN)
    # How far a block is before the last one.
    before = (last_block - column // WIDE)[None, :] * BM if WIDE < BN else 0
    c = tl.program_id(0) // tiles * WIDE + column % WIDE
    b, d = split(c, DIM, WIDE)
    row = tl.arange(0, BM)
    k = tl.arange(0, BK)
    row_at = row % COPIES * width - row // COPIES * COPIES
    w_at = table + h * COPIES * width + zero - start + row_at[:, None] + k[None, :]
    v_at = v + h * vh + (b * vb + d)[None, :]
    inside = (c < columns)[None, :]
    low = tl.maximum(start + first, 0) // BK * BK
    high = tl.minimum(start + BM + last, n_in + last_block * BM)
    acc = tl.zeros((BM, BN), tl.float32)
    for m in tl.range(low, high, BK):
        at = (m + k)[:, None] - before
        there = inside & (at < n_in)
        if WIDE < BN:
            there &= at >= 0
        v_tile = tl.load(v_at + at.to(tl.int64) * vn, mask=there, other=0.0)
        w_tile = tl.load(w_at + m)
        acc = tl.dot(w_tile, v_tile, acc, input_precision="tf32x3")
    if SCALE:
        acc *= 1 / unit(tl.load(top + h))
    n = (start + row)[:, None] - before
    y_at = y + h * yh + n.to(tl.int64) * yn + (b * yb + d)[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=inside & (n < n_out))


def product(w: Tensor, v: Tensor, y: Tensor, first: int, *, sign: int = 1) -> None:
    """y[n] = Σ_d w_d · v[n+sign·d]; v and y (batch, heads, ., dim) with contiguous dim."""
    (_, heads, n, dim), m, columns = v.shape, y.shape[2], v.shape[0] * v.shape[3]
    tile, wide = _tile(v.dtype, columns, m, heads)
    size = tile["BM"]
    rows = size * (tile["BN"] // wide)
    zero = ceil_div(m, rows) * rows
    width = zero + ceil_div(n, size) * size + size  # loads past the last tile stay inside
    # With a copy for each row of a tile it is a plain piece of a matrix: faster, if that is small.
    copies = size if heads * size * width * 3 <= v.numel() else COPIES
    scale = v.dtype == torch.float16  # the others have the range of float32
    top = largest_weight(w) if scale else w
    table = torch.empty(heads, copies, width, dtype=v.dtype, device=v.device)
    grid = ceil_div(width, 1024), heads, copies
    numbers = w.shape[1], first, sign, zero, width
    launch(_shift, grid, w, top, table, *numbers, COPIES=copies, SCALE=scale, BLOCK=1024)
    low, high = sorted((sign * first, sign * (first + w.shape[1] - 1)))
    grid = zero // rows * ceil_div(columns, wide), heads
    numbers = width, zero, low, high, n, m, columns, *v.stride()[:3], *y.stride()[:3]
    constants = {"DIM": dim, "COPIES": copies, "SCALE": scale, "WIDE": wide, **tile}
    launch(_product, grid, table, top, v, y, *numbers, **constants)


def _tile(dtype: torch.dtype, columns: int, rows: int, heads: int) -> tuple[dict[str, int], int]:
    """The tile for so many columns and rows of each head, and how many columns it takes."""
    if dtype == torch.float32:
        tile = FLOAT32
    elif columns <= 64:
        tile = NARROW
    else:
        programs = heads * ceil_div(rows, PRODUCT["BM"]) * ceil_div(columns, PRODUCT["BN"])
        tile = PRODUCT if programs >= ENOUGH else FEW
    wide = min(tile["BN"], tile_width(columns))
    blocks = ceil_div(rows, tile["BM"])
    spare = max(1, heads * blocks // ENOUGH)
    together = min(tile["BN"] // wide, power_of_2(blocks), 1 << (spare.bit_length() - 1))
    return tile | {"BN": wide * together}, wide


@triton.jit
def diagonals(tiles, BT: tl.constexpr, COUNT: tl.constexpr):
    """The sums over t[r, r+j] and over t[r, r+j-BT], j < BT, of BT×BT tiles side by side."""
    r, j = tl.arange(0, BT)[:, None, None], tl.arange(0, BT)[None, None, :]
    tiles = tl.reshape(tiles, (BT, COUNT, BT))
    skewed = tl.gather(tiles, tl.broadcast_to((r + j) % BT, (BT, COUNT, BT)), 2)
    upper = tl.where(r + j < BT, skewed, 0.0)
    lower = tl.sum(skewed - upper, 0)
    return tl.reshape(tl.sum(upper, 0), (COUNT * BT,)), tl.reshape(lower, (COUNT * BT,))


@triton.jit
def _lags(
    g,
    v,
    sums,
    first,
    n_out,
    n_in,
    columns,
    share,
    gb,
    gh,
    gn,
    vb,
    vh,
    vn,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
    BK: tl.constexpr,
):
    """Σ g[n]·v[n+d] over a share of the columns, d within one window of BW distances or the next.

    The sum of g·vᵀ over blocks of BT positions n, each with the BW positions m at a fixed offset
    from its start; BK/WIDE blocks at a time, each with WIDE columns.
    """
    offset = first + tl.program_id(0) * BW
    part = tl.program_id(1)
    h = tl.program_id(2).to(tl.int64)
    r, q, k = tl.arange(0, BT), tl.arange(0, BW), tl.arange(0, BK)
    together: tl.constexpr = BK // WIDE
    low = tl.cdiv(tl.maximum(1 - offset - BW, 0), BT)
    high = tl.cdiv(tl.maximum(tl.minimum(n_out, n_in - offset), 0), BT)
    steps = tl.cdiv(tl.maximum(high - low, 0), together)
    start = part * share
    chunks = tl.cdiv(tl.minimum(share, columns - start), WIDE)
    acc = tl.zeros((BT, BW), tl.float32)
    for step in tl.range(0, chunks * steps):
        block = (low + step % steps * together) * BT
        if WIDE < BK:
            block += (k // WIDE * BT)[None, :]
        c = start + step // steps * WIDE + k % WIDE
        b, d = split(c, DIM, WIDE)
        n, m = r[:, None] + block, q[:, None] + (block + offset)
        g_at = g + h * gh + n.to(tl.int64) * gn + (b * gb + d)[None, :]
        v_at = v + h * vh + m.to(tl.int64) * vn + (b * vb + d)[None, :]
        inside = (c < columns)[None, :]
        there = inside & (m < n_in)
        if BT < BW:
            there &= m >= 0
        g_tile = tl.load(g_at, mask=inside & (n < n_out), other=0.0)
        v_tile = tl.load(v_at, mask=there, other=0.0)
        acc = tl.dot(g_tile, tl.trans(v_tile), acc, input_precision="tf32x3")
    upper, lower = diagonals(acc, BT, BW // BT)
    out = sums + ((h * tl.num_programs(1) + part) * tl.num_programs(0) + tl.program_id(0)) * 2 * BW
    out += q // BT * (2 * BT) + q % BT
    tl.store(out, upper)
    tl.store(out + BT, lower)


@triton.jit
def _collect(sums, dw, distances, offset, blocks, parts, BT: tl.constexpr):
    """dw_d from diagonals: the upper ones of a block of distances, the lower ones of the next."""
    block, h, r = tl.program_id(0), tl.program_id(1), tl.arange(0, BT)
    total = tl.zeros((BT,), tl.float32)
    for part in tl.range(0, parts):
        at = sums + ((h * parts + part).to(tl.int64) * blocks + block) * (2 * BT) + r
        total += tl.load(at) + tl.load(at + 3 * BT)
    j = block * BT + r - offset
    tl.store(dw + h.to(tl.int64) * distances + j, total, mask=(j >= 0) & (j < distances))


def shares(columns: int, chunk: int, programs: int) -> tuple[int, int]:
    """Into how many parts of how many columns, whole chunks, to cut the work of few programs."""
    parts = max(1, min(ceil_div(columns, chunk), PROGRAMS // programs))
    share = ceil_div(ceil_div(columns, parts), chunk) * chunk
    return ceil_div(columns, share), share


def lags(g: Tensor, v: Tensor, first: int, distances: int) -> Tensor:
    """dw_d = Σ_n ⟨g[n], v[n+d]⟩ over batch and dim: (heads, distances) float32, from `first` on."""
    (_, heads, n, dim), m, columns = v.shape, g.shape[2], v.shape[0] * v.shape[3]
    g = g.contiguous()  # every block is read for many distances
    tile = FLOAT32_LAGS if v.dtype == torch.float32 else NARROW_LAGS if columns <= 64 else LAGS
    size, window, wide = tile["BT"], tile["BW"], min(tile["BK"], tile_width(columns))
    first_block, last_block = first // size, (first + distances - 1) // size + 1
    windows = ceil_div(last_block - first_block + 1, window // size)
    parts, share = shares(columns, wide, windows * heads)
    blocks = windows * (window // size)
    sums = g.new_empty(heads, parts, blocks, 2, size, dtype=torch.float32)
    grid = windows, parts, heads
    numbers = first_block * size, m, n, columns, share, *g.stride()[:3], *v.stride()[:3]
    launch(_lags, grid, g, v, sums, *numbers, DIM=dim, WIDE=wide, **tile)
    dw = g.new_empty(heads, distances, dtype=torch.float32)
    grid = last_block - first_block, heads
    launch(_collect, grid, sums, dw, distances, first - first_block * size, blocks, parts, BT=size)
    return dw
