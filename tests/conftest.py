import importlib.util

import pytest
import torch

import interpreter

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    interpreter.use()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
