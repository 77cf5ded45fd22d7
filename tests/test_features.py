import itertools

import pytest
import torch

from fastrpb import DPFP, FavorPlus, elu1, linear_attention, relu, sikf, softmax_attention
from fastrpb.attention import linear_attention_weights

X = torch.tensor([[-2.0, -0.5, 0.0, 1.0, 3.0]])


def test_elementwise_maps_by_their_formulas():
    torch.testing.assert_close(
        elu1.features(X), torch.tensor([[-2.0, -0.5, 0.0, 0.0, 0.0]]).exp() + X.clamp(min=0)
    )
    assert torch.equal(relu.features(X), torch.tensor([[0.0, 0.0, 0.0, 1.0, 3.0]]) + 1e-3)
    assert torch.equal(sikf.log_features(X), X)


def test_elu1_does_not_cancel():
    x = torch.tensor([-10.0, -18.0, -50.0, -80.0])
    torch.testing.assert_close(elu1.features(x), x.exp(), rtol=1e-6, atol=0)


def test_features_of_half_precision_inputs():
    q, k = torch.randn(2, 2, 3, 5, 8).half()
    mask = torch.rand(2, 5) < 0.5
    phi_q, phi_k = sikf(q, k, mask)
    assert phi_q.isfinite().all()
    assert torch.equal(phi_k == 0, ~mask[:, None, :, None].expand_as(phi_k))
    assert linear_attention_weights(q, k, phi=sikf, causal=True).isfinite().all()


def test_dpfp_entry_by_entry():
    x = torch.randn(7, 4)
    r = torch.cat([x, -x], -1).clamp(min=0)
    phi = DPFP(nu=3).features(x)
    assert phi.shape == (7, 2 * 4 * 3)
    for j in range(1, 4):
        for i in range(8):
            assert torch.equal(phi[:, 8 * (j - 1) + i], r[:, i] * r[:, (i - j) % 8])


def test_favor_rows_are_orthogonal_by_blocks_and_as_long_as_normal_rows():
    phi = FavorPlus(16, 40)
    for start in (0, 16, 32):
        rows = phi.projection[start : start + 16]
        gram = rows @ rows.mT
        torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-4)
    squares = FavorPlus(16, 20_000).projection.square().sum(-1)
    assert abs(squares.mean() - 16) < 0.3  # chi-squared: mean dim, variance 2·dim
    assert abs(squares.var() - 32) < 3


def test_favor_is_seeded_redraws_and_is_saved():
    phi = FavorPlus(8, 12, seed=3)
    assert torch.equal(phi.projection, FavorPlus(8, 12, seed=3).projection)
    first = phi.projection.clone()
    phi.redraw(4)
    assert not torch.equal(phi.projection, first)
    other = FavorPlus(8, 12)
    other.load_state_dict(phi.state_dict())
    assert torch.equal(other.projection, phi.projection)


def test_favor_features_are_unbiased():
    """φ(q)ᵀφ(k) = exp(qᵀk/√dim) on average, by its definition in float64."""
    q, k = torch.randn(2, 5, 8, dtype=torch.float64) / 2
    phi = FavorPlus(8, 64).double()
    total = torch.zeros(5, 5, dtype=torch.float64)
    for seed in range(300):
        phi.redraw(seed)
        total += phi.log_features(q).exp() @ phi.log_features(k).exp().mT
    torch.testing.assert_close(total / 300, (q @ k.mT / 8**0.5).exp(), rtol=0.05, atol=0)


def test_favor_converges_to_softmax_attention():
    q, k, v = torch.randn(3, 2, 2, 50, 16)
    q, k = q / 2, k / 2
    exact = softmax_attention(q, k, v)
    errors = []
    for count in (8, 64, 512, 4096):
        y = [linear_attention(q, k, v, phi=FavorPlus(16, count, seed=s)) for s in range(3)]
        errors.append(sum((yi - exact).norm() / exact.norm() for yi in y) / 3)
    assert all(later < 0.6 * earlier for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 0.05


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sikf_cannot_overflow(dtype, causal):
    """±1e4: exp of it overflows in every dtype. The definition by logsumexp in float64 is exact."""
    for kind in ("signs", "uniform", "late spike"):
        q, k = torch.rand(2, 2, 3, 150, 8) * 2e4 - 1e4
        if kind == "signs":
            q, k = q.sign() * 1e4, k.sign() * 1e4
        if kind == "late spike":  # later keys dwarf earlier ones, within a chunk too
            q, k = torch.randn(2, 2, 3, 150, 8)
            k[:, :, 70:] += 200
            k[:, :, 73:] += 9000
        q, k, v = q.to(dtype), k.to(dtype), torch.randn(2, 3, 150, 4).to(dtype)
        y = linear_attention(q, k, v, phi=sikf, causal=causal)
        assert y.dtype == dtype
        assert y.isfinite().all()
        exact = (
            linear_attention_weights(q.double(), k.double(), phi=sikf, causal=causal) @ v.double()
        )
        # log similarities up to 2e4 carry float32's rounding of 2e4.
        tolerance = torch.finfo(dtype).eps + 2e4 * torch.finfo(torch.float32).eps
        assert ((y.double() - exact).abs() <= tolerance * (1 + exact.abs())).all()


@pytest.mark.parametrize("causal", [False, True])
def test_sikf_is_shift_invariant(causal):
    q, k, v = torch.randn(3, 2, 3, 100, 8)
    y = linear_attention(q, k, v, phi=sikf, causal=causal)
    moved = linear_attention(q + 37.5, k - 81.25, v, phi=sikf, causal=causal)
    torch.testing.assert_close(moved, y, rtol=1e-4, atol=1e-4)
    other = linear_attention(q + 37.5, k - 81.25, v, phi=elu1, causal=causal)
    assert (other - linear_attention(q, k, v, phi=elu1, causal=causal)).abs().max() > 0.1


def test_sikf_features_of_large_and_small_channels_survive():
    """A shift for all features at once would lose the small ones."""
    k = torch.tensor([[[[500.0, 0.0], [400.0, 3.0]]]])
    q = torch.tensor([[[[-600.0, 0.0]]]])
    v = torch.tensor([[[[1.0], [2.0]]]])
    wanted = linear_attention_weights(q.double(), k.double(), phi=sikf) @ v.double()
    torch.testing.assert_close(linear_attention(q, k, v, phi=sikf).double(), wanted)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: DPFP(0), "nu=0"),
        (lambda: DPFP(8).features(torch.randn(3, 4)), r"nu=8 must be below 2·dim = 8"),
        (lambda: FavorPlus(0, 4), "dim=0"),
        (lambda: FavorPlus(8, 4).log_features(torch.randn(3, 7)), "7 channels.*dim=8"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
