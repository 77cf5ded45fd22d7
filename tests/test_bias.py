import copy
import io
import math
import pickle
from functools import partial
from itertools import product

import pytest
import torch

from fastrpb import FastRPB, FastRPB2d, init, toeplitz
from oracles import assert_product, assert_same_gradients

FLAGS = [{}, {"causal": True}, {"symmetric": True}]
BIASES_2D = [
    lambda **k: FastRPB2d(3, 4, 4, **k),
    lambda **k: FastRPB2d(3, 3, 5, **k),
    lambda **k: FastRPB2d(3, 4, 4, kind="full", **k),
    lambda **k: FastRPB2d(3, 5, 3, kind="full", **k),
    lambda **k: FastRPB2d(3, 4, 5, symmetric=True, **k),
    lambda **k: FastRPB2d(3, 5, 3, kind="full", symmetric=True, **k),
]
ALL = [*BIASES_2D, *(partial(FastRPB, 3, 20, **f) for f in FLAGS)]


def distances(bias):
    """How far its weights reach, by definition."""
    if isinstance(bias, FastRPB):
        first = 0 if bias.symmetric else 1 - bias.max_length
        return torch.arange(first, first + bias.w.shape[1]).abs()
    dy, dx = (torch.arange(1 - size, size) for size in (bias.height, bias.width))
    if bias.kind == "additive":
        d = max(dy, dx, key=len)
        return d[d >= 0] if bias.symmetric else d.abs()
    dx = dx[dx >= 0] if bias.symmetric else dx
    return (dy.unsqueeze(1) ** 2 + dx**2).sqrt()


def tokens(bias):
    return bias.max_length if isinstance(bias, FastRPB) else bias.height * bias.width


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("length", [1, 2, 63, 100])
def test_forward_is_its_matrix(length, prefix, flags):
    rpb = FastRPB(3, 100, prefix=prefix, init=init.normal(1.0), **flags)
    v = torch.randn(2, 3, prefix + length, 4)
    assert_product(rpb(v), rpb.matrix(prefix + length), v, 2 * length)
    assert_product(rpb(v[0]), rpb.matrix(prefix + length), v[0], 2 * length)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("bias", BIASES_2D)
def test_forward_2d_is_its_matrix(bias, prefix):
    rpb = bias(prefix=prefix, init=init.normal(1.0))
    n = prefix + rpb.height * rpb.width
    v = torch.randn(2, 3, n, 4)
    assert_product(rpb(v), rpb.matrix(n), v, 4 * n)


@pytest.mark.parametrize("bias", ALL)
def test_a_threshold_takes_its_amount_off_every_weight(bias):
    torch.manual_seed(0)
    plain = bias(init=init.normal(1.0))
    torch.manual_seed(0)
    rpb = bias(init=init.normal(1.0), threshold=0.3)
    assert torch.equal(plain.w, rpb.w)
    with torch.no_grad():
        plain.w.copy_(plain.w.sign() * (plain.w.abs() - 0.3).clamp(min=0))
    n = tokens(rpb)
    v = torch.randn(2, 3, n, 4)
    torch.testing.assert_close(rpb(v), plain(v))
    torch.testing.assert_close(rpb.matrix(n), plain.matrix(n))


@pytest.mark.parametrize("bias", ALL)
def test_dropout_drops_weights_for_the_whole_batch_while_training(bias):
    rpb = bias(init=lambda w, *_: w.fill_(1.0), dropout=0.25)
    n = tokens(rpb)
    v = torch.randn(1, 3, n, 4).expand(2, -1, -1, -1)
    torch.manual_seed(0)
    dropped = rpb(v)
    torch.testing.assert_close(dropped[0], dropped[1])
    torch.manual_seed(0)
    torch.testing.assert_close(dropped, rpb.matrix(n) @ v)
    weights = rpb.weights(n) if isinstance(rpb, FastRPB) else rpb.weights()
    kept = weights[weights != 0]
    assert 0 < len(kept) < weights.numel()
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.75))
    rpb.eval()
    assert torch.equal(rpb(v), rpb(v))


@pytest.mark.parametrize("bias", ALL)
def test_an_envelope_multiplies_every_weight_by_its_decay(bias):
    rpb, plain = bias(envelope=(0.5, 8.0)), bias()
    scale = torch.tensor([0.5, 2.0, 8.0]).view(3, *[1] * (plain.w.dim() - 1))
    with torch.no_grad():
        rpb.w.normal_()
        plain.w.copy_(rpb.w * torch.exp(-distances(plain) / scale))
    n = tokens(rpb)
    v = torch.randn(2, 3, n, 4)
    torch.testing.assert_close(rpb(v), plain(v))
    torch.testing.assert_close(rpb.matrix(n), plain.matrix(n))
    assert rpb.bfloat16().matrix(n).dtype == torch.bfloat16


@pytest.mark.parametrize("bias", ALL)
def test_the_envelope_comes_before_the_threshold(bias):
    rpb, plain = bias(envelope=(1, 8), threshold=0.3), bias(threshold=0.3)
    scale = torch.tensor([1.0, 8**0.5, 8.0]).view(3, *[1] * (plain.w.dim() - 1))
    with torch.no_grad():
        rpb.w.normal_()
        plain.w.copy_(rpb.w * torch.exp(-distances(plain) / scale))
    torch.testing.assert_close(rpb.matrix(tokens(rpb)), plain.matrix(tokens(rpb)))


@pytest.mark.parametrize("fill", [init.local(1, 4), init.normal(1.0), init.zero])
@pytest.mark.parametrize("bias", ALL)
def test_the_first_weights_under_an_envelope_are_those_of_the_init_but_for_far_ones(bias, fill):
    torch.manual_seed(0)
    plain = bias(init=fill)
    torch.manual_seed(0)
    rpb = bias(init=fill, envelope=(1, 4))
    scale = torch.tensor([1.0, 2.0, 4.0]).view(3, *[1] * (plain.w.dim() - 1))
    envelope = torch.exp(-distances(plain) / scale)
    with torch.no_grad():
        plain.w *= torch.where(envelope < 0.1, envelope / 0.1, 1)
    torch.testing.assert_close(rpb.matrix(tokens(rpb)), plain.matrix(tokens(rpb)))
    assert rpb.w.abs().max() <= 50  # so large that a rate can still move it


def test_far_weights_learn_less_under_an_envelope():
    rpb = FastRPB(1, 20, init=init.zero, envelope=(2, 2))
    rpb(torch.ones(1, 1, 20, 1))[0, 0, 0, 0].backward()
    expected = torch.exp(-torch.arange(20.0) / 2)
    torch.testing.assert_close(rpb.w.grad[0, 19:], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{"threshold": 0.5}, {"envelope": (8, 64)}])
def test_a_stream_has_the_same_weights(settings):
    rpb = FastRPB(3, 200, causal=True, init=init.normal(1.0), **settings)
    v = torch.randn(2, 3, 200, 4)
    state = rpb.init_state(v)
    steps = [rpb.step(v[:, :, t : t + 1], state)[0] for t in range(200)]
    torch.testing.assert_close(torch.cat(steps, 2), rpb(v), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flags", FLAGS)
def test_shorter_sequences_use_the_same_distances(flags):
    rpb = FastRPB(3, 50, init=init.normal(1.0), **flags)
    assert torch.equal(rpb.matrix(20), rpb.matrix(50)[:, :20, :20])
    assert torch.equal(rpb.matrix(20), toeplitz(rpb.weights(20)))


def test_causal_and_symmetric_store_half_of_the_weights():
    assert FastRPB(3, 50).w.shape == (3, 99)
    causal, symmetric = FastRPB(3, 50, causal=True), FastRPB(3, 50, symmetric=True)
    assert causal.w.shape == symmetric.w.shape == (3, 50)
    assert not causal.matrix(50).triu(1).any()
    assert torch.equal(causal.matrix(50)[:, -1], causal.w)
    assert torch.equal(symmetric.matrix(50), symmetric.matrix(50).mT)
    assert torch.equal(symmetric.matrix(50)[:, 0], symmetric.w)


@pytest.mark.parametrize(("kind", "stored"), [("additive", (5,)), ("full", (7, 5))])
def test_a_symmetric_image_bias_treats_mirror_images_alike(kind, stored):
    rpb = FastRPB2d(3, 4, 5, kind=kind, symmetric=True, prefix=1)
    assert rpb.w.shape == (3, *stored)
    cls, pixels = torch.randn(2, 3, 1, 4), torch.randn(2, 3, 4, 5, 4)

    def bias_of(pixels):
        y = rpb(torch.cat([cls, pixels.flatten(2, 3)], dim=2))
        return y[:, :, 1:].unflatten(2, (4, 5))

    torch.testing.assert_close(bias_of(pixels.flip(3)), bias_of(pixels).flip(3))
    upside_down = (bias_of(pixels.flip(2)) - bias_of(pixels).flip(2)).abs().max()
    assert upside_down < 1e-5 if kind == "additive" else upside_down > 0.1


def test_causal_bias_does_not_see_the_future():
    rpb = FastRPB(3, 300, causal=True, init=init.normal(1.0))
    v = torch.randn(2, 3, 300, 4)
    later = v.clone()
    later[:, :, 200:] = 7
    torch.testing.assert_close(rpb(later)[:, :, :200], rpb(v)[:, :, :200], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "rpb", [FastRPB(3, 15, prefix=1), FastRPB2d(3, 3, 5, prefix=1, kind="full")]
)
def test_prefix_neither_gets_nor_gives_nor_shifts(rpb):
    v = torch.randn(2, 3, 16, 4)
    y = rpb(v)
    assert not y[:, :, 0].any()
    louder = v.clone()
    louder[:, :, 0] = 1e6
    assert torch.equal(rpb(louder), y)
    plain = (
        FastRPB(3, 15, init=init.zero)
        if isinstance(rpb, FastRPB)
        else FastRPB2d(3, 3, 5, kind="full")
    )
    plain.load_state_dict(rpb.state_dict())
    assert torch.equal(plain(v[:, :, 1:]), y[:, :, 1:])


@pytest.mark.parametrize(
    "rpb", [FastRPB(3, 20), FastRPB2d(3, 4, 5), FastRPB2d(3, 4, 5, kind="full")]
)
def test_masked_tokens_contribute_nothing(rpb):
    v, mask = torch.randn(2, 3, 20, 4), torch.rand(2, 20) < 0.6
    expected = rpb(v * mask[:, None, :, None])
    garbage = torch.where(mask[:, None, :, None], v, torch.nan)
    assert torch.equal(rpb(garbage, mask), expected)
    assert (rpb(v) - expected).abs().max() > 0.01
    assert torch.equal(rpb(v, torch.ones(2, 20, dtype=torch.bool)), rpb(v))


@pytest.mark.parametrize("rpb", [FastRPB(3, 20), FastRPB2d(3, 4, 5)], ids=["1d", "2d"])
def test_a_mask_without_batch(rpb):
    v, mask = torch.randn(3, 20, 4), torch.rand(20) < 0.5
    torch.testing.assert_close(rpb(v, mask), rpb(v[None], mask[None])[0])


@pytest.mark.parametrize("flags", FLAGS)
def test_gradients(flags):
    rpb = FastRPB(3, 200, prefix=1, **flags)
    mask = torch.rand(2, 151) < 0.8
    exact = copy.deepcopy(rpb).double()

    def fast(w, v):
        return torch.func.functional_call(rpb, {"w": w}, (v, mask))

    def definition(w, v):
        matrix = torch.func.functional_call(Matrix(exact), {"bias.w": w}, (151,))
        return matrix @ (v * mask[:, None, :, None])

    assert_same_gradients(fast, definition, rpb.w.detach(), torch.randn(2, 3, 151, 4))


class Matrix(torch.nn.Module):
    """`matrix` as a forward, so that `functional_call` reaches it."""

    def __init__(self, bias):
        super().__init__()
        self.bias = bias

    def forward(self, length):
        return self.bias.matrix(length)


def test_lengths_that_are_none():
    rpb = FastRPB(2, 5)
    for call, error in product((rpb.weights, rpb.matrix), (True, "4", 4.5)):
        with pytest.raises(TypeError, match="length must be a whole number"):
            call(error)


def test_state_dict_round_trip_and_other_lengths():
    rpb = FastRPB(3, 20)
    same = FastRPB(3, 20)
    same.load_state_dict(rpb.state_dict())
    assert torch.equal(same.w, rpb.w)
    with pytest.raises(
        RuntimeError, match=r"max_length=20, this bias has 3 heads and max_length=30"
    ):
        FastRPB(3, 30).load_state_dict(rpb.state_dict())
    with pytest.raises(RuntimeError, match=r"layer\.w: .*of 3 heads .*has 4 heads"):
        torch.nn.ModuleDict({"layer": FastRPB(4, 20)}).load_state_dict({"layer.w": rpb.w})
    with pytest.raises(RuntimeError, match=r"max_length=12, .*max_length=20"):
        FastRPB(3, 20, causal=True).load_state_dict(FastRPB(3, 12, causal=True).state_dict())
    with pytest.raises(RuntimeError, match=r"\(3, 15\) are not the \(3, 11\).*4×6 pixels"):
        FastRPB2d(3, 4, 6).load_state_dict(FastRPB2d(3, 8, 8).state_dict())


def test_a_state_dict_may_be_plain():
    rpb, state = FastRPB(3, 20), {}
    rpb.state_dict(destination=state)
    assert torch.equal(state["w"], rpb.w)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (lambda: FastRPB(2, 9, causal=True), lambda: FastRPB(2, 9, symmetric=True), "-8..0.* 0..8"),
        (lambda: FastRPB(2, 17, causal=True), lambda: FastRPB(2, 9), "-16..0.* -8..8"),
        (
            lambda: FastRPB2d(2, 3, 5, kind="full"),
            lambda: FastRPB2d(2, 3, 9, kind="full", symmetric=True),
            "-2..2 by -4..4.* -2..2 by 0..8",
        ),
    ],
)
def test_weights_of_one_shape_and_other_distances(one, other, words):
    for saved, mine in ((one(), other()), (other(), one())):
        assert saved.w.shape == mine.w.shape
        file = io.BytesIO()
        torch.save(torch.nn.ModuleList([saved]).state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        before = mine.w.clone()
        with pytest.raises(RuntimeError, match="make it as that one was"):
            torch.nn.ModuleList([mine]).load_state_dict(state)
        assert torch.equal(mine.w, before)
        mine.load_state_dict({"w": saved.w})  # of a file that knows no more
        assert torch.equal(mine.w, saved.w)
    with pytest.raises(RuntimeError, match=words.replace("..", r"\.\.")):
        other().load_state_dict(one().state_dict())


def test_weights_of_another_symmetry_are_refused():
    plain, half = FastRPB(3, 20), FastRPB(3, 20, symmetric=True)
    neither, either = "neither causal nor symmetric", "causal or symmetric"
    with pytest.raises(RuntimeError, match=rf"\(3, 39\).*that is {neither}.*\(3, 20\) is {either}"):
        half.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match=rf"\(3, 20\).*that is {either}.*\(3, 39\) is {neither}"):
        plain.load_state_dict(half.state_dict())
    image = FastRPB2d(3, 4, 6, kind="full", symmetric=True)
    with pytest.raises(RuntimeError, match=r"\(3, 7, 6\) of this bias \(symmetric, full.*symmetry"):
        image.load_state_dict(FastRPB2d(3, 4, 6, kind="full").state_dict())


def test_copies_and_pickles():
    rpb = FastRPB(3, 20, causal=True)
    for other in (copy.deepcopy(rpb), pickle.loads(pickle.dumps(rpb))):
        assert torch.equal(other.matrix(20), rpb.matrix(20))


def test_half_precision_module_and_values():
    rpb = FastRPB(3, 200, init=init.normal(1.0))
    v = torch.randn(2, 3, 200, 4)
    for dtype in (torch.float16, torch.bfloat16):
        assert_product(rpb(v.to(dtype)), rpb.matrix(200), v.to(dtype), 400)
        half = copy.deepcopy(rpb).to(dtype)
        assert_product(half(v.to(dtype)), half.matrix(200), v.to(dtype), 400)


def test_repr_shows_the_settings():
    assert repr(FastRPB(8, 64, causal=True, prefix=1)) == (
        "FastRPB(8, max_length=64, causal=True, prefix=1)"
    )
    assert repr(FastRPB2d(8, 28, 30, kind="full", dropout=0.1, threshold=0.2)) == (
        "FastRPB2d(8, 28, 30, kind='full', dropout=0.1, threshold=0.2)"
    )
    assert repr(FastRPB2d(8, 4, 5, symmetric=True)) == (
        "FastRPB2d(8, 4, 5, kind='additive', symmetric=True)"
    )
    assert repr(FastRPB(8, 64, envelope=(1, 9))) == "FastRPB(8, max_length=64, envelope=(1, 9))"


V = torch.randn(2, 3, 10, 4)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: FastRPB(0, 10), ValueError, "num_heads=0"),
        (lambda: FastRPB(3, 0), ValueError, "max_length=0"),
        (lambda: FastRPB(3, 10, prefix=-1), ValueError, "prefix=-1 must be at least 0"),
        (lambda: FastRPB(3, 10, causal=True, symmetric=True), ValueError, "causal.*symmetric"),
        (lambda: FastRPB(3, 10, init=init.local(2, 1)), ValueError, "shortest.*2 and 1"),
        (lambda: FastRPB(3, 10, envelope=(0, 1)), ValueError, "shortest.*0 and 1"),
        (lambda: FastRPB(3, 10, envelope=(1, math.inf)), ValueError, "longest <= 1e9.*1 and inf"),
        (lambda: FastRPB(3, 10, envelope=4), TypeError, r"envelope must be \(shortest.*got 4"),
        (
            lambda: FastRPB(3, 10, envelope=("a", 1)),
            TypeError,
            "envelope must be a number",
        ),
        (lambda: FastRPB(3, 10, init=init.local), TypeError, r"init=local .*: pass local\(\)"),
        (lambda: FastRPB(3, 10, prefix=3).matrix(2), ValueError, "length 2 .*prefix of 3"),
        (lambda: FastRPB(3, 10, symmetric="no"), TypeError, "symmetric='no' must be true or false"),
        (lambda: FastRPB(3, 10, causal=1), TypeError, "causal=1 must be true or false"),
        (lambda: FastRPB2d(3, 2, 2, symmetric=None), TypeError, "symmetric=None must be"),
        (lambda: FastRPB(3.0, 10), TypeError, "num_heads.*3.0"),
        (lambda: FastRPB(3, 9)(V), ValueError, "length 10 .*max_length=9"),
        (lambda: FastRPB(3, 9).matrix(10), ValueError, "length 10 .*max_length=9"),
        (lambda: FastRPB(3, 9).matrix(0), ValueError, "length=0 must be at least 1"),
        (lambda: FastRPB(3, 9, prefix=None), TypeError, "prefix must be a whole number"),
        (lambda: FastRPB(4, 10)(V), ValueError, r"4 heads.*\(2, 3, 10, 4\)"),
        (lambda: FastRPB(3, 10)(V[0, 0]), ValueError, r"\(10, 4\)"),
        (lambda: FastRPB(3, 10)(V.int()), TypeError, "int32"),
        (lambda: FastRPB(3, 10)([1.0]), TypeError, "v must be a tensor, got list"),
        (lambda: FastRPB(3, 10)(V[:, :, :0]), ValueError, "0 tokens"),
        (lambda: FastRPB(3, 10, prefix=10)(V), ValueError, "10 tokens.*prefix of 10"),
        (lambda: FastRPB(3, 10)(V, torch.ones(2, 10)), TypeError, "mask must be bool.*float32"),
        (
            lambda: FastRPB(3, 10)(V, torch.ones(2, 9, dtype=torch.bool)),
            ValueError,
            r"\(2, 10\).*\(2, 9\)",
        ),
        (lambda: FastRPB(3, 10).resize(0), ValueError, "max_length=0"),
        (lambda: FastRPB(3, 10, dropout=1.0), ValueError, "dropout=1.0"),
        (lambda: FastRPB(3, 10, dropout="0.1"), TypeError, "dropout must be a number"),
        (lambda: FastRPB2d(3, 4, 4, threshold=-1.0), ValueError, "threshold=-1.0"),
        (lambda: FastRPB2d(3, 0, 4), ValueError, "height=0"),
        (lambda: FastRPB2d(3, 4, 4.5), TypeError, "width.*4.5"),
        (lambda: FastRPB(3, 10, init="zero"), TypeError, "init must be a function.*'zero'"),
        (lambda: FastRPB(3, 10, prefix=1.5), TypeError, "prefix.*1.5"),
        (lambda: FastRPB2d(3, 4, 4, kind="sum"), ValueError, "kind='sum'"),
        (lambda: FastRPB2d(3, 3, 3)(V), ValueError, "10 tokens.*3×3 = 9 pixels"),
        (lambda: FastRPB2d(3, 3, 3).matrix(10), ValueError, "10 tokens"),
    ],
)
def test_bad_input_names_the_argument_and_its_numbers(call, error, words):
    with pytest.raises(error, match=words):
        call()
