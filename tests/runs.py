"""Runs of a second."""

from fastrpb.config import RunConfig, override, preset

SIZE = {"layers": 1, "dim": 16, "heads": 2, "mlp_dim": 16, "filters": 2, "dropout": 0.1}
PARTS = {"pooling": "cls", "absolute": "learned", "norm": "layer"}
SMALL = {**SIZE, **PARTS, "batch_size": 8, "steps": 30}


def small(**values) -> RunConfig:
    cell = {k: values.pop(k) for k in ("attention", "features", "position") if k in values}
    return override(preset("digits", **cell), {**SMALL, **values})
