"""Calls of `torch.autograd.Function`s with little work on the CPU."""

from typing import Any

import torch


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, for all parameters of its forward.

    Where no transform needs to see the call, this leaves out what `Function.apply` does before it
    calls the same method: inspecting the signature of forward to fill in defaults, 100 µs a call.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # pyright: ignore[reportAttributeAccessIssue]
