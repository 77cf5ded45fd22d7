"""Triton's interpreter, so that the kernels run on the CPU: set up before triton is imported."""

import os


def use() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.runtime.interpreter import InterpreterBuilder  # noqa: PLC0415

    dot = InterpreterBuilder.create_dot

    def widened(handle):
        # The interpreter keeps bfloat16 as its bits, and multiplies those.
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return type(handle)(bits.view(np.float32), tl.float32)

    InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(
        self, widened(a), widened(b), *rest
    )
