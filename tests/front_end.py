"""Puts the kernels through Triton's compiler as far as that needs no GPU; a program of its own.

The interpreter, in which the other tests run them, does not know all that the compiler refuses.
"""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from fastrpb import DPFP, FavorPlus, elu1, fused_attention, kernels, linear_attention, relu, sikf
from fastrpb.kernels import ops
from fastrpb.toeplitz import toeplitz_matmul, toeplitz_matmul_2d

MODULES = [import_module(f"fastrpb.kernels.{x.name}") for x in iter_modules(kernels.__path__)]
TARGET = GPUTarget("cuda", 90, 32)
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
seen: set[tuple] = set()


def front_end(source: ASTSource, options: dict[str, Any]) -> None:
    """The kernel as Triton's first language."""
    backend = make_backend(TARGET)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    source.make_ir(TARGET, parsed, functions, modules, context)


def instead_of_launches(compile_one: Callable[[ASTSource, dict[str, Any]], None]) -> None:
    """From now on, hand each kernel and its launch options to a compiler, once."""

    def launch(kernel: Any, grid: tuple[int, ...], *args: Tensor | float, **options: Any) -> None:
        names = kernel.arg_names
        kinds = [f"*{NAMES[x.dtype]}" if isinstance(x, Tensor) else _number(x) for x in args]
        constants = {name: x for name, x in options.items() if name in names}
        signature = dict(zip(names, kinds, strict=False)) | dict.fromkeys(constants, "constexpr")
        key = kernel, *signature.values(), *options.values()
        if key in seen:
            return
        seen.add(key)
        # As Triton does: what is a multiple of 16 is known to be one, and loads are wide.
        even = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(args) if _is_even(x)}
        rest = {name: x for name, x in options.items() if name not in names}
        compile_one(ASTSource(kernel, signature, constants, even), rest)

    for module in MODULES:
        if hasattr(module, "launch"):
            module.launch = launch
    ops.runs_on = lambda x: True


def _number(x: float) -> str:
    return "fp32" if isinstance(x, float) else "i32"


def _is_even(x: Tensor | float) -> bool:
    return isinstance(x, Tensor) or (isinstance(x, int) and x % 16 == 0)


def main() -> None:
    instead_of_launches(front_end)
    for dtype in (torch.bfloat16, torch.float32):
        for phi in (sikf, elu1, relu, DPFP(), FavorPlus(20, 40)):
            q, k, v = (torch.zeros(2, 2, 300, 20, dtype=dtype, requires_grad=True) for _ in "qkv")
            for causally in (False, True):
                if fused_attention._fits(phi, q, k, v, causally):
                    mask = torch.ones(2, 300, dtype=torch.bool)
                    y = linear_attention(
                        q, k, v, phi=phi, mask=mask, causal=causally, plus=v, impl="triton"
                    )
                    y.sum().backward()
    for n, dim in ((300, 16), (300, 8), (6000, 16)):
        w = torch.zeros(2, 2 * n - 1, requires_grad=True)
        v = torch.zeros(2, 2, n, dim, dtype=torch.bfloat16, requires_grad=True)
        toeplitz_matmul(w, v, impl="triton").sum().backward()
    v = torch.zeros(2, 2, 16 * 16, 16, dtype=torch.bfloat16, requires_grad=True)
    for shape in ((2, 31), (2, 31, 31)):
        w = torch.zeros(shape, requires_grad=True)
        toeplitz_matmul_2d(w, v, (16, 16), impl="triton").sum().backward()
    torch.ops.fastrpb.coins_triton(torch.zeros(2, dtype=torch.int64), [100], 100)
    print(len(seen), "kernels")


if __name__ == "__main__":
    main()
