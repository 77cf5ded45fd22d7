"""The core under torch.compile, torch.export, torch.func and the operator checks."""

import shutil

import pytest
import torch
from torch.library import opcheck

from fastrpb import (
    Classifier,
    FastRPB,
    FastRPB2d,
    ModelConfig,
    elu1,
    init,
    linear_attention,
    sikf,
    toeplitz,
    toeplitz_matmul,
    toeplitz_matmul_2d,
)
from oracles import assert_product

BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "n", "dim"), [(6, 6, 2), (4, 7, 3), (1, 1, 1)])
def test_operators_are_registered_correctly(m, n, dim, dtype):
    w, g = torch.randn(3, m + n - 1, dtype=dtype), torch.randn(2, 3, m, dim, dtype=dtype)
    contiguous = torch.randn(2, 3, n, dim, dtype=dtype)
    strided = torch.randn(2, n, 3, 2 * dim, dtype=dtype).transpose(1, 2)[..., ::2]
    for v in (contiguous, strided):
        opcheck(torch.ops.fastrpb.toeplitz_fft.default, (w, v, m))
        opcheck(torch.ops.fastrpb.toeplitz_fft_backward.default, (g, w, v))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_to_one_graph_with_gradients(backend):
    torch.compiler.reset()
    rpb = FastRPB(3, 300, prefix=1, init=init.normal(1.0))
    image = FastRPB2d(3, 15, 20, prefix=1, kind="full")
    additive = FastRPB2d(3, 15, 20, prefix=1)
    mask = torch.rand(2, 301) < 0.8

    def run(v):
        with torch.autocast("cpu", torch.bfloat16):
            return rpb(v, mask) + image(v, mask) + additive(v, mask)

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    v = torch.randn(2, 3, 301, 4, requires_grad=True)
    y = compiled(v)
    g = torch.randn_like(y)
    wanted, got = run(v), compiled(v)
    torch.testing.assert_close(got, wanted)
    leaves = (v, rpb.w, image.w, additive.w)
    for a, b in zip(
        torch.autograd.grad(got, leaves, g), torch.autograd.grad(wanted, leaves, g), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_compiles_with_dynamic_lengths():
    torch.compiler.reset()
    rpb = FastRPB(3, 1000, init=init.normal(1.0))
    compiled = torch.compile(rpb, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (700, 900, 1000, 11):
        v = torch.randn(2, 3, length, 4)
        assert_product(compiled(v), rpb.matrix(length), v, 2 * length)


@pytest.mark.parametrize("length", [20, 600])
def test_exports_with_a_dynamic_batch(length):
    rpb = FastRPB(3, length, init=init.normal(1.0))
    v = torch.randn(4, 3, length, 4)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(rpb, (v,), dynamic_shapes={"v": {0: batch}})
    for size in (2, 7):
        v = torch.randn(size, 3, length, 4)
        assert_product(program.module()(v), rpb.matrix(length), v, 2 * length)


def test_exports_with_a_dynamic_length():
    class Product(torch.nn.Module):
        def forward(self, w, v):
            return toeplitz_matmul(w, v)

    half = torch.export.Dim("half", min=2, max=2000)
    shapes = {"w": {1: 4 * half - 1}, "v": {2: 2 * half}}
    program = torch.export.export(
        Product(), (torch.randn(3, 79), torch.randn(2, 3, 40, 4)), dynamic_shapes=shapes
    )
    for n in (4, 300, 1000):
        w, v = torch.randn(3, 2 * n - 1), torch.randn(2, 3, n, 4)
        assert_product(program.module()(w, v), toeplitz(w), v, 2 * n)


@pytest.mark.parametrize("impl", ["dense", "fft"])
@pytest.mark.parametrize("in_dims", [(0, 0), (None, 0), (0, None), (1, 3)])
def test_vmap_equals_a_loop(in_dims, impl):
    def at(x, dim):
        return x if dim is None else torch.stack([x, 2 * x, x - 1], dim)

    w, v = torch.randn(2, 13), torch.randn(5, 2, 7, 4)
    args = [at(x, d) for x, d in zip((w, v), in_dims, strict=True)]
    got = torch.func.vmap(lambda w, v: toeplitz_matmul(w, v, impl=impl), in_dims)(*args)
    for i in range(3):
        wi, vi = (x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True))
        assert_product(got[i], toeplitz(wi), vi, 14)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("impl", ["dense", "fft"])
def test_vmap_over_gradients(impl):
    """Per-sample gradients of w, as in influence functions or private training."""
    w, v = torch.randn(2, 13), torch.randn(4, 3, 2, 7, 4)

    def loss(w, v):
        return toeplitz_matmul(w, v, impl=impl).square().sum()

    got = torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, 0))(w, v)
    for i in range(4):
        wi, vi = w.clone().requires_grad_(), v[i].clone().requires_grad_()
        (toeplitz(wi) @ vi).square().sum().backward()
        torch.testing.assert_close(got[0][i], wi.grad, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(got[1][i], vi.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("moves", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("impl", ["dense", "fft"])
def test_forward_mode(impl, moves):
    """The tangent of W·v is W'·v + W·v', whichever of the two there is."""
    w, v = torch.randn(2, 11), torch.randn(3, 2, 7, 4)
    dw, dv = torch.randn_like(w), torch.randn_like(v)

    def run(*moved):
        given = iter(moved)
        both = (next(given) if moving else x for moving, x in zip(moves, (w, v), strict=True))
        return toeplitz_matmul(*both, out_length=5, impl=impl)

    moved, tangents = (
        tuple(x for moving, x in zip(moves, pair, strict=True) if moving)
        for pair in ((w, v), (dw, dv))
    )
    y, dy = torch.func.jvp(run, moved, tangents)
    wanted = moves[0] * (toeplitz(dw, 5) @ v) + moves[1] * (toeplitz(w, 5) @ dv)
    torch.testing.assert_close(y, toeplitz(w, 5) @ v, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dy, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("outer", [torch.func.jacfwd, torch.func.jacrev])
@pytest.mark.parametrize("inner", [torch.func.jacfwd, torch.func.jacrev])
def test_second_derivatives(inner, outer):
    """Forward and reverse mode over each other, batched."""
    w, v = torch.randn(2, 13, dtype=torch.float64), torch.randn(3, 2, 7, 4, dtype=torch.float64)

    def loss(w, v, impl):
        return toeplitz_matmul(w, v, impl=impl).pow(3).sum()

    second = outer(inner(loss, (0, 1)), (0, 1))
    torch.testing.assert_close(second(w, v, "fft"), second(w, v, "dense"))


def test_forward_mode_of_a_model():
    """⟨g, J·t⟩ = ⟨Jᵀ·g, t⟩ for all weights together."""
    config = ModelConfig(vocab_size=9, max_length=700, dim=16, layers=2, heads=2)
    model = Classifier(config).eval().double()
    weights = {name: x.detach() for name, x in model.named_parameters()}
    tangents = {name: torch.randn_like(x) for name, x in weights.items()}
    tokens = torch.randint(9, (2, 700))

    def run(weights):
        return torch.func.functional_call(model, weights, (tokens,))

    y, dy = torch.func.jvp(run, (weights,), (tangents,))
    g = torch.randn_like(y)
    (gradients,) = torch.func.vjp(run, weights)[1](g)
    torch.testing.assert_close(
        (g * dy).sum(), sum((gradients[name] * tangents[name]).sum() for name in weights)
    )


def test_operators_by_themselves_have_no_gradients():
    """Programs that were exported are of these; they compute, but do not train."""
    w, v = torch.randn(2, 1399, requires_grad=True), torch.randn(1, 2, 700, 4)
    y = torch.ops.fastrpb.toeplitz_fft(w, v, 700)
    torch.testing.assert_close(y, toeplitz_matmul(w, v))
    with pytest.raises(RuntimeError, match="operators of fastrpb have no gradients of their own"):
        y.sum().backward()
    rpb = FastRPB(2, 700)
    program = torch.export.export(rpb, (v,)).module()
    torch.testing.assert_close(program(v), rpb(v))
    with pytest.raises(RuntimeError, match="operators of fastrpb have no gradients of their own"):
        program(v).sum().backward()


def _product(w):
    return toeplitz_matmul(w, torch.ones(2, 7, 4).cumsum(1), impl="fft")


def _cubes(w):
    return _product(w).pow(3).sum()


@pytest.mark.parametrize(
    "derivative",
    [
        lambda w: torch.func.jvp(_product, (w,), (w,))[1],
        lambda w: torch.func.vjp(_product, w)[1](_product(w))[0],
        lambda w: torch.func.vmap(torch.func.grad(_cubes))(torch.stack([w, 2 * w])),
        torch.func.hessian(_cubes),
    ],
    ids=["jvp", "vjp", "vmap", "hessian"],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_torch_func_in_what_is_compiled(derivative):
    """Dynamo takes operators for constants: their derivatives would be zero."""
    torch.compiler.reset()
    w = torch.randn(2, 13)
    wanted = derivative(w)
    with pytest.raises(RuntimeError, match="leave out fullgraph=True"):
        torch.compile(derivative, backend="aot_eager", fullgraph=True)(w)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(derivative, backend="aot_eager")(w), wanted)
    assert wanted.count_nonzero()


def test_vmap_2d():
    w, v = torch.randn(3, 2, 5, 7), torch.randn(3, 2, 12, 4)
    got = torch.func.vmap(lambda w, v: toeplitz_matmul_2d(w, v, (3, 4), impl="fft"))(w, v)
    for i in range(3):
        torch.testing.assert_close(got[i], toeplitz_matmul_2d(w[i], v[i], (3, 4), impl="dense"))


@pytest.mark.parametrize("causal", [False, True])
def test_exports_a_bias_up_to_its_longest(causal):
    rpb = FastRPB(3, 500, causal=causal, init=init.normal(1.0))
    length = torch.export.Dim("length", min=2, max=500)
    v = torch.randn(2, 3, 40, 4)
    program = torch.export.export(rpb, (v,), dynamic_shapes=({2: length},))
    for n in (2, 500):
        v = torch.randn(2, 3, n, 4)
        assert_product(program.module()(v), rpb.matrix(n), v, 2 * n)


@pytest.mark.parametrize("phi", [sikf, elu1], ids=["sikf", "elu1"])
@pytest.mark.parametrize("traced", [40, 150])
def test_exports_causal_attention_for_any_length(phi, traced):
    """With padding at the left, whose queries see nothing, and in the first chunks all of it."""

    class Attention(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return linear_attention(q, k, v, phi=phi, mask=mask, causal=True)

    def inputs(n):
        q, k, v = torch.randn(3, 2, 2, n, 6)
        return 30 * q, 30 * k, v, torch.arange(n) >= torch.tensor([[n // 3], [n - 1]])

    length = torch.export.Dim.AUTO
    shapes = *3 * ({2: length},), {1: length}
    program = torch.export.export(Attention(), inputs(traced), dynamic_shapes=shapes).module()
    for n in (2, 64, 65, 300):
        tensors = inputs(n)
        torch.testing.assert_close(program(*tensors), Attention()(*tensors), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_sequence():
    model = Classifier(ModelConfig(vocab_size=9, max_length=40, dim=16, layers=2, heads=2)).eval()
    parameters, tokens = dict(model.named_parameters()), torch.randint(9, (4, 40))

    def loss(parameters, sequence):
        return torch.func.functional_call(model, parameters, (sequence[None],)).sum()

    gradient = torch.func.grad(loss)
    each = torch.func.vmap(gradient, (None, 0))(parameters, tokens)
    for i, sequence in enumerate(tokens):
        for name, wanted in gradient(parameters, sequence).items():
            torch.testing.assert_close(each[name][i], wanted, rtol=1e-3, atol=1e-5)
