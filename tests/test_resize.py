"""Biases for other lengths and images, by `resize`."""

import pytest
import torch

from fastrpb import FastRPB, FastRPB2d, init


def test_resized_under_an_envelope():
    rpb = FastRPB(3, 20, envelope=(1, 8))
    for length in (11, 20):
        torch.testing.assert_close(rpb.resize(30).matrix(length), rpb.matrix(length))
    with torch.no_grad():
        image = FastRPB2d(3, 4, 6, kind="full", envelope=(1, 8))
        torch.testing.assert_close(image.resize(6, 6).weights()[:, 2:-2], image.weights())


@pytest.mark.parametrize("flags", [{}, {"causal": True}, {"symmetric": True}])
@pytest.mark.parametrize("new", [1, 7, 20, 33])
def test_resize_keeps_common_distances(new, flags):
    rpb = FastRPB(3, 20, prefix=1, **flags)
    other = rpb.resize(new)
    assert other.max_length == new
    assert other.prefix == 1
    common = min(new, 20) + 1
    assert torch.equal(other.matrix(common), rpb.matrix(common))
    distance = (torch.arange(new)[:, None] - torch.arange(new)).abs()
    assert not other.matrix(new + 1)[:, 1:, 1:][:, distance >= 20].any()
    assert other.w.requires_grad


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("kind", ["additive", "full"])
def test_resize_2d_keeps_common_distances(kind, symmetric):
    rpb = FastRPB2d(3, 4, 6, kind=kind, symmetric=symmetric, init=init.normal(1.0))
    larger = rpb.resize(5, 9)
    corner = larger.matrix(45).unflatten(-1, (5, 9)).unflatten(1, (5, 9))[:, :4, :6, :4, :6]
    assert torch.equal(corner.flatten(-2).flatten(1, 2), rpb.matrix(24))
    smaller = larger.resize(4, 6)
    assert torch.equal(smaller.w, rpb.w)


@pytest.mark.parametrize(
    "make", [lambda f: FastRPB(2, 5, init=f), lambda f: FastRPB2d(2, 3, 3, init=f)]
)
def test_resize_draws_nothing(make):
    """Given weights have the size of the first bias, and the random numbers are the user's."""
    given = torch.randn_like(make(init.zero).w)
    bias = make(lambda w, distance, copies: w.copy_(given))
    before = torch.get_rng_state()
    size = (7,) if isinstance(bias, FastRPB) else (7, 7)
    larger = bias.resize(*size)
    assert torch.equal(torch.get_rng_state(), before)
    assert larger.init is bias.init


def test_resize_keeps_dtype():
    assert FastRPB(3, 20).double().resize(10).w.dtype == torch.float64
    assert FastRPB2d(3, 4, 4).half().resize(2, 2).w.dtype == torch.float16


def test_a_state_dict_whose_weights_were_resized():
    saved, longer = FastRPB(2, 8), FastRPB(2, 16)
    state = saved.state_dict()
    state["w"] = saved.resize(16).w.detach()
    longer.load_state_dict(state)
    assert torch.equal(longer.matrix(8), saved.matrix(8))


@pytest.mark.parametrize(
    "rpb", [FastRPB(3, 20, dropout=0.5), FastRPB2d(3, 4, 5, dropout=0.5)], ids=["1d", "2d"]
)
def test_resized_it_trains_as_before(rpb):
    size = (20,) if isinstance(rpb, FastRPB) else (4, 5)
    v = torch.randn(2, 3, 20, 4)
    same = rpb.requires_grad_(False).eval().resize(*size)
    assert not same.w.requires_grad
    torch.testing.assert_close(same(v), rpb(v))
    again = rpb.requires_grad_(True).train().resize(*size)
    assert again.training
    assert again.w.requires_grad


@pytest.mark.parametrize(
    "other",
    [FastRPB(3, 20, init=init.zero).resize(30), FastRPB2d(3, 4, 5, init=init.zero).resize(6, 6)],
    ids=["1d", "2d"],
)
def test_resized_it_keeps_its_init(other):
    other.w.data.normal_()
    other.reset_parameters()
    assert not other.w.any()
