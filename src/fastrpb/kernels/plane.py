"""Y = W·V over the pixels of images on tensor cores, W[n, m] = w_{dy,dx} of a full 2D bias.

A row of W is pieces of rows of w. In a table of w whose rows are `pitch` apart, and that stands
there 8 times, each copy shifted by one more, those of a whole row of pixels are contiguous from a
multiple of 16 bytes on. So tiles are whole rows of pixels, each `LINE` pixels wide and taken as
`SPAN`, the next power of two; what is beyond is masked. O(N²) operations for N pixels: where LINE
is a power of two, a quarter of those of a 1D product over rows padded to 2·LINE-1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.direct import COPIES, shares, split
from fastrpb.kernels.launch import ceil_div, launch, power_of_2, tile_width
from fastrpb.kernels.layout import largest_weight, unit

PRODUCT = {"BM": 128, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3}
LAGS = {"BT": 128, "BK": 64, "num_warps": 4, "num_stages": 3}
FLOAT32 = {"BM": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 2}
FLOAT32_LAGS = {"BT": 64, "BK": 32, "num_warps": 4, "num_stages": 2}


@triton.jit
def _shift(
    w,
    top,
    table,
    height,
    width,
    pitch,
    sign,
    zero,
    length,
    COPIES: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """table[h, r, x] = w_{dy,dx} where sign·(dy·pitch + dx) = x - zero - r; zero: pitches."""
    h, r = tl.program_id(1), tl.program_id(2)
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = x + (width - 1) - r + COPIES * pitch  # not negative, so that division rounds down
    dy = at // pitch - COPIES - zero // pitch
    dx = at % pitch - (width - 1)
    row, column = height - 1 + sign * dy, width - 1 + sign * dx
    inside = (row >= 0) & (row < 2 * height - 1) & (column >= 0) & (column < 2 * width - 1)
    j = row * (2 * width - 1) + column
    weight = tl.load(w + h * (2 * height - 1) * (2 * width - 1) + j, mask=inside, other=0.0)
    if SCALE:
        weight *= unit(tl.load(top + h))
    at = table + (h * COPIES + r).to(tl.int64) * length + x
    tl.store(at, weight.to(table.dtype.element_ty), mask=x < length)


@triton.jit
def _product(
    table,
    top,
    v,
    y,
    length,
    zero,
    pixels,
    columns,
    vb,
    vh,
    vn,
    yb,
    yh,
    yn,
    PITCH: tl.constexpr,
    LINE: tl.constexpr,
    SPAN: tl.constexpr,
    DIM: tl.constexpr,
    COPIES: tl.constexpr,
    SCALE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """A tile of Y: BM/SPAN rows of pixels by BN columns, which run over (batch, dim)."""
    rows = pixels // LINE * SPAN
    tiles = tl.cdiv(rows, BM)
    start = tl.program_id(0) % tiles * BM
    h = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) // tiles * BN + tl.arange(0, BN)
    b, d = split(c, DIM, BN)
    inside = (c < columns)[None, :]
    r, k = tl.arange(0, BM), tl.arange(0, BK)
    at = r // SPAN * PITCH + r % SPAN
    w_at = table + h * COPIES * length + zero - start // SPAN * PITCH
    w_at += (at % COPIES * length - at // COPIES * COPIES)[:, None]
    w_at += (k // SPAN * PITCH + k % SPAN)[None, :]
    v_at = v + h * vh + (b * vb + d)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for m in tl.range(0, rows, BK):
        there = m // SPAN * LINE + k // SPAN * LINE + k % SPAN
        keep = (k % SPAN < LINE) & (there < pixels)
        v_tile = tl.load(
            v_at + there[:, None].to(tl.int64) * vn, mask=inside & keep[:, None], other=0.0
        )
        w_tile = tl.load(w_at + m // SPAN * PITCH)
        acc = tl.dot(w_tile, v_tile, acc, input_precision="tf32x3")
    if SCALE:
        acc *= 1 / unit(tl.load(top + h))
    n = start // SPAN * LINE + r // SPAN * LINE + r % SPAN
    keep = (r % SPAN < LINE) & (n < pixels)
    y_at = y + h * yh + n[:, None].to(tl.int64) * yn + (b * yb + d)[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=inside & keep[:, None])


def product(w: Tensor, v: Tensor, y: Tensor, line: int, *, sign: int = 1) -> None:
    """y[n] = Σ_m w_{sign·(m-n)} · v[m] over pixels of rows of `line`; w (heads, 2H-1 times 2W-1).

    v and y are (batch, heads, pixels, dim) with contiguous dim.
    """
    (_, heads, pixels, dim), columns = v.shape, v.shape[0] * v.shape[3]
    span, pitch = power_of_2(line), ceil_div(2 * line - 1, COPIES) * COPIES
    tile = FLOAT32 if v.dtype == torch.float32 else PRODUCT
    if columns <= 32:
        tile = tile | {"BN": 32}
    high = ceil_div(pixels // line * span, tile["BM"]) * tile["BM"] // span  # rows in all tiles
    zero = high * pitch
    length = zero + high * pitch
    scale = v.dtype == torch.float16  # the others have the range of float32
    top = largest_weight(w) if scale else w
    table = torch.empty(heads, COPIES, length, dtype=v.dtype, device=v.device)
    grid = ceil_div(length, 1024), heads, COPIES
    numbers = pixels // line, line, pitch, sign, zero, length
    launch(_shift, grid, w, top, table, *numbers, COPIES=COPIES, SCALE=scale, BLOCK=1024)
    grid = high * span // tile["BM"] * ceil_div(columns, tile["BN"]), heads
    numbers = length, zero, pixels, columns, *v.stride()[:3], *y.stride()[:3]
    sizes = {"PITCH": pitch, "LINE": line, "SPAN": span, "DIM": dim}
    launch(_product, grid, table, top, v, y, *numbers, **sizes, COPIES=COPIES, SCALE=scale, **tile)


@triton.jit
def _lags(
    g,
    v,
    sums,
    first_block,
    pixels,
    columns,
    share,
    gb,
    gh,
    gn,
    vb,
    vh,
    vn,
    LINE: tl.constexpr,
    SPAN: tl.constexpr,
    DIM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """Σ g[n]·v[m] over a share of the columns, of pixels whose rows lie `delta` tiles apart.

    By whether a distance leaves its tile: down, across, both or neither.
    """
    delta = tl.program_id(0) + first_block
    part = tl.program_id(1)
    h = tl.program_id(2).to(tl.int64)
    r, k = tl.arange(0, BT), tl.arange(0, BK)
    pixel = r // SPAN * LINE + r % SPAN
    real = r % SPAN < LINE
    low = tl.maximum(0, -delta)
    blocks = tl.cdiv(pixels // LINE * SPAN, BT) - tl.abs(delta)
    start = part * share
    chunks = tl.cdiv(tl.minimum(share, columns - start), BK)
    acc = tl.zeros((BT, BT), tl.float32)
    for step in tl.range(0, chunks * blocks):
        n = (low + step % blocks) * (BT // SPAN * LINE) + pixel
        m = n + delta * (BT // SPAN * LINE)
        c = start + step // blocks * BK + k
        b, d = split(c, DIM, BK)
        g_at = g + h * gh + n[:, None].to(tl.int64) * gn + (b * gb + d)[None, :]
        v_at = v + h * vh + m[:, None].to(tl.int64) * vn + (b * vb + d)[None, :]
        inside = (c < columns)[None, :]
        g_tile = tl.load(g_at, mask=inside & (real & (n < pixels))[:, None], other=0.0)
        v_tile = tl.load(v_at, mask=inside & (real & (m < pixels))[:, None], other=0.0)
        acc = tl.dot(g_tile, tl.trans(v_tile), acc, input_precision="tf32x3")
    row, j = r[:, None], r[None, :]
    down, across = row // SPAN + j // SPAN, row % SPAN + j % SPAN
    skewed = tl.gather(acc, down % (BT // SPAN) * SPAN + across % SPAN, 1)
    out = sums + ((h * tl.num_programs(1) + part) * tl.num_programs(0) + tl.program_id(0)) * 4 * BT
    below, beside = down >= BT // SPAN, across >= SPAN
    for kind in tl.static_range(4):
        of_kind = (below == (kind // 2 == 1)) & (beside == (kind % 2 == 1))
        tl.store(out + kind * BT + r, tl.sum(tl.where(of_kind, skewed, 0.0), 0))


def lags(g: Tensor, v: Tensor, line: int) -> Tensor:
    """dw_{dy,dx} = Σ ⟨g[n], v[n+(dy,dx)]⟩ over batch and dim: (heads, 2H-1, 2W-1) float32."""
    (_, heads, pixels, dim), columns = v.shape, v.shape[0] * v.shape[3]
    span, height = power_of_2(line), pixels // line
    tile = FLOAT32_LAGS if v.dtype == torch.float32 else LAGS
    size, chunk = tile["BT"], min(tile["BK"], tile_width(columns))
    high = ceil_div(height * span, size)
    blocks, rows = 2 * high - 1, size // span
    parts, share = shares(columns, chunk, blocks * heads)
    sums = g.new_empty(heads, parts, blocks, 2, 2, rows, span, dtype=torch.float32)
    numbers = 1 - high, pixels, columns, share, *g.stride()[:3], *v.stride()[:3]
    sizes = {"LINE": line, "SPAN": span, "DIM": dim}
    launch(_lags, (blocks, parts, heads), g, v, sums, *numbers, **sizes, **(tile | {"BK": chunk}))
    here, below = sums.sum(1).unbind(2)  # (heads, blocks, 2, rows, span): dy from its own tile on
    down = g.new_zeros(heads, blocks + 1, *here.shape[2:], dtype=torch.float32)
    down[:, 1:] += here
    down[:, :-1] += below
    down = down.transpose(1, 2).flatten(2, 3)  # (heads, 2, dy, span), dy from -high·rows on
    right, left = down.narrow(2, high * rows - height + 1, 2 * height - 1).unbind(1)
    return torch.cat([left[:, :, span - line + 1 :], right[:, :, :line]], -1)
