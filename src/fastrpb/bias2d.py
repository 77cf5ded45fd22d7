"""FastRPB2d: the bias over the pixels of an image."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fastrpb.bias_base import Bias
from fastrpb.checks import check_choice, check_size, compute_dtype
from fastrpb.init import Copies, Init, local, zero
from fastrpb.toeplitz import toeplitz_2d, toeplitz_matmul_2d

Kind = Literal["additive", "full"]


class FastRPB2d(Bias):
    """Y = W·V over the pixels of an image, by their vertical and horizontal distances dy and dx.

    - `kind="additive"`: w_dy + w_dx with one w for both (the paper's). Row sums, column sums and
      two small products: it reads and writes V once.
    - `kind="full"`: w_{dy,dx}, which an additive bias cannot express; O(HW log HW) a channel.

    Args:
        num_heads: heads, each with weights of its own.
        height: rows of the image.
        width: columns of the image; need not equal `height`.
        kind: "additive" or "full".
        symmetric: w_{dy,dx} = w_{dy,-dx}, so that an image and its mirror image are treated alike;
            stores half of the weights. Of an additive bias, w_d = w_{-d} for rows as well.
        prefix: tokens at the front (CLS) outside the bias: their rows are zero, they contribute
            nothing, and pixels are counted after them.
        init: fills `w` (see `fastrpb.init`).
        envelope: (shortest, longest) scales s_h of a decay, spread over the heads as by
            `init.local`: the effective weight is w_d·exp(-|d|/s_h). So far weights learn slowly,
            and the sum of many of them cannot become noise. One pass over the weights for every
            forward. None: w is used as it is.
        dropout: probability that a weight is dropped in a step of training, for the whole batch.
        threshold: λ of a soft threshold, sign(w)·max(|w|-λ, 0): long filters learn to be sparse.

    Attributes:
        w: additive (num_heads, 2·max(height, width)-1); full (num_heads, 2·height-1, 2·width-1).
            Symmetric: of the last axis, the distances from 0.

    >>> rpb = FastRPB2d(8, 28, 28, prefix=1)
    >>> rpb(torch.randn(2, 8, 785, 32)).shape
    torch.Size([2, 8, 785, 32])
    """

    def __init__(
        self,
        num_heads: int,
        height: int,
        width: int,
        *,
        kind: Kind = "additive",
        symmetric: bool = False,
        prefix: int = 0,
        init: Init = local(),  # noqa: B008  (a function, not state)
        envelope: tuple[float, float] | None = None,
        dropout: float = 0.0,
        threshold: float = 0.0,
    ):
        super().__init__(num_heads, prefix, init, envelope, dropout, threshold, symmetric)
        check_size("height", height)
        check_size("width", width)
        check_choice("kind", kind, get_args(Kind))
        self.height = height
        self.width = width
        self.kind: Kind = kind
        self.w = nn.Parameter(torch.empty(num_heads, *map(len, self._distances())))
        self.reset_parameters()

    def _distances(self) -> list[range]:
        full = self.kind == "full"
        sizes = [self.height, self.width] if full else [max(self.height, self.width)]
        axes = [range(1 - size, size) for size in sizes]
        if self.symmetric:
            axes[-1] = range(sizes[-1])
        return axes

    def _distance(self) -> Tensor:
        dtype, device = compute_dtype(self.w), self.w.device
        axes = [
            torch.arange(axis.start, axis.stop, dtype=dtype, device=device)
            for axis in self._distances()
        ]
        return axes[0].abs() if self.kind == "additive" else torch.hypot(axes[0][:, None], axes[1])

    def _copies(self) -> Copies:
        copies = super()._copies()
        return (self.height + self.width) * copies if self.kind == "additive" else copies

    def weights(self) -> Tensor:
        """The effective w: under the envelope, past the threshold, in training with some dropped.

        >>> FastRPB2d(2, 3, 3, kind="full", threshold=0.1).weights().shape
        torch.Size([2, 5, 5])
        """
        distance = None if self.envelope is None else self._distance()
        return self._both_sides(self._effective(self.w, distance))

    def _dense(self, length: int) -> Tensor:
        self._check_length(length)
        return toeplitz_2d(self.weights(), (self.height, self.width))

    def _multiply(self, v: Tensor) -> Tensor:
        self._check_length(v.shape[-2] - self.prefix)
        v = v[..., self.prefix :, :]
        y = toeplitz_matmul_2d(self.weights(), v, (self.height, self.width))
        return nn.functional.pad(y, (0, 0, self.prefix, 0)) if self.prefix else y

    def _check_length(self, length: int) -> None:
        if length != self.height * self.width:
            raise ValueError(
                f"{length} tokens after the prefix of {self.prefix} do not make an image of "
                f"{self.height}×{self.width} = {self.height * self.width} pixels"
            )

    @torch.no_grad()
    def resize(self, height: int, width: int) -> "FastRPB2d":
        """A new bias for another image: the weights of common distances kept, others zero."""
        new = FastRPB2d(
            self.num_heads,
            height,
            width,
            kind=self.kind,
            init=zero,
            **self._settings(),
        ).to(self.w)
        self._give_to(new)
        return new

    def _mismatch(self, saved: torch.Size) -> str:
        return (
            f"the saved weights {tuple(saved)} are not the {tuple(self.w.shape)} of this bias "
            f"({'symmetric, ' if self.symmetric else ''}{self.kind}, {self.num_heads} heads, "
            f"{self.height}×{self.width} pixels); load them into a FastRPB2d of their own size and "
            "symmetry and resize() it"
        )

    def extra_repr(self) -> str:
        size = f"{self.num_heads}, {self.height}, {self.width}"
        return f"{size}, kind={self.kind!r}{self._shown_settings()}"
