"""Row and column sums of images, and their adjoint, in one read or one write of the pixels.

The sums of an image of H×W pixels are two lines of max(H, W) positions, zero beyond H or W.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.launch import launch

TILE, COLUMNS = 16384, 64  # numbers of a tile of `_sums`, and the most columns
PROGRAMS = 528  # to fill a large GPU
ROWS, WIDE = 4, 32  # of a tile of `_spread`
TUNE = {}
STUNE = {}


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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The sums of a band of rows within a group of columns."""
    group, band = tl.program_id(0) % groups, tl.program_id(0) // groups
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    v += b * vb + h * vh
    parts += (b * heads + h) * (groups * height + bands * width) * DIM
    j = group * COLUMNS + tl.arange(0, COLUMNS)
    d = tl.arange(0, D)[None, :]
    column = tl.zeros((COLUMNS, D), tl.float32)
    end = tl.minimum(height, (band + 1) * share)
    for start in tl.range(band * share, end, ROWS):
        i = start + tl.arange(0, ROWS)
        n = (i[:, None] * width + j[None, :])[:, :, None].to(tl.int64)
        inside = (i < end)[:, None, None] & (j < width)[None, :, None] & (d < DIM)[:, None, :]
        pixels = tl.load(v + n * vn + d[:, None, :], mask=inside, other=0.0).to(tl.float32)
        column += tl.sum(pixels, 0)
        at = parts + (group * height + i)[:, None] * DIM + d
        tl.store(at, tl.sum(pixels, 1), mask=(i < end)[:, None] & (d < DIM))
    at = parts + (groups * height + band * width + j)[:, None] * DIM + d
    tl.store(at, column, mask=(j < width)[:, None] & (d < DIM))


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
    which, bh = tl.program_id(1), tl.program_id(2).to(tl.int64)
    s = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)[None, :]
    size, count = tl.where(which == 0, height, width), tl.where(which == 0, groups, bands)
    parts += (bh * (groups * height + bands * width) + which * groups * height) * DIM
    total = tl.zeros((ROWS, D), tl.float32)
    for p in tl.range(0, count):
        at = parts + (p * size + s)[:, None] * DIM + d
        total += tl.load(at, mask=(s < size)[:, None] & (d < DIM), other=0.0)
    at = out + ((which * tl.num_programs(2) + bh) * side + s)[:, None] * DIM + d
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
    tiles = tl.cdiv(width, COLUMNS)
    i = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    bh = tl.program_id(2).to(tl.int64) * heads + tl.program_id(1)
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
    side, d = max(height, width), triton.next_power_of_2(dim)
    columns = min(COLUMNS, triton.next_power_of_2(width))
    rows, groups = max(1, TILE // (columns * d)), triton.cdiv(width, columns)
    wanted = max(1, min(PROGRAMS // max(1, batch * heads * groups), triton.cdiv(height, rows)))
    share = triton.cdiv(triton.cdiv(height, wanted), rows) * rows
    bands = triton.cdiv(height, share)
    lines = groups * height + bands * width
    parts = v.new_empty(batch, heads, lines, dim, dtype=torch.float32)
    numbers = height, width, heads, groups, bands, share, *v.stride()[:3]
    tile = {"DIM": dim, "D": d, "ROWS": rows}
    launch(_sums, (groups * bands, heads, batch), v, parts, *numbers, **tile, COLUMNS=columns, **TUNE)
    out = v.new_empty(2, batch, heads, side, dim, dtype=torch.float32)
    grid = triton.cdiv(side, 16), 2, batch * heads
    launch(_total, grid, parts, out, height, width, groups, bands, side, **tile | {"ROWS": 16})
    return out


def spread(x: Tensor, height: int, width: int, y: Tensor) -> None:
    """Fill y (batch, heads, H·W, dim), contiguous, from contiguous lines like those of `sums`."""
    _, batch, heads, side, dim = x.shape
    columns = min(WIDE, triton.next_power_of_2(width))
    grid = triton.cdiv(height, ROWS) * triton.cdiv(width, columns), heads, batch
    tile = {"DIM": dim, "D": triton.next_power_of_2(dim), "ROWS": ROWS, "COLUMNS": columns}
    launch(_spread, grid, x[0], x[1], y, height, width, side, heads, **tile, **STUNE)
