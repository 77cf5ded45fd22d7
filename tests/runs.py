"""Runs of a second."""

import os
import signal
from dataclasses import asdict

import torch
from safetensors.torch import load_file

from fastrpb.config import RunConfig, override
from fastrpb.presets import preset

SIZE = {"layers": 2, "dim": 16, "heads": 2, "mlp_dim": 16, "filters": 2, "dropout": 0.1}
PARTS = {"pooling": "cls", "absolute": "learned", "norm": "layer"}
SMALL = {**SIZE, **PARTS, "batch_size": 8, "steps": 30}
# A pair a step, at a rate that moves the weights; ε keeps the rounding of a zero gradient small.
PAIRS_OF_PAPERS = {
    **{"layers": 2, "dim": 16, "mlp_dim": 16, "dropout": 0.0, "max_length": 50, "batch_size": 1},
    **{"learning_rate": 1e-2, "schedule": "constant", "warmup": 0, "eps": 1e-3},
}


def small(**values) -> RunConfig:
    cell = {k: values.pop(k) for k in ("attention", "features", "position") if k in values}
    return override(preset("digits", **cell), {**SMALL, **values})


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


def record_of(config):
    """That of a finished run; its numbers all differ."""
    test = {"accuracy": 0.5, "f1": 0.25}
    numbers = {"seconds": 3.0, "peak_memory_bytes": 7 * 2**20, "metrics": {"test": test}}
    numbers |= {"steps": 2, "tokens_per_second": 4321.0}
    made = {"device": "cpu", "versions": {"fastrpb": "0", "torch": "2"}, "revision": None}
    return {"name": "x", "config": asdict(config), **numbers, **made}


def stop_at(step):
    def stop(progress):
        if progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop
