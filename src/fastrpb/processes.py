"""Processes that start in no time and keep their memory, and signals that let them finish."""

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt
_SAME_WISH = 1.0  # seconds


def keep_freed_memory() -> None:
    """What tensors free stays with this process, for the next ones; no effect but with glibc.

    Else each large tensor is mapped anew and its pages are cleared when they are first touched: up
    to half of the time of a model on the CPU. It costs some memory, a tenth for CIFAR10's best, and
    is so in the main thread alone.
    """
    with suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def fresh_processes(module: str) -> ForkServerContext:
    """A context whose processes find a module imported, and nothing else of this process.

    Whatever asks for a GPU while it is imported must not open it: a process that is forked
    afterwards could not use it.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def start(process: BaseProcess) -> None:
    """Start a process of these; a terminal's Ctrl-C is neither for it nor for what starts it."""
    with ctrl_c_ignored():
        ensure_running()
    process.start()


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """What is started meanwhile inherits that: a terminal sends its Ctrl-C to all processes."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_with_parent() -> None:
    """From now on this process ends when the one that has started it does, however that ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait = lambda: (parent.join(), os._exit(1))  # noqa: E731
        threading.Thread(target=wait, daemon=True).start()


def ends() -> list[int]:
    """The signals by which a process is told to end, but Ctrl-C.

    Of a terminal that closes, `nohup` does not want to hear.
    """
    hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return [signal.SIGTERM, *[signal.SIGHUP] * hangs_up]


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Signals to end as numbers in a list, to be looked at; a second Ctrl-C ends at once.

    One wish may come as several signals: terminals and schedulers send theirs to all processes,
    and launchers hand them on to their own. So nothing but a Ctrl-C a second later is another one.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread gets signals
        return

    since = time.monotonic()

    def note(number: int, _: object) -> None:
        nonlocal since
        if not caught:
            since = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > since + _SAME_WISH:
            raise KeyboardInterrupt
        caught.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, *ends())}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
