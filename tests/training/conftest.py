import multiprocessing
from multiprocessing import forkserver

import pytest
import torch

from fastrpb.config import override, preset

SMALL = {"layers": 1, "dim": 16, "heads": 2, "mlp_dim": 16, "batch_size": 8, "steps": 30}

# Processes of the tests start in no time: what they need is imported once.
multiprocessing.set_forkserver_preload(["fastrpb.sweep"])
forkserver.ensure_running()


@pytest.fixture
def small():
    """A run of a second."""

    def config(**values):
        cell = {k: values.pop(k) for k in ("attention", "features", "position") if k in values}
        return override(preset("digits", **cell), {**SMALL, **values})

    return config


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums over two threads round otherwise than over one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
