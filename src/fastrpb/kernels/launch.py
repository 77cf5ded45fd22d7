"""Launches of Triton kernels with less work on the CPU than Triton's own."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

_COMPILED: dict[tuple, tuple[Any, tuple]] = {}
_LIMIT = 4096  # launches to remember


def launch(kernel, grid: tuple[int, ...], *args: Tensor | float, **options: Any) -> None:
    """`kernel[grid](*args, **options)`, the compiled kernel remembered by its arguments.

    Triton works out anew for each launch how its arguments are specialised, about 40 µs for 20 of
    them. Numbers, dtypes and alignment decide it; with all of them equal, so is the kernel.
    `options` are the constexpr parameters, the last of the kernel, and the launch options.
    """
    device = next(x.device for x in args if isinstance(x, Tensor))
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on the current device
            return launch(kernel, grid, *args, **options)
    tensors = [(x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x for x in args]
    key = (kernel, device, *tensors, *options.values())
    known = _COMPILED.get(key)
    if known is not None:
        compiled, constants = known
        compiled[(*grid, 1, 1)[:3]](*args, *constants)
        return None
    compiled = _launched(kernel, grid, args, options)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_COMPILED) >= _LIMIT:
            _COMPILED.clear()
        names = kernel.arg_names[len(args) :]
        _COMPILED[key] = compiled, tuple(options[name] for name in names)
    return None


def _launched(kernel, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> Any:
    """The compiled kernel, launched; with as many stages of its loops as shared memory holds.

    They are chosen for 227 KB; an A100 has 163, most others 99.
    """
    from triton.runtime.errors import OutOfResources  # noqa: PLC0415, ops must not need Triton

    while options.get("num_stages", 1) > 1:
        with suppress(OutOfResources):
            return kernel[grid](*args, **options)
        options = {**options, "num_stages": options["num_stages"] - 1}
    return kernel[grid](*args, **options)


def ceil_div(a: int, b: int) -> int:
    """⌈a/b⌉; Triton's own takes 5 µs, and a product needs many."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The first power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()


def tile_width(n: int) -> int:
    """Columns of a tile that holds n: a power of 2, of which tensor cores take 16 at the least."""
    return max(16, power_of_2(n))


FAVOR_ROWS = 64  # of a projection that a program of FAVOR+ takes at a time


def favor_features(rows: int) -> int:
    """How many the kernels of FAVOR+ hold for so many rows: two each, and those that pad."""
    return 2 * ceil_div(rows, FAVOR_ROWS) * FAVOR_ROWS
