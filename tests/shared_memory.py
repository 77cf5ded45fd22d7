"""Compiles the kernels that need most shared memory for another GPU; a program of its own.

    python shared_memory.py CAPABILITY KILOBYTES CHANNELS

ends with an error if one does not fit with any number of stages. Channels are those of half
precision; half as many in float32.
"""

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastrpb import FavorPlus, linear_attention, sikf
from fastrpb.toeplitz import toeplitz_matmul
from front_end import instead_of_launches

CAPABILITY, KILOBYTES, CHANNELS = map(int, sys.argv[1:])
WIDEST = {"_product", "_query_gradients", "_key_gradients", "_output", "_feature_gradients"}
fitting: list[str] = []


def fit(source: ASTSource, options: dict[str, Any]) -> None:
    name = source.fn.__name__
    if name not in WIDEST:
        return
    target, needed = GPUTarget("cuda", CAPABILITY, 32), 0
    for stages in range(options["num_stages"], 0, -1):  # as `launch` does
        with_stages = {**options, "num_stages": stages}
        needed = triton.compile(source, target=target, options=with_stages).metadata.shared
        if needed <= KILOBYTES * 1024:
            fitting.append(name)
            return
    sys.exit(f"{name} of {source.constants} needs {needed} bytes")


def main() -> None:
    instead_of_launches(fit)
    for dtype, dim in ((torch.bfloat16, CHANNELS), (torch.float32, CHANNELS // 2)):
        q, k, v = (torch.zeros(1, 1, 256, dim, dtype=dtype, requires_grad=True) for _ in "qkv")
        for phi in (sikf, FavorPlus(dim, 128)):
            linear_attention(q, k, v, phi=phi, plus=v, impl="triton").sum().backward()
        linear_attention(q, k, v, phi=sikf, plus=v, causal=True, impl="triton")
    w = torch.zeros(16, 2 * 1024 - 1)
    toeplitz_matmul(w, torch.zeros(16, 16, 1024, 32, dtype=torch.bfloat16), impl="triton")
    print(len(fitting), "kernels")


if __name__ == "__main__":
    main()
