"""W from w (the definition) and W·v without W, in one and two dimensions (§3.2, Prop. 1 and 2).

Conventions, used everywhere: `W[n, m] = w_{m-n}`, row n = output position, column m = input
position. The last axis of `w` runs over the distances in ascending order, so for N positions index
`N-1+d` holds `w_d`. Values are (batch, heads, length, dim).
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from fastrpb.kernels.fft import toeplitz_fft

Impl = Literal["auto", "dense", "fft"]

# The square size up to which the dense product is the fastest, as measured by
# `benchmarks/crossover.py` on the machine that results/ names.
_DENSE_UP_TO = {
    ("cpu", torch.float32): 160,
    ("cpu", torch.float64): 160,
    ("cuda", torch.float32): 512,
    ("cuda", torch.float64): 512,
}


def toeplitz(w: Tensor, out_length: int | None = None) -> Tensor:
    """The Toeplitz matrix W[n, m] = w_{m-n}: the definition that everything is tested against.

    Args:
        w: (..., M+N-1) weights of the distances -(M-1)..N-1, ascending.
        out_length: M, the number of rows. Default: square, M = N.

    Returns:
        (..., M, N). O(MN) memory: for definitions, plots and short sequences.

    >>> toeplitz(torch.tensor([-2, -1, 0, 1, 2]))
    tensor([[ 0,  1,  2],
            [-1,  0,  1],
            [-2, -1,  0]])
    """
    if w.dim() < 1:
        raise ValueError("w must have at least one axis, the distances; got a scalar")
    distances = w.shape[-1]
    if out_length is None:
        if distances % 2 == 0:
            raise ValueError(
                f"w holds {distances} distances, but a square matrix has 2N-1, an odd number; "
                "pass out_length for a rectangular one"
            )
        out_length = (distances + 1) // 2
    if not 1 <= out_length <= distances:
        raise ValueError(
            f"out_length={out_length} must be from 1 to the {distances} distances of w"
        )
    # Window i of w is the row whose first distance is i-(M-1); the last row comes first.
    return w.unfold(-1, distances - out_length + 1, 1).flip(-2)


def toeplitz_2d(w: Tensor, shape: tuple[int, int]) -> Tensor:
    """The matrix of a 2D bias over the flattened pixels of an H×W image.

    Between pixels (i, j) → (k, l) it holds, with dy = k-i and dx = l-j,

    - `w` (heads, 2·max(H, W)-1), or without heads: w_dy + w_dx, the paper's additive bias;
    - `w` (heads, 2H-1, 2W-1): w_{dy,dx}, the full bias.

    Returns:
        (heads, H·W, H·W), or without heads: for definitions, plots and small images.

    >>> toeplitz_2d(torch.tensor([-1.0, 0.0, 1.0]), (2, 2))[0]
    tensor([0., 1., 1., 2.])
    """
    height, width = _check_shape(shape)
    _check_weights_2d(w, height, width)
    if w.dim() == 3:
        rows = w.unfold(1, height, 1).flip(1)  # (heads, H, 2W-1, H): i, dx, k
        full = rows.unfold(2, width, 1).flip(2)  # (heads, H, W, H, W): i, j, k, l
    else:
        down, across = _additive_parts(w, height, width)
        full = toeplitz(down)[..., :, None, :, None] + toeplitz(across)[..., None, :, None, :]
    return full.flatten(-4, -3).flatten(-2, -1)


def toeplitz_matmul(
    w: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    out_length: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Y = W·v with W[n, m] = w_{m-n}, W never formed: O(N log N) time a channel, O(N) weights.

    Args:
        w: (heads, 2N-1), (2N-1,), or any leading shape that broadcasts with that of v: the weights
            of the distances -(N-1)..N-1.
        v: (batch, heads, N, dim), or any leading shape.
        causal: use only the distances m-n <= 0; the other weights are ignored.
        out_length: M outputs over the N inputs (cross-attention); w then holds the M+N-1 distances
            -(M-1)..N-1. Default: N.
        impl: "dense" forms W; "fft" is exact at any length; "auto" takes the faster of the two, as
            measured for this size, dtype and device.

    Returns:
        (batch, heads, M, dim) in the dtype of v. Half precisions are computed in float32. An error
        of the FFT is relative to the norm of a channel and the one it is paired with.

    >>> w, v = torch.randn(4, 2 * 1000 - 1), torch.randn(2, 4, 1000, 16)
    >>> torch.allclose(toeplitz_matmul(w, v), toeplitz(w) @ v, atol=1e-3)
    True
    """
    _check_values(w, v)
    n = v.shape[-2]
    m = n if out_length is None else out_length
    if m < 1:
        raise ValueError(f"out_length={m} must be at least 1")
    if w.dim() < 1 or w.shape[-1] != m + n - 1:
        raise ValueError(
            f"w must hold M+N-1 = {m + n - 1} distances for {m} outputs over {n} inputs; "
            f"got w of shape {tuple(w.shape)}"
        )
    lead = _broadcast_lead(w.shape[:-1], v.shape[:-2], w, v)
    if causal:
        w = torch.nn.functional.pad(w[..., :m], (0, n - 1))
    dtype = _compute_dtype(w, v)
    impl = _choose(impl, m * n / (m + n) * 2, v.device, dtype)
    y = _product(w.to(dtype), v.to(dtype), m, lead, impl)
    return y.to(v.dtype)


def toeplitz_matmul_2d(
    w: Tensor, v: Tensor, shape: tuple[int, int], *, impl: Impl = "auto"
) -> Tensor:
    """Y = W·v for the matrix of `toeplitz_2d`, never formed.

    Args:
        w: (heads, 2·max(H, W)-1), or without heads: the paper's additive bias. Prop. 2: row sums
            and column sums of the image, two small products; reads and writes v once.
            (heads, 2H-1, 2W-1): the full bias w_{dy,dx}; O(HW log HW) a channel.
        v: (batch, heads, H·W, dim), or any leading shape that broadcasts: pixels row by row.
        shape: (height, width).
        impl: as in `toeplitz_matmul`.

    Returns:
        (batch, heads, H·W, dim) in the dtype of v.

    >>> w, v = torch.randn(4, 2 * 7 - 1), torch.randn(2, 4, 5 * 7, 16)
    >>> torch.allclose(toeplitz_matmul_2d(w, v, (5, 7)), toeplitz_2d(w, (5, 7)) @ v, atol=1e-3)
    True
    """
    height, width = _check_shape(shape)
    _check_values(w, v)
    _check_weights_2d(w, height, width)
    if v.shape[-2] != height * width:
        raise ValueError(
            f"v holds {v.shape[-2]} positions, but shape=({height}, {width}) has {height * width}"
        )
    heads = w.shape[:1] if w.dim() > 1 else w.shape[:0]
    lead = _broadcast_lead(heads, v.shape[:-2], w, v)
    dtype = _compute_dtype(w, v)
    w = w.to(dtype)
    if w.dim() < 3:
        return _additive(w, v, height, width, lead, impl).to(v.dtype)
    impl = _choose(impl, height * width, v.device, dtype)
    return _full(w, v.to(dtype), height, width, lead, impl).to(v.dtype)


def _additive(
    w: Tensor, v: Tensor, height: int, width: int, lead: torch.Size, impl: Impl
) -> Tensor:
    """Prop. 2: R·(row sums), the same for every column, plus R·(column sums), for every row."""
    image = v.unflatten(-2, (height, width))
    sums = image.sum(-2, dtype=w.dtype), image.sum(-3, dtype=w.dtype)
    down, across = (
        _product(part, x, x.shape[-2], lead, _choose(impl, x.shape[-2], v.device, w.dtype))
        for part, x in zip(_additive_parts(w, height, width), sums, strict=True)
    )
    return (down.unsqueeze(-2) + across.unsqueeze(-3)).flatten(-3, -2)


def _full(w: Tensor, v: Tensor, height: int, width: int, lead: torch.Size, impl: Impl) -> Tensor:
    """A full 2D bias is a 1D one on rows padded to 2W-1, so that no distance leaves its row.

    The flattened weights are then the 1D weights as they stand: (2H-1)(2W-1) = 2N-1 distances for
    N = (H-1)(2W-1) + W positions. Same transform length as a 2D FFT over (2H, 2W).
    """
    if impl == "dense":
        with torch.autocast(v.device.type, enabled=False):
            return toeplitz_2d(w, (height, width)) @ v
    stride = 2 * width - 1
    n = (height - 1) * stride + width
    padded = torch.nn.functional.pad(v.unflatten(-2, (height, width)), (0, 0, 0, width - 1))
    y = _product(w.flatten(-2), padded.flatten(-3, -2)[..., :n, :], n, lead, impl)
    y = torch.nn.functional.pad(y, (0, 0, 0, width - 1)).unflatten(-2, (height, stride))
    return y[..., :width, :].flatten(-3, -2)


def _product(w: Tensor, v: Tensor, m: int, lead: torch.Size, impl: Impl) -> Tensor:
    """W·v for checked arguments of one dtype and a chosen `impl`; `lead` is the broadcast shape."""
    if impl == "dense":
        # Not under autocast: it would round both factors to half precision.
        with torch.autocast(v.device.type, enabled=False):
            return toeplitz(w, m) @ v
    # The operator takes (heads, distances) and (batch, heads, N, dim): the axes that w varies over
    # are heads, those before them are batch.
    own = next((i for i, size in enumerate(w.shape[:-1]) if size != 1), w.dim() - 1)
    heads = lead[len(lead) - (w.dim() - 1 - own) :]
    batch = lead[: len(lead) - len(heads)]
    w = w.expand(*lead[len(lead) - (w.dim() - 1) :], -1)[(0,) * own].reshape(-1, w.shape[-1])
    v = v.expand(*lead, -1, -1).reshape(batch.numel(), heads.numel(), *v.shape[-2:])
    return toeplitz_fft(w, v, m).reshape(*lead, m, v.shape[-1])


def _choose(impl: str, size: float, device: torch.device, dtype: torch.dtype) -> Impl:
    """The implementation to run; `size` is that of the square product of the same cost."""
    if impl not in get_args(Impl):
        raise ValueError(f"unknown impl={impl!r}; choose from {', '.join(get_args(Impl))}")
    if impl != "auto":
        return impl  # pyright: ignore[reportReturnType]
    return "dense" if size <= _DENSE_UP_TO.get((device.type, dtype), 128) else "fft"


def _additive_parts(w: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """The weights of the vertical and of the horizontal distances: middle slices of w."""
    zero = w.shape[-1] // 2
    return w[..., zero - height + 1 : zero + height], w[..., zero - width + 1 : zero + width]


def _compute_dtype(w: Tensor, v: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (w.dtype, v.dtype) else torch.float32


def _check_values(w: Tensor, v: Tensor) -> None:
    for name, x in (("w", w), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise TypeError(f"{name} must have a floating-point dtype, got {x.dtype}")
    if w.device != v.device:
        raise ValueError(f"w is on {w.device} and v on {v.device}; move them to one device")
    if v.dim() < 2:
        raise ValueError(f"v must be (..., length, dim), got shape {tuple(v.shape)}")
    if v.shape[-2] == 0:
        raise ValueError(f"v has an empty sequence: shape {tuple(v.shape)}")


def _broadcast_lead(w_lead: torch.Size, v_lead: torch.Size, w: Tensor, v: Tensor) -> torch.Size:
    try:
        return torch.broadcast_shapes(w_lead, v_lead)
    except RuntimeError:
        raise ValueError(
            f"the heads of w and v do not match: {tuple(w_lead)} of w {tuple(w.shape)} do not "
            f"broadcast with {tuple(v_lead)} of v {tuple(v.shape)}"
        ) from None


def _check_shape(shape: tuple[int, int]) -> tuple[int, int]:
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"shape must be (height, width), both at least 1; got {tuple(shape)}")
    return shape


def _check_weights_2d(w: Tensor, height: int, width: int) -> None:
    additive, full = 2 * max(height, width) - 1, (2 * height - 1, 2 * width - 1)
    fits = w.shape[-1] == additive if w.dim() in (1, 2) else w.dim() == 3 and w.shape[1:] == full
    if not fits:
        raise ValueError(
            f"for a {height}×{width} image w must be (heads, {additive}) for the additive bias or "
            f"(heads, {full[0]}, {full[1]}) for the full one; got shape {tuple(w.shape)}"
        )
