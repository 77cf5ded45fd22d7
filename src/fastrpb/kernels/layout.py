"""Memory order and magnitude of what the Triton kernels read: packing, largest entries, scales."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.launch import ceil_div, launch, power_of_2
from fastrpb.kernels.ops import heads_inside

SWAP = {"BR": 128, "BC": 128, "num_warps": 8}


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
    tiles = tl.cdiv(length, ROWS)
    b, h = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    n = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
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
    grid = ceil_div(length, rows) * batch, heads
    bits = out.view(torch.int32)
    numbers = heads, length, dim, *x.stride()[:3]
    launch(_largest, grid, x, bits, *numbers, ROWS=rows, COLUMNS=columns, num_warps=8)
    return out


def largest_weight(w: Tensor) -> Tensor:
    """(heads,) the largest |w|."""
    return torch.linalg.vector_norm(w, torch.inf, dim=-1)


@triton.jit
def _copy(
    src,
    dst,
    batch,
    outer,
    inner,
    sb,
    so,
    si,
    sd,
    db,
    do,
    di,
    dd,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """dst = src, both (batch, outer, inner, DIM): tiles of (outer, batch) by (inner, DIM).

    One side's memory is contiguous along `batch`, that of the other along DIM and `inner`.
    """
    row = tl.arange(0, BR)[:, None]
    tiles = tl.cdiv(inner * DIM, BC)
    o = (tl.program_id(0) // tiles).to(tl.int64) * (BR // WIDE) + row // WIDE
    b = (tl.program_id(1) * WIDE + row % WIDE).to(tl.int64)
    c = tl.program_id(0) % tiles * BC + tl.arange(0, BC)[None, :]
    i, d = (c // DIM).to(tl.int64), c % DIM
    inside = (b < batch) & (o < outer) & (i < inner)
    tile = tl.load(src + b * sb + o * so + i * si + d * sd, mask=inside)
    tl.store(dst + b * db + o * do + i * di + d * dd, tile, mask=inside)


def _swap(src: Tensor, dst: Tensor, inside: bool) -> None:
    """Copy (batch, heads, length, dim); `inside` says that heads are nearer than positions."""
    if inside:
        src, dst = src.transpose(1, 2), dst.transpose(1, 2)
    batch, outer, inner, dim = src.shape
    wide = min(64, power_of_2(batch))
    tiles = ceil_div(inner * dim, SWAP["BC"]) * ceil_div(outer, SWAP["BR"] // wide)
    numbers = batch, outer, inner, *src.stride(), *dst.stride()
    grid = tiles, ceil_div(batch, wide)
    launch(_copy, grid, src, dst, *numbers, DIM=dim, WIDE=wide, **SWAP)


def _by_batch(packed: Tensor, batch: int) -> Tensor:
    """The tensor of `empty_packed` as (batch, heads, length, dim)."""
    return packed.squeeze(0).unflatten(-1, (-1, batch)).movedim(-1, 0)


def empty_packed(x: Tensor, length: int) -> Tensor:
    """A fresh (1, heads, length, dim·batch) tensor for `pack` and `unpack` of tensors like x."""
    batch, heads, _, dim = x.shape
    return x.new_empty(1, heads, length, dim * batch)


def pack(x: Tensor) -> Tensor:
    """(batch, heads, length, dim) to (1, heads, length, dim·batch): the batch as columns.

    What few channels share a filter gives a product by tensor cores too few columns.
    """
    packed = empty_packed(x, x.shape[2])
    _swap(x, _by_batch(packed, len(x)), heads_inside(x))
    return packed


def unpack(packed: Tensor, y: Tensor) -> None:
    """Undo `pack` into y (batch, heads, length, dim)."""
    _swap(_by_batch(packed, len(y)), y, heads_inside(y))
