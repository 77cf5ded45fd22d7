"""`make bench-model`: an attention layer for every attention and every positional encoding."""

from itertools import product
from typing import get_args

import torch

from fastrpb.bench.cpu import load_libraries
from fastrpb.bench.measure import Rows, Run, against_length, bar, device, growth, medians, peak_of
from fastrpb.model import Block
from fastrpb.model_config import ON_LOGITS, Attention, Features, ModelConfig, Position
from fastrpb.presets import COLUMNS, ROWS, row

LENGTHS = [256, 512, 1024, 2048, 4096, 8192]

Pair = dict[str, str]


def bench_model() -> dict[str, Rows]:
    """Time and peak memory against the length, how they grow, and where linear attention wins."""
    rows = {
        _name(pair): against_length(layer_cost, pair, LENGTHS, device())
        for pair in bar(_pairs(), "layers")
    }
    return {
        "attention layer": [{"layer": name, **row} for name, part in rows.items() for row in part],
        "time ~ N^a": [
            {"layer": name, **{kind: growth(part, f"{kind} ms") for kind in ("forward", FULL)}}
            for name, part in rows.items()
        ],
        "linear against softmax, forward+backward": _crossings(rows),
    }


FULL = "forward+backward"


def layer_cost(pair: Pair, n: int, backward: bool) -> tuple[float, int]:
    """Seconds and peak bytes of one attention layer, batch 1, 8 heads of 32."""
    load_libraries()
    _layer_run(pair, 16, backward)()
    run = _layer_run(pair, n, backward)
    peak = peak_of(run, device())  # of the first run: later ones find the memory of earlier ones
    return medians({"run": run}, repeats=3)["run"], peak


def _layer_run(pair: Pair, n: int, backward: bool) -> Run:
    height = 2 ** (n.bit_length() // 2)  # an image of n pixels, for n a power of two
    image = (height, n // height)
    config = ModelConfig(vocab_size=1, max_length=n, image=image, pooling="mean", **pair)  # pyright: ignore[reportArgumentType]
    layer = Block(config).attention.to(device())
    x = torch.randn(1, n, config.dim, device=device(), requires_grad=backward)

    def train() -> None:
        layer.zero_grad()
        layer(x).sum().backward()

    return train if backward else torch.no_grad()(lambda: layer(x))


def _pairs() -> list[Pair]:
    """Every attention with every positional encoding that it can have."""
    found = []
    for attention, features, position in product(
        get_args(Attention), get_args(Features), get_args(Position)
    ):
        once = attention == "linear" or features == "sikf"  # softmax has no features
        possible = attention == "softmax" or position not in ON_LOGITS
        if once and possible:
            found.append({"attention": attention, "features": features, "position": position})
    return found


def _name(pair: Pair) -> str:
    name = ROWS[row(pair["attention"], pair["features"])]
    return name if pair["position"] == "none" else f"{name} + {COLUMNS[pair['position']]}"


def _crossings(rows: dict[str, Rows]) -> Rows:
    """From which measured length on each linear layer is faster than softmax without positions."""
    base = {row["length"]: row[f"{FULL} ms"] for row in rows[ROWS["softmax"]]}
    found: Rows = []
    for name, part in rows.items():
        if not name.startswith(ROWS["softmax"]):
            times = {row["length"]: row[f"{FULL} ms"] for row in part}
            wins = [n for n in LENGTHS if n in times and times[n] < base.get(n, torch.inf)]  # pyright: ignore[reportOperatorIssue]
            first = next((n for i, n in enumerate(LENGTHS) if wins == LENGTHS[i:]), "-")
            found.append({"layer": name, "faster than softmax from N =": first})
    return found
