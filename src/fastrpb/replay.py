"""Launches that a GPU records once for each shape, and then replays.

A step of a small model is a thousand launches, which take the CPU longer than the GPU needs to
compute them. Replayed, they are one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch
from torch import Tensor

from fastrpb.files import first_line


class Replayed:
    """A function of tensors on a GPU, recorded for each of their shapes and then replayed.

    The function may change other tensors in place (gradients, averages) as long as they stay where
    they are, and draw random numbers. It must not read from the GPU. Its first call for a shape
    runs as it is: kernels are compiled and buffers made then. The second is recorded. All
    recordings share the memory of the largest.

    The stream must not be the default one: see `own_stream`.
    """

    def __init__(self, function: Callable[..., Tensor]):
        self._function = function
        self._recorded: dict[tuple[torch.Size, ...], Callable[..., Tensor] | None] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, *inputs: Tensor) -> Tensor:
        shapes = tuple(x.shape for x in inputs)
        if shapes not in self._recorded:
            self._recorded[shapes] = None
            return self._function(*inputs)
        replay = self._recorded[shapes]
        if replay is None:
            replay = self._recorded[shapes] = self._record(inputs)
        return replay(*inputs)

    def _record(self, inputs: tuple[Tensor, ...]) -> Callable[..., Tensor]:
        buffers = [torch.empty_like(x) for x in inputs]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the first call left there cannot be used in a recording
        graph.capture_begin(pool=self._pool)
        try:
            result = self._function(*buffers)
            graph.capture_end()
        except RuntimeError as error:
            with suppress(RuntimeError):  # it would hide what went wrong
                graph.capture_end()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(
                f"the GPU cannot record a step: {first_line(error)}; remove the run's folder and "
                "begin again with --no-compile"
            ) from error

        def replay(*inputs: Tensor) -> Tensor:
            for buffer, x in zip(buffers, inputs, strict=True):
                buffer.copy_(x)
            graph.replay()
            return result.clone()

        return replay


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """A stream other than the default one, which cannot be recorded; the same in every call."""
    before, stream = torch.cuda.current_stream(device), _stream(device)
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
