"""The command `fastrpb` from its first moment, beside the package, which imports torch at once.

That takes a second, in which there is nothing to save, and in which a KeyboardInterrupt may surface
as anything: as a long traceback, or in C++ as an abort.
"""

import signal


def main() -> None:
    """Run a command; a Ctrl-C before it can begin just ends the process."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else something that starts us has its own wishes
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fastrpb.__main__ import main as run  # noqa: PLC0415

    signal.signal(signal.SIGINT, before)
    run()
