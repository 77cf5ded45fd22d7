import importlib.util

import pytest
import torch

import interpreter
from fastrpb.config import override, preset

SIZE = {"layers": 1, "dim": 16, "heads": 2, "mlp_dim": 16, "filters": 2, "dropout": 0.1}
SMALL = {**SIZE, "pooling": "cls", "absolute": "learned", "batch_size": 8, "steps": 30}

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    interpreter.use()


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
    """A run of a second."""

    def config(**values):
        cell = {k: values.pop(k) for k in ("attention", "features", "position") if k in values}
        return override(preset("digits", **cell), {**SMALL, **values})

    return config
