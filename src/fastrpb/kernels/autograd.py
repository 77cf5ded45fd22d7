"""Calls of `torch.autograd.Function`s with little work on the CPU, and what `vmap` gives them."""

from typing import Any

import torch
from torch import Tensor


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, for all parameters of its forward.

    Where no transform needs to see the call, this leaves out what `Function.apply` does before it
    calls the same method: inspecting the signature of forward to fill in defaults, 100 µs a call.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # pyright: ignore[reportAttributeAccessIssue]


def into_axis(x: Tensor, mapped: int | None, count: int, axis: int) -> Tensor:
    """Merge the axis that `torch.func.vmap` maps over, or `count` copies, into another axis."""
    x = torch.stack([x] * count, axis) if mapped is None else x.movedim(mapped, axis)
    return x.flatten(axis, axis + 1)
