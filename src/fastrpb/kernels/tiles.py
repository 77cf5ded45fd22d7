"""What the kernels of linear attention share: rows of tensors, features, exact enough products."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.launch import ceil_div, tile_width

HIDDEN = tl.constexpr(-1e30)  # below any logarithm of a feature, yet finite


@triton.jit
def rest(x, high):
    """What bfloat16 leaves of x."""
    return (x.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def rounded(x, like):
    """Weights in bfloat16 where that is the precision of what they are weights of."""
    return x.to(tl.bfloat16) if like.dtype == tl.bfloat16 else x


@triton.jit
def dot(a, b, acc, FULL: tl.constexpr):
    """acc + a·b to float32, or to 16 bits of mantissa by products of bfloat16."""
    if FULL:
        return tl.dot(a, b, acc, input_precision="tf32x3")
    a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
    if a.dtype != tl.bfloat16:
        acc = tl.dot(rest(a, a_high), b_high, acc)
    if b.dtype != tl.bfloat16:
        acc = tl.dot(a_high, rest(b, b_high), acc)
    return tl.dot(a_high, b_high, acc)


@triton.jit
def load(x, sn, n, keep, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows n of x (., DIM), zero where not `keep` and beyond DIM columns."""
    d = tl.arange(0, WIDTH)[None, :]
    inside = keep[:, None]
    if DIM != WIDTH:
        inside = inside & (d < DIM)
    return tl.load(x + n[:, None].to(tl.int64) * sn + d, mask=inside, other=0.0)


@triton.jit
def store(x, sn, n, end, value, DIM: tl.constexpr, WIDTH: tl.constexpr):
    d = tl.arange(0, WIDTH)[None, :]
    inside = (n < end)[:, None] & (d < DIM)
    tl.store(x + n[:, None].to(tl.int64) * sn + d, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def divisor(total):
    """What to divide by, also where there is nothing."""
    return tl.where(total == 0, 1.0, total)


@triton.jit
def kept(mask, n, end, MASKED: tl.constexpr):
    keep = n < end
    if MASKED:
        keep = keep & (tl.load(mask + n, mask=keep, other=0) != 0)
    return keep


@triton.jit
def features(x, KIND: tl.constexpr):
    """φ(x) of the maps that are no exponentials; 3: x itself."""
    if KIND == 3:
        return x
    positive = tl.maximum(x, 0.0)
    return positive + (tl.exp(tl.minimum(x, 0.0)) if KIND == 1 else 1e-3)


@triton.jit
def log_slope(x, KIND: tl.constexpr):
    """d log φ(x) / dx."""
    slope = tl.full(x.shape, 1.0, tl.float32)
    if KIND == 1:
        slope = 1 / (1 + tl.maximum(x, 0.0))
    if KIND == 2:
        slope = tl.where(x > 0, 1 / (tl.maximum(x, 0.0) + 1e-3), 0.0)
    return slope


@triton.jit
def load_state(means, norms, at, WIDTH: tl.constexpr, VWIDTH: tl.constexpr):
    """The sums over keys (WIDTH, VWIDTH) and their norms (WIDTH,) that stand at `at`."""
    row = at * WIDTH + tl.arange(0, WIDTH)
    columns = tl.arange(0, VWIDTH)[None, :]
    return tl.load(means + row[:, None] * VWIDTH + columns), tl.load(norms + row)


@triton.jit
def store_state(means, norms, at, total, norm, WIDTH: tl.constexpr, VWIDTH: tl.constexpr):
    row = at * WIDTH + tl.arange(0, WIDTH)
    tl.store(means + row[:, None] * VWIDTH + tl.arange(0, VWIDTH)[None, :], total)
    tl.store(norms + row, norm)


def sizes(q: Tensor, v: Tensor, kind: int) -> dict:
    """The constants that all these kernels take."""
    dim, v_dim = q.shape[-1], v.shape[-1]
    return {
        "DIM": dim,
        "WIDTH": tile_width(dim),
        "VDIM": v_dim,
        "VWIDTH": tile_width(v_dim),
        "KIND": kind,
        "FULL": v.dtype == torch.float32,
    }


def strides(*tensors: Tensor) -> list[int]:
    """Those of all axes but the last, which is contiguous."""
    return [stride for x in tensors for stride in x.stride()[:-1]]


def parts_of(length: int, batch_heads: int, block: int, programs: int) -> tuple[int, int]:
    """Into how many parts of how many positions to cut a sequence."""
    wanted = max(1, min(programs // batch_heads, ceil_div(length, 2 * block)))
    share = ceil_div(ceil_div(length, wanted), block) * block
    return ceil_div(length, share), share


def buffers(x: Tensor, parts: int, constants: dict) -> tuple[Tensor, Tensor]:
    """Room for the sums and the norms of so many parts of each sequence."""
    shape = *x.shape[:2], parts, constants["WIDTH"]
    means = torch.empty(*shape, constants["VWIDTH"], dtype=torch.float32, device=x.device)
    return means, torch.empty(shape, dtype=torch.float32, device=x.device)
