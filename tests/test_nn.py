"""`fastrpb.nn.MultiheadAttention` against the original, and against the definition."""

import itertools

import pytest
import torch
from torch import nn

from fastrpb import FastRPB, FastRPB2d, FavorPlus, elu1, init, linear_attention_weights, sikf
from fastrpb.nn import MultiheadAttention

DIM, HEADS, BATCH, LENGTH = 12, 3, 4, 10
OPTIONS = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"kdim": 7, "vdim": 5},
    {"kdim": 7, "vdim": 5, "add_bias_kv": True, "add_zero_attn": True, "bias": False},
]
options = pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "+".join(x) or "plain")


def inputs(attention, batched=True):
    sizes = (DIM, attention.kdim, attention.vdim)
    shape = (BATCH, LENGTH) if attention.batch_first else (LENGTH, BATCH)
    return [torch.randn(*(shape if batched else (LENGTH,)), size) for size in sizes]


def zero(**settings):
    return FastRPB(HEADS, 16, init=init.zero, **settings)


def padding():
    return torch.arange(LENGTH) >= torch.tensor([[10], [4], [7], [1]])


def causal_mask():
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


@options
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "masks", list(itertools.product(["none", "bool", "float"], ["none", "causal"]))
)
@pytest.mark.parametrize("rpb", ["none", "zero"])
def test_equals_the_original(options, batch_first, training, masks, rpb):
    old = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first, **options).train(training)
    causal = masks[1] == "causal"
    bias = None if rpb == "none" else zero(causal=causal)
    new = MultiheadAttention(DIM, HEADS, batch_first=batch_first, rpb=bias, **options)
    new.train(training).load_state_dict(old.state_dict())
    pads = {
        "none": None,
        "bool": padding(),
        "float": torch.zeros(BATCH, LENGTH).masked_fill(padding(), -torch.inf),
    }[masks[0]]
    mask = causal_mask() if causal else None
    if causal and masks[0] == "float":  # of one type, the original wants
        mask = torch.zeros(LENGTH, LENGTH).masked_fill(mask, -torch.inf)
    q, k, v = inputs(old)
    for settings in ({}, {"need_weights": False}, {"average_attn_weights": False}):
        settings |= {"key_padding_mask": pads, "attn_mask": mask}
        with torch.no_grad():
            wanted, got = old(q, k, v, **settings), new(q, k, v, **settings)
        assert torch.equal(got[0], wanted[0])
        assert (got[1] is None and wanted[1] is None) or torch.equal(got[1], wanted[1])


def test_unbatched_inputs():
    old = nn.MultiheadAttention(DIM, HEADS)
    x = inputs(old, batched=False)
    for settings in ({"rpb": zero()}, {"rpb": FastRPB(HEADS, 16), "features": elu1}):
        new = MultiheadAttention(DIM, HEADS, **settings)
        new.load_state_dict(old.state_dict())
        y, weights = new(*x, key_padding_mask=padding()[1])
        assert y.shape == (LENGTH, DIM)
        assert weights.shape == (LENGTH, LENGTH)
        batched, _ = new(*(i.unsqueeze(1) for i in x), key_padding_mask=padding()[1:2])
        torch.testing.assert_close(y, batched.squeeze(1))


@options
@pytest.mark.parametrize("features", [sikf, elu1], ids=["sikf", "elu1"])
@pytest.mark.parametrize("causal", [True, False])
def test_linear_attention_equals_its_definition(options, features, causal):
    rpb = FastRPB(6, 16, causal=causal, init=init.normal(1.0))
    new = MultiheadAttention(DIM, HEADS, batch_first=True, features=features, rpb=rpb, **options)
    q, k, v = inputs(new)
    settings = {"key_padding_mask": padding(), "attn_mask": causal_mask() if causal else None}
    if causal and (new.bias_k is not None or new.add_zero_attn):
        with pytest.raises(ValueError, match="leave out add_bias_kv and add_zero_attn"):
            new(q, k, v, **settings)
        return
    y, weights = new(q, k, v, **settings, average_attn_weights=False)
    old = nn.MultiheadAttention(DIM, HEADS, batch_first=True, **options)
    old.load_state_dict({k: x for k, x in new.state_dict().items() if k != "rpb.w"})
    keep = ~padding()
    pq, pk, pv = (old_project(old, i, x) for i, x in enumerate((q, k, v)))
    kept = pv.masked_fill(~keep[..., None], 0).unflatten(-1, (6, 2)).transpose(1, 2)
    bias = rpb.matrix(LENGTH) @ kept
    if old.bias_k is not None:
        pk = torch.cat([pk, old.bias_k.expand(BATCH, 1, DIM)], 1)
        pv = torch.cat([pv, old.bias_v.expand(BATCH, 1, DIM)], 1)
    if old.add_zero_attn:
        pk, pv = (nn.functional.pad(x, (0, 0, 0, 1)) for x in (pk, pv))
    keep = nn.functional.pad(keep, (0, pk.shape[1] - LENGTH), value=True)
    heads = [x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (pq, pk, pv)]
    definition = linear_attention_weights(*heads[:2], phi=features, mask=keep, causal=causal)
    torch.testing.assert_close(weights, definition)
    inner = (definition @ heads[2]).transpose(1, 2).flatten(2) + bias.transpose(1, 2).flatten(2)
    torch.testing.assert_close(y, old.out_proj(inner), rtol=1e-4, atol=1e-4)
    quick, none = new(q, k, v, **settings, need_weights=False)
    assert none is None
    torch.testing.assert_close(quick, y)


def old_project(attention, which, x):
    if attention._qkv_same_embed_dim:
        weight = attention.in_proj_weight.chunk(3)[which]
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        weight = getattr(attention, names[which])
    bias = attention.in_proj_bias
    return nn.functional.linear(x, weight, None if bias is None else bias.chunk(3)[which])


def test_softmax_with_a_bias_equals_its_definition():
    rpb = FastRPB2d(HEADS, 3, 3, prefix=1, kind="full", init=init.normal(1.0))
    new = MultiheadAttention(DIM, HEADS, batch_first=True, rpb=rpb)
    x = torch.randn(2, LENGTH, DIM)
    y, weights = new(x, x, x, average_attn_weights=False)
    v = old_project(new, 2, x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    inner = ((weights + rpb.matrix(LENGTH)) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(y, new.out_proj(inner), rtol=1e-4, atol=1e-4)


def test_averaged_weights():
    new = MultiheadAttention(DIM, HEADS, features=sikf)
    x = inputs(new)
    torch.testing.assert_close(new(*x)[1], new(*x, average_attn_weights=False)[1].mean(1))


@pytest.mark.parametrize("settings", [{"rpb": FastRPB(HEADS, 16)}, {"features": sikf}])
def test_masks_that_hide_nothing(settings):
    new = MultiheadAttention(DIM, HEADS, batch_first=True, **settings)
    q, k, v = inputs(new)
    for n in (LENGTH, 1):  # one token has no future: the causal mask is empty
        x = [i[:, :n] for i in (q, k, v)]
        for mask in (torch.zeros(n, n), torch.zeros(n, n, dtype=torch.bool)):
            torch.testing.assert_close(new(*x, attn_mask=mask), new(*x))


def test_the_hint_of_causality_stands_for_the_mask():
    new = MultiheadAttention(DIM, HEADS, features=sikf, rpb=FastRPB(HEADS, 16, causal=True))
    x = inputs(new)
    torch.testing.assert_close(new(*x, is_causal=True), new(*x, attn_mask=causal_mask()))


def test_every_parameter_trains():
    new = MultiheadAttention(DIM, HEADS, features=sikf, rpb=FastRPB(HEADS, 16))
    x = torch.randn(LENGTH, BATCH, DIM)
    new(x, x, x, need_weights=False)[0].square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in new.parameters())


def test_state_dicts_go_both_ways():
    rpb = FastRPB(HEADS, 16)
    new = MultiheadAttention(DIM, HEADS, rpb=rpb, features=FavorPlus(4, 8))
    w, projection = rpb.w.clone(), new.features.projection.clone()
    state = nn.MultiheadAttention(DIM, HEADS).state_dict()
    model = nn.Sequential(new)
    model.load_state_dict({f"0.{key}": x for key, x in state.items()})
    assert torch.equal(new.rpb.w, w)
    assert torch.equal(new.features.projection, projection)
    assert torch.equal(new.in_proj_weight, state["in_proj_weight"])
    other = MultiheadAttention(DIM, HEADS, rpb=FastRPB(HEADS, 16), features=FavorPlus(4, 8, seed=1))
    other.load_state_dict(new.state_dict())
    assert torch.equal(other.rpb.w, w)
    assert torch.equal(other.features.projection, projection)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({k: x for k, x in state.items() if k != "in_proj_weight"})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_encoder_layers_do_not_go_around_it():
    """In eval mode, PyTorch's encoder layer reads the weights of its attention by itself."""
    layer = nn.TransformerEncoderLayer(DIM, 2, 16, batch_first=True).eval()
    x = torch.randn(BATCH, LENGTH, DIM)
    new = MultiheadAttention(DIM, 2, batch_first=True, rpb=FastRPB(2, 16, init=init.zero))
    new.load_state_dict(layer.self_attn.state_dict())
    with torch.no_grad():
        plain = layer(x)
        layer.self_attn = new.eval()
        torch.testing.assert_close(layer(x), plain, rtol=1e-4, atol=1e-5)
        nn.init.normal_(new.rpb.w)
        assert (layer(x) - plain).abs().max() > 1e-2
        stack = nn.TransformerEncoder(layer, 1)
        with pytest.raises(ValueError, match="enable_nested_tensor=False"):
            stack(x, src_key_padding_mask=padding())


def test_half_precision_and_compilation():
    torch.compiler.reset()
    new = MultiheadAttention(
        DIM, HEADS, batch_first=True, features=sikf, rpb=FastRPB(HEADS, 16), dtype=torch.bfloat16
    )
    assert new.rpb.w.dtype == torch.bfloat16
    favor = MultiheadAttention(DIM, HEADS, features=FavorPlus(DIM // HEADS, 8), device="meta")
    assert favor.features.projection.is_meta
    x = torch.randn(BATCH, LENGTH, DIM, dtype=torch.bfloat16)
    compiled = torch.compile(new, fullgraph=True, backend="aot_eager")
    wanted = new(x, x, x, need_weights=False)[0]
    assert wanted.dtype == torch.bfloat16
    torch.testing.assert_close(compiled(x, x, x, need_weights=False)[0], wanted)


def mistake(call, **settings):
    def run():
        attention = MultiheadAttention(DIM, HEADS, batch_first=True, **settings)
        q, k, v = inputs(attention)
        return call(attention, q, k, v)

    return run


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (mistake(None, features=sikf, dropout=0.1), ValueError, "no weights to drop"),
        (mistake(None, features="sikf"), TypeError, "feature map such as fastrpb.sikf"),
        (mistake(None, rpb=FastRPB(5, 16)), ValueError, "5 heads of rpb must divide embed_dim=12"),
        (mistake(None, bias=FastRPB(3, 16)), TypeError, "a FastRPB goes into rpb"),
        (mistake(None, rpb="fastrpb"), TypeError, "rpb must be a FastRPB or FastRPB2d, got str"),
        (
            mistake(lambda a, q, k, v: a(q, k, v, attn_mask=causal_mask()[:5, :5]), features=sikf),
            ValueError,
            r"attn_mask must be \(queries, keys\) = \(10, 10\), got \(5, 5\)",
        ),
        (
            mistake(lambda a, q, k, v: a(q, k[..., 1:], v), features=sikf),
            ValueError,
            r"key must have 3 axes .* the last of size 12; got \(4, 10, 11\)",
        ),
        (
            mistake(lambda a, q, k, v: a(q, k, v[0]), features=sikf),
            ValueError,
            r"value must have 3 axes .* got \(10, 12\)",
        ),
        (
            mistake(lambda a, q, k, v: a(q[None], k[None], v[None]), features=sikf),
            ValueError,
            r"query must have 3 axes .* got \(1, 4, 10, 12\)",
        ),
        (
            mistake(lambda a, q, k, v: a(q, k, v, attn_mask=torch.rand(10, 10) < 0.5), rpb=zero()),
            ValueError,
            "no attn_mask but the causal one",
        ),
        (
            mistake(lambda a, q, k, v: a(q, k, v, attn_mask=torch.rand(10, 10)), features=sikf),
            ValueError,
            "no attn_mask but the causal one",
        ),
        (
            mistake(lambda a, q, k, v: a(q, k, v, attn_mask=causal_mask()), rpb=zero()),
            ValueError,
            "attn_mask is causal but rpb is not",
        ),
        (
            mistake(
                lambda a, q, k, v: a(q, k, v, attn_mask=causal_mask()), rpb=FastRPB2d(HEADS, 2, 5)
            ),
            ValueError,
            "attn_mask is causal but rpb is not",
        ),
        (
            mistake(lambda a, q, k, v: a(q, k, v, torch.rand(BATCH, LENGTH)), features=sikf),
            ValueError,
            "0 and -inf only",
        ),
        (
            mistake(lambda a, q, k, v: a(q[:, :7], k, v), rpb=zero()),
            ValueError,
            "7 queries over 10 values",
        ),
        (
            mistake(lambda a, q, k, v: a(q, k, v), rpb=FastRPB(HEADS, 9)),
            ValueError,
            "length 10 is not within 1..max_length=9",
        ),
    ],
)
def test_mistakes_get_one_sentence(call, error, words):
    with pytest.raises(error, match=words):
        call()
