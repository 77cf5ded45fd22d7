"""The Toeplitz matrices A_f of `hierarchical` from w, and dw from the sums over their diagonals.

Only the 2L-1 numbers of each A_f are stored, as copies shifted by one so that tiles load in wide
words. A real FFT over the block index gives them; all its harmonics that are odd are needed.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrpb.kernels.direct import COPIES
from fastrpb.kernels.launch import ceil_div, launch
from fastrpb.kernels.layout import largest_weight, unit

FOLD, TABULATE, UNTABULATE = 32, 32, 16  # tiles
MANY = 4096  # spectra, to tabulate them in larger tiles


class Cut(NamedTuple):
    """N <= outer·inner·size positions: P = outer·inner blocks of `size` = L."""

    outer: int
    inner: int
    size: int

    @property
    def blocks(self) -> int:
        return self.outer * self.inner


@triton.jit
def _fold(w, out, distances, first, sign, P, L: tl.constexpr, TILE: tl.constexpr):
    """out[h, δ+L, q] = w_d at d = sign·(qL+δ), q modulo 4P; zero where P <= |q|."""
    h = tl.program_id(2)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)[None, :]
    q = tl.where(t < P, t, t - 4 * P)
    j = sign * (q * L + i - L) - first
    there = (i > 0) & (q >= -P) & (j >= 0) & (j < distances)
    tile = tl.load(w + h.to(tl.int64) * distances + j, mask=there, other=0.0)
    tl.store(out + (h * 2 * L + i).to(tl.int64) * (4 * P) + t, tile, mask=t < 4 * P)


@triton.jit
def _harmonic(e, outer, inner):
    """Where the frequency e = (f1, f2) stands in a real transform over 4P; -1 if conjugated."""
    k = 2 * (e // inner + 2 * outer * (e % inner)) + 1
    half = 2 * outer * inner
    return tl.where(k < half, k, 2 * half - k), tl.where(k < half, 1.0, -1.0)


@triton.jit
def _tabulate(
    spectra,
    top,
    table,
    outer,
    inner,
    extra,
    L: tl.constexpr,
    COPIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """table[h, f, part, r, δ+L+r] = a_f[δ] = Σ_q w_{qL+δ}·exp(iω_f·q), scaled: 8 shifted copies."""
    h, P = tl.program_id(2), outer * inner
    e = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    k, sign = _harmonic(e, outer, inner)
    at = spectra + ((h * 2 * L + i).to(tl.int64) * (2 * P + 1) + k) * 2
    scale = unit(tl.load(top + h)) * extra
    real = tl.load(at, mask=e < P, other=0.0) * scale
    imaginary = -tl.load(at + 1, mask=e < P, other=0.0) * scale * sign
    row = table + (h * P + e).to(tl.int64) * (2 * COPIES * 2 * L)
    for r in tl.static_range(COPIES):
        fits = (e < P) & (i + r < 2 * L)
        tl.store(row + r * 2 * L + i + r, real.to(tl.float16), mask=fits)
        tl.store(row + (COPIES + r) * 2 * L + i + r, imaginary.to(tl.float16), mask=fits)


@triton.jit
def _untabulate(sums, spectra, outer, inner, L: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr):
    """The adjoint of `_tabulate`, from the diagonals that `_block_lags` gives."""
    h, P = tl.program_id(2), outer * inner
    e = tl.program_id(0) * TILE + tl.arange(0, TILE)[None, :]
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    k, sign = _harmonic(e, outer, inner)
    ways: tl.constexpr = 2 * (L // BT) - 1
    # Of the blocks of distances u = -L/BT.. the upper diagonals of way u and the lower ones of the
    # next; the first has no upper and the last no lower ones.
    way = i // BT - 1
    at = sums + ((h * P + e).to(tl.int64) * 2 * ways + way) * (2 * BT) + i % BT
    upper, lower = (e < P) & (way >= 0), (e < P) & (way + 1 < ways)
    part = ways * 2 * BT
    real = tl.load(at, mask=upper, other=0.0) + tl.load(at + 3 * BT, mask=lower, other=0.0)
    at += part
    imaginary = tl.load(at, mask=upper, other=0.0) + tl.load(at + 3 * BT, mask=lower, other=0.0)
    out = spectra + ((h * 2 * L + i).to(tl.int64) * (2 * P + 1) + k) * 2
    tl.store(out, real / 2, mask=e < P)
    tl.store(out + 1, -imaginary * sign / 2, mask=e < P)


@triton.jit
def _unfold(folded, norm, dw, distances, first, P, L: tl.constexpr, TILE: tl.constexpr):
    """The adjoint of `_fold`: each distance is that of two pairs (q, δ)."""
    h = tl.program_id(1)
    j = tl.program_id(0) * TILE + tl.arange(0, TILE)
    d = j + first + P * L  # from 0 on
    q, i = d // L - P, d % L + L
    row = folded + (h * 2 * L + i).to(tl.int64) * (4 * P)
    inside = j < distances
    here = tl.load(row + tl.where(q < 0, q + 4 * P, q), mask=inside, other=0.0)
    row -= L * 4 * P.to(tl.int64)
    q += 1
    after = tl.load(row + tl.where(q < 0, q + 4 * P, q), mask=inside & (q < P), other=0.0)
    tl.store(dw + h.to(tl.int64) * distances + j, (here + after) * tl.load(norm + h), mask=inside)


def tabulate(w: Tensor, cut: Cut, first: int, sign: int) -> tuple[Tensor, Tensor, float]:
    """The table of all A_f, the largest of w for each head, and the factor to undo."""
    size, blocks = cut.size, cut.blocks
    heads, distances = w.shape
    # |Z| <= L·|A|·|X| with |A| <= 2P and |X| <= √P must fit float16, whose largest is 65504.
    extra = 2.0 ** min(0, 15 - math.ceil(math.log2(2 * size * blocks**1.5)))
    top = largest_weight(w)
    folded = w.new_empty(heads, 2 * size, 4 * blocks)
    grid = ceil_div(4 * blocks, FOLD), 2 * size // FOLD, heads
    launch(_fold, grid, w, folded, distances, first, sign, blocks, L=size, TILE=FOLD)
    spectra = torch.view_as_real(torch.fft.rfft(folded))
    table = w.new_empty(heads, blocks, 2, COPIES, 2 * size, dtype=torch.float16)
    tile = TABULATE if heads * blocks < MANY else 2 * TABULATE
    grid = ceil_div(blocks, tile), 2 * size // tile, heads
    numbers = cut.outer, cut.inner, extra
    launch(_tabulate, grid, spectra, top, table, *numbers, L=size, COPIES=COPIES, TILE=tile)
    return table, top, 1 / extra


def untabulate(sums: Tensor, norm: Tensor, cut: Cut, first: int, distances: int) -> Tensor:
    """The adjoint of `tabulate`: dw from the diagonals of all blocks."""
    size, blocks, heads = cut.size, cut.blocks, len(sums)
    spectra = sums.new_zeros(heads, 2 * size, 2 * blocks + 1, 2)
    grid = ceil_div(blocks, UNTABULATE), 2 * size // UNTABULATE, heads
    constants = {"L": size, "BT": sums.shape[-1], "TILE": UNTABULATE}
    launch(_untabulate, grid, sums, spectra, cut.outer, cut.inner, **constants)
    folded = torch.fft.irfft(torch.view_as_complex(spectra), n=4 * blocks, norm="forward")
    dw = sums.new_empty(heads, distances)
    grid = ceil_div(distances, 256), heads
    launch(_unfold, grid, folded, norm, dw, distances, first, blocks, L=size, TILE=256)
    return dw
