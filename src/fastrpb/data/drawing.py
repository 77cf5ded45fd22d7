"""An image as text: one character for two pixels, one above the other."""

from torch import Tensor

_SHADES = " .:-=+*#%@"


def draw(tokens: Tensor, shape: tuple[int, int], white: int = 255) -> str:
    """The pixels row by row as H/2 lines of W characters; `white` is the brightest value.

    >>> import torch
    >>> print(draw(torch.tensor([0, 255, 0, 255, 0, 255, 0, 0]), (4, 2)))
     @
     =
    """
    rows = tokens.float().unflatten(0, shape)
    pairs = (rows[0::2] + rows[1::2]) / 2  # a character is twice as high as it is wide
    levels = (pairs / white * (len(_SHADES) - 1)).round().int()
    return "\n".join("".join(_SHADES[level] for level in line) for line in levels.tolist())
