"""Calls of `torch.autograd.Function`s with little work on the CPU, and what `vmap` gives them."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, for all parameters of its forward.

    Where no transform needs to see the call, this leaves out what `Function.apply` does before it
    calls the same method: inspecting the signature of forward to fill in defaults, 100 µs a call.
    In forward mode (`torch.func.jvp`) the tangents are those of `function.tangent`.
    """
    transformed = torch._C._are_functorch_transforms_active()
    moves = forward_ad._current_level >= 0
    if torch.compiler.is_compiling():
        if transformed or moves:
            # Dynamo would take the operators for constants: derivatives would be zero. Code that
            # raises is left uncompiled.
            raise RuntimeError(
                "torch.compile cannot hold what torch.func makes of this: leave out "
                "fullgraph=True, or compile without torch.func"
            )
        return function.apply(*args)
    if moves:
        return _in_forward_mode(function).apply(*args)
    if transformed:
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # pyright: ignore[reportAttributeAccessIssue]


@cache
def _in_forward_mode(function: Any) -> type[torch.autograd.Function]:
    """`function` with the method `jvp`, for which Dynamo would refuse to compile it."""

    class InForwardMode(function):
        @staticmethod
        def setup_context(ctx, inputs, output):
            function.setup_context(ctx, inputs, output)
            ctx.save_for_forward(*(x if isinstance(x, Tensor) else None for x in inputs))
            ctx.settings = [None if isinstance(x, Tensor) else x for x in inputs]

        @staticmethod
        def jvp(ctx, *tangents):
            # torch calls this with forward mode off, which would lose the tangents of tangents;
            # the inputs still carry those that are being taken here.
            unpack_dual = forward_ad.unpack_dual
            with forward_ad._set_fwd_grad_enabled(True):
                saved = (x if x is None else unpack_dual(x).primal for x in ctx.saved_tensors)
                pairs = zip(saved, ctx.settings, strict=True)
                return function.tangent(tangents, *(x if s is None else s for x, s in pairs))

    return InForwardMode


def into_axis(x: Tensor, mapped: int | None, count: int, axis: int) -> Tensor:
    """Merge the axis that `torch.func.vmap` maps over, or `count` copies, into another axis."""
    x = torch.stack([x] * count, axis) if mapped is None else x.movedim(mapped, axis)
    return x.flatten(axis, axis + 1)
