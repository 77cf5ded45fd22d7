import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from fastrpb import toeplitz, toeplitz_2d, toeplitz_matmul, toeplitz_matmul_2d
from fastrpb.kernels.fft import _CHUNK_BYTES, _CHUNK_SIGNALS, _chunks
from oracles import assert_product, assert_same_gradients

LENGTHS = [1, 2, 3, 7, 63, 64, 127, 784, 1000]
RECTANGLES = [(1, 5), (5, 1), (3, 8), (8, 3), (100, 37), (37, 100)]
IMAGES = [(1, 1), (1, 4), (4, 1), (3, 3), (3, 5), (6, 2), (14, 9)]
IMPLS = ["dense", "fft", "auto"]


def future_cut(w, m):
    """The weights with those of future inputs (m > n) set to zero."""
    return torch.where(torch.arange(w.shape[-1]) < m, w, 0)


def test_definition_entry_by_entry():
    w = torch.randn(2, 5 + 3 - 1)
    matrix = toeplitz(w, out_length=5)
    assert matrix.shape == (2, 5, 3)
    for n in range(5):
        for m in range(3):
            assert torch.equal(matrix[:, n, m], w[:, 4 + m - n])


def test_a_compiled_rectangle():
    torch.compiler.reset()
    w = torch.randn(2, 5 + 3 - 1)
    compiled = torch.compile(toeplitz, backend="aot_eager", fullgraph=True)
    for m in (5, 3, 1):
        assert torch.equal(compiled(w, m), toeplitz(w, m))


@pytest.mark.parametrize("shape", IMAGES)
@pytest.mark.parametrize("full", [False, True])
def test_definition_2d_entry_by_entry(shape, full):
    h, w_ = shape
    w = torch.randn(2, 2 * h - 1, 2 * w_ - 1) if full else torch.randn(2, 2 * max(shape) - 1)
    matrix = toeplitz_2d(w, shape).unflatten(-1, shape).unflatten(-3, shape)
    zero = max(shape) - 1
    for i, j, y, x in itertools.product(range(h), range(w_), range(h), range(w_)):
        if full:
            wanted = w[:, h - 1 + y - i, w_ - 1 + x - j]
        else:
            wanted = w[:, zero + y - i] + w[:, zero + x - j]
        assert torch.equal(matrix[:, i, j, y, x], wanted)


def test_worked_example_of_the_paper():
    """The 3×3 image of the proof of Prop. 2: X_flat and Y_flat as printed, row by row."""
    a, b, c, d, e = w = torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0])  # w_{-2} .. w_2
    stack = lambda rows: torch.stack([torch.stack(row) for row in rows])  # noqa: E731
    x_flat = stack(
        3 * [[c, c, c, d, d, d, e, e, e]]
        + 3 * [[b, b, b, c, c, c, d, d, d]]
        + 3 * [[a, a, a, b, b, b, c, c, c]]
    )
    y_flat = stack(3 * [3 * [c, d, e], 3 * [b, c, d], 3 * [a, b, c]])
    assert torch.equal(toeplitz_2d(w, (3, 3)), x_flat + y_flat)
    v = torch.randn(9, 4)
    for impl in IMPLS:
        torch.testing.assert_close(
            toeplitz_matmul_2d(w, v, (3, 3), impl=impl), (x_flat + y_flat) @ v
        )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", LENGTHS)
def test_product_equals_definition(n, causal, impl):
    for dim in (1, 2, 5):
        w, v = torch.randn(3, 2 * n - 1), torch.randn(2, 3, n, dim)
        matrix = toeplitz(future_cut(w, n) if causal else w)
        assert_product(toeplitz_matmul(w, v, causal=causal, impl=impl), matrix, v, 2 * n)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("m", "n"), RECTANGLES)
def test_rectangular_product_equals_definition(m, n, causal, impl):
    w, v = torch.randn(3, m + n - 1), torch.randn(2, 3, n, 4)
    matrix = toeplitz(future_cut(w, m) if causal else w, m)
    y = toeplitz_matmul(w, v, causal=causal, out_length=m, impl=impl)
    assert_product(y, matrix, v, m + n)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [*IMAGES, (28, 28), (17, 40)])
@pytest.mark.parametrize("full", [False, True])
def test_2d_product_equals_definition(shape, full, impl):
    h, w_ = shape
    w = torch.randn(3, 2 * h - 1, 2 * w_ - 1) if full else torch.randn(3, 2 * max(shape) - 1)
    for dim in (1, 4):
        v = torch.randn(2, 3, h * w_, dim)
        y = toeplitz_matmul_2d(w, v, shape, impl=impl)
        assert_product(y, toeplitz_2d(w, shape), v, 4 * h * w_)


@pytest.mark.parametrize("impl", ["dense", "fft"])
@pytest.mark.parametrize("n", LENGTHS)
def test_gradients_equal_those_of_the_definition(n, impl):
    for dim in (1, 4):
        assert_same_gradients(
            lambda w, v: toeplitz_matmul(w, v, impl=impl),
            lambda w, v: toeplitz(w) @ v,
            torch.randn(3, 2 * n - 1),
            torch.randn(2, 3, n, dim),
        )


@pytest.mark.parametrize("impl", ["dense", "fft"])
@pytest.mark.parametrize("full", [False, True])
def test_2d_gradients_equal_those_of_the_definition(full, impl):
    assert_same_gradients(
        lambda w, v: toeplitz_matmul_2d(w, v, (7, 10), impl=impl),
        lambda w, v: toeplitz_2d(w, (7, 10)) @ v,
        torch.randn(3, 13, 19) if full else torch.randn(3, 19),
        torch.randn(2, 3, 70, 4),
    )


@pytest.mark.parametrize("impl", ["dense", "fft"])
@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize(("m", "n", "causal"), [(5, 5, False), (5, 5, True), (3, 6, False)])
def test_gradcheck(m, n, causal, dim, impl):
    w = torch.randn(2, m + n - 1, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 2, n, dim, dtype=torch.float64, requires_grad=True)

    def product(w, v):
        return toeplitz_matmul(w, v, causal=causal, out_length=m, impl=impl)

    assert gradcheck(product, (w, v))
    assert gradgradcheck(product, (w, v))
    assert gradcheck(product, (w.detach(), v))
    assert gradcheck(product, (w, v.detach()))


@pytest.mark.parametrize("impl", ["dense", "fft"])
@pytest.mark.parametrize("weights", [(2, 7), (2, 5, 7)])
def test_gradcheck_2d(weights, impl):
    w = torch.randn(weights, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 2, 12, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda w, v: toeplitz_matmul_2d(w, v, (3, 4), impl=impl), (w, v))
    assert gradgradcheck(lambda w, v: toeplitz_matmul_2d(w, v, (3, 4), impl=impl), (w, v))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("w_lead", "v_lead"),
    [
        ((), ()),
        ((), (2, 3)),
        ((3,), ()),
        ((3,), (3,)),
        ((3,), (5, 2, 3)),
        ((1,), (2, 3)),
        ((3,), (2, 1)),
        ((2, 3), (3,)),
        ((2, 1), (2, 3)),
        ((2, 1), (4, 1, 3)),
        ((2, 3), (2, 3)),
    ],
)
def test_leading_shapes_broadcast(w_lead, v_lead, impl):
    w, v = torch.randn(*w_lead, 13), torch.randn(*v_lead, 7, 4)
    assert_product(toeplitz_matmul(w, v, impl=impl), toeplitz(w), v, 14)


@pytest.mark.parametrize("impl", IMPLS)
def test_leading_shapes_broadcast_2d(impl):
    for w in (torch.randn(3, 5), torch.randn(5), torch.randn(3, 3, 5)):
        for lead in ((), (3,), (2, 1), (4, 2, 3)):
            v = torch.randn(*lead, 6, 4)
            y = toeplitz_matmul_2d(w, v, (2, 3), impl=impl)
            assert_product(y, toeplitz_2d(w, (2, 3)), v, 24)


@pytest.mark.parametrize("impl", IMPLS)
def test_any_memory_layout(impl):
    w = torch.randn(599, 3).T
    for v in (
        torch.randn(2, 300, 3, 4).transpose(1, 2),
        torch.randn(2, 3, 4, 300).transpose(2, 3),
        torch.randn(2, 3, 300, 8)[..., ::2],
        torch.randn(2, 3, 300, 5)[..., 1:],
        torch.randn(2, 3, 600, 4)[:, :, ::2],
        torch.randn(2, 1, 300, 4).expand(2, 3, 300, 4),
        torch.randn(2 * 3 * 300 * 4 + 1)[1:].view(2, 3, 300, 4),
    ):
        assert_product(toeplitz_matmul(w, v, impl=impl), toeplitz(w), v, 600)


def test_more_work_than_one_chunk():
    """Chunks are cut along channels, heads and batch; every one must be written."""
    for lead, n, dim in (((1, 2), 40_000, 28), ((3, 5), 9_000, 14), ((70, 3), 300, 130)):
        w, v = torch.randn(lead[1], 2 * n - 1), torch.randn(*lead, n, dim)
        g = torch.randn(lead[1], n, 1)
        y = toeplitz_matmul(w, v, impl="fft")
        # ⟨g, W·v⟩ = ⟨Wᵀ·g, v⟩ checks all of y against one column a head.
        transposed = toeplitz_matmul(w.double().flip(-1), g.double(), impl="fft")
        torch.testing.assert_close(
            (g * y).sum(-2).double(), (transposed * v).sum(-2), rtol=1e-3, atol=2e-2 * n**0.5
        )
        assert y.isfinite().all()
        few = torch.randint(n, (5,))
        rows = torch.stack([w[:, n - 1 - i : 2 * n - 1 - i] for i in few.tolist()], 1).double()
        torch.testing.assert_close(y[:, :, few].double(), rows @ v.double(), rtol=1e-3, atol=5e-3)


@pytest.mark.parametrize(
    "shape", [(3, 5, 7, 9000), (70, 3, 65, 300), (1, 2, 14, 200_000), (1, 1, 1, 2)]
)
def test_chunks_are_small_and_cover_everything_once(shape):
    signals = torch.zeros(1, dtype=torch.complex64).expand(shape)
    seen = torch.zeros(shape[:3], dtype=torch.int)
    size = 2 * shape[-1]
    for chunk in _chunks(signals, size):
        seen[chunk] += 1
        count = seen[chunk].numel()
        assert count <= _CHUNK_SIGNALS or count * size * 8 <= _CHUNK_BYTES["cpu"][1]
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("shape", "m"), [((70, 3, 300, 130), 300), ((1, 64, 500, 128), 100), ((1, 64, 100, 128), 500)]
)
def test_gradients_of_more_work_than_one_chunk(shape, m):
    w = torch.randn(shape[1], shape[2] + m - 1, requires_grad=True)
    v = torch.randn(shape, requires_grad=True)
    g = torch.randn(*shape[:2], m, shape[-1])

    def gradients(impl):
        return torch.autograd.grad(toeplitz_matmul(w, v, out_length=m, impl=impl), (w, v), g)

    (dw, dv), exact = gradients("fft"), gradients("dense")
    torch.testing.assert_close(dw, exact[0], rtol=1e-3, atol=1e-5 * exact[0].norm().item())
    torch.testing.assert_close(dv, exact[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("impl", IMPLS)
def test_prefix_is_left_out(impl):
    w, v = torch.randn(3, 5 + 7 - 1), torch.randn(2, 3, 2 + 7, 4)
    y = toeplitz_matmul(w, v, out_length=5, prefix=2, impl=impl)
    assert y.shape == (2, 3, 2 + 5, 4)
    assert not y[:, :, :2].any()
    assert_product(y[:, :, 2:], toeplitz(w, 5), v[:, :, 2:], 12)


@pytest.mark.parametrize("impl", ["dense", "fft"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("w_dtype", [torch.float16, torch.float32, torch.float64])
def test_dtype_of_the_values_comes_back(dtype, w_dtype, impl):
    w, v = torch.randn(3, 199).to(w_dtype), torch.randn(2, 3, 100, 4).to(dtype)
    assert_product(toeplitz_matmul(w, v, impl=impl), toeplitz(w), v, 200)
    image = torch.randn(3, 39).to(w_dtype)
    y = toeplitz_matmul_2d(image, v, (5, 20), impl=impl)
    wide = torch.promote_types(torch.promote_types(w_dtype, dtype), torch.float32)
    assert_product(y, toeplitz_2d(image.to(wide), (5, 20)), v, 400)


@pytest.mark.parametrize("impl", ["dense", "fft"])
@pytest.mark.parametrize("shape", [(1, 8), (8, 1)])
def test_sums_of_an_image_do_not_overflow_float16(shape, impl):
    w, v = torch.full((1, 15), 1 / 64), torch.full((1, 1, 8, 1), 3e4).half()
    y = toeplitz_matmul_2d(w, v, shape, impl=impl)
    torch.testing.assert_close(y, (toeplitz_2d(w, shape) @ v.float()).half())


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_does_not_round(impl):
    w, v = torch.randn(3, 399), torch.randn(2, 3, 200, 4)
    full = torch.randn(3, 19, 39)
    with torch.autocast("cpu", torch.bfloat16):
        y = toeplitz_matmul(w, v, impl=impl)
        half = toeplitz_matmul(w, v.bfloat16(), impl=impl)
        image = toeplitz_matmul_2d(full, v, (10, 20), impl=impl)
    assert_product(y, toeplitz(w), v, 400)
    assert_product(half, toeplitz(w), v.bfloat16(), 400)
    assert_product(image, toeplitz_2d(full, (10, 20)), v, 800)


@pytest.mark.parametrize("impl", ["dense", "fft"])
def test_causality(impl):
    """Changing the future, or its weights, changes nothing."""
    w, v = torch.randn(3, 399), torch.randn(2, 3, 200, 4)
    y = toeplitz_matmul(w, v, causal=True, impl=impl)
    later = v.clone()
    later[:, :, 120:] += 1
    changed = toeplitz_matmul(w, later, causal=True, impl=impl)
    torch.testing.assert_close(changed[:, :, :120], y[:, :, :120], rtol=0, atol=1e-4)
    assert (changed[:, :, 120:] - y[:, :, 120:]).abs().max() > 0.1
    w[:, 200:] = torch.nan
    assert torch.equal(toeplitz_matmul(w, v, causal=True, impl=impl), y)


@pytest.mark.parametrize("impl", ["dense", "fft"])
def test_nan_weights_propagate(impl):
    w, v = torch.randn(2, 599), torch.randn(1, 2, 300, 4)
    w[0, 299] = torch.nan
    y = toeplitz_matmul(w, v, impl=impl)
    assert y[:, 0].isnan().all()
    assert y[:, 1].isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_empty_batch_heads_and_dim(impl):
    for lead, dim in (((0, 3), 4), ((2, 3), 0), ((0,), 4)):
        w = torch.randn(*lead[-1:], 1999, requires_grad=True)
        v = torch.randn(*lead, 1000, dim, requires_grad=True)
        y = toeplitz_matmul(w, v, impl=impl)
        assert y.shape == v.shape
        y.sum().backward()
        assert w.grad is not None
        assert not w.grad.any()


def test_deterministic():
    w = torch.randn(3, 1999, requires_grad=True)
    v = torch.randn(8, 3, 1000, 32, requires_grad=True)
    runs = []
    for _ in range(2):
        y = toeplitz_matmul(w, v, impl="fft")
        runs.append((y, *torch.autograd.grad(y.square().sum(), (w, v))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


sizes = st.integers(1, 40)


@settings(deadline=None, max_examples=50)
@given(m=sizes, n=sizes, seed=st.integers(0, 2**31), causal=st.booleans())
def test_linear_in_both_arguments(m, n, seed, causal):
    g = torch.Generator().manual_seed(seed)
    w1, w2 = torch.randn(2, m + n - 1, dtype=torch.float64, generator=g)
    v1, v2 = torch.randn(2, n, 2, dtype=torch.float64, generator=g)

    def product(w, v):
        return toeplitz_matmul(w, v, causal=causal, out_length=m, impl="fft")

    torch.testing.assert_close(product(w1, 2 * v1 + v2), 2 * product(w1, v1) + product(w1, v2))
    torch.testing.assert_close(product(2 * w1 + w2, v1), 2 * product(w1, v1) + product(w2, v1))


@settings(deadline=None, max_examples=50)
@given(m=sizes, n=sizes, seed=st.integers(0, 2**31))
def test_transposition_is_reversed_weights(m, n, seed):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(m + n - 1, dtype=torch.float64, generator=g)
    u = torch.randn(m, 1, dtype=torch.float64, generator=g)
    v = torch.randn(n, 1, dtype=torch.float64, generator=g)
    left = u.T @ toeplitz_matmul(w, v, out_length=m, impl="fft")
    right = toeplitz_matmul(w.flip(-1), u, out_length=n, impl="fft").T @ v
    torch.testing.assert_close(left, right)
    assert torch.equal(toeplitz(w, m).T, toeplitz(w.flip(-1), n))


@settings(deadline=None, max_examples=50)
@given(n=st.integers(2, 40), seed=st.integers(0, 2**31), data=st.data())
def test_shift_equivariance(n, seed, data):
    shift = data.draw(st.integers(1, n - 1))
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(2 * n - 1, dtype=torch.float64, generator=g)
    v = torch.randn(n, 3, dtype=torch.float64, generator=g)
    v[n - shift :] = 0
    moved = toeplitz_matmul(w, v.roll(shift, 0), impl="fft")
    torch.testing.assert_close(moved[shift:], toeplitz_matmul(w, v, impl="fft")[: n - shift])


W, V = torch.randn(3, 9), torch.randn(2, 3, 5, 4)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: toeplitz(torch.tensor(1.0)), ValueError, "w must have at least one axis"),
        (lambda: toeplitz(torch.randn(3, 8)), ValueError, "8 distances"),
        (lambda: toeplitz(torch.randn(8), 9), ValueError, "out_length=9.*8 distances"),
        (lambda: toeplitz(torch.randn(8), 0), ValueError, "out_length=0"),
        (lambda: toeplitz([1, 2, 3]), TypeError, "w must be a tensor, got list"),
        (lambda: toeplitz_matmul(W, V[0, 0, 0]), ValueError, r"\(4,\)"),
        (lambda: toeplitz_matmul(W[:, 1:], V), ValueError, r"9 distances.*\(3, 8\)"),
        (lambda: toeplitz_matmul(W, V, out_length=6), ValueError, "10 distances.*6 outputs over 5"),
        (lambda: toeplitz_matmul(W, V, out_length=0), ValueError, "out_length=0"),
        (lambda: toeplitz_matmul(W, V, out_length=5.0), TypeError, "out_length.*5.0"),
        (lambda: toeplitz_matmul(W[:2], V), ValueError, r"heads.*\(2,\).*\(2, 3\)"),
        (lambda: toeplitz_matmul(W, V[:, :, :0]), ValueError, r"empty sequence.*\(2, 3, 0, 4\)"),
        (lambda: toeplitz_matmul(W, V.long()), TypeError, "v must.*int64"),
        (lambda: toeplitz_matmul(W.int(), V), TypeError, "w must.*int32"),
        (lambda: toeplitz_matmul(W, V.to(torch.complex64)), TypeError, "v must.*complex64"),
        (lambda: toeplitz_matmul(W, V.numpy()), TypeError, "v must be a tensor, got ndarray"),
        (
            lambda: toeplitz_matmul(W, V, impl="cuda"),
            ValueError,
            "'cuda'.*auto, dense, fft, triton",
        ),
        (lambda: toeplitz_matmul(W, V, prefix=5), ValueError, "5 positions.*prefix of 5"),
        (lambda: toeplitz_matmul(W, V, prefix=-1), ValueError, "prefix=-1 must be at least 0"),
        (lambda: toeplitz_matmul(W, V, causal="no"), TypeError, "causal='no' must be true or"),
        (lambda: toeplitz_matmul(W.to("meta"), V), ValueError, "w is on meta and v on cpu"),
        (lambda: toeplitz_matmul_2d(W[:, 2:7], V, (2, 3)), ValueError, "5 positions.*6"),
        (lambda: toeplitz_matmul_2d(W, V, (1, 4)), ValueError, r"1×4.*\(heads, 7\).*\(3, 9\)"),
        (lambda: toeplitz_matmul_2d(W, V, (0, 5)), ValueError, "height=0 must be at least 1"),
        (lambda: toeplitz_matmul_2d(W, V, (1, 5.0)), TypeError, "width must be.*5.0"),
        (lambda: toeplitz_matmul(W, V, prefix=True), TypeError, "prefix must be.*True"),
        (lambda: toeplitz_matmul_2d(W, V, (5,)), ValueError, r"shape.*\(5,\)"),
        (lambda: toeplitz_matmul_2d(W[:2], V, (1, 5)), ValueError, "heads"),
        (lambda: toeplitz_matmul_2d(W, V, (1, 5), impl="gpu"), ValueError, "impl='gpu'"),
        (lambda: toeplitz_2d(W, (5,)), ValueError, "shape"),
        (lambda: toeplitz_2d(torch.randn(3, 3, 9, 9), (5, 5)), ValueError, r"\(3, 3, 9, 9\)"),
    ],
)
def test_bad_input_names_the_argument_and_its_numbers(call, error, words):
    with pytest.raises(error, match=words):
        call()
