"""What users may pass: each check raises an error that names the argument, with its numbers."""

from collections.abc import Collection
from difflib import get_close_matches

import torch
from torch import Tensor


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.is_nested:
        raise TypeError(f"{name} is a nested tensor; pass a padded one with a mask")


def check_floating(name: str, x: Tensor) -> None:
    check_tensor(name, x)
    if not x.is_floating_point():
        raise TypeError(f"{name} must have a floating-point dtype, got {x.dtype}")


def check_values(name: str, x: Tensor) -> None:
    """Vectors along a sequence: (..., length, dim), at least one of them."""
    check_floating(name, x)
    if x.dim() < 2:
        raise ValueError(f"{name} must be (..., length, dim), got shape {tuple(x.shape)}")
    if x.shape[-2] == 0:
        raise ValueError(f"{name} has an empty sequence: shape {tuple(x.shape)}")


def check_size(name: str, size: object, least: int = 1) -> None:
    if isinstance(size, bool) or not isinstance(size, int | torch.SymInt):
        raise TypeError(f"{name} must be a whole number (int), got {size!r}")
    if size < least:
        raise ValueError(f"{name}={size} must be at least {least}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be true or false")


def check_number(name: str, x: object) -> None:
    if isinstance(x, bool) or not isinstance(x, int | float):
        raise TypeError(f"{name} must be a number (int or float), got {x!r}")


def check_scales(name: str, scales: object) -> None:
    """(shortest, longest), lengths in tokens or pixels."""
    if not isinstance(scales, tuple | list) or len(scales) != 2:
        raise TypeError(f"{name} must be (shortest, longest), got {scales!r}")
    for x in scales:
        check_number(name, x)
    shortest, longest = scales
    if not 1e-3 <= shortest <= longest <= 1e9:
        raise ValueError(
            f"{name} need 0.001 <= shortest <= longest <= 1e9, got {shortest} and {longest}"
        )


def check_choice(name: str, value: object, options: Collection[str]) -> None:
    if value not in options:
        raise ValueError(f"unknown {name}={value!r}; {nearest(value, options)}")


def nearest(word: object, options: Collection[str]) -> str:
    """What may have been meant by a word, or everything that could be.

    >>> nearest("fastrbp", ["none", "fastrpb"])
    'did you mean fastrpb?'
    """
    near = get_close_matches(str(word), options, n=1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(options)}"


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """What to compute in: float64 where any tensor has it, else float32."""
    double = any(x.dtype == torch.float64 for x in tensors)
    return torch.float64 if double else torch.float32


def check_mask(mask: Tensor | None, shape: tuple[int, ...]) -> None:
    """A mask over tokens, if there is one: bool, True = keep."""
    if mask is None:
        return
    check_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool with True = keep, got {mask.dtype}")
    if mask.shape != shape:
        raise ValueError(f"mask must be (batch, length) = {tuple(shape)}, got {tuple(mask.shape)}")


def kept(x: Tensor, mask: Tensor | None, fill: float = 0) -> Tensor:
    """x (batch, heads, length, dim) with `fill` where masked: a weight of 0 times NaN is NaN."""
    return x if mask is None else x.masked_fill(~mask[..., None, :, None], fill)
