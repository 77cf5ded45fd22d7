import pytest
import torch

from fastrpb import (
    DPFP,
    FastRPB,
    FavorPlus,
    elu1,
    linear_attention,
    linear_attention_init_state,
    linear_attention_state,
    linear_attention_step,
    linear_attention_weights,
    relu,
    sikf,
    softmax_attention,
)
from oracles import assert_same_gradients

PHIS = {"sikf": sikf, "elu1": elu1, "relu": relu, "dpfp": DPFP(2), "favor": FavorPlus(8, 16)}
phis = pytest.mark.parametrize("phi", PHIS.values(), ids=PHIS)
causals = pytest.mark.parametrize("causal", [False, True])


def inputs(m, n, dim=8, dim_v=5):
    return torch.randn(2, 3, m, dim), torch.randn(2, 3, n, dim), torch.randn(2, 3, n, dim_v)


def wide(phi):
    return FavorPlus(8, 16).double() if isinstance(phi, FavorPlus) else phi


def softmax_definition(q, k, v, mask=None, causal=False, logits=0.0):
    """Eq. 1, with zeros where nothing is visible."""
    scores = q @ k.mT / q.shape[-1] ** 0.5 + logits
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if causal:
        visible = visible.tril()
    visible = visible.expand_as(scores)
    if mask is not None:
        visible = visible & mask[:, None, None, :]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return weights.nan_to_num(0.0) @ v


@phis
@causals
@pytest.mark.parametrize(
    ("m", "n"),
    [(1, 1), (2, 2), (7, 7), (63, 63), (64, 64), (65, 65), (300, 300), (10, 70), (70, 10)],
)
def test_linear_attention_equals_its_definition(phi, m, n, causal):
    q, k, v = inputs(m, n)
    for mask in (None, torch.rand(2, n) < 0.7):
        y = linear_attention(q, k, v, phi=phi, mask=mask, causal=causal)
        weights = linear_attention_weights(
            q.double(), k.double(), phi=wide(phi), mask=mask, causal=causal
        )
        torch.testing.assert_close(y.double(), weights @ v.double(), rtol=1e-4, atol=1e-4)


def test_more_queries_than_very_negative_keys():
    q, k, v = inputs(70, 10)
    y = linear_attention(q, k - 200, v, phi=sikf, causal=True)
    weights = linear_attention_weights(q, k - 200, phi=sikf, causal=True)
    torch.testing.assert_close(y, weights @ v, rtol=1e-3, atol=1e-3)


@phis
@causals
@pytest.mark.parametrize("n", [7, 150])
def test_linear_attention_gradients(phi, n, causal):
    mask = torch.rand(2, n) < 0.7
    mask[:, 0] = True
    assert_same_gradients(
        lambda q, k, v: linear_attention(q, k, v, phi=phi, mask=mask, causal=causal),
        lambda q, k, v: linear_attention_weights(q, k, phi=wide(phi), mask=mask, causal=causal) @ v,
        *inputs(n, n),
    )


@phis
def test_weights_are_a_distribution(phi):
    q, k, _ = inputs(20, 30)
    weights = linear_attention_weights(q, k, phi=phi)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 20))


@phis
@causals
def test_masked_keys_do_not_count_even_as_nan(phi, causal):
    q, k, v = inputs(100, 100)
    mask = torch.rand(2, 100) < 0.6
    hole = ~mask[:, None, :, None]
    y = linear_attention(q, k, v, phi=phi, mask=mask, causal=causal)
    dirty = linear_attention(
        q,
        k.masked_fill(hole, torch.nan),
        v.masked_fill(hole, torch.nan),
        phi=phi,
        mask=mask,
        causal=causal,
    )
    assert torch.equal(y, dirty)


@phis
def test_masked_keys_have_no_gradients_even_as_nan(phi):
    q, k, v = (x.requires_grad_() for x in inputs(5, 5))
    mask = torch.tensor([[True] * 3 + [False] * 2]).expand(2, 5)
    hole = ~mask[:, None, :, None]
    spoiled = k.masked_fill(hole, torch.nan)
    for key in (k, spoiled):
        weights = linear_attention_weights(q, key, phi=phi, mask=mask)
        state = linear_attention_state(key, v, phi=phi, mask=mask)
        begin = linear_attention_init_state(k, v, phi=phi)
        last = (x[..., 4:, :] for x in (q, key, v))
        y, after = linear_attention_step(*last, begin, phi=phi, mask=mask[:, 4:])
        outputs = [weights.square(), *state, y, *after]
        assert all(x.isfinite().all() for x in outputs)
        grads = torch.autograd.grad([x.sum() for x in outputs if x.requires_grad], (q, k, v))
        assert all(g.isfinite().all() for g in grads)


@causals
def test_masked_keys_do_not_count_even_as_nan_in_softmax(causal):
    q, k, v = inputs(30, 30)
    mask = torch.rand(2, 30) < 0.6
    hole = ~mask[:, None, :, None]
    y = softmax_attention(q, k, v, mask=mask, causal=causal)
    k, v = k.masked_fill(hole, torch.nan), v.masked_fill(hole, torch.inf)
    torch.testing.assert_close(softmax_attention(q, k, v, mask=mask, causal=causal), y)


@causals
def test_softmax_gradients(causal):
    mask = torch.rand(2, 20) < 0.7
    mask[:, 0] = True
    logits = torch.randn(3, 20, 20)
    assert_same_gradients(
        lambda q, k, v: softmax_attention(q, k, v, mask=mask, causal=causal, logits=logits),
        lambda q, k, v: softmax_definition(q, k, v, mask, causal, logits),
        *inputs(20, 20),
    )


def test_autocast_brings_softmax_inputs_to_one_dtype():
    """Normalised queries and keys are float32 there, values are not."""
    q, k, v = inputs(30, 30)
    mask = torch.rand(2, 30) < 0.8
    exact = softmax_attention(q, k, v, mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        y = softmax_attention(q, k, v.bfloat16(), mask=mask, logits=torch.zeros(30, 30))
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.05)


def test_mixed_dtypes_compute_in_the_widest():
    q, k, v = inputs(70, 70)
    y = linear_attention(q.double(), k.half(), v, phi=sikf, causal=True)
    assert y.dtype == torch.float32
    wanted = linear_attention_weights(q.double(), k.half().double(), phi=sikf, causal=True)
    torch.testing.assert_close(y.double(), wanted @ v.double(), rtol=1e-5, atol=1e-6)


@phis
@causals
def test_a_row_that_sees_nothing_gives_zeros(phi, causal):
    q, k, v = (x.requires_grad_() for x in inputs(100, 100))
    mask = torch.ones(2, 100, dtype=torch.bool)
    mask[0] = False
    mask[1, :70] = False
    for attend in (
        lambda: linear_attention(q, k, v, phi=phi, mask=mask, causal=causal),
        lambda: softmax_attention(q, k, v, mask=mask, causal=causal),
    ):
        y = attend()
        assert not y[0].any()
        assert y[1, :, :70].any() != causal
        assert y[1, :, 70:].any()
        for g in torch.autograd.grad(y.sum(), (q, k, v)):
            assert g.isfinite().all()


@phis
def test_causality(phi):
    q, k, v = inputs(200, 200)
    y = linear_attention(q, k, v, phi=phi, causal=True)
    k[:, :, 101:], v[:, :, 101:] = 5.0, 9.0
    later = linear_attention(q, k, v, phi=phi, causal=True)
    torch.testing.assert_close(later[:, :, :101], y[:, :, :101])
    assert (later[:, :, 101:] - y[:, :, 101:]).abs().max() > 0.1


@causals
@pytest.mark.parametrize(("m", "n"), [(1, 1), (30, 30), (10, 30), (30, 10)])
def test_softmax_attention_equals_its_definition(m, n, causal):
    q, k, v = inputs(m, n)
    for mask in (None, torch.rand(2, n) < 0.6):
        for logits in (None, torch.randn(3, m, n)):
            y = softmax_attention(q, k, v, mask=mask, causal=causal, logits=logits)
            wanted = softmax_definition(
                q.double(), k.double(), v.double(), mask, causal, 0.0 if logits is None else logits
            )
            torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [None, torch.ones(2, 30, dtype=torch.bool)])
def test_softmax_dropout_drops_weights_and_keeps_their_mean(mask):
    q, k, v = inputs(30, 30)
    y = softmax_attention(q, k, torch.ones_like(v), mask=mask, dropout=0.5)
    assert y.std() > 0.05
    assert 0.9 < y.mean() < 1.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@causals
@phis
def test_half_precision_is_float32_inside(phi, dtype, causal):
    q, k, v = (x.to(dtype) for x in inputs(500, 500))
    y = linear_attention(q, k, v, phi=phi, causal=causal)
    assert y.dtype == dtype
    exact = linear_attention(q.float(), k.float(), v.float(), phi=phi, causal=causal)
    assert torch.equal(y, exact.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_attention(q, k, v, phi=phi, causal=causal), y)


def test_causal_memory_is_linear():
    """No tensor of the graph holds more than a few values for each token and channel."""
    q, k, v = (torch.randn(1, 1, 4096, 32, requires_grad=True) for _ in range(3))
    largest = 0

    def record(x):
        nonlocal largest
        largest = max(largest, x.numel())
        return x

    for phi in (sikf, elu1):
        with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
            linear_attention(q, k, v, phi=phi, causal=True)
    assert 0 < largest <= 3 * 64 * 4096  # the quadratic blocks within a chunk


@phis
def test_streaming_equals_the_parallel_form(phi):
    q, k, v = inputs(130, 130)
    whole = linear_attention(q, k, v, phi=phi, causal=True)
    state, ys = linear_attention_init_state(k, v, phi=phi), []
    for t in range(130):
        here = (slice(None), slice(None), slice(t, t + 1))
        y, state = linear_attention_step(q[here], k[here], v[here], state, phi=phi)
        ys.append(y)
    torch.testing.assert_close(torch.cat(ys, 2), whole, rtol=1e-4, atol=1e-5)
    assert state.sums.shape[-1] == 6


@phis
def test_streams_may_begin_with_many_tokens_and_skip_some(phi):
    q, k, v = inputs(130, 130)
    k[0, :, :30] += 1000  # what is masked must not even raise a shift
    mask = torch.arange(130) >= torch.tensor([[30], [0]])
    whole = linear_attention(q, k, v, phi=phi, mask=mask, causal=True)
    for first in (1, 29, 100):
        state = linear_attention_state(
            k[:, :, :first], v[:, :, :first], phi=phi, mask=mask[:, :first]
        )
        ys = []
        for t in range(first, 130):
            here = (slice(None), slice(None), slice(t, t + 1))
            y, state = linear_attention_step(
                q[here], k[here], v[here], state, phi=phi, mask=mask[:, t : t + 1]
            )
            ys.append(y)
        torch.testing.assert_close(torch.cat(ys, 2), whole[:, :, first:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("phi", "changed"),
    [
        (sikf, lambda k: k + torch.linspace(0, 9000, 40)[:, None]),
        (sikf, lambda k: k - 200),
        (PHIS["favor"], lambda k: 20 * k),  # exponents far below zero, too
    ],
    ids=["growing", "very negative", "favor"],
)
def test_streams_survive_keys_of_any_size(phi, changed):
    q, k, v = inputs(40, 40)
    k = changed(k)
    state, ys = linear_attention_init_state(k, v, phi=phi), []
    for t in range(40):
        here = (slice(None), slice(None), slice(t, t + 1))
        y, state = linear_attention_step(q[here], k[here], v[here], state, phi=phi)
        ys.append(y)
    weights = linear_attention_weights(q.double(), k.double(), phi=wide(phi), causal=True)
    exact = weights @ v.double()
    torch.testing.assert_close(torch.cat(ys, 2).double(), exact, rtol=1e-3, atol=1e-3)


@phis
def test_autocast_does_not_round_streams(phi):
    q, k, v = inputs(10, 10)

    def run():
        state = linear_attention_state(k[:, :, :9], v[:, :, :9], phi=phi)
        last = (x[:, :, 9:] for x in (q, k, v))
        y, after = linear_attention_step(*last, state, phi=phi)
        return *state, y, *after

    wanted = run()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(), wanted)


def test_one_compiled_causal_program_has_the_gradients_of_all_lengths():
    torch.compiler.reset()

    def attend(q, k, v):
        return linear_attention(q, k, v, phi=relu, causal=True).square().sum()

    compiled = torch.compile(attend, dynamic=True)
    for length in (133, 300):
        x = [x.requires_grad_() for x in torch.randn(3, 1, 2, length, 4)]
        got, wanted = (torch.autograd.grad(f(*x), x) for f in (compiled, attend))
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


@phis
@causals
def test_compiles_to_one_graph(phi, causal):
    torch.compiler.reset()
    q, k, v = (x.requires_grad_() for x in inputs(100, 100))
    mask = torch.rand(2, 100) < 0.8

    def attend(q, k, v):
        return linear_attention(q, k, v, phi=phi, mask=mask, causal=causal)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    got, wanted = compiled(q, k, v), attend(q, k, v)
    torch.testing.assert_close(got, wanted)
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), (q, k, v)),
        torch.autograd.grad(wanted.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


Q, K, V = inputs(10, 10)
STATE = linear_attention_init_state(K, V, phi=sikf)
CAUSAL = FastRPB(3, 10, causal=True)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: linear_attention(Q, K, V, phi="sikf"), TypeError, "feature map.*'sikf'"),
        (lambda: linear_attention(Q[..., :7], K, V, phi=sikf), ValueError, "dim 7 and k has 8"),
        (lambda: linear_attention(Q, K, V[:, :, 1:], phi=sikf), ValueError, "10 positions.*9"),
        (lambda: linear_attention(Q[:1], K, V, phi=sikf), ValueError, r"\(1, 3\), \(2, 3\)"),
        (lambda: linear_attention(Q, K, V[:1], phi=sikf), ValueError, r"\(2, 3\), \(1, 3\)"),
        (lambda: linear_attention(Q.long(), K, V, phi=sikf), TypeError, "q must.*int64"),
        (lambda: softmax_attention(Q, K, V[0, 0, 0]), ValueError, r"v must.*\(5,\)"),
        (lambda: linear_attention(Q, K[:, :, :0], V, phi=sikf), ValueError, "k has an empty"),
        (lambda: softmax_attention(Q, K, V, mask=[True]), TypeError, "mask must be a tensor"),
        (lambda: softmax_attention(Q.half(), K, V), TypeError, "one dtype.*float16"),
        (
            lambda: softmax_attention(Q, K, V, logits=torch.randn(3, 9, 9)),
            ValueError,
            r"\(3, 9, 9\).*\(2, 3, 10, 10\)",
        ),
        (lambda: softmax_attention(Q, K, V, logits=[1]), TypeError, "logits must be a tensor"),
        (lambda: linear_attention(Q[0, 0], K[0, 0], V[0, 0], phi=sikf), ValueError, r"\(10, 8\)"),
        (lambda: linear_attention_weights(Q, K, phi=None), TypeError, "feature map"),
        (lambda: linear_attention_init_state(K.int(), V, phi=sikf), TypeError, "int32"),
        (
            lambda: linear_attention_step(*(x[:1, :, :1] for x in (Q, K, V)), STATE, phi=sikf),
            ValueError,
            r"state \(2, 3, 8, 6\) is of another.*\(1, 3, 8, 6\)",
        ),
        (
            lambda: linear_attention_step(*(x[:, :, :1] for x in (Q, K, V)), STATE, phi=DPFP(2)),
            ValueError,
            r"state \(2, 3, 8, 6\) is of another.*\(2, 3, 32, 6\)",
        ),
        (lambda: softmax_attention(Q, K, V, dropout=2.0), ValueError, "dropout=2.0"),
        (lambda: softmax_attention(Q, K, V, dropout="x"), TypeError, "dropout must be a number"),
        (lambda: softmax_attention(Q, K, V, causal="no"), TypeError, "causal='no'"),
        (lambda: linear_attention_weights(Q, K, phi=sikf, causal="no"), TypeError, "causal='no'"),
        (lambda: softmax_attention(Q, K, V.to("meta")), ValueError, "v on meta"),
        (lambda: CAUSAL.step(V[:1, :, :1], CAUSAL.init_state(V)), ValueError, r"\(1, 3, 1, 5\)"),
        (lambda: CAUSAL.step(V[:, :, :1, :1], CAUSAL.init_state(V)), ValueError, "2, 3, 1, 1"),
        (lambda: softmax_attention(Q, K, V, mask=torch.ones(2, 10)), TypeError, "bool.*float32"),
        (
            lambda: softmax_attention(Q, K, V, mask=torch.ones(2, 9, dtype=torch.bool)),
            ValueError,
            r"\(2, 10\).*\(2, 9\)",
        ),
        (lambda: linear_attention_step(Q, K, V, STATE, phi=sikf), ValueError, "one token, got 10"),
        (
            lambda: linear_attention_step(Q[:, :, :1], K, V, STATE, phi=sikf),
            ValueError,
            "1 queries, 10 keys",
        ),
        (lambda: FastRPB(3, 10).init_state(V), ValueError, "causal=True"),
        (lambda: CAUSAL.init_state(V[:, :2]), ValueError, r"3 heads.*\(2, 2, 10, 5\)"),
        (lambda: CAUSAL.step(V, CAUSAL.init_state(V)), ValueError, "one token, got 10"),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    ("plus", "error", "words"),
    [
        (torch.zeros(2, 1, 5, 3), ValueError, r"\(2, 1, 5, 3\).*\(2, 1, 5, 4\)"),
        (torch.zeros(2, 1, 5, 4).double(), TypeError, "float64 and torch.float32"),
        (torch.zeros(2, 1, 5, 4, device="meta"), ValueError, "meta and v on cpu"),
    ],
)
def test_what_cannot_be_added_raises(plus, error, words):
    x = torch.randn(2, 1, 5, 4)
    with pytest.raises(error, match=words):
        linear_attention(x, x, x, phi=sikf, plus=plus)


@phis
def test_weights_in_half_precision_and_under_autocast(phi):
    q, k = 40 * torch.rand(2, 1, 2, 30, 8)
    wanted = linear_attention_weights(q, k, phi=phi)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(linear_attention_weights(q, k, phi=phi), wanted)
    q, k = q.half(), k.half()
    weights = linear_attention_weights(q, k, phi=phi)
    assert weights.dtype == torch.float16
    wanted = linear_attention_weights(q.float(), k.float(), phi=phi)
    torch.testing.assert_close(weights, wanted.half())


@causals
def test_shapes_on_the_meta_device(causal):
    q, k, v = torch.randn(3, 2, 4, 100, 8, device="meta")
    assert linear_attention(q, k, v, phi=sikf, causal=causal).shape == (2, 4, 100, 8)
    assert FastRPB(4, 100, causal=causal).to("meta")(v).shape == (2, 4, 100, 8)
