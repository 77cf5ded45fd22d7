"""What the tests of the Triton kernels share: on a GPU if there is one, else in the interpreter."""

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def poisoned():
    """Fresh memory is NaN, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def error(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def masks(batch: int, length: int) -> Tensor:
    """Some tokens of each sequence, none of the last."""
    mask = torch.rand(batch, length, device=DEVICE) < 0.6
    mask[-1] = False
    return mask
