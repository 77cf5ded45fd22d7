"""W from w (the definition) and W·v without W, in one and two dimensions (§3.2, Prop. 1 and 2).

Conventions, used everywhere: `W[n, m] = w_{m-n}`, row n = output position, column m = input
position. The last axis of `w` runs over the distances in ascending order, so for N positions index
`N-1+d` holds `w_d`. Values are (batch, heads, length, dim).
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fastrpb.checks import (
    check_choice,
    check_flag,
    check_floating,
    check_size,
    check_tensor,
    check_values,
    compute_dtype,
)
from fastrpb.kernels import ops
from fastrpb.kernels.autograd import apply
from fastrpb.kernels.fft import toeplitz_fft
from fastrpb.kernels.product import product
from fastrpb.modes import exact

Impl = Literal["auto", "dense", "fft", "triton"]


class _Cost(NamedTuple):
    """Nanoseconds, fitted to measurements: `auto` compares the two ways by them."""

    form: float  # dense: to write one entry of W
    multiply: float  # dense: one multiply-add
    launch: float  # fft: a call
    transform: float  # fft: one entry of a signal, there and back

    def prefers_dense(self, entries: int, length: int, heads: int, columns: int) -> bool:
        """W with `entries` entries a head, or transforms of `length`; `columns` vectors a head."""
        dense = heads * entries * (self.form + self.multiply * columns)
        return dense <= self.launch + heads * length * (columns + 1) * self.transform


# Measured on two cores of an AMD EPYC, torch 2.13, and on an NVIDIA H200, torch 2.11; the first row
# with gradients, for which a dense product writes two more matrices of the size of W. Other devices
# take those of the CPU; `make bench` shows how `auto` does.
_COSTS = {
    ("cpu", torch.float32): _Cost(1.2, 0.0125, 2e5, 1.4),
    ("cpu", torch.float64): _Cost(0.6, 0.04, 3e5, 2.0),
    ("cuda", torch.float32): _Cost(0.0034, 4.3e-5, 2.7e5, 0.0105),
    ("cuda", torch.float64): _Cost(0.0036, 4.0e-5, 2.8e5, 0.02),
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
    check_tensor("w", w)
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
    check_size("out_length", out_length)
    if out_length > distances:
        raise ValueError(
            f"out_length={out_length} must be from 1 to the {distances} distances of w"
        )
    if torch.compiler.is_compiling():  # `unfold` would fix the length of the compiled graph
        m, n = (torch.arange(x, device=w.device) for x in (distances - out_length + 1, out_length))
        return w[..., m - n.unsqueeze(-1) + out_length - 1]
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
    check_tensor("w", w)
    _check_weights_2d(w, height, width)
    if w.dim() == 3:
        rows = w.unfold(1, height, 1).flip(1)  # (heads, H, 2W-1, H): i, dx, k
        full = rows.unfold(2, width, 1).flip(2)  # (heads, H, W, H, W): i, j, k, l
    else:
        down, across = additive_parts(w, height, width)
        full = toeplitz(down)[..., :, None, :, None] + toeplitz(across)[..., None, :, None, :]
    return full.flatten(-4, -3).flatten(-2, -1)


def toeplitz_matmul(
    w: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    out_length: int | None = None,
    prefix: int = 0,
    impl: Impl = "auto",
) -> Tensor:
    """Y = W·v with W[n, m] = w_{m-n}: without forming W, O(N log N) time a channel, O(N) weights.

    Args:
        w: (heads, 2N-1), (2N-1,), or any leading shape that broadcasts with that of v: the weights
            of the distances -(N-1)..N-1.
        v: (batch, heads, N, dim), or any leading shape.
        causal: use only the distances m-n <= 0; the other weights are ignored.
        out_length: M outputs over the N inputs (cross-attention); w then holds the M+N-1 distances
            -(M-1)..N-1. Default: N.
        prefix: positions at the front (CLS) outside the product, not counted in N and M: their
            outputs are zero and they contribute nothing.
        impl: "dense" forms W; "fft" is exact at any length; "triton" is exact at any length
            on the tensor cores of a GPU; "auto" takes the fastest, as measured for this size, dtype
            and device.

    Returns:
        (batch, heads, prefix+M, dim) in the dtype of v. Half precisions are computed in float32, by
        "triton" as products of half precisions with sums in float32: the errors of a dense product
        in that precision. The FFT takes two neighbouring channels together: its rounding is
        relative to the larger of the two, and a NaN in one reaches both; by "triton" it reaches all
        channels of a head.

    >>> w, v = torch.randn(4, 2 * 1000 - 1), torch.randn(2, 4, 1000, 16)
    >>> torch.allclose(toeplitz_matmul(w, v), toeplitz(w) @ v, atol=1e-3)
    True
    """
    _check_pair(w, v)
    check_flag("causal", causal)
    check_size("prefix", prefix, least=0)
    n = v.shape[-2] - prefix
    if n < 1:
        raise ValueError(f"v has {v.shape[-2]} positions, none after a prefix of {prefix}")
    m = n if out_length is None else out_length
    check_size("out_length", m)
    if w.dim() < 1 or w.shape[-1] != m + n - 1:
        raise ValueError(
            f"w must hold M+N-1 = {m + n - 1} distances for {m} outputs over {n} inputs; "
            f"got w of shape {tuple(w.shape)}"
        )
    lead = _broadcast_lead(w, w.shape[:-1], v)
    if _use_triton(impl, w, v):
        w, x = _canonical(w[..., :m] if causal else w, v, lead, v.dtype)
        return _restore(product(w, x, 1 - m, m, "triton", prefix), lead, v)
    if causal:
        w = torch.nn.functional.pad(w[..., :m], (0, n - 1))
    w, x = _canonical(w, v, lead)
    x = x[:, :, prefix:]
    y = toeplitz_fft(w, x, m) if _use_fft(impl, m * n, m + n - 1, x) else _dense(toeplitz(w, m), x)
    if prefix:
        y = torch.nn.functional.pad(y, (0, 0, prefix, 0))
    return _restore(y, lead, v)


def toeplitz_matmul_2d(
    w: Tensor, v: Tensor, shape: tuple[int, int], *, impl: Impl = "auto"
) -> Tensor:
    """Y = W·v for the matrix of `toeplitz_2d`, without forming it where it is large.

    Args:
        w: (heads, 2·max(H, W)-1), or without heads: the paper's additive bias. Prop. 2: row sums
            and column sums of the image, two small products; reads and writes v once.
            (heads, 2H-1, 2W-1): the full bias w_{dy,dx}; O(HW log HW) a channel. On a GPU up to
            2500 pixels, O((HW)²) on tensor cores, which is faster.
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
    _check_pair(w, v)
    _check_weights_2d(w, height, width)
    if v.shape[-2] != height * width:
        raise ValueError(
            f"v holds {v.shape[-2]} positions, but shape=({height}, {width}) has {height * width}"
        )
    return (_full if w.dim() == 3 else _additive)(w, v, height, width, impl)


def _additive(w: Tensor, v: Tensor, height: int, width: int, impl: Impl) -> Tensor:
    """Prop. 2: R·(row sums), the same for every column, plus R·(column sums), for every row."""
    lead = _broadcast_lead(w, w.shape[:-1], v)  # here: an error shows the shapes the user gave
    if _use_triton(impl, w, v) and v.dtype in ops.HALF:
        w, x = _canonical(w, v, lead, v.dtype)
        sums = apply(ops.ImageSums, x, height, width)  # rows and columns are lines of one length
        lines = product(w, sums.flatten(0, 1), 1 - sums.shape[3], sums.shape[3], "triton")
        lines = lines.unflatten(0, (2, -1))
        return _restore(apply(ops.ImageSpread, lines, height, width, v.dtype), lead, v)
    down, across = additive_parts(w, height, width)
    image = v.unflatten(-2, (height, width))
    dtype = compute_dtype(w, v)
    down = toeplitz_matmul(down, image.sum(-2, dtype=dtype), impl=impl)
    across = toeplitz_matmul(across, image.sum(-3, dtype=dtype), impl=impl)
    return (down.unsqueeze(-2) + across.unsqueeze(-3)).flatten(-3, -2).to(v.dtype)


def _full(w: Tensor, v: Tensor, height: int, width: int, impl: Impl) -> Tensor:
    """A full 2D bias is a 1D one on rows padded to 2W-1, so that no distance leaves its row.

    The kernel for small images takes them as they are. Else:

    The flattened weights are then the 1D weights as they stand: (2H-1)(2W-1) = 2N-1 distances for
    N = (H-1)(2W-1) + W positions. The transforms are as long as those of a 2D FFT over (2H, 2W).
    """
    n, stride = height * width, 2 * width - 1
    lead = _broadcast_lead(w, w.shape[:1], v)
    fast = _use_triton(impl, w, v)
    flat, x = _canonical(w.flatten(1), v, lead, v.dtype if fast else None)
    if fast and ops.takes_image(n, width):
        y = product(flat, x, -(flat.shape[-1] // 2), n, "triton", line=width)
    elif fast or _use_fft(impl, n * n, flat.shape[-1], x):
        rows = torch.nn.functional.pad(x.unflatten(-2, (height, width)), (0, 0, 0, width - 1))
        line = rows.flatten(2, 3)[:, :, : 1 - width or None]
        length = line.shape[-2]
        line = product(flat, line, 1 - length, length, "triton" if fast else "fft")
        rows = torch.nn.functional.pad(line, (0, 0, 0, width - 1)).unflatten(2, (height, stride))
        y = rows[..., :width, :].flatten(2, 3)
    else:
        y = _dense(toeplitz_2d(flat.unflatten(-1, (-1, stride)), (height, width)), x)
    return _restore(y, lead, v)


def _canonical(
    w: Tensor, v: Tensor, lead: torch.Size, v_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Weights (heads, distances) and values (batch, heads, length, dim) in the dtype to compute in.

    The axes that w varies over are heads, those before them are batch.
    """
    dtype = compute_dtype(w, v)
    v_dtype = dtype if v_dtype is None else v_dtype
    if w.dtype != dtype or v.dtype != v_dtype:  # a cast that changes nothing costs a microsecond
        w, v = w.to(dtype), v.to(v_dtype)
    if w.dim() == 2 and v.dim() == 4 and w.shape[0] == v.shape[1]:
        return w, v
    own = list(w.shape[:-1])
    while own and own[0] == 1:
        own.pop(0)
    batch, heads = lead[: len(lead) - len(own)], lead[len(lead) - len(own) :]
    distances = w.shape[-1]
    w = w.reshape(*own, distances).expand(*heads, distances).reshape(heads.numel(), distances)
    v = v.expand(*lead, *v.shape[-2:]).reshape(batch.numel(), heads.numel(), *v.shape[-2:])
    return w, v


def _restore(y: Tensor, lead: torch.Size, v: Tensor) -> Tensor:
    """Undo `_canonical` for a result: the leading shape and the dtype of the values."""
    if y.shape[:-2] != lead:
        y = y.reshape(*lead, *y.shape[-2:])
    return y if y.dtype == v.dtype else y.to(v.dtype)


def _dense(matrix: Tensor, v: Tensor) -> Tensor:
    """(heads, M, N) times (batch, heads, N, dim), as one wide product a head where that is faster.

    The plain product copies the matrix for every batch element, the wide one copies v.
    """
    batch, heads, n, dim = v.shape
    with exact(v):
        if n < 2 * dim or 4 * matrix.shape[-2] <= dim:
            return matrix @ v
        wide = matrix @ v.permute(1, 2, 0, 3).reshape(heads, n, batch * dim)
        return wide.unflatten(-1, (batch, dim)).permute(2, 0, 1, 3).contiguous()


def _use_triton(impl: str, w: Tensor, v: Tensor) -> bool:
    if impl != "triton":
        return impl == "auto" and v.is_cuda and ops.wins(w, v)
    if not ops.runs_on(v):
        raise ValueError(f"impl='triton' needs {ops.NEEDS}, v is on {v.device}; use impl='auto'")
    if torch.float64 in (v.dtype, w.dtype):
        raise ValueError(
            f"impl='triton' has no float64, v is {v.dtype} and w {w.dtype}; use impl='auto'"
        )
    return True


def _use_fft(impl: str, entries: int, length: int, v: Tensor) -> bool:
    if impl != "auto":
        check_choice("impl", impl, get_args(Impl))
        return impl == "fft"
    if not isinstance(length, int):
        return True  # exported for any length
    batch, heads, _, dim = v.shape
    columns = dim * (batch if isinstance(batch, int) else 64)  # exported for any batch: a usual one
    cost = _COSTS.get((v.device.type, v.dtype), _COSTS["cpu", v.dtype])
    return not cost.prefers_dense(entries, length, heads, columns)


def additive_parts(w: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """The weights of the vertical and of the horizontal distances: middle slices of w."""
    zero = w.shape[-1] // 2
    return w[..., zero - height + 1 : zero + height], w[..., zero - width + 1 : zero + width]


def _check_pair(w: Tensor, v: Tensor) -> None:
    check_floating("w", w)
    check_values("v", v)
    if w.device != v.device:
        raise ValueError(f"w is on {w.device} and v on {v.device}; move them to one device")


def _broadcast_lead(w: Tensor, heads: torch.Size, v: Tensor) -> torch.Size:
    """The leading shape of the result; `heads` is that of w."""
    lead = v.shape[:-2]
    if heads == lead[-1:]:
        return lead
    try:
        return torch.broadcast_shapes(heads, lead)
    except RuntimeError:
        raise ValueError(
            f"the heads of w and v do not match: {tuple(heads)} of w {tuple(w.shape)} do not "
            f"broadcast with {tuple(lead)} of v {tuple(v.shape)}"
        ) from None


def _check_shape(shape: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(shape, tuple | list) or len(shape) != 2:
        raise ValueError(f"shape must be (height, width), got {shape!r}")
    height, width = shape
    check_size("height", height)
    check_size("width", width)
    return height, width


def _check_weights_2d(w: Tensor, height: int, width: int) -> None:
    additive, full = 2 * max(height, width) - 1, (2 * height - 1, 2 * width - 1)
    fits = w.shape[-1] == additive if w.dim() in (1, 2) else w.dim() == 3 and w.shape[1:] == full
    if not fits:
        raise ValueError(
            f"for a {height}×{width} image w must be (heads, {additive}) for the additive bias or "
            f"(heads, {full[0]}, {full[1]}) for the full one; got shape {tuple(w.shape)}"
        )
