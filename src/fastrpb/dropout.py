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
        scale = ops.SIDES / (ops.SIDES - dropped)
        return torch.where(_coins(seed, input.shape, dropped), input * scale, 0.0)


def _coins(seed: Tensor, shape: torch.Size, dropped: int) -> Tensor:
    """Bool of that shape, True with probability 1 - dropped/2¹⁶.

    Not of the input, which an operator that is handed it would have written to memory first.
    """
    *lead, last = shape
    bits = torch.ops.fastrpb.coins_triton(seed, [*lead, (last + 7) // 8], dropped)
    places = torch.arange(8, dtype=torch.uint8, device=seed.device)
    return ((bits.unsqueeze(-1) >> places) & 1).flatten(-2)[..., :last] != 0


def _compiles_for_gpu(x: Tensor) -> bool:
    return ops.INSTALLED and x.is_cuda and torch.compiler.is_compiling()
