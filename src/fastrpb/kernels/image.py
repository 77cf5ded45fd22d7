"""Row and column sums of images, and their adjoint, in one read or one write of the pixels.

The sums are a product with a matrix of zeros and ones, so that one read of an image gives up to
LARGEST of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.launch import launch

SUMS = {"BM": 64, "BK": 128, "num_warps": 4, "num_stages": 3}
LARGEST = 128  # rows and columns together
ROWS, COLUMNS = 4, 32  # of a tile of `_spread`


@triton.jit
def _sums(
    v,
    rows,
    columns,
    height,
    width,
    heads,
    vb,
    vh,
    vn,
    DIM: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """BM of the sums over rows and columns, as a product with a matrix of zeros and ones."""
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    s = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    v += b * vb + h * vh
    acc = tl.zeros((BM, D), tl.float32)
    for start in tl.range(0, height * width, BK):
        n = start + tl.arange(0, BK)
        inside = (n < height * width)[:, None] & (d < DIM)[None, :]
        pixels = tl.load(v + n[:, None].to(tl.int64) * vn + d[None, :], mask=inside, other=0.0)
        here = tl.where((s < height)[:, None], n[None, :] // width, n[None, :] % width + height)
        acc = tl.dot((here == s[:, None]).to(v.dtype.element_ty), pixels, acc)
    bh, real = b * heads + h, (d < DIM)[None, :]
    at = rows + (bh * height + s)[:, None] * DIM + d[None, :]
    tl.store(at, acc, mask=(s < height)[:, None] & real)
    at = columns + (bh * width + s - height)[:, None] * DIM + d[None, :]
    tl.store(at, acc, mask=(s >= height)[:, None] & (s < height + width)[:, None] & real)


@triton.jit
def _spread(
    rows,
    columns,
    y,
    height,
    width,
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
    row = tl.load(
        rows + (bh * height + i)[:, None] * DIM + d[None, :],
        mask=(i < height)[:, None] & real,
        other=0.0,
    )
    column = tl.load(
        columns + (bh * width + j)[:, None] * DIM + d[None, :],
        mask=(j < width)[:, None] & real,
        other=0.0,
    )
    n = bh * height * width + i[:, None] * width + j[None, :]
    at = y + n[:, :, None] * DIM + d[None, None, :]
    inside = (i < height)[:, None, None] & (j < width)[None, :, None] & real[:, None, :]
    tl.store(at, (row[:, None, :] + column[None, :, :]).to(y.dtype.element_ty), mask=inside)


def sums(v: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """(batch, heads, H·W, dim) to float32 (batch, heads, H, dim) and (batch, heads, W, dim)."""
    batch, heads, _, dim = v.shape
    rows, columns = (
        v.new_empty(batch, heads, n, dim, dtype=torch.float32) for n in (height, width)
    )
    tile = SUMS | {"BM": 64 if height + width <= 64 else 128}
    grid = triton.cdiv(height + width, tile["BM"]), heads, batch
    launch(
        _sums,
        grid,
        v,
        rows,
        columns,
        height,
        width,
        heads,
        *v.stride()[:3],
        DIM=dim,
        D=max(16, triton.next_power_of_2(dim)),
        **tile,
    )
    return rows, columns


def spread(rows: Tensor, columns: Tensor, y: Tensor) -> None:
    """Fill y (batch, heads, H·W, dim), contiguous, from contiguous float32 rows and columns."""
    (batch, heads, height, dim), width = rows.shape, columns.shape[2]
    tile = {"ROWS": ROWS, "COLUMNS": min(COLUMNS, triton.next_power_of_2(width))}
    grid = triton.cdiv(height, ROWS) * triton.cdiv(width, tile["COLUMNS"]), heads, batch
    launch(
        _spread,
        grid,
        rows,
        columns,
        y,
        height,
        width,
        heads,
        DIM=dim,
        D=triton.next_power_of_2(dim),
        **tile,
        num_warps=4,
    )
