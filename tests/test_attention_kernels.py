"""Linear attention by the Triton kernels against the definition."""

import pytest
import torch

from fastrpb import (
    DPFP,
    FavorPlus,
    elu1,
    fused_attention,
    linear_attention,
    linear_attention_weights,
    relu,
    sikf,
)
from on_triton import DEVICE, HALF, error, masks, poisoned, rand  # noqa: F401, a fixture

causal_kernels = pytest.importorskip("fastrpb.kernels.causal", reason="needs triton")
causal_gradients = pytest.importorskip("fastrpb.kernels.causal_gradients")
image = pytest.importorskip("fastrpb.kernels.image")
layout = pytest.importorskip("fastrpb.kernels.layout")
linear = pytest.importorskip("fastrpb.kernels.linear")

PHIS = pytest.mark.parametrize("phi", [sikf, elu1, relu], ids=["sikf", "elu1", "relu"])


def assert_attention_as_good_as_plain(q, k, v, *, plus=False, largest_exponent=3.0, **options):
    """Values and gradients against the definition, in float64; `plus` is added in the kernel.

    The kernels compute exp(x) as 2^(x·log₂e), whose exponent float32 rounds by |x|·2⁻²⁴.
    """
    dtype, batch, n = v.dtype, k.shape[0], k.shape[2]
    mask = options.get("mask")
    hidden = torch.zeros(batch, n, dtype=torch.bool, device=DEVICE) if mask is None else ~mask
    hidden = hidden[:, None, :, None]
    tensors = [q, k, v] + ([rand(*q.shape[:3], v.shape[3], dtype=dtype)] if plus else [])
    wide = [x.double().requires_grad_() for x in tensors]
    weights = linear_attention_weights(wide[0], wide[1].masked_fill(hidden, 0), **options)
    exact = weights @ wide[2].masked_fill(hidden, 0) + (wide[3] if plus else 0)
    g = rand(*exact.shape, dtype=dtype)
    exact_grads = torch.autograd.grad(exact, wide, g.double())
    # What is masked may be anything.
    tensors[1:3] = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.inf)

    def errors(impl):
        inputs = [x.detach().requires_grad_() for x in tensors]
        added = {"plus": inputs[3]} if plus else {}
        y = linear_attention(*inputs[:3], **added, **options, impl=impl)
        assert y.dtype == dtype
        got = (y, *torch.autograd.grad(y, inputs, g))
        return [error(a, b) for a, b in zip(got, (exact, *exact_grads), strict=True)]

    for fast, plain in zip(errors("triton"), errors("torch"), strict=True):
        assert fast <= 2 * plain + largest_exponent * 2**-24


@PHIS
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_linear_attention(phi, dtype, masked):
    q, k, v = (3 * rand(2, 2, m, d, dtype=dtype) for m, d in ((70, 20), (150, 20), (150, 24)))
    mask = masks(2, 150) if masked else None
    assert_attention_as_good_as_plain(q, k, v, phi=phi, mask=mask)


@pytest.mark.parametrize(
    ("features", "dtype", "masked"),
    [
        (50, torch.float16, True),
        (50, torch.bfloat16, False),
        (50, torch.float32, True),
        (80, torch.bfloat16, True),
    ],
)
def test_favor_plus(features, dtype, masked):
    """In two parts; features of a program and a part of another."""
    phi = FavorPlus(20, features).to(DEVICE)
    q, k, v = (3 * rand(2, 1, m, d, dtype=dtype) for m, d in ((70, 20), (150, 20), (150, 24)))
    mask = masks(2, 150) if masked else None
    largest = max(float(phi.log_features(x.float()).abs().max()) for x in (q, k))
    assert_attention_as_good_as_plain(
        q, k, v, phi=phi, mask=mask, plus=True, largest_exponent=largest
    )


@pytest.mark.parametrize(
    ("stored", "tokens", "values"),
    [
        (torch.float16, torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ],
)
def test_favor_plus_in_other_dtypes(stored, tokens, values):
    """A projection in that of the model, queries and keys in another than the values."""
    phi = FavorPlus(8, 5).to(DEVICE, stored)
    q, k = rand(2, 1, 2, 20, 8, dtype=tokens)
    v = rand(1, 2, 20, 8, dtype=values)
    assert_attention_as_good_as_plain(q, k, v, phi=phi)


def test_maps_of_ones_own_are_plain_torch():
    class Own(FavorPlus):
        """It may override what the kernels know."""

    x = rand(1, 1, 5, 4)
    with pytest.raises(ValueError, match="got Own"):
        linear_attention(x, x, x, phi=Own(4, 8).to(DEVICE), impl="triton")
    assert not fused_attention._fits(Own(4, 8), x, x, x, causal=False)
    assert fused_attention._fits(FavorPlus(4, 8), x, x, x, causal=False)


@pytest.mark.parametrize(
    ("nu", "dtype", "masked"),
    [(1, torch.bfloat16, False), (1, torch.float32, True), (2, torch.bfloat16, True)],
)
def test_dpfp(nu, dtype, masked):
    q, k, v = (3 * rand(2, 1, m, d, dtype=dtype) for m, d in ((70, 12), (150, 12), (150, 24)))
    q[:, :, 3] = 0  # no feature at all: it attends to nothing
    mask = masks(2, 150) if masked else None
    assert_attention_as_good_as_plain(q, k, v, phi=DPFP(nu), mask=mask, plus=True)


# The kernel takes 64 positions at a time, in parts of at least twice as many.
@pytest.mark.parametrize(
    ("phi", "m", "n", "dim", "dtype", "masked"),
    [
        (sikf, 2, 2, 3, torch.bfloat16, False),
        (sikf, 279, 279, 5, torch.float32, True),
        (sikf, 133, 190, 8, torch.bfloat16, True),
        (sikf, 190, 133, 20, torch.float16, False),
        (elu1, 200, 200, 8, torch.float32, False),
        (elu1, 290, 50, 5, torch.bfloat16, True),
        (relu, 50, 266, 8, torch.float16, True),
        (relu, 128, 128, 8, torch.float32, False),
    ],
)
def test_causal_linear_attention(phi, m, n, dim, dtype, masked):
    q, k, v = (3 * rand(2, 1, x, d, dtype=dtype) for x, d in ((m, dim), (n, dim), (n, 7)))
    mask = masks(2, n) if masked else None
    assert_attention_as_good_as_plain(q, k, v, phi=phi, mask=mask, causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_plus_is_added_in_the_kernel(dtype, causal):
    q, k, v = rand(2, 50, 3 * 8, dtype=dtype).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    assert_attention_as_good_as_plain(q, k, v, phi=sikf, causal=causal, plus=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_sikf_does_not_overflow(dtype, causal):
    q, k = 1e4 * rand(2, 1, 1, 80, 16)
    v = rand(1, 1, 80, 16, dtype=dtype)
    q, k = q.to(dtype), k.to(dtype)
    exact = linear_attention(q.double(), k.double(), v.double(), phi=sikf, causal=causal)
    plain, fast = (
        error(linear_attention(q, k, v, phi=sikf, causal=causal, impl=impl), exact)
        for impl in ("torch", "triton")
    )
    assert fast <= 2 * plain + 2e-7


def test_no_key_is_lost_because_later_ones_dwarf_it():
    """Within a chunk, across chunks and across parts, in the gradients too."""
    n = 300
    k = torch.linspace(0, 9000, n, device=DEVICE)[:, None].expand(n, 4).view(1, 1, n, 4)
    q, v = rand(2, 1, 1, n, 4)
    assert_attention_as_good_as_plain(q, k, v, phi=sikf, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_no_sequences(causal):
    q, k, v = (rand(0, 3, 7, 8).requires_grad_() for _ in range(3))
    y = linear_attention(q, k, v, phi=sikf, causal=causal, impl="triton")
    gradients = torch.autograd.grad(y.sum(), (q, k, v))
    assert all(x.shape == q.shape for x in (y, *gradients))


@pytest.mark.parametrize("causal", [False, True])
def test_no_gradients_of_attention_where_only_plus_needs_them(causal, monkeypatch):
    form = causal_gradients if causal else linear
    monkeypatch.setattr(form, "backward", lambda *_: pytest.fail("computed for nothing"))
    q, k, v = (rand(2, 3, 7, 8) for _ in range(3))
    plus = rand(2, 3, 7, 8).requires_grad_()
    y = linear_attention(q, k, v, phi=sikf, causal=causal, plus=plus, impl="triton")
    (gradient,) = torch.autograd.grad(y.sum(), plus)
    assert torch.equal(gradient, torch.ones_like(plus))


def test_many_sequences_go_along_the_axis_that_has_room(monkeypatch):
    """CUDA takes 2³¹ programs along the first axis of a grid, and 65 535 along the others."""
    launched = {}
    note = lambda kernel, grid, *_, **__: launched.setdefault(kernel.__name__, grid)  # noqa: E731
    for form in (linear, causal_kernels, image, layout):
        monkeypatch.setattr(form, "launch", note)
    q = torch.empty(256, 257, 100, 1, device=DEVICE, dtype=torch.bfloat16)
    for causal in (False, True):
        linear_attention(q, q, q, phi=sikf, causal=causal, impl="triton")
    image.sums(q, 10, 10)
    many = torch.empty(70_000, 1, 1, 1, device=DEVICE, dtype=torch.bfloat16)
    image.spread(image.sums(many, 1, 1), 1, 1, many)
    layout.largest(many)
    long = torch.empty(64, 150_000, 2, 1, device=DEVICE, dtype=torch.bfloat16)
    layout.pack(long.transpose(1, 2))
    assert {"_merge", "_output", "_total", "_spread", "_largest", "_copy"} <= launched.keys()
    assert all(size <= 65_535 for grid in launched.values() for size in grid[1:])


@pytest.mark.parametrize("causal", [False, True])
def test_more_sequences_than_a_grid_takes(causal):
    q = torch.empty(65_536, 1, 1, 1, device=DEVICE)
    with pytest.raises(ValueError, match="up to 65535 sequences"):
        linear_attention(q, q, q, phi=sikf, causal=causal, impl="triton")


def test_one_part_needs_no_sums_of_those_before_it(monkeypatch):
    launched = []
    note = lambda kernel, *_, **__: launched.append(kernel.__name__)  # noqa: E731
    monkeypatch.setattr(causal_kernels, "launch", note)
    many = rand(300, 8, 64, 8)
    linear_attention(many, many, many, phi=sikf, causal=True, impl="triton")
    assert launched == ["_output"]
    long = rand(1, 1, 1000, 8)
    linear_attention(long, long, long, phi=sikf, causal=True, impl="triton")
    assert launched[1:] == ["_sums", "_scan", "_output"]


def test_linear_attention_in_any_memory_order_and_lead():
    qkv = rand(2, 60, 3 * 2 * 16, dtype=torch.float16)
    q, k, v = (x.unflatten(-1, (2, 16)).transpose(1, 2) for x in qkv.chunk(3, -1))
    y = linear_attention(q, k, v, phi=sikf, impl="triton")
    assert y.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(y, linear_attention(q, k, v, phi=sikf, impl="torch"))
    alone = linear_attention(q[0], k[0], v[0], phi=sikf, impl="triton")
    torch.testing.assert_close(alone, y[0])
