"""What the results must equal, and by how much they may differ: the definition in float64."""

import math

import torch
from torch import Tensor


def assert_product(y: Tensor, matrix: Tensor, v: Tensor, size: int) -> None:
    """`y` is W·v, W given densely, up to the rounding of a transform of about `size` entries.

    An FFT errs by about eps·log2(size) of the norm that passes through it, here at most
    ‖W‖·‖v‖ (Frobenius norms: a bound, since the circulant holds each diagonal of W once more).
    Rounding to the result's dtype adds eps of that dtype.
    """
    expected = matrix.double() @ v.double()
    assert y.shape == expected.shape
    assert y.dtype == v.dtype
    inner = torch.finfo(
        torch.float64 if torch.float64 in (matrix.dtype, v.dtype) else torch.float32
    )
    norm = torch.linalg.matrix_norm
    rounding = inner.eps * (2 + math.log2(size)) * 2**0.5 * norm(matrix.double()) * norm(v.double())
    rounding = rounding + torch.finfo(y.dtype).eps * norm(expected) + torch.finfo(y.dtype).tiny
    error = norm(y.double() - expected)
    assert (error <= rounding).all(), f"error {error.max():.3g}, allowed {rounding.min():.3g}"


def assert_same_gradients(fast, exact, *inputs: Tensor) -> None:
    """Gradients of the float32 function `fast` match those of the float64 function `exact`.

    Both for a random direction; the tolerance is float32 rounding of sums over all positions.
    """
    narrow = [x.detach().requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    y = fast(*narrow)
    direction = torch.randn_like(y)
    got = torch.autograd.grad(y, narrow, direction)
    wanted = torch.autograd.grad(exact(*wide), wide, direction.double())
    for x, a, b in zip(inputs, got, wanted, strict=True):
        assert a.shape == x.shape
        scale = b.norm() + direction.norm()
        tolerance = torch.finfo(torch.float32).eps * (4 + math.log2(x.numel())) * scale
        assert (a.double() - b).norm() <= tolerance, f"{(a.double() - b).norm() / scale:.3g}"
