"""Memory order and magnitude of what the Triton kernels read: packing, largest entries, scales."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.launch import ceil_div, launch, power_of_2


def heads_inside(v: Tensor) -> bool:
    """Whether memory runs over (batch, length, heads, dim), not (batch, heads, length, dim)."""
    return v.shape[1] > 1 and v.stride(1) < v.stride(2)


@triton.jit
def unit(largest):
    """The power of two that brings numbers up to `largest` to at most 1; NaN if not finite."""
    exponent = tl.ceil(tl.log2(tl.where(largest == 0, 1.0, largest)))
    # Within bounds where the scale and its inverse are both normal numbers.
    exponent = tl.minimum(tl.maximum(exponent, -120.0), 120.0)
    return tl.exp2(-exponent) + (largest - largest)


@triton.jit
def _largest(x, out, heads, length, dim, sb, sh, sn, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[b, h] = max |x[b, h]| by its bits, which are ordered like the numbers."""
    b, h = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    d = tl.arange(0, COLUMNS)[None, :]
    inside = (n < length) & (d < dim)
    block = tl.load(x + b * sb + h * sh + n * sn + d, mask=inside, other=0.0).to(tl.float32)
    bits = tl.abs(block).to(tl.int32, bitcast=True)
    tl.atomic_max(out + b * heads + h, tl.max(tl.max(bits, 1), 0))


def largest(x: Tensor) -> Tensor:
    """(batch, heads) float32: the largest |x| of each; NaN where there is one."""
    batch, heads, length, dim = x.shape
    out = x.new_zeros(batch, heads, dtype=torch.float32)
    columns = power_of_2(dim)
    rows = max(1, 16384 // columns)
    grid = ceil_div(length, rows), batch, heads
    bits = out.view(torch.int32)
    numbers = heads, length, dim, *x.stride()[:3]
    launch(_largest, grid, x, bits, *numbers, ROWS=rows, COLUMNS=columns, num_warps=8)
    return out


def largest_weight(w: Tensor) -> Tensor:
    """(heads,) the largest |w|."""
    return torch.linalg.vector_norm(w, torch.inf, dim=-1)


@triton.jit
def _copy(src, dst, batch, inner, sb, si, sj, db, di, dj, BB: tl.constexpr, BJ: tl.constexpr):
    """dst[b, i, j] = src[b, i, j] in tiles of b and j, either side along its contiguous axis."""
    i = tl.program_id(1).to(tl.int64)
    b = (tl.program_id(2) * BB + tl.arange(0, BB)).to(tl.int64)[:, None]
    j = (tl.program_id(0) * BJ + tl.arange(0, BJ)).to(tl.int64)[None, :]
    inside = (b < batch) & (j < inner)
    tile = tl.load(src + b * sb + i * si + j * sj, mask=inside)
    tl.store(dst + b * db + i * di + j * dj, tile, mask=inside)


def _swap(src: Tensor, dst: Tensor) -> None:
    """Copy (batch, outer, inner) between memory orders that end in `inner` and in `batch`."""
    batch, outer, inner = src.shape
    block = 64
    grid = ceil_div(inner, block), outer, ceil_div(batch, block)
    numbers = batch, inner, *src.stride(), *dst.stride()
    launch(_copy, grid, src, dst, *numbers, BB=block, BJ=block, num_warps=4)


def _lines(x: Tensor) -> Tensor:
    """(batch, heads, length, dim) as (batch, outer, inner) with inner contiguous."""
    return (x.transpose(1, 2) if heads_inside(x) else x).flatten(2)


def empty_packed(x: Tensor, length: int) -> Tensor:
    """A fresh (1, heads, length, dim·batch) tensor for `pack` and `unpack` of tensors like x."""
    batch, heads, _, dim = x.shape
    if heads_inside(x):
        return x.new_empty(1, length, heads, dim * batch).transpose(1, 2)
    return x.new_empty(1, heads, length, dim * batch)


def _packed_lines(packed: Tensor, batch: int) -> Tensor:
    """The tensor of `empty_packed` as (batch, outer, inner), in the order of `_lines`."""
    return _lines(packed.unflatten(-1, (-1, batch)).movedim(-1, 1).squeeze(0))


def pack(x: Tensor) -> Tensor:
    """(batch, heads, length, dim) to (1, heads, length, dim·batch): the batch as columns.

    What few channels share a filter gives a product by tensor cores too few columns.
    """
    packed = empty_packed(x, x.shape[2])
    _swap(_lines(x), _packed_lines(packed, len(x)))
    return packed


def unpack(packed: Tensor, y: Tensor) -> None:
    """Undo `pack` into y (batch, heads, length, dim)."""
    _swap(_packed_lines(packed, len(y)), _lines(y))
