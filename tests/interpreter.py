"""Triton's interpreter, so that the kernels run on the CPU: to be set up before triton is imported.

It keeps bfloat16 as its bits, rounds to it by cutting them off, and multiplies them as integers;
here it rounds and multiplies like a GPU.
"""

import os


def use() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle  # noqa: PLC0415

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounding_cast(self, src, dst_type):
        if dst_type.scalar != tl.bfloat16 or src.dtype.scalar == tl.bfloat16:
            return cast(self, src, dst_type)
        bits = np.ascontiguousarray(src.data, dtype=np.float32).view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return TensorHandle(nearest.astype(np.uint16), tl.bfloat16)

    def rounding_dot(self, a, b, *rest):
        return dot(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = rounding_dot
    InterpreterBuilder.cast_impl = rounding_cast
