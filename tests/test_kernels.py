"""The Triton kernels against the definition: on a GPU if there is one, else in the interpreter."""

import pytest
import torch

from fastrpb import (
    FastRPB,
    init,
    linear_attention,
    sikf,
    toeplitz,
    toeplitz_2d,
    toeplitz_matmul,
    toeplitz_matmul_2d,
)
from fastrpb.kernels import ops
from on_triton import DEVICE, HALF, error, masks, poisoned, rand  # noqa: F401, a fixture

direct = pytest.importorskip("fastrpb.kernels.direct", reason="needs triton")
hierarchical = pytest.importorskip("fastrpb.kernels.hierarchical")
layout = pytest.importorskip("fastrpb.kernels.layout")
spectra = pytest.importorskip("fastrpb.kernels.spectra")

DIRECT = ["direct", "side by side"]


@pytest.fixture(params=[*DIRECT, "hierarchical"])
def way(request, monkeypatch):
    """All products by one of the kernels, whatever their length."""
    limit = 10**9 if request.param in DIRECT else 0
    monkeypatch.setattr(ops, "CROSSOVER", limit)
    if request.param == "side by side":
        monkeypatch.setattr(direct, "ENOUGH", 1)
    monkeypatch.setattr(hierarchical, "LEAST", 0)  # small tensors in slices too
    sizes = {"two steps": (2, 64), "wide blocks": (1, 128)}.get(request.param)
    if sizes:
        inner, size = sizes
        cut = lambda n, *_, **__: hierarchical.Cut(-(-n // (inner * size)), inner, size)  # noqa: E731
        monkeypatch.setattr(hierarchical, "cut", cut)
        monkeypatch.setattr(spectra, "MANY", 0)  # tables in large tiles
    return request.param


def future_cut(w, m):
    return torch.where(torch.arange(w.shape[-1], device=w.device) < m, w, 0)


def assert_as_good_as_plain(fast, plain, w, v, factor=2.0):
    """Values and gradients of `fast` err at most `factor` times as much as plain torch.

    Both against float64; plain torch has w in the dtype of v too, as a dense product needs it.
    """
    wide = [x.detach().double().requires_grad_() for x in (w, v)]
    exact = plain(*wide)
    g = rand(*exact.shape, dtype=v.dtype)
    exact_grads = torch.autograd.grad(exact, wide, g.double())
    narrow = [x.detach().to(v.dtype).requires_grad_() for x in (w, v)]
    baseline = plain(*narrow)
    baseline_grads = torch.autograd.grad(baseline, narrow, g)
    inputs = [w.detach().requires_grad_(), v.detach().requires_grad_()]
    y = fast(*inputs)
    assert y.dtype == v.dtype
    got = (y, *torch.autograd.grad(y, inputs, g))
    for a, b, e in zip(got, (baseline, *baseline_grads), (exact, *exact_grads), strict=True):
        assert a.shape == e.shape
        assert error(a, e) <= factor * error(b, e) + 1e-6


# 130 and 300 take several tiles, the last of them in part; 1 and 17 less than one. Side by side,
# 400 positions are four blocks of one tile, the last of them in part.
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("way", "shape", "m", "dtype"),
    [
        ("direct", (1, 2, 1, 16), 1, torch.float16),
        ("direct", (2, 2, 17, 16), 17, torch.bfloat16),
        ("direct", (3, 2, 130, 24), 130, torch.float16),
        ("direct", (1, 1, 300, 16), 130, torch.float16),
        ("direct", (1, 2, 100, 32), 300, torch.bfloat16),
        ("direct", (5, 3, 70, 2), 70, torch.float16),
        ("direct", (3, 4, 140, 1), 140, torch.bfloat16),
        ("side by side", (3, 1, 400, 1), 300, torch.float16),
        ("side by side", (2, 2, 90, 3), 400, torch.bfloat16),
        ("side by side", (40, 1, 300, 1), 300, torch.bfloat16),
        ("side by side", (1, 1, 300, 16), 130, torch.float16),
        ("hierarchical", (2, 1, 190, 16), 190, torch.float16),
        ("hierarchical", (1, 2, 100, 16), 190, torch.bfloat16),
        ("hierarchical", (9, 2, 130, 2), 130, torch.bfloat16),
        ("hierarchical", (2, 1, 130, 80), 130, torch.bfloat16),
        ("wide blocks", (1, 1, 250, 16), 250, torch.float16),
        ("two steps", (1, 1, 250, 16), 250, torch.bfloat16),
        ("two steps", (17, 1, 250, 1), 130, torch.bfloat16),
    ],
    indirect=["way"],
)
def test_products_and_gradients(way, shape, m, dtype, causal):
    if causal and way == "two steps":
        pytest.skip("slow in the interpreter, and no other code than that of one step")
    w, v = rand(shape[1], m + shape[2] - 1), rand(*shape, dtype=dtype)

    def fast(w, v):
        return toeplitz_matmul(w, v, out_length=m, causal=causal, impl="triton")

    def plain(w, v):
        return toeplitz(future_cut(w, m) if causal else w, m) @ v

    # The DFT of two or three blocks has few entries, whose rounding errors do not average out.
    assert_as_good_as_plain(fast, plain, w, v, factor=2.0 if way in DIRECT else 3.0)


@pytest.mark.parametrize(("dim", "inside"), [(2, True), (2, False), (16, True)])
def test_prefix(way, dim, inside):
    """Zero rows and columns before W, in gradients too, in either memory order."""
    rpb = FastRPB(2, 100, prefix=3, init=init.normal(1.0)).to(DEVICE)
    v = rand(2, 2, 103, dim, dtype=torch.float16)
    v = v.transpose(1, 2).contiguous().transpose(1, 2) if inside else v

    def fast(w, v):
        return toeplitz_matmul(w, v, prefix=3, impl="triton")

    def plain(w, v):
        return torch.nn.functional.pad(toeplitz(w), (3, 0, 3, 0)) @ v

    assert_as_good_as_plain(fast, plain, rpb.w.detach(), v, factor=3.0)
    assert not fast(rpb.w, v)[:, :, :3].any()
    assert error(rpb(v), rpb.matrix(103).double() @ v.double()) < 1e-3


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_cuts_cover_any_length(dtype, gradients):
    for n in (1, 63, 64, 8193, 16385, 70_001, 131_073, 1 << 20, (1 << 20) + 1):
        outer, inner, size = hierarchical.cut(n, dtype, gradients=gradients)
        assert (outer - 1) * inner * size < n <= outer * inner * size
        assert inner == 1 or dtype == torch.bfloat16


@pytest.mark.parametrize("enough", [1, 1000])
def test_float32_by_the_direct_kernel(enough, monkeypatch):
    """Three products of tf32 for each, not one."""
    monkeypatch.setattr(direct, "ENOUGH", enough)
    w, v = rand(2, 2 * 130 - 1), rand(2, 2, 130, 16)
    exact = toeplitz(w.double()) @ v.double()
    fft = error(toeplitz_matmul(w, v, impl="fft"), exact)
    assert error(toeplitz_matmul(w, v, impl="triton"), exact) <= 2 * fft + 2e-7


@pytest.mark.parametrize("dim", [1, 16])
def test_any_memory_order(way, dim):
    """And the result follows that of v."""
    w, n = rand(2, 2 * 90 - 1), 90
    inside = rand(2, n, 2, dim, dtype=torch.float16).transpose(1, 2)
    chunk = rand(2, n, 6 * dim, dtype=torch.float16).chunk(3, -1)[1].unflatten(-1, (2, dim))
    strided = rand(2, 2, n, 2 * dim, dtype=torch.float16)[..., ::2]
    for v in (inside, chunk.transpose(1, 2), strided):
        y = toeplitz_matmul(w, v, impl="triton")
        exact = toeplitz(w.double()) @ v.double()
        assert error(y, exact) <= 3 * error(toeplitz(w.half()) @ v, exact)
        assert y.transpose(1, 2).is_contiguous() == (v is not strided)


@pytest.mark.parametrize("dim", [1, 3])
def test_the_batch_is_packed_as_columns(dim):
    """Contiguous for each head, from either memory order, and back."""
    inside = rand(70, 11, 3, dim, dtype=torch.float16).transpose(1, 2)
    strided = rand(3, 5, 9, 2 * dim, dtype=torch.float16)[..., :dim]
    for x in (inside, inside.contiguous(), strided):
        packed = layout.pack(x)
        assert packed.is_contiguous()
        assert torch.equal(packed, x.permute(1, 2, 3, 0).flatten(2).unsqueeze(0))
        y = torch.full_like(x, torch.nan)
        layout.unpack(packed, y)
        assert torch.equal(x, y)


def test_scales_do_not_overflow(way):
    """Numbers beyond float16 in bfloat16, weights beyond it, and small ones beside large ones."""
    n = 100
    w = rand(2, 2 * n - 1) * torch.tensor([[1e6], [1e-6]], device=DEVICE)
    v = rand(2, 2, n, 16) * torch.tensor([1e10, 1e-10], device=DEVICE)[:, None, None, None]
    v = v.bfloat16()
    y = toeplitz_matmul(w, v, impl="triton")
    exact = toeplitz(w.double()) @ v.double()
    for b in range(2):
        for h in range(2):
            assert error(y[b, h], exact[b, h]) < 4e-3
    ones = torch.ones(1, 1, 5000 if DEVICE == "cuda" else 190, 16, device=DEVICE).bfloat16()
    w = torch.ones(1, 2 * ones.shape[2] - 1, device=DEVICE)
    torch.testing.assert_close(
        toeplitz_matmul(w, ones, impl="triton"), ones.shape[2] * ones, rtol=8e-3, atol=0
    )


def test_zeros_and_nan(way):
    w, v = rand(2, 199), rand(2, 2, 100, 16, dtype=torch.float16)
    assert not toeplitz_matmul(w, torch.zeros_like(v), impl="triton").any()
    assert not toeplitz_matmul(torch.zeros_like(w), v, impl="triton").any()
    v[1, 0, 50] = torch.nan
    y = toeplitz_matmul(w, v, impl="triton")
    assert y[1, 0].isnan().any(-1).all()
    assert y[0].isfinite().all()
    assert y[1, 1].isfinite().all()


@pytest.mark.parametrize(
    ("values", "gradients"),
    [
        ((1e6, 1.0), (0.0, 0.0)),  # as under a CLS token in the last layer
        ((1e6, 1.0), (0.0, 1e-35)),
        ((0.0, 0.0), (1.0, 1.0)),  # as of padding
        ((0.0, 1.0), (1.0, 0.0)),
        ((0.0, 1e-3), (1e6, 1e-3)),
    ],
)
def test_sequences_of_zeros_give_nothing(way, values, gradients):
    """Values or gradients of one sequence or of both are zero: no scale of them overflows."""
    of_each = lambda x: torch.tensor(x, device=DEVICE)[:, None, None, None]  # noqa: E731
    w, v = rand(1, 199).requires_grad_(), rand(2, 1, 100, 16) * of_each(values)
    v, g = v.bfloat16().requires_grad_(), (rand(2, 1, 100, 16) * of_each(gradients)).bfloat16()
    dw, dv = torch.autograd.grad(toeplitz_matmul(w, v, impl="triton"), (w, v), g)
    wide = w.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(toeplitz(wide) @ v.detach().double(), wide, g.double())
    assert (dw.double() - exact).norm() <= 4e-3 * exact.norm()
    assert dv.isfinite().all()
    assert not dv[of_each(gradients).flatten() == 0].any()


def test_deterministic(way):
    w, v = rand(1, 259).requires_grad_(), rand(2, 1, 130, 16, dtype=torch.float16).requires_grad_()
    runs = []
    for _ in range(2):
        y = toeplitz_matmul(w, v, impl="triton")
        runs.append((y, *torch.autograd.grad(y.float().square().sum(), (w, v))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("shape", "full", "dtype", "dim"),
    [
        ((5, 9), False, torch.bfloat16, 16),
        ((1, 140), False, torch.float16, 16),
        ((20, 70), False, torch.float16, 16),
        ((70, 20), False, torch.bfloat16, 16),
        ((5, 9), True, torch.float16, 16),
        ((33, 28), True, torch.bfloat16, 1),
        ((7, 64), True, torch.bfloat16, 70),
        ((140, 1), True, torch.float16, 2),
        ((1, 40), True, torch.bfloat16, 1),
        ((13, 17), True, torch.float32, 3),
        ((4, 65), True, torch.float16, 2),
    ],
)
def test_images(shape, full, dtype, dim):
    h, width = shape
    w = rand(2, 2 * h - 1, 2 * width - 1) if full else rand(2, 2 * max(shape) - 1)
    v = rand(3, h * width, 2, dim, dtype=dtype).transpose(1, 2)
    assert_as_good_as_plain(
        lambda w, v: toeplitz_matmul_2d(w, v, shape, impl="triton"),
        lambda w, v: toeplitz_2d(w, shape) @ v,
        w,
        v,
    )


def test_small_tensors_are_not_cut_into_slices(monkeypatch):
    launched = []
    monkeypatch.setattr(hierarchical, "launch", lambda kernel, *_, **__: launched.append(kernel))
    monkeypatch.setattr(hierarchical, "largest", lambda v: v.new_ones(v.shape[:2]).float())
    w, v = rand(8, 2 * 4096 - 1), rand(1, 8, 4096, 64, dtype=torch.bfloat16)
    toeplitz_matmul(w, v, impl="triton")
    assert [kernel.__name__ for kernel in launched].count("_blocks") == 1
    monkeypatch.setattr(hierarchical, "LEAST", 0)
    toeplitz_matmul(w, v, impl="triton")
    assert [kernel.__name__ for kernel in launched].count("_blocks") == 1 + 8


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
class TestOnAGpu:
    @pytest.mark.parametrize("shape", [(2, 8, 1000, 64), (1, 2, 5000, 64), (1, 2, 70_001, 32)])
    @pytest.mark.parametrize("dtype", HALF)
    def test_auto_at_length(self, shape, dtype):
        w, v = rand(shape[1], 2 * shape[2] - 1), rand(*shape, dtype=dtype)
        inputs = w.requires_grad_(), v.requires_grad_()
        wide = [x.detach().double().requires_grad_() for x in inputs]
        g = rand(*shape, dtype=dtype)
        y = toeplitz_matmul(*inputs)
        exact = toeplitz_matmul(*wide, impl="fft")
        got = (y, *torch.autograd.grad(y, inputs, g))
        wanted = (exact, *torch.autograd.grad(exact, wide, g.double()))
        # A dense product in that precision rounds w and y, each by about 0.42 of half its eps.
        plain = 2**0.5 * 0.42 * torch.finfo(dtype).eps / 2
        assert error(y, exact) < 2 * plain
        assert error(got[2], wanted[2]) < 2 * plain
        assert error(got[1], wanted[1]) < max(2 * plain, 1e-3)  # products of rounded transforms

    def test_a_million_positions(self):
        n = 1 << 20
        w, v = rand(1, 2 * n - 1), rand(1, 1, n, 64, dtype=torch.bfloat16)
        exact = toeplitz_matmul(w.double(), v.double(), impl="fft")
        assert error(toeplitz_matmul(w, v), exact) < 2 * error(exact.bfloat16(), exact)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize(("n", "dim"), [(3000, 64), (1000, 128)])
    def test_linear_attention_at_length(self, n, dim, dtype, causal):
        q, k, v = (rand(2, 3, n, dim, dtype=dtype) for _ in range(3))
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        exact = linear_attention(*wide, phi=sikf, causal=causal)
        g = rand(*exact.shape, dtype=dtype)
        wanted = (exact, *torch.autograd.grad(exact, wide, g.double()))

        def errors(impl):
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            y = linear_attention(*inputs, phi=sikf, causal=causal, impl=impl)
            got = (y, *torch.autograd.grad(y, inputs, g))
            return [error(a, b) for a, b in zip(got, wanted, strict=True)]

        for fast, plain in zip(errors("auto"), errors("torch"), strict=True):
            assert fast <= 2 * plain + 2e-7

    @pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
    def test_cuda_graph(self):
        rpb = FastRPB(4, 6000, init=init.normal(1.0)).to(DEVICE)
        v = rand(2, 4, 6000, 64, dtype=torch.bfloat16).requires_grad_()

        def step():
            y = linear_attention(v, v, v, phi=sikf) + rpb(v)
            return y, *torch.autograd.grad(y.float().square().sum(), (rpb.w, v))

        torch.use_deterministic_algorithms(False)
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = step()
        with torch.no_grad():
            v.copy_(torch.randn_like(v))
        graph.replay()
        for a, b in zip(outputs, step(), strict=True):
            torch.testing.assert_close(a, b)

    def test_autocast_and_auto(self):
        rpb = FastRPB(4, 300, init=init.normal(1.0)).to(DEVICE)
        v = rand(2, 4, 300, 16, dtype=torch.bfloat16)
        with torch.autocast("cuda", torch.bfloat16):
            y = rpb(v)
        torch.testing.assert_close(y, toeplitz_matmul(rpb.w, v, impl="triton"))

    @pytest.mark.parametrize(("n", "limit"), [(1024, 1.5), (4096, 1.5), (16384, 6), (65536, 6)])
    def test_extra_memory(self, n, limit):
        torch.use_deterministic_algorithms(False)
        w, v = rand(8, 2 * n - 1), rand(65536 // n, 8, n, 64, dtype=torch.bfloat16)
        toeplitz_matmul(w, v)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        toeplitz_matmul(w, v)
        assert torch.cuda.max_memory_allocated() - before <= limit * v.nbytes
