import importlib.util

import pytest
import torch

import interpreter
import runs

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    interpreter.use()


collect_ignore = ["front_end.py", "shared_memory.py"]  # programs, which need triton


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def one_thread():
    """Sums over two threads round otherwise than over one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small():
    return runs.small
