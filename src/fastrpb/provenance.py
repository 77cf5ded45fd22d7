"""What a run is computed on and with: the machine, the versions, the commit, the memory it took."""

import os
import platform
import resource
import subprocess
from pathlib import Path
from typing import Any

import torch

from fastrpb import __version__


def provenance(device: torch.device) -> dict[str, Any]:
    """What a record was computed on and with."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "cores": os.cpu_count(),
        "versions": {
            "fastrpb": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "revision": _revision(),
    }


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak: of the allocator on CUDA, of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _revision() -> str | None:
    """The commit of the source that runs, with "+" where it was changed; None outside a clone."""
    git = ["git", "-C", str(Path(__file__).parent)]
    ours = [*git, "ls-files", "--error-unmatch", Path(__file__).name]  # not of a clone around us
    describe = [*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        subprocess.run(ours, capture_output=True, check=True)
        done = subprocess.run(describe, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
