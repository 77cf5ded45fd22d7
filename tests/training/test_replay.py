"""Recorded steps against those that are launched one by one: on a GPU alone."""

import pytest
import torch
from safetensors.torch import load_file

from fastrpb.config import override
from fastrpb.dropout import Dropout
from fastrpb.parts import build, classify
from fastrpb.presets import preset, with_row
from fastrpb.replay import Replayed, own_stream
from fastrpb.train import train
from runs import PAIRS_OF_PAPERS
from samples import write_papers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda")


def test_a_shape_runs_then_is_recorded_then_replayed():
    calls, total = [], torch.zeros(3, device=DEVICE)

    def add(x):
        calls.append(len(x))
        total.add_(x.sum(0))
        return total.sum()

    with own_stream(DEVICE):
        replayed, expected = Replayed(add), 0.0
        for length in (2, 5, 2, 5, 2, 2):
            x = torch.rand(length, 3, device=DEVICE)
            expected += x.double().sum().item()
            assert replayed(x).item() == pytest.approx(expected, rel=1e-5)
    assert calls == [2, 5, 2, 5]


@pytest.mark.parametrize("compiled", [False, True])
def test_random_numbers_follow_the_seed(compiled):
    ones, drop = torch.ones(1000, device=DEVICE), Dropout(0.5)
    if compiled:
        torch.compiler.reset()
        drop.compile(fullgraph=True)
    with own_stream(DEVICE):
        replayed = Replayed(drop)
        draws = []
        for seed in (1, 2, 1, 3, 2):
            torch.manual_seed(seed)
            draws.append(replayed(ones))
    assert torch.equal(draws[0], draws[2])
    assert torch.equal(draws[1], draws[4])
    assert not torch.equal(draws[2], draws[3])


CELLS = [
    *[(row, position) for row in ("softmax", "sikf") for position in ("none", "fastrpb")],
    *[(row, "fastrpb") for row in ("dpfp", "elu1", "relu", "favor")],
    *[("sikf", position) for position in ("sinespe", "convspe", "rope")],
    *[("softmax", position) for position in ("sinespe", "convspe", "rpe", "t5", "alibi")],
]


@pytest.mark.parametrize(("row", "position"), CELLS)
@pytest.mark.parametrize("task", ["text", "retrieval"])
def test_every_cell_can_be_recorded(task, row, position):
    small = {"dim": 32, "layers": 2, "heads": 2, "mlp_dim": 32, "max_length": 200, "norm": "batch"}
    config = override(preset(task, *with_row(row), position), small)
    model = build(config).to(DEVICE)
    shape = (4, 2, 150) if task == "retrieval" else (4, 150)
    tokens = torch.randint(1, 255, shape, device=DEVICE, dtype=torch.uint8)
    lengths = torch.tensor([150, 149, 90, 10], device=DEVICE)
    mask = torch.arange(150, device=DEVICE) < lengths.unsqueeze(1)
    mask = mask.unsqueeze(1).expand(shape) if task == "retrieval" else mask

    def gradients(tokens, mask):
        with torch.autocast("cuda", torch.bfloat16):
            logits = classify(model, tokens, mask).float()
        logits.square().sum().backward()
        return logits.detach()

    outcomes = []
    with own_stream(DEVICE):
        replayed = Replayed(gradients)
        for _ in range(3):
            torch.manual_seed(5)
            model.zero_grad(set_to_none=False)
            logits = replayed(tokens, mask)
            outcomes.append([logits, *(p.grad.clone() for p in model.parameters())])
    first, recorded, again = outcomes
    # Atomic additions change the order of sums, and half precisions round.
    for x, y, z in zip(first, recorded, again, strict=True):
        size = x.norm().item()
        assert (y - x).norm().item() <= 0.02 * size + 1e-6
        assert (z - x).norm().item() <= 0.02 * size + 1e-6


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # the compiler would like it, float32 is asked
@pytest.mark.parametrize("changes", [{}, {"batch_size": 2, "accumulate": 2}])
def test_replayed_it_learns_the_same(changes, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTRPB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fastrpb.train._LENGTHS", 4)
    write_papers(tmp_path / "aan")
    config = override(preset("retrieval"), {**PAIRS_OF_PAPERS, "steps": 9, **changes})
    train(config, tmp_path / "plain", data_dir=tmp_path / "aan")
    replays = []
    original = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(original(graph))
    )
    train(override(config, {"compile": True}), tmp_path / "fast", data_dir=tmp_path / "aan")
    assert replays
    plain, fast = (load_file(tmp_path / x / "model.safetensors") for x in ("plain", "fast"))
    for name, x in plain.items():
        torch.testing.assert_close(fast[name], x, rtol=1e-3, atol=1e-4)
