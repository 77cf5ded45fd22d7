"""Processes that start in no time, from a server that has imported what they need."""

import multiprocessing
import os
from multiprocessing.context import ForkServerContext


def fresh_processes(module: str) -> ForkServerContext:
    """A context whose processes find a module imported, and nothing else of this process.

    Whatever asks for a GPU while it is imported must not open it: a process that is forked
    afterwards could not use it.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context
