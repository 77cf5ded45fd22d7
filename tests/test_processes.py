import platform
import resource
import signal
import subprocess
import sys

import pytest
import torch

from apart import APART
from fastrpb.processes import keep_freed_memory

SIZE = 256 * 2**20


def _faults_of_another_tensor(pipe):
    """Pages that are mapped for a tensor where equal ones were before."""
    keep_freed_memory()
    for _ in range(8):  # their holes must become large enough for one that is to be aligned
        torch.ones(SIZE, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(SIZE, dtype=torch.uint8)
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_used_again():
    mine, its = APART.Pipe()
    process = APART.Process(target=_faults_of_another_tensor, args=(its,))
    process.start()
    assert mine.recv() < SIZE / resource.getpagesize() / 100
    process.join()


# The finder is asked for torch when the command imports it.
INTERRUPTED = """
import os, signal, sys
class Finder:
    def find_spec(name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
signal.signal(signal.SIGINT, {handler})
from fastrpb_command import main
sys.argv = ["fastrpb", "--version"]
main()
"""


@pytest.mark.parametrize(
    ("handler", "code"), [("signal.default_int_handler", -signal.SIGINT), ("signal.SIG_IGN", 0)]
)
def test_ctrl_c_before_a_command_begins_is_no_traceback(handler, code):
    program = INTERRUPTED.format(handler=handler)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (run.returncode, run.stderr) == (code, b"")
