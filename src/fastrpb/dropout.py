"""Dropout that a compiled program can afford."""

import torch
from torch import Tensor, nn

from fastrpb.kernels import ops


class Dropout(nn.Dropout):
    """`nn.Dropout`; compiled for a GPU, by coins of 16 bits.

    Inductor would call a generator of 128 bits for each element, and again for its gradient, which
    takes several times as long as to read and write them. Here a call gives 8 coins, which are kept
    for the backward pass, a bit each. They drop with a probability of p within 2⁻¹⁷, and scale by
    just that: the expectation is exact.

    >>> Dropout(0.1)
    Dropout(p=0.1, inplace=False)
    """

    def forward(self, input: Tensor) -> Tensor:
        dropped = round(self.p * ops.SIDES)
        fits = input.dim() and not self.inplace and 0 < dropped < ops.SIDES
        if not self.training or not fits or not _compiles_for_gpu(input):
            return super().forward(input)
        # Drawn here, not in the operator: of two equal calls of an operator, whatever its tags say,
        # torch computes one; and it knows how to record its own draws so that each replay has
        # another. Two words, since Inductor's may be of 32 bits.
        seed = torch.randint(2**31 - 1, (2,), device=input.device)
        *lead, last = input.shape
        # Not of the input: handed to an operator, it would have to be written to memory first.
        coins = torch.ops.fastrpb.coins_triton(seed, [*lead, (last + 7) // 8], dropped)
        return _Dropped.apply(input, coins, ops.SIDES / (ops.SIDES - dropped))


class _Dropped(torch.autograd.Function):
    """The input times `scale` where a coin shows 1, else 0; coins by the bits of bytes."""

    @staticmethod
    def forward(x, coins, scale):
        return torch.where(_shown(coins, x.shape[-1]), x * scale, 0.0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, coins, ctx.scale = inputs
        ctx.save_for_backward(coins)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        (coins,) = ctx.saved_tensors
        # By another formula than before: of two equal ones torch would keep what the first gave,
        # eight times as large, instead of the bits.
        place = 1 << _places(coins)
        keep = (coins.unsqueeze(-1) & place).flatten(-2)[..., : g.shape[-1]] != 0
        return torch.where(keep, g * ctx.scale, 0.0), None, None


def _shown(coins: Tensor, last: int) -> Tensor:
    """Bool (..., last), a bit each."""
    return ((coins.unsqueeze(-1) >> _places(coins)) & 1).flatten(-2)[..., :last] != 0


def _places(coins: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=coins.device)


def _compiles_for_gpu(x: Tensor) -> bool:
    return torch.compiler.is_compiling() and x.is_cuda and ops.runs_on(x)
