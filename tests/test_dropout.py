"""Dropout by coins, compiled: by Triton's kernel on a GPU if there is one, else interpreted."""

import pytest
import torch
from torch import nn
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from fastrpb import Classifier, ModelConfig, dropout
from fastrpb.dropout import Dropout
from on_triton import DEVICE, poisoned, rand  # noqa: F401, a fixture

pytest.importorskip("fastrpb.kernels.coins", reason="needs triton")

SIDES = 2**16
LANES = 8  # coins of one call of the generator


@pytest.fixture
def anywhere(monkeypatch):
    """Compiled, by coins on the CPU too."""
    torch.compiler.reset()
    monkeypatch.setattr(dropout, "_compiles_for_gpu", lambda x: torch.compiler.is_compiling())


def compiled(function, **options):
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


def coins(*size, dropped, seed=(1, 2)):
    *lead, last = size
    size = [*lead, -(-last // LANES)]
    bits = torch.ops.fastrpb.coins_triton(torch.tensor(seed, device=DEVICE), size, dropped)
    return dropout._shown(bits, last)


def sigmas(keep, p):
    """How far the mean of coins is from p, in standard deviations of it."""
    return ((keep.double().mean() - p) * (keep.numel() / (p * (1 - p))) ** 0.5).abs().item()


def correlation(x, y, p):
    """Of coins that are kept with p, in standard deviations of that of independent ones."""
    x, y = ((z.double() - p) / (p * (1 - p)) ** 0.5 for z in (x.flatten(), y.flatten()))
    return ((x * y).sum() / x.numel() ** 0.5).abs().item()


@pytest.mark.parametrize("dropped", [0, 1, 6554, 32768, 65535, SIDES])
def test_the_rate(dropped):
    keep, p = coins(2**19, dropped=dropped), 1 - dropped / SIDES
    assert sigmas(keep, p) < 5 if 0 < p < 1 else keep.float().mean() == p


def test_coins_are_independent():
    keep, p = coins(2**19, dropped=13107), 1 - 13107 / SIDES
    for distance in (1, 2, 3, LANES, 1024, LANES * 1024):
        assert correlation(keep[distance:], keep[:-distance], p) < 5
    lanes = keep.view(-1, LANES)
    for i in range(LANES):
        assert sigmas(lanes[:, i], p) < 5
        for j in range(i):
            assert correlation(lanes[:, i], lanes[:, j], p) < 5


def test_seeds():
    """Both words count, and equal seeds give equal coins, also of a larger tensor."""
    a = coins(10_000, dropped=32768)
    assert torch.equal(a, coins(100, 200, dropped=32768).flatten()[:10_000])
    for seed in ((1, 3), (3, 2), (2, 1)):
        assert correlation(a, coins(10_000, dropped=32768, seed=seed), 0.5) < 5


@pytest.mark.parametrize("size", [(0,), (3, 0, 5), (1,), (7, 13), (3, 8191), (2, 4096)])
def test_any_size(size):
    *lead, last = size
    row = -(-last // LANES) * LANES  # whole bytes
    longer = coins(2**16, dropped=32768)[: torch.Size(lead).numel() * row]
    assert torch.equal(coins(*size, dropped=32768), longer.view(*lead, row)[..., :last])


def test_the_operator_is_registered_correctly():
    seed = torch.tensor([1, 2], device=DEVICE)
    opcheck(torch.ops.fastrpb.coins_triton.default, (seed, [3, 5], 6554))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(anywhere, dtype, dynamic):
    """Zeros or x/(1-p'), p' = 6554/2¹⁶ where p = 0.1; the same for the gradients; seeded."""
    run = compiled(Dropout(0.1), dynamic=dynamic)
    x = rand(37, 41, dtype=dtype).requires_grad_()
    torch.manual_seed(1)
    y = run(x)
    scale = 1 / (1 - 6554 / SIDES)
    assert y.dtype == dtype
    assert 0.8 < (y != 0).double().mean() < 0.99
    torch.testing.assert_close(y, torch.where(y != 0, x * scale, 0), rtol=0, atol=0)
    (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(g, torch.where(y != 0, torch.ones_like(x) * scale, 0))
    assert not torch.equal(run(x), y)
    torch.manual_seed(1)
    assert torch.equal(run(x), y)


def test_equal_calls_are_drawn_apart(anywhere):
    drop = Dropout(0.5)
    x = torch.ones(10_000, device=DEVICE, requires_grad=True)
    a, b = compiled(lambda x: (drop(x), drop(x)))(x)
    assert correlation(a != 0, b != 0, 0.5) < 5
    (g,) = torch.autograd.grad((a + 3 * b).sum(), x)
    torch.testing.assert_close(g, a + 3 * b)


def test_only_the_coins_are_kept_for_the_gradients(anywhere):
    """Also where torch might keep what it made of them instead: between products."""
    kept = []

    def keep(x):
        kept.append((x.dtype, tuple(x.shape)))
        return x

    model = nn.Sequential(nn.Linear(16, 40), Dropout(0.5), nn.Linear(40, 16), Dropout(0.5))
    # What Inductor keeps, too: that partition into passes which keeps the least.
    run = torch.compile(model.to(DEVICE), backend="aot_eager_decomp_partition", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run(rand(30, 16))
    assert (torch.uint8, (30, 5)) in kept
    assert (torch.uint8, (30, 2)) in kept
    assert not [x for x in kept if x[0] == torch.bool]


@pytest.mark.parametrize("inside", [False, True])
def test_checkpoints_draw_the_same_again(anywhere, inside):
    drop, x = Dropout(0.5), torch.ones(1000, device=DEVICE, requires_grad=True)
    part = (lambda x: drop(x).sin()) if inside else compiled(lambda x: drop(x).sin())

    def run(x):
        return checkpoint(part, x, use_reentrant=False)

    y = compiled(run)(x) if inside else run(x)
    (g,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y != 0, g != 0)


def same(function, wanted, x):
    results = []
    for f in (function, wanted):
        torch.manual_seed(1)
        results.append(f(x))
    return torch.equal(*results)


@pytest.mark.parametrize("p", [0.0, 0.1, 1.0])
def test_eager_is_that_of_torch(p):
    x = rand(100, 10)
    for train in (False, True):
        assert same(Dropout(p).train(train), nn.Dropout(p).train(train), x)


@pytest.mark.parametrize("p", [0.0, 1e-6, 1 - 1e-6, 1.0])
def test_what_no_coin_can_tell_from_0_or_1_is_that_of_torch(anywhere, p):
    assert same(compiled(Dropout(p)), compiled(nn.Dropout(p)), rand(100, 10))


def test_compiled_otherwise_it_is_that_of_torch(anywhere, monkeypatch):
    x = rand(100, 10)
    assert same(compiled(Dropout(0.5).eval()), nn.Identity(), x)
    assert same(compiled(Dropout(0.5)), compiled(nn.Dropout(0.5)), x[0, 0])
    y = x.clone()
    assert compiled(Dropout(0.5, inplace=True))(y) is y
    assert not torch.equal(x, y)
    if DEVICE == "cpu":
        monkeypatch.undo()
        assert same(compiled(Dropout(0.5)), compiled(nn.Dropout(0.5)), x)


def test_models_are_made_of_it():
    config = ModelConfig(vocab_size=10, max_length=8, num_classes=2, dim=8, heads=2, layers=1)
    model = Classifier(config)
    found = [x for x in model.modules() if isinstance(x, nn.Dropout)]
    assert len(found) == 3
    assert all(type(x) is Dropout for x in found)
    assert repr(found[0]) == repr(nn.Dropout(config.dropout))
    assert not Dropout().state_dict()
