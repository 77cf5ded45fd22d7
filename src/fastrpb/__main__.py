"""The entry of the command `fastrpb`, also by `python -m`, `accelerate launch -m`, `torchrun -m`.

It meets what can go wrong around a command: missing packages, closed outputs, signals, and the
mistakes of users, each of which is one sentence and exit code 2, no traceback.
"""

import atexit
import os
import signal
import sys
from typing import NoReturn

try:
    from fastrpb.cli import app, complain
except ModuleNotFoundError as missing:
    how = "pip install '.[train]' in a clone of fastrpb"
    print(f"fastrpb: the command needs the package {missing.name}: {how}", file=sys.stderr)
    sys.exit(2)

from fastrpb.files import reason_of
from fastrpb.processes import ends

EXTRAS = {"accelerate": "train", "filelock": "train", "safetensors": "model"}
EXTRAS |= {"matplotlib": "report", "optuna": "sweep", "scipy": "bench", "triton": "gpu"}


def main() -> None:
    """Run a command."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="replace")
    for number in ends():
        signal.signal(number, _end)
    atexit.register(_leave_signals)
    try:
        app()
    except (OSError, ValueError) as error:
        complain(reason_of(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as missing:
        if missing.name not in EXTRAS:
            raise
        how = f"pip install '.[{EXTRAS[missing.name]}]' in a clone of fastrpb"
        complain(f"this needs the package {missing.name}: {how}")
    sys.exit(2)


def _end(number: int, _: object) -> NoReturn:
    """Ended by a signal, as by Ctrl-C: half-written files go, and so do the workers."""
    for other in ends():
        signal.signal(other, signal.SIG_IGN)  # sent again, it would interrupt just that
    sys.exit(128 + number)


def _leave_signals() -> None:
    """All is done: one more of them ends the process, and needs no traceback."""
    for number in (signal.SIGINT, *ends()):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()
