import pytest
import torch

from fastrpb import FastRPB, FastRPB2d, init


def test_zero_init_adds_nothing():
    v = torch.randn(2, 3, 20, 4)
    for rpb in (FastRPB(3, 20, init=init.zero), FastRPB2d(3, 4, 5, init=init.zero)):
        assert torch.equal(rpb(v), torch.zeros_like(v))


def test_normal_init():
    w = FastRPB(8, 5000, init=init.normal(0.3)).w
    assert abs(w.std() - 0.3) < 0.01
    assert abs(w.mean()) < 0.01


def test_defaults():
    torch.manual_seed(0)
    first = FastRPB(3, 20).w
    torch.manual_seed(0)
    assert torch.equal(FastRPB(3, 20, init=init.local(1, 16)).w, first)
    assert abs(FastRPB(8, 5000, init=init.normal()).w.std() - 0.02) < 0.001


def test_inits_are_written_as_they_are():
    """No module rescales what an init wrote; local itself knows of the additive bias's copies."""
    for kind in ("additive", "full"):
        w = FastRPB2d(64, 28, 28, kind=kind, init=init.normal(0.3)).w
        assert abs(w.std() - 0.3) < 0.02
    torch.testing.assert_close(FastRPB2d(4, 8, 28).w.norm(dim=-1), torch.full((4,), 1 / 6))


def test_local_init_is_unit_and_reaches_from_shortest_to_longest():
    rpb = FastRPB(5, 4000, init=init.local(1, 256))
    torch.testing.assert_close(rpb.w.norm(dim=-1), torch.ones(5))
    distance = torch.arange(-3999.0, 4000).abs()
    reach = (rpb.w.square() * distance).sum(-1).detach()
    assert (reach.diff() > 0).all()
    assert 0.01 < reach[0] < 2
    assert 60 < reach[-1] < 260


@pytest.mark.parametrize(
    ("rpb", "length"),
    [
        (FastRPB(3, 401, symmetric=True, init=init.local(1, 8)), 401),
        (FastRPB2d(3, 41, 41, kind="full", symmetric=True, init=init.local(1, 2)), 41 * 41),
    ],
)
def test_local_init_of_symmetric_weights_counts_both_sides(rpb, length):
    middle = rpb.matrix(length)[:, length // 2]
    torch.testing.assert_close(middle.norm(dim=-1), torch.ones(3))


def test_local_init_keeps_the_size_of_the_matrix():
    for rpb in (FastRPB(3, 64), FastRPB2d(3, 8, 8, kind="full"), FastRPB2d(3, 8, 8)):
        rows = []
        for _ in range(50):
            rpb.reset_parameters()
            rows.append(rpb.matrix(64).norm(dim=-1))
        assert 0.5 < torch.cat(rows).square().mean().sqrt() < 1.5


def test_init_is_seeded_by_torch():
    torch.manual_seed(3)
    first = FastRPB(3, 20).w
    torch.manual_seed(3)
    assert torch.equal(first, FastRPB(3, 20).w)


@pytest.mark.parametrize("made", [torch.zeros_like, lambda w: None])
def test_an_init_that_fills_nothing_is_refused(made):
    with pytest.raises(ValueError, match="init did not fill w: it must do so in place"):
        FastRPB(3, 8, init=lambda w, *_: made(w))
    with torch.inference_mode():
        assert FastRPB(3, 8).w.isfinite().all()


def test_an_init_of_torch_takes_too_little():
    with pytest.raises(TypeError, match=r"of \(w, distance, copies\), see fastrpb\.init: "):
        FastRPB(3, 8, init=torch.nn.init.zeros_)
