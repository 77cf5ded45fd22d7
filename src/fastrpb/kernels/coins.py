"""Coins by eights from each call of a generator: what dropout keeps."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.launch import ceil_div, launch

# Philox4x32 passes BigCrush from 7 rounds on (Salmon et al., 2011), and its rounds are the time.
TILE = {"BLOCK": 1024, "ROUNDS": 7, "num_warps": 4}


@triton.jit
def _pair(bits, dropped):
    """Two bits, each 1 where 16 of the 32 bits are `dropped` at least."""
    low, high = (bits & 0xFFFF) >= dropped, (bits >> 16) >= dropped
    return low.to(tl.uint32) | tl.where(high, 2, 0).to(tl.uint32)


@triton.jit
def _coins(seed, out, dropped, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """Of each call of the generator one byte."""
    # Calls are numbered by 64 bits: none has the number of another, however large the tensor.
    call = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(seed) | (tl.load(seed + 1) << 32)
    a, b, c, d = tl.randint4x(key, call, ROUNDS)
    low = _pair(a, dropped) | (_pair(b, dropped) << 2)
    high = _pair(c, dropped) | (_pair(d, dropped) << 2)
    tl.store(out + call, (low | (high << 4)).to(tl.uint8))


def coins(seed: Tensor, size: list[int], dropped: int) -> Tensor:
    """Bytes of that size, each bit 1 with probability 1 - dropped/2¹⁶; equal ones of equal seeds.

    Args:
        seed: two numbers from 0 to below 2³¹, int64.
        size: of the result.
        dropped: from 0 to 2¹⁶.
    """
    count = torch.Size(size).numel()
    programs = ceil_div(count, TILE["BLOCK"])
    # Room for whole programs: they need no mask, and no program for each count.
    out = seed.new_empty(programs * TILE["BLOCK"], dtype=torch.uint8)
    if count:
        launch(_coins, (programs,), seed, out, dropped, **TILE)
    return out[:count].view(size)
