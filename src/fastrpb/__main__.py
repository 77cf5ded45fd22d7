"""A first look at the core: `python -m fastrpb`."""

import sys
import time

import torch

from fastrpb import toeplitz, toeplitz_matmul


def main() -> None:
    """Print one W, then the time and the error of W·v against the length."""
    sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    torch.manual_seed(0)
    print("W[n, m] = w_{m-n}, here w_d = d:\n")
    print(toeplitz(torch.arange(-4, 5)), "\n")
    print("W·v for 8 heads of 64 without forming W, float32:\n")
    print(f"{'length':>8} {'dense ms':>10} {'auto ms':>10} {'error of auto':>15}")
    for n in (64, 256, 1024, 4096, 16384):
        w, v = torch.randn(8, 2 * n - 1), torch.randn(1, 8, n, 64)
        fast, y = _timed(lambda: toeplitz_matmul(w, v))  # noqa: B023
        if n <= 4096:
            dense, _ = _timed(lambda: toeplitz_matmul(w, v, impl="dense"))  # noqa: B023
            exact = toeplitz_matmul(w.double(), v.double(), impl="dense")
            error = f"{(y - exact).norm() / exact.norm():15.1e}"
            print(f"{n:8} {dense:10.2f} {fast:10.2f} {error}")
        else:
            print(f"{n:8} {'(8 GiB)':>10} {fast:10.2f}")


def _timed(run) -> tuple[float, torch.Tensor]:
    """Milliseconds of the best of seven calls, and the result."""
    seconds, result = [], run()
    for _ in range(7):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds), result


if __name__ == "__main__":
    main()
