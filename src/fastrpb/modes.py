"""What torch is doing around a call."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def exact(x: Tensor) -> AbstractContextManager[object]:
    """Without autocast, which would round the factors of products; x is on the device."""
    on = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if on else nullcontext()


def exporting() -> bool:
    """Whether the program is traced for a range of sizes, which no branch may fix."""
    # torch.compiler.is_exporting() is True in what torch 2.11 compiles, too.
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
