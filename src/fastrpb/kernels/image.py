"""Row and column sums of images, and their adjoint, in one read or one write of the pixels.

The sums of an image of H×W pixels are two lines of max(H, W) positions, zero beyond H or W.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.launch import ceil_div, launch, power_of_2, tile_width

SUMS = {"BK": 64, "num_warps": 4, "num_stages": 4}
COLUMNS = 64  # the most that a program sums up
PROGRAMS = 264  # to fill a large GPU
ROWS, WIDE = 4, 32  # of a tile of `_spread`


@triton.jit
def _sums(
    v,
    parts,
    height,
    width,
    heads,
    groups,
    bands,
    share,
    vb,
    vh,
    vn,
    DIM: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """The sums of a band of rows within a group of columns, by a matrix of zeros and ones."""
    group, band = tl.program_id(0) % groups, tl.program_id(0) // groups % bands
    b, h = (tl.program_id(0) // (groups * bands)).to(tl.int64), tl.program_id(1).to(tl.int64)
    top, left = band * share, group * COLUMNS
    v += b * vb + h * vh + (top * width + left).to(tl.int64) * vn
    parts += (b * heads + h) * (groups * height + bands * width) * DIM
    s, d = tl.arange(0, BM), tl.arange(0, D)[None, :]
    rows, columns = tl.minimum(share, height - top), tl.minimum(COLUMNS, width - left)
    acc = tl.zeros((BM, D), tl.float32)
    for start in tl.range(0, rows * COLUMNS, BK):
        t = start + tl.arange(0, BK)
        i, j = t // COLUMNS, t % COLUMNS
        inside = ((i < rows) & (j < columns))[:, None] & (d < DIM)
        n = (i * width + j)[:, None].to(tl.int64)
        pixels = tl.load(v + n * vn + d, mask=inside, other=0.0)
        ones = s[:, None] == tl.where((s < COLUMNS)[:, None], j[None, :], i[None, :] + COLUMNS)
        acc = tl.dot(ones.to(pixels.dtype), pixels, acc)
    at = groups * height + band * width + left + s
    at = tl.where(s < COLUMNS, at, group * height + top + s - COLUMNS)
    there = tl.where(s < COLUMNS, s < columns, s - COLUMNS < rows)
    tl.store(parts + at[:, None] * DIM + d, acc, mask=there[:, None] & (d < DIM))


@triton.jit
def _total(
    parts,
    out,
    height,
    width,
    groups,
    bands,
    side,
    DIM: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The sums of the parts that `_sums` left: of rows (0) or of columns (1)."""
    bh, which = tl.program_id(0).to(tl.int64), tl.program_id(2)
    s = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)[None, :]
    size, count = tl.where(which == 0, height, width), tl.where(which == 0, groups, bands)
    parts += (bh * (groups * height + bands * width) + which * groups * height) * DIM
    total = tl.zeros((ROWS, D), tl.float32)
    for p in tl.range(0, count):
        at = parts + (p * size + s)[:, None] * DIM + d
        total += tl.load(at, mask=(s < size)[:, None] & (d < DIM), other=0.0)
    at = out + ((which * tl.num_programs(0) + bh) * side + s)[:, None] * DIM + d
    tl.store(at, total, mask=(s < side)[:, None] & (d < DIM))


@triton.jit
def _spread(
    rows,
    columns,
    y,
    height,
    width,
    side,
    heads,
    DIM: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y[i, j] = rows[i] + columns[j]."""
    across, down = tl.cdiv(width, COLUMNS), tl.cdiv(height, ROWS)
    i = tl.program_id(0) // across % down * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    b = (tl.program_id(0) // (across * down)).to(tl.int64)
    bh = b * heads + tl.program_id(1)
    d = tl.arange(0, D)
    real = (d < DIM)[None, :]
    at = (bh * side + i)[:, None] * DIM + d[None, :]
    row = tl.load(rows + at, mask=(i < height)[:, None] & real, other=0.0)
    at = (bh * side + j)[:, None] * DIM + d[None, :]
    column = tl.load(columns + at, mask=(j < width)[:, None] & real, other=0.0)
    n = bh * height * width + i[:, None] * width + j[None, :]
    at = y + n[:, :, None] * DIM + d[None, None, :]
    inside = (i < height)[:, None, None] & (j < width)[None, :, None] & real[:, None, :]
    tl.store(at, (row[:, None, :] + column[None, :, :]).to(y.dtype.element_ty), mask=inside)


def sums(v: Tensor, height: int, width: int) -> Tensor:
    """(batch, heads, H·W, dim) to float32 (2, batch, heads, max(H, W), dim): rows and columns."""
    batch, heads, _, dim = v.shape
    side, d = max(height, width), tile_width(dim)
    columns = min(COLUMNS, tile_width(width))
    groups = ceil_div(width, columns)
    # As many rows as columns at the most: together they are the rows of a tile.
    wanted = PROGRAMS // max(1, batch * heads * groups)
    share = min(columns, ceil_div(height, max(1, wanted)))
    bands = ceil_div(height, share)
    parts = v.new_empty(batch, heads, groups * height + bands * width, dim, dtype=torch.float32)
    numbers = height, width, heads, groups, bands, share, *v.stride()[:3]
    tile = {"DIM": dim, "D": d, "COLUMNS": columns, "BM": 2 * columns, **SUMS}
    launch(_sums, (groups * bands * batch, heads), v, parts, *numbers, **tile)
    out = v.new_empty(2, batch, heads, side, dim, dtype=torch.float32)
    grid = batch * heads, ceil_div(side, 16), 2
    launch(_total, grid, parts, out, height, width, groups, bands, side, DIM=dim, D=d, ROWS=16)
    return out


def spread(x: Tensor, height: int, width: int, y: Tensor) -> None:
    """Fill y (batch, heads, H·W, dim), contiguous, from contiguous lines like those of `sums`."""
    _, batch, heads, side, dim = x.shape
    columns = min(WIDE, power_of_2(width))
    grid = ceil_div(height, ROWS) * ceil_div(width, columns) * batch, heads
    tile = {"DIM": dim, "D": power_of_2(dim), "ROWS": ROWS, "COLUMNS": columns}
    launch(_spread, grid, x[0], x[1], y, height, width, side, heads, **tile)
