import math

import pytest
import torch

from fastrpb import (
    ALiBi,
    ConvSPE,
    LearnedPositions,
    RelativeKeyQuery,
    RoPE,
    SineSPE,
    SinusoidalPositions,
    T5Bias,
    softmax_attention,
)

IDS = torch.zeros(1, 2, 4, 4, dtype=torch.int64)
NOTHING = torch.zeros(2, 1, 2, 0, 3)  # queries and keys of no tokens


def test_sinusoidal_entry_by_entry():
    table = SinusoidalPositions(50, 7)(torch.randn(1, 50, 7))
    assert table.shape == (50, 7)
    for n in (0, 1, 17, 49):
        for i in range(7):
            angle = n / 10000 ** (2 * (i // 2) / 8)  # an odd width is cut from the next even one
            wanted = math.cos(angle) if i % 2 else math.sin(angle)
            assert abs(table[n, i].item() - wanted) < 1e-5


def test_absolute_positions_of_shorter_sequences():
    x = torch.randn(2, 5, 8)
    for positions in (LearnedPositions(10, 8), SinusoidalPositions(10, 8)):
        whole = positions(torch.randn(2, 10, 8))
        assert torch.equal(positions(x), whole[:5])
        with pytest.raises(ValueError, match="length 11 exceeds max_length=10"):
            positions(torch.randn(2, 11, 8))


@pytest.mark.parametrize(
    "make", [lambda: RelativeKeyQuery(8, 30), lambda: T5Bias(2), lambda: ALiBi(2)]
)
def test_logits_of_the_first_queries_alone(make):
    logits, (q, k) = make(), torch.randn(2, 1, 2, 20, 8)
    torch.testing.assert_close(logits(q[:, :, :7], k), logits(q, k)[..., :7, :])


def test_rope_scores_depend_on_the_distance_only():
    q, k = torch.randn(2, 1, 2, 1, 8).expand(-1, -1, -1, 30, -1)
    a, b = RoPE()(q, k)
    scores = a @ b.mT
    torch.testing.assert_close(scores[..., 1:, 1:], scores[..., :-1, :-1], rtol=1e-4, atol=1e-4)
    assert scores[0, 0, 0].std() > 0.1
    torch.testing.assert_close(a.norm(dim=-1), q.norm(dim=-1))
    assert torch.equal(a[:, :, 0], q[:, :, 0])
    with pytest.raises(ValueError, match="one even dim; they have 7 and 7"):
        RoPE()(torch.randn(1, 1, 3, 7), torch.randn(1, 1, 3, 7))


def test_rope_and_sines_stay_exact_far_out():
    q = torch.ones(1, 1, 5000, 2, dtype=torch.float64)
    angle = torch.arange(5000, dtype=torch.float64)
    wanted = torch.stack([angle.cos() - angle.sin(), angle.sin() + angle.cos()], -1)
    torch.testing.assert_close(RoPE()(q, q)[0][0, 0], wanted)
    table = SinusoidalPositions(65536, 2)(torch.randn(1, 65536, 2))
    torch.testing.assert_close(table[-1, 0], torch.tensor(math.sin(65535)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: T5Bias(3, num_buckets=2), "num_buckets=2"),
        (lambda: T5Bias(3, max_distance=8), "max_distance=8"),
        (lambda: ALiBi(0), "num_heads=0"),
        (lambda: LearnedPositions(0, 8), "max_length=0"),
        (lambda: SinusoidalPositions(9, -1), "dim=-1"),
        (lambda: RelativeKeyQuery(8, -9), "max_length=-9"),
        (lambda: RoPE(0.0), "base=0.0 must be positive"),
        (lambda: SineSPE(2, 3, num_realizations=0), "num_realizations=0"),
        (lambda: ConvSPE(2, 3, kernel_size=0), "kernel_size=0"),
        (lambda: ALiBi(3)(torch.randn(1, 3, 6, 4), torch.randn(1, 3, 5, 4)), "no more positions"),
        (lambda: ConvSPE(2, 3)(*NOTHING), "q has an empty sequence"),
        (lambda: RelativeKeyQuery(3, 9)(*NOTHING), "q has an empty sequence"),
        (lambda: T5Bias(0), "num_heads=0"),
        (lambda: SineSPE(-1, 3), "num_heads=-1"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: RoPE()(IDS, IDS), "q must have a floating-point dtype"),
        (lambda: LearnedPositions(9, 4)(IDS[0, 0]), "x must have a floating-point dtype"),
        (lambda: SinusoidalPositions(9, 4)(IDS[0, 0]), "x must have a floating-point dtype"),
        (lambda: T5Bias(3, num_buckets=32.0), "num_buckets must be a whole number"),
        (lambda: T5Bias(3, max_distance="128"), "max_distance must be a whole number"),
        (lambda: ConvSPE(2.0, 3), "num_heads must be a whole number"),
    ],
)
def test_bad_types(call, words):
    with pytest.raises(TypeError, match=words):
        call()


SPES = [
    lambda **k: SineSPE(2, 3, num_sines=4, **k),
    lambda **k: ConvSPE(2, 3, kernel_size=5, **k),
]


@pytest.mark.parametrize("make", SPES)
def test_spe_codes_have_their_covariance(make):
    spe = make(num_realizations=200_000, gated=False)
    with torch.no_grad():
        code_q, code_k = spe.codes(9, torch.float32)
        got = code_q @ code_k.mT / 200_000
        wanted = spe.covariance(9)
        scale = (
            code_q.square().mean(-1)[..., None] * code_k.square().mean(-1)[..., None, :]
        ).sqrt()
    assert wanted.shape == (2, 3, 9, 9)
    assert (got - wanted).abs().max() < 5 * scale.max() * (2 / 200_000) ** 0.5


@pytest.mark.parametrize(("length", "drawn"), [(1, 5), (4, 8), (10, 14), (37, 44)])
def test_codes_of_convspe_are_its_noise_filtered(length, drawn):
    """In windows of 10; the last has noise to its end."""
    spe = ConvSPE(2, 3, kernel_size=5, num_realizations=7).double()
    torch.manual_seed(2)
    codes = spe.codes(length, torch.float64)
    torch.manual_seed(2)
    noise = torch.randn(2, 3, drawn, 7, dtype=torch.float64)[:, :, : length + 4]
    for code, kernel in zip(codes, (spe.kernel_q, spe.kernel_k), strict=True):
        wanted = torch.einsum("hdnrp,hdp->hdnr", noise.unfold(2, 5, 1), kernel)
        torch.testing.assert_close(code, wanted)


def test_convspe_trains_where_its_noise_takes_several_transforms():
    """64 filters of 64 realizations: more than one chunk, and more noise than code."""
    spe = ConvSPE(4, 16, num_realizations=64)
    q = torch.randn(1, 4, 256, 16)
    sum(x.square().sum() for x in spe(q, q)).backward()
    assert spe.kernel_q.grad.abs().min() > 0


@pytest.mark.parametrize("make", SPES)
def test_spe_is_exported_for_a_range_of_lengths(make):
    q, length = torch.randn(2, 2, 20, 3), torch.export.Dim("length", min=2, max=100)
    program = torch.export.export(
        make(num_realizations=8), (q, q), dynamic_shapes=2 * ({2: length},)
    )
    assert program.module()(q[:, :, :9], q[:, :, :9])[0].shape == (2, 2, 9, 8)


def test_rpe_is_exported_for_a_range_of_lengths():
    rpe, length = RelativeKeyQuery(3, 100), torch.export.Dim("length", min=2, max=100)
    q, k = torch.randn(2, 2, 2, 20, 3)
    program = torch.export.export(rpe, (q, k), dynamic_shapes=2 * ({2: length},))
    q, k = q[:, :, :9], k[:, :, :9]
    torch.testing.assert_close(program.module()(q, k), rpe(q, k))


@pytest.mark.parametrize("make", SPES)
def test_spe_in_the_dtype_of_the_queries(make):
    spe, q = make(num_realizations=8), torch.randn(2, 2, 6, 3).bfloat16()
    assert [x.dtype for x in spe(q, q)] == 2 * [torch.bfloat16]
    assert [x.dtype for x in spe.codes(6, torch.bfloat16)] == 2 * [torch.bfloat16]


def test_covariances_by_their_formulas():
    spe = SineSPE(2, 3, num_sines=4)
    gains = torch.nn.functional.softplus(spe.gain)
    squares = gains.square() / gains.square().sum(-1, keepdim=True)
    frequency = torch.sigmoid(spe.frequency) / 2
    m, n = 7, 3
    wanted = (squares * torch.cos(2 * math.pi * frequency * (m - n) + spe.phase)).sum(-1)
    torch.testing.assert_close(spe.covariance(9)[..., m, n], wanted)
    conv = ConvSPE(2, 3, kernel_size=5)
    a, b = conv.kernel_q, conv.kernel_k
    for m, n in ((4, 4), (2, 4), (6, 3), (0, 8)):
        wanted = sum(
            (a[..., p] * b[..., p + m - n] for p in range(5) if 0 <= p + m - n < 5),
            start=torch.zeros(2, 3),
        )
        torch.testing.assert_close(conv.covariance(9)[..., m, n], wanted)


@pytest.mark.parametrize("make", SPES)
def test_spe_attention_approaches_the_covariance_weighted_scores(make):
    """The scores are Σ_d q_d·P_d(m, n)·k_d/√dim, P with the gate's share of 1."""
    spe = make(num_realizations=50_000, gated=True)
    q, k = torch.randn(2, 1, 2, 9, 3)
    with torch.no_grad():
        spe.gate.normal_()
        gate = torch.sigmoid(spe.gate)
        covariance = (1 - gate) * spe.covariance(9) + gate
        q_hat, k_hat = spe(q, k)
    assert q_hat.shape == (1, 2, 9, 50_000)
    got = q_hat @ k_hat.mT / 50_000**0.5
    wanted = torch.einsum("bhmd,hdmn,bhnd->bhmn", q, covariance, k) / 3**0.5
    torch.testing.assert_close(got, wanted, rtol=0, atol=0.1)


@pytest.mark.parametrize("make", SPES)
def test_spe_draws_anew_and_follows_the_seed(make):
    spe = make(num_realizations=8)
    q, k = torch.randn(2, 2, 2, 6, 3)
    torch.manual_seed(1)
    first = spe(q, k)
    assert not torch.equal(spe(q, k)[0], first[0])
    torch.manual_seed(1)
    assert torch.equal(spe(q, k)[0], first[0])
    with pytest.raises(ValueError, match=r"\(batch, 2, length, 3\).*\(2, 2, 6, 4\)"):
        spe(torch.randn(2, 2, 6, 4), torch.randn(2, 2, 6, 4))


def test_relative_key_query_entry_by_entry():
    rpe = RelativeKeyQuery(4, 10)
    q, k = torch.randn(2, 2, 3, 6, 4)
    logits = rpe(q, k)
    assert logits.shape == (2, 3, 6, 6)
    for n in range(6):
        for m in range(6):
            r = rpe.table[9 + m - n]
            wanted = (q[:, :, n] @ r + k[:, :, m] @ r) / 2
            torch.testing.assert_close(logits[:, :, n, m], wanted)
    with pytest.raises(ValueError, match="length 11 exceeds max_length=10"):
        rpe(torch.randn(1, 1, 11, 4), torch.randn(1, 1, 11, 4))


def t5_bucket(d, buckets, max_distance, causal):
    """The published rule for one distance, d = key - query."""
    bucket = 0
    if not causal:
        buckets //= 2
        bucket += buckets if d > 0 else 0
        d = abs(d)
    else:
        d = max(-d, 0)
    exact = buckets // 2
    if d < exact:
        return bucket + d
    far = exact + int(math.log(d / exact) / math.log(max_distance / exact) * (buckets - exact))
    return bucket + min(far, buckets - 1)


@pytest.mark.parametrize("causal", [False, True])
def test_t5_buckets_entry_by_entry(causal):
    t5 = T5Bias(3, causal=causal)
    buckets = t5.buckets(300, 300)
    for n in range(0, 300, 7):
        for m in range(300):
            assert buckets[n, m] == t5_bucket(m - n, 32, 128, causal)
    count = 128 if causal else 256
    rounded = T5Bias(3, num_buckets=count, max_distance=100, causal=causal)
    for distance in range(-99, 100):  # where a boundary is a whole number, as at 80
        row, column = max(-distance, 0), max(distance, 0)
        wanted = t5_bucket(distance, count, 100, causal)
        assert rounded.buckets(row + 1, 100)[row, column] == wanted
    q = torch.randn(2, 3, 20, 4)
    for queries in (q, q[:, :, :7]):
        wanted = t5.weight[buckets[: queries.shape[2], :20]].permute(2, 0, 1)
        assert torch.equal(t5(queries, q), wanted)


def test_alibi_slopes_and_logits():
    assert ALiBi(8).slopes.tolist() == [2.0**-h for h in range(1, 9)]
    torch.testing.assert_close(
        ALiBi(12).slopes,
        torch.tensor([2.0**-h for h in range(1, 9)] + [2.0 ** -(h + 0.5) for h in range(4)]),
    )
    q = torch.randn(2, 8, 10, 4)
    logits = ALiBi(8)(q, q)
    assert logits[2, 3, 7] == logits[2, 7, 3] == -4 / 8


@pytest.mark.parametrize(("m", "n"), [(9, 9), (1, 20)])
def test_a_compiled_relative_key_query_is_the_same(m, n):
    rpe = RelativeKeyQuery(4, 20).double()
    q, k = (torch.randn(2, 3, x, 4, dtype=torch.float64, requires_grad=True) for x in (m, n))
    compiled = torch.compile(rpe, backend="aot_eager", fullgraph=True)
    g, inputs = torch.randn(2, 3, m, n, dtype=torch.float64), (q, k, rpe.table)
    for y in (rpe(q, k), compiled(q, k)):
        torch.testing.assert_close(y[..., 0, -1], rpe.dim**-0.5 * _far(rpe, q, k))
    eager, fast = (torch.autograd.grad(f(q, k), inputs, g) for f in (rpe, compiled))
    torch.testing.assert_close(fast, eager)


def _far(rpe, q, k):
    """The first query, the last key: the largest distance."""
    row = rpe.table[rpe.max_length - 1 + k.shape[2] - 1]
    return (q[..., 0, :] + k[..., -1, :]) @ row


@pytest.mark.parametrize("logits", [RelativeKeyQuery(4, 20), T5Bias(3), ALiBi(3)])
def test_logits_reach_softmax_attention(logits):
    q, k, v = torch.randn(3, 2, 3, 20, 4)
    y = softmax_attention(q, k, v, logits=logits(q, k), causal=True)
    scores = (q @ k.mT / 2 + logits(q, k)).masked_fill(
        torch.ones(20, 20).triu(1).bool(), -torch.inf
    )
    torch.testing.assert_close(y, scores.softmax(-1) @ v, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("encoding", [SineSPE(2, 4), ConvSPE(2, 4)], ids=["sine", "conv"])
def test_reset_sets_the_gate_too(encoding):
    torch.nn.init.constant_(encoding.gate, torch.nan)
    encoding.reset_parameters()
    assert not encoding.gate.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_far_waves_in_half_precision(dtype, monkeypatch):
    """With the identity for noise, codes give P itself: right to the rounding of its factors."""
    sine = SineSPE(2, 4, num_sines=10, num_realizations=20, gated=False).to(dtype)
    exact = SineSPE(2, 4, num_sines=10, num_realizations=20, gated=False).double()
    exact.load_state_dict(sine.state_dict())
    identity = torch.eye(20, dtype=dtype)
    monkeypatch.setattr(torch, "randn", lambda shape, **_: identity.expand(shape))
    q, k = sine.codes(1024, dtype)
    error = (q.double() @ k.double().mT - exact.covariance(1024)).abs().max()
    assert error < 4 * torch.finfo(dtype).eps
    assert (sine.covariance(1024) - exact.covariance(1024)).abs().max() < 4 * torch.finfo(dtype).eps


def test_buckets_do_not_depend_on_the_default_dtype():
    bias = T5Bias(2)
    wanted = bias.buckets(300, 300)
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert torch.equal(bias.buckets(300, 300), wanted)
        finally:
            torch.set_default_dtype(torch.float32)
