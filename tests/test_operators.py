"""The operators that Triton computes, as torch sees them: transforms, compilation, refusals."""

import copy
import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

from fastrpb import (
    DPFP,
    FavorPlus,
    attention,
    linear_attention,
    sikf,
    toeplitz_matmul,
    toeplitz_matmul_2d,
)
from fastrpb.kernels import ops
from fastrpb.kernels.launch import launch
from fastrpb.model import Classifier
from fastrpb.model_config import ModelConfig
from on_triton import DEVICE, error, masks, poisoned, rand  # noqa: F401, a fixture

pytest.importorskip("fastrpb.kernels.direct", reason="needs triton")
OutOfResources = pytest.importorskip("triton.runtime.errors").OutOfResources


@pytest.mark.parametrize(
    ("phi", "causal"),
    [(sikf, False), (sikf, True), (FavorPlus(16, 20).to(DEVICE), False), (DPFP(), False)],
    ids=["sikf", "causal", "favor", "dpfp"],
)
def test_gradients_of_gradients(phi, causal):
    w, v = rand(2, 39).requires_grad_(), rand(1, 2, 20, 16, dtype=torch.float16).requires_grad_()
    q, k = rand(2, 1, 2, 20, 16).unbind()

    def second(impls, w, v, q, k):
        q, k = q.requires_grad_(), k.requires_grad_()
        y = toeplitz_matmul(w, v, impl=impls[0]).to(q.dtype)
        y = linear_attention(q, k, y, phi=phi, causal=causal, impl=impls[1])
        first = torch.autograd.grad(y.square().sum(), (w, q), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), (w, q, k))

    got = second(("triton", "triton"), w, v, q, k)
    wanted = second(
        ("dense", "torch"), *(x.detach().double().requires_grad_() for x in (w, v, q, k))
    )
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < 5e-3


def test_gradients_over_images():
    """Of gradients, and of v where w is frozen."""
    w, v = rand(2, 9, 17), rand(1, 2, 5 * 9, 16, dtype=torch.float16)
    exact = [x.double() for x in (w, v)]

    def second(impl, w, v):
        w, v = w.requires_grad_(), v.requires_grad_()
        y = toeplitz_matmul_2d(w, v, (5, 9), impl=impl)
        first = torch.autograd.grad(y.to(w.dtype).square().mean(), (w, v), create_graph=True)
        return torch.autograd.grad(sum(x.to(w.dtype).square().sum() for x in first), (w, v))

    def frozen(impl, w, v):
        y = toeplitz_matmul_2d(w.detach(), v.requires_grad_(), (5, 9), impl=impl)
        return torch.autograd.grad(y.sum(), v)

    for run in (second, frozen):
        for a, b in zip(run("triton", w, v), run("dense", *exact), strict=True):
            assert error(a, b) < 5e-3


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_func_transforms():
    w, v = rand(2, 39), rand(3, 2, 2, 20, 16, dtype=torch.float16)
    got = torch.func.vmap(lambda v: toeplitz_matmul(w, v, impl="triton"))(v)
    torch.testing.assert_close(got, toeplitz_matmul(w, v, impl="triton"))
    q, k, u = rand(3, 3, 2, 2, 20, 16)

    def loss(q, k, u):
        return linear_attention(q, k, u, phi=sikf, impl="triton").square().sum()

    got = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(q, k, u)
    inputs = [x.clone().requires_grad_() for x in (q, k, u)]
    linear_attention(*inputs, phi=sikf, impl="torch").square().sum().backward()
    for a, x in zip(got, inputs, strict=True):
        torch.testing.assert_close(a, x.grad, rtol=1e-4, atol=1e-5)
    q, k, u = (x[:, :1, :1, :5] for x in (q, k, u))
    phis = [FavorPlus(16, 5, seed=seed).to(DEVICE) for seed in range(3)]
    rows = torch.stack([phi.projection for phi in phis])

    def favor(rows, q, k, u):
        phi = copy.copy(phis[0])
        phi._buffers = {"projection": rows}
        return linear_attention(q, k, u, phi=phi, impl="triton")

    for axes, of_each in (((None, 0, 0, 0), [phis[0]] * 3), ((0, 0, 0, 0), phis)):
        got = torch.func.vmap(favor, axes)(rows[0] if axes[0] is None else rows, q, k, u)
        wanted = [
            linear_attention(*x, phi=phi, impl="torch")
            for phi, *x in zip(of_each, q, k, u, strict=True)
        ]
        torch.testing.assert_close(got, torch.stack(wanted), rtol=1e-4, atol=1e-5)
    image = rand(2, 7)
    mapped = torch.func.vmap(lambda v: toeplitz_matmul_2d(image, v, (4, 4), impl="triton"))
    v = rand(3, 2, 2, 16, 16, dtype=torch.float16)
    torch.testing.assert_close(mapped(v), toeplitz_matmul_2d(image, v, (4, 4), impl="triton"))


@pytest.mark.parametrize(
    ("phi", "causal"),
    [(sikf, False), (sikf, True), (FavorPlus(16, 20).to(DEVICE), False)],
    ids=["sikf", "causal", "favor"],
)
def test_forward_mode(phi, causal):
    """Tangents of products and attention, and of their gradients, as of the definitions."""
    primals = rand(1, 23), rand(1, 7), *rand(3, 2, 1, 12, 16)
    tangents = rand(1, 23), rand(1, 7), *rand(3, 2, 1, 12, 16)
    mask = masks(2, 12)

    def run(impls, w, image, q, k, v):
        values = v if v.dtype == torch.float64 else v.half()  # which the kernels take
        plus = toeplitz_matmul(w, values, impl=impls[0])
        plus = plus + toeplitz_matmul_2d(image, values, (3, 4), impl=impls[0])
        settings = {"phi": phi, "mask": mask, "causal": causal, "impl": impls[1]}
        return linear_attention(q, k, v, plus=plus.to(v.dtype), **settings)

    def gradients(*call):
        return torch.func.grad(lambda *x: run(*x).square().sum(), (1, 2, 3, 4, 5))(*call)

    def tangent(impls, *at):
        return torch.func.jvp(partial(run, impls), at, tuple(x.to(at[0].dtype) for x in tangents))[
            1:
        ]

    exact = [tuple(x.double() for x in xs) for xs in (primals, tangents)]
    for function in (lambda *call: (run(*call),), gradients, tangent):
        got = torch.func.jvp(partial(function, ("triton", "triton")), primals, tangents)
        wanted = torch.func.jvp(partial(function, ("dense", "torch")), *exact)
        for a, b in zip(got[1], wanted[1], strict=True):
            assert error(a, b) < 5e-3


@pytest.mark.parametrize("inside", [False, True])
def test_operators_are_registered_correctly(inside):
    w, g = rand(2, 39), rand(2, 2, 20, 4, dtype=torch.float16)
    for v in (rand(2, 2, 20, 4).half(), rand(2, 20, 2, 8).half().transpose(1, 2)[..., ::2]):
        opcheck(torch.ops.fastrpb.toeplitz_triton.default, (w, v, -19, 20, 0, 0, inside))
        opcheck(torch.ops.fastrpb.toeplitz_triton_backward.default, (g, w, v, -19, 0, 0, inside))
    w = rand(2, 7 * 9)  # over images of 4×5
    opcheck(torch.ops.fastrpb.toeplitz_triton.default, (w, g, -31, 20, 0, 5, inside))
    opcheck(torch.ops.fastrpb.toeplitz_triton_backward.default, (g, w, g, -31, 0, 5, inside))


def test_the_order_in_memory_is_the_one_asked_for():
    """A compiled program relies on the order that it was traced with, whatever it hands over."""
    w, apart = rand(3, 39), rand(2, 3, 20, 4, dtype=torch.float16)
    together = apart.transpose(1, 2).contiguous().transpose(1, 2)
    assert [ops.heads_inside(v) for v in (apart, together)] == [False, True]
    for v, asked in itertools.product((apart, together), (False, True)):
        y = torch.ops.fastrpb.toeplitz_triton(w, v, -19, 20, 0, 0, asked)
        _, dv = torch.ops.fastrpb.toeplitz_triton_backward(v, w, v, -19, 0, 0, asked)
        z, state = torch.ops.fastrpb.linear_attention_triton(
            v, v, v, None, None, None, 0, False, asked
        )
        gradients = torch.ops.fastrpb.linear_attention_triton_backward(
            v, v, v, v, None, None, state, 0, False, asked
        )
        assert [ops.heads_inside(x) for x in (y, dv, z, *gradients)] == 6 * [asked]
        torch.testing.assert_close(y, toeplitz_matmul(w, v, impl="triton"))


def test_the_other_operators_are_registered_correctly():
    q, k, v = rand(3, 2, 1, 16, 4, dtype=torch.float16)
    rows, kept = rand(5, 4), masks(2, 16)
    for mask, projection, kind, causal in (
        (None, None, 0, False),
        (kept, None, 0, False),
        (kept, None, 0, True),
        (kept, rows, 4, False),
    ):
        inputs = q, k, v, mask, q, projection, kind, causal, False
        opcheck(torch.ops.fastrpb.linear_attention_triton.default, inputs)
        y, state = torch.ops.fastrpb.linear_attention_triton(*inputs)
        inputs = y, q, k, v, mask, projection, state, kind, causal, False
        opcheck(torch.ops.fastrpb.linear_attention_triton_backward.default, inputs)
    opcheck(torch.ops.fastrpb.image_sums_triton.default, (v, 2, 8))
    sums = torch.ops.fastrpb.image_sums_triton(v, 2, 8)
    opcheck(torch.ops.fastrpb.image_spread_triton.default, (sums, 2, 8, torch.float16))


def test_compiles_to_one_graph(monkeypatch):
    torch.compiler.reset()
    w, q = rand(2, 39).requires_grad_(), rand(2, 2, 20, 16, dtype=torch.float16)

    def run(w, q):
        y = toeplitz_matmul(w, q, impl="triton")
        y = linear_attention(q, q, q, phi=sikf, plus=y, impl="triton")
        y = linear_attention(q, q, y, phi=sikf, causal=True, impl="triton")
        return y + toeplitz_matmul_2d(w[:, 15:24], q, (4, 5), impl="triton")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    got, wanted = compiled(w, q), run(w, q)
    torch.testing.assert_close(got, wanted)
    g = rand(*got.shape, dtype=torch.float16)
    torch.testing.assert_close(
        torch.autograd.grad(got, w, g), torch.autograd.grad(wanted, w, g), rtol=1e-3, atol=1e-3
    )


@pytest.mark.skipif(DEVICE == "cuda", reason="compiled for the GPU by the other tests")
def test_the_kernels_pass_the_front_end_of_the_compiler():
    """The interpreter does not know all that the compiler refuses."""
    assert run_without_interpreter("front_end.py") > 100


@pytest.mark.timeout(300)  # 15 kernels, each to machine code
@pytest.mark.parametrize(("capability", "kilobytes", "dim"), [(80, 163, 128), (89, 99, 64)])
def test_the_widest_kernels_fit_into_the_shared_memory_of_other_gpus(capability, kilobytes, dim):
    """An A100 and an RTX 4090 have less than what the tiles were chosen for."""
    assert run_without_interpreter("shared_memory.py", capability, kilobytes, dim) > 10


def run_without_interpreter(script, *arguments):
    """What a program of its own says first: how many kernels it compiled."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).with_name(script), *arguments]
    run = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return int(run.stdout.split()[0])


class OnASmallGpu:
    """Stands in for a kernel: its loops fit with so many stages, and it notes its launches."""

    arg_names = ("x", "BLOCK")

    def __init__(self, most):
        self.most, self.launches = most, []

    def __getitem__(self, grid):
        def run(*args, num_stages=None, **_):
            if num_stages is not None and num_stages > self.most:
                raise OutOfResources(200_000, 101_376, "shared memory")
            self.launches.append(num_stages)
            return self

        return run


@pytest.mark.parametrize(("stages", "most", "used"), [(4, 4, 4), (4, 2, 2), (1, 1, 1)])
def test_launches_with_the_stages_that_fit(stages, most, used):
    kernel, x = OnASmallGpu(most), rand(3)
    for _ in range(2):  # the second time it is remembered
        launch(kernel, (1,), x, BLOCK=16, num_stages=stages)
    assert kernel.launches == [used, None]


@pytest.mark.parametrize(
    ("properties", "room"),
    [
        ({"major": 7, "shared_memory_per_block_optin": 65_536}, 0),
        ({"major": 8, "shared_memory_per_block_optin": 101_376}, 101_376),
        ({"major": 9}, 49_152),  # ROCm knows no other
    ],
)
def test_the_room_of_a_gpu(properties, room, monkeypatch):
    gpu = SimpleNamespace(shared_memory_per_block=49_152, **properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ops, "INSTALLED", True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(ops, "_known_room", ops._room)
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"))
    assert ops.room(x) == room
    assert ops.runs_on(x) == (room > 0)


def test_what_is_traced_for_a_gpu_needs_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ops, "_known_room", ops._room)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(1, 2, 300, 16, dtype=torch.bfloat16, device="cuda")
        y = linear_attention(x, x, x, phi=sikf)
        y = y + toeplitz_matmul(torch.empty(2, 599, device="cuda"), x)
    assert y.shape == x.shape
    assert y.is_cuda


def test_heads_are_narrower_where_there_is_less_room(monkeypatch):
    monkeypatch.setattr(ops, "room", lambda x: 101_376)
    for dtype, most in ((torch.bfloat16, 64), (torch.float32, 32)):
        x = rand(1, 1, 5, most, dtype=dtype)
        linear_attention(x, x, x, phi=sikf, impl="triton")
        x = rand(1, 1, 5, most + 1, dtype=dtype)
        with pytest.raises(ValueError, match=f"up to {most} channels, .* got SIKF, {most + 1}"):
            linear_attention(x, x, x, phi=sikf, impl="triton")


def test_a_launch_without_stages_is_left_as_it_is():
    kernel = OnASmallGpu(1)
    launch(kernel, (1,), rand(3), BLOCK=16)
    assert kernel.launches == [None]


def test_what_does_not_fit_at_all_says_so():
    with pytest.raises(OutOfResources, match="shared memory"):
        launch(OnASmallGpu(0), (1,), rand(3), BLOCK=16, num_stages=3)


@pytest.mark.skipif(DEVICE == "cuda", reason="trained on a GPU it is what tests of replays train")
def test_a_compiled_last_block_trains_at_any_length(monkeypatch):
    """Slices for CLS alone, in the last block, must not keep the strides of the first length."""
    torch.compiler.reset()
    monkeypatch.setattr(attention, "use_triton", lambda *_: True)
    size = {"dim": 16, "layers": 1, "heads": 2, "vocab_size": 9, "max_length": 40, "dropout": 0.0}
    model = Classifier(ModelConfig(**size, position="fastrpb"))
    for block in model.encoder.blocks:
        block.compile(dynamic=True)
    for length in (30, 20, 40):
        tokens, mask = torch.randint(9, (3, length)), torch.ones(3, length, dtype=torch.bool)
        with torch.autocast("cpu", torch.bfloat16):
            model(tokens, mask).square().sum().backward()
    assert model.encoder.blocks[0].attention.qkv.weight.grad.isfinite().all()


W, V = torch.randn(2, 9), torch.randn(1, 2, 5, 4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: toeplitz_matmul(W, V.half(), impl="triton"), "needs a GPU.*v is on cpu"),
        (lambda: toeplitz_matmul_2d(W, V.half(), (1, 5), impl="triton"), "needs a GPU"),
        (lambda: linear_attention(V, V, V, phi=sikf, impl="triton"), "needs a GPU.*cpu"),
    ],
)
def test_triton_off_the_gpu_raises(call, words, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=words):
        call()


def _wide(v, dim):
    x = v[..., :1].expand(*v.shape[:-1], dim)
    return linear_attention(x, x, x, phi=sikf, impl="triton")


def _favor(v, **options):
    phi = FavorPlus(4, 8).to(DEVICE)
    return linear_attention(v, v, v, phi=phi, impl="triton", **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda v: toeplitz_matmul(W.to(v), v, impl="triton"), "float64"),
        (lambda v: toeplitz_matmul(W.to(v), v.float(), impl="triton"), "float32 .*w .*float64"),
        (lambda v: linear_attention(v, v, v, phi=sikf, impl="triton"), "float64"),
        (lambda v: linear_attention(v, v, v, phi=DPFP(), impl="triton"), "got DPFP.*float64"),
        (lambda v: _favor(v.float(), causal=True), "got causal FavorPlus"),
        (lambda v: _wide(v.float(), 65), "64 channels.*65 and 65"),
        (lambda v: _wide(v.half(), 129), "128 channels.*129 and 129"),
        (lambda v: linear_attention(v, v, v, phi=sikf, impl="cuda"), "'cuda'.*auto, torch, triton"),
    ],
)
def test_what_triton_does_not_take_raises(call, words):
    with pytest.raises(ValueError, match=words):
        call(V.double().to(DEVICE))
