"""The operators as torch sees them: `operator` makes one of a function.

`torch.library.custom_op` would, too. But its first call imports Dynamo, which takes a second, and
every call goes through Python three times more, to check what is true of these: that they change no
input and give no view of one.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_LIBRARY = torch.library.Library("fastrpb", "DEF")


def operator(name: str) -> Callable[[Callable], Callable]:
    """Makes `fastrpb::name` of a function, and in its place what takes a fake of it."""

    def register(kernel: Callable) -> Callable:
        schema = torch.library.infer_schema(kernel, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, _unseen(kernel), "CompositeExplicitAutograd")
        return torch.library.register_fake(f"fastrpb::{name}", lib=_LIBRARY)

    return register


def _unseen(kernel: Callable) -> Callable:
    """Keeps Dynamo, once it is imported, from compiling a kernel's Python, and autograd out of it.

    Gradients are those of the functions around the operators; what calls an operator itself, such
    as an exported program, must not take others for them.
    """
    hidden: list[Callable] = []

    @wraps(kernel)
    def run(*args: Any) -> Any:
        if not hidden:
            disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
            if disable is not None:
                hidden.append(disable(kernel))
        learning = []
        if torch.is_grad_enabled():
            learning = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        with torch.no_grad():
            result = hidden[0](*args) if hidden else kernel(*args)
        return tree_map(lambda x: _Refused.apply(x, *learning), result) if learning else result

    return run


class _Refused(torch.autograd.Function):
    """A result of tensors that learn, but not through it."""

    @staticmethod
    def forward(ctx, result, *_):
        return result.view_as(result)

    @staticmethod
    def backward(ctx, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "the operators of fastrpb have no gradients of their own, so programs with them, such "
            "as exported ones, cannot be trained; train the model that they were made of"
        )
