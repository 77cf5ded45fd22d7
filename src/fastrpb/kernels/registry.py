"""The operators as torch sees them: `operator` makes one of a function.

`torch.library.custom_op` would, too. But its first call imports Dynamo, which takes a second, and
every call goes through Python three times more, to check what is true of these: that they change no
input, give no view of one, and have no gradients of their own.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

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
    """For Dynamo, if it is there, a kernel's Python is nothing to compile."""
    hidden: list[Callable] = []

    @wraps(kernel)
    def run(*args: Any) -> Any:
        if not hidden:
            disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
            if disable is None:
                return kernel(*args)
            hidden.append(disable(kernel))
        return hidden[0](*args)

    return run
