"""Row and column sums of images, and their adjoint, in one read or one write of the pixels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 4, 32  # of a tile
PROGRAMS = 1024  # fill a large GPU


@triton.jit
def _sums(
    v, rows, columns, height, width, share, heads, vb, vh, vn,
    DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Sums over a tile's columns for each row, and over a share of the rows for each column."""
    part, parts = tl.program_id(0) % tl.cdiv(height, share), tl.cdiv(height, share)
    tile, tiles = tl.program_id(0) // parts, tl.cdiv(width, COLUMNS)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    j = tile * COLUMNS + tl.arange(0, COLUMNS)
    d = tl.arange(0, D)
    inside = (j < width)[None, :, None] & (d < DIM)[None, None, :]
    total = tl.zeros((COLUMNS, D), tl.float32)
    end = tl.minimum(height, (part + 1) * share)
    for start in tl.range(part * share, end, ROWS):
        i = start + tl.arange(0, ROWS)
        n = (i[:, None] * width + j[None, :]).to(tl.int64)
        at = v + b * vb + h * vh + n[:, :, None] * vn + d[None, None, :]
        pixels = tl.load(at, mask=inside & (i < end)[:, None, None], other=0.0).to(tl.float32)
        total += tl.sum(pixels, 0)
        out = rows + (((b * heads + h) * tiles + tile) * height + i)[:, None] * DIM + d[None, :]
        tl.store(out, tl.sum(pixels, 1), mask=(i < end)[:, None] & (d < DIM)[None, :])
    out = columns + (((b * heads + h) * parts + part) * width + j)[:, None] * DIM + d[None, :]
    tl.store(out, total, mask=(j < width)[:, None] & (d < DIM)[None, :])


@triton.jit
def _spread(
    rows, columns, y, height, width, heads,
    DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """y[i, j] = rows[i] + columns[j]."""
    tiles = tl.cdiv(width, COLUMNS)
    i = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    bh = tl.program_id(2).to(tl.int64) * heads + tl.program_id(1)
    d = tl.arange(0, D)
    real = (d < DIM)[None, :]
    row = tl.load(rows + (bh * height + i)[:, None] * DIM + d[None, :], mask=(i < height)[:, None] & real, other=0.0)
    column = tl.load(
        columns + (bh * width + j)[:, None] * DIM + d[None, :], mask=(j < width)[:, None] & real, other=0.0
    )
    n = bh * height * width + i[:, None] * width + j[None, :]
    at = y + n[:, :, None] * DIM + d[None, None, :]
    inside = (i < height)[:, None, None] & (j < width)[None, :, None] & real[:, None, :]
    tl.store(at, (row[:, None, :] + column[None, :, :]).to(y.dtype.element_ty), mask=inside)


def _sizes(dim: int, width: int) -> dict:
    columns = min(COLUMNS, triton.next_power_of_2(width))
    return {"DIM": dim, "D": triton.next_power_of_2(dim), "ROWS": ROWS, "COLUMNS": columns}


def sums(v: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """(batch, heads, H·W, dim) to float32 sums (batch, heads, H, dim) and (batch, heads, W, dim)."""
    batch, heads, _, dim = v.shape
    sizes = _sizes(dim, width)
    tiles = triton.cdiv(width, sizes["COLUMNS"])
    wanted = max(1, min(triton.cdiv(height, ROWS), PROGRAMS // (tiles * batch * heads)))
    share = triton.cdiv(triton.cdiv(height, wanted), ROWS) * ROWS
    parts = triton.cdiv(height, share)
    rows = v.new_empty(batch, heads, tiles, height, dim, dtype=torch.float32)
    columns = v.new_empty(batch, heads, parts, width, dim, dtype=torch.float32)
    _sums[parts * tiles, heads, batch](
        v, rows, columns, height, width, share, heads, *v.stride()[:3], **sizes, num_warps=4
    )
    return tuple(x.squeeze(2) if x.shape[2] == 1 else x.sum(2) for x in (rows, columns))


def spread(rows: Tensor, columns: Tensor, y: Tensor) -> None:
    """Fill y (batch, heads, H·W, dim), contiguous, from contiguous float32 rows and columns."""
    (batch, heads, height, dim), width = rows.shape, columns.shape[2]
    sizes = _sizes(dim, width)
    grid = triton.cdiv(height, ROWS) * triton.cdiv(width, sizes["COLUMNS"]), heads, batch
    _spread[grid](rows, columns, y, height, width, heads, **sizes, num_warps=4)
