"""Initial values for the weights of a bias. On text they decide accuracy, on images hardly.

An init is a function `init(w, distance, copies)` that fills `w` (heads, ...) in place. `distance`
(...) is how far every relative distance reaches, in tokens (in pixels for a 2D bias); `copies` is
how often a weight stands in a row of W: an int for all alike, or a tensor like `distance`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fastrpb.checks import check_scales

Copies = int | Tensor
Init = Callable[[Tensor, Tensor, Copies], object]


def zero(w: Tensor, distance: Tensor, copies: Copies) -> None:
    """w = 0: the bias adds nothing yet, so a trained model that gets one is unchanged.

    >>> from fastrpb import FastRPB
    >>> FastRPB(2, 3, init=zero).w
    Parameter containing:
    tensor([[0., 0., 0., 0., 0.],
            [0., 0., 0., 0., 0.]], requires_grad=True)
    """
    w.zero_()


def normal(std: float = 0.02) -> Init:
    """w_d ~ N(0, std²), for every distance alike."""
    return partial(_normal, std=std)


def local(shortest: float = 1.0, longest: float = 16.0) -> Init:
    """w_d ~ N(0, 1)·exp(-|d|/s_h), then rows of W of norm 1: random filters of the neighbourhood.

    The scales s_h of the heads are spread from `shortest` to `longest` tokens, evenly in the
    logarithm. A small text model learned little from noise at all distances or from zero, and much
    from this (docs/reproduction.md).

    >>> from fastrpb import FastRPB
    >>> FastRPB(4, 100, init=local(1, 16)).w.norm(dim=-1).allclose(torch.ones(4))
    True
    """
    check_scales("the scales", (shortest, longest))
    return partial(_local, shortest=shortest, longest=longest)


def decay(heads: int, distance: Tensor, shortest: float, longest: float) -> Tensor:
    """exp(-|d|/s_h), (heads, ...): the scales s_h evenly spread in the logarithm.

    >>> decay(3, torch.tensor([0.0, 16.0]), 1, 16)[2]
    tensor([1.0000, 0.3679])
    """
    spread = torch.linspace(0, 1, heads, dtype=distance.dtype, device=distance.device)
    scale = shortest * (longest / shortest) ** spread
    return torch.exp(-distance / scale.view(-1, *[1] * distance.dim()))


def _normal(w: Tensor, distance: Tensor, copies: Copies, std: float) -> None:
    w.normal_(0.0, std)


def _local(w: Tensor, distance: Tensor, copies: Copies, shortest: float, longest: float) -> None:
    w.normal_().mul_(decay(w.shape[0], distance, shortest, longest))
    axes = tuple(range(1, w.dim()))
    w /= torch.linalg.vector_norm(w * copies**0.5, dim=axes, keepdim=True)
