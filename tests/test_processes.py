import platform
import resource

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
