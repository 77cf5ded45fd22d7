"""Streams: values are those of the whole, and gradients reach what is new."""

import pytest
import torch

from fastrpb import Classifier, FastRPB, LanguageModel, ModelConfig, init
from fastrpb.hf import FastRPBConfig, FastRPBForCausalLM
from fastrpb.layers import Stream

LENGTH = 200
SMALL = {"vocab_size": 11, "max_length": 24, "num_classes": 3, "dim": 16, "layers": 2, "heads": 2}


def config(**changes):
    return ModelConfig(**{**SMALL, "causal": True, "pooling": "mean", "dropout": 0.0, **changes})


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 100, 127, 300])
def test_streaming_bias_equals_the_parallel_form(n, prefix):
    rpb = FastRPB(3, n, causal=True, prefix=prefix, init=init.normal(1.0))
    v = torch.randn(2, 3, prefix + n, 4)
    state, ys = rpb.init_state(v), []
    for t in range(prefix + n):
        y, state = rpb.step(v[:, :, t : t + 1], state)
        ys.append(y)
    torch.testing.assert_close(torch.cat(ys, 2), rpb(v), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=f"longer than max_length={n}"):
        rpb.step(v[:, :, :1], state)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("first", [1, 63, 64, 100, 192, 255, 256, 300])
def test_a_stream_of_the_bias_may_begin_with_many_tokens(first, prefix):
    rpb = FastRPB(3, 301, causal=True, prefix=prefix, init=init.normal(1.0))
    v = torch.randn(2, 3, prefix + 301, 4, requires_grad=True)
    mask = torch.rand(2, prefix + 301) < 0.8
    cut = prefix + first
    state = rpb.init_state(v)
    begin = rpb(v[:, :, :cut], mask[:, :cut], state)
    later = rpb(v[:, :, cut:], mask[:, cut:], state)
    torch.testing.assert_close(torch.cat([begin, later], 2), rpb(v, mask), rtol=1e-4, atol=1e-4)
    assert state.tokens == prefix + 301
    (gradient,) = torch.autograd.grad(begin.sum(), v)
    assert gradient.abs().max() > 0
    assert not state.history.requires_grad


def test_a_stream_of_the_bias_may_begin_within_the_prefix():
    rpb = FastRPB(3, 20, causal=True, prefix=2, init=init.normal(1.0))
    v = torch.randn(2, 3, 22, 4)
    state = rpb.init_state(v)
    parts = [rpb(x, state=state) for x in v.split([1, 1, 20], 2)]
    torch.testing.assert_close(torch.cat(parts, 2), rpb(v), rtol=1e-4, atol=1e-4)


def test_tokens_that_cannot_go_on_a_stream_leave_it_as_it_is():
    rpb, v = FastRPB(3, 20, causal=True, prefix=1), torch.randn(2, 3, 21, 4)
    state = rpb.init_state(v)
    begin = rpb(v[:, :, :15], state=state)
    with pytest.raises(ValueError, match=r"7 tokens after 15 .* longer than max_length=20"):
        rpb(v[:, :, :7], state=state)
    with pytest.raises(ValueError, match="v has no tokens"):
        rpb(v[:, :, :0], state=state)
    with pytest.raises(ValueError, match="of a bias of max_length=20, this one has 30"):
        rpb.resize(30)(v[:, :, 15:], state=state)
    whole = torch.cat([begin, rpb(v[:, :, 15:], state=state)], 2)
    torch.testing.assert_close(whole, rpb(v), rtol=1e-4, atol=1e-4)


def test_streaming_bias_in_other_dtypes():
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float64, 1e-12)):
        rpb = FastRPB(3, 50, causal=True).to(dtype)
        v = torch.randn(2, 3, 50, 4).to(dtype)
        state, ys = rpb.init_state(v), []
        for t in range(50):
            y, state = rpb.step(v[:, :, t : t + 1], state)
            ys.append(y)
        torch.testing.assert_close(torch.cat(ys, 2), rpb(v), rtol=tolerance, atol=tolerance)


def test_streaming_bias_is_not_rounded_by_autocast():
    rpb, v = FastRPB(3, 100, causal=True, init=init.normal(1.0)), torch.randn(2, 3, 100, 4)
    state, ys = rpb.init_state(v), []
    with torch.autocast("cpu", torch.bfloat16):
        for t in range(100):
            y, state = rpb.step(v[:, :, t : t + 1], state)
            ys.append(y)
    torch.testing.assert_close(torch.cat(ys, 2), rpb(v), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("sizes", [(2, 90, 1, 70, 37), (150, 3, 47), (1, 1, 1, 197), (130, 64, 6)])
@pytest.mark.parametrize("learns", [False, True])
def test_chunks_of_any_size(prefix, sizes, learns):
    rpb = FastRPB(3, LENGTH - prefix, causal=True, prefix=prefix, init=init.normal(1.0))
    v = torch.randn(2, 3, LENGTH, 4)
    state = rpb.init_state(v)
    with torch.set_grad_enabled(learns):
        parts = [rpb(part, state=state) for part in v.split(sizes, -2)]
    assert parts[-1].requires_grad == learns
    torch.testing.assert_close(torch.cat(parts, -2), rpb(v), rtol=1e-4, atol=1e-4)
    assert state.tokens == LENGTH


@pytest.mark.parametrize(("before", "count"), [(1, 5), (100, 1), (100, 70), (2, 150)])
def test_gradients_of_a_later_chunk(before, count):
    """As if the tokens before were constants; with a prefix of three, which may be among them."""
    rpb = FastRPB(3, LENGTH, causal=True, prefix=3, init=init.normal(1.0))
    v = torch.randn(2, 3, before + count, 4)
    state, new = rpb.init_state(v), v[..., before:, :].clone().requires_grad_()
    with torch.no_grad():
        rpb(v[..., :before, :], state=state)
    whole = torch.cat([v[..., :before, :], new], -2)
    direction = torch.randn_like(new)
    matrix = rpb.matrix(before + count)
    wanted = torch.autograd.grad((matrix @ whole)[..., before:, :], (new, rpb.w), direction)
    got = torch.autograd.grad(rpb(new, state=state), (new, rpb.w), direction)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert not state.history.requires_grad
    assert not state.pending.requires_grad


def test_few_tokens_have_gradients_where_the_bias_is_frozen():
    rpb = FastRPB(3, LENGTH, causal=True, prefix=1).requires_grad_(False)
    v = torch.randn(2, 3, 60, 4)
    state, new = rpb.init_state(v), v[..., 58:, :].clone().requires_grad_()
    rpb(v[..., :58, :], state=state)
    direction = torch.randn_like(new)
    (got,) = torch.autograd.grad(rpb(new, state=state), new, direction)
    torch.testing.assert_close(got, rpb.matrix(60)[:, 58:, 58:].mT @ direction)


def test_steps_hold_no_gradients():
    rpb, v = FastRPB(3, 100, causal=True), torch.randn(2, 3, 100, 4, requires_grad=True)
    state = rpb.init_state(v)
    ys = [rpb.step(v[..., t : t + 1, :], state)[0] for t in range(100)]
    assert not any(x.requires_grad for x in (*ys, state.history, state.pending))


def test_chunks_keep_the_dtype_of_the_values():
    rpb, v = FastRPB(3, LENGTH, causal=True), torch.randn(2, 3, LENGTH, 4).bfloat16()
    state = rpb.init_state(v)
    parts = [rpb(part, state=state) for part in v.split([100, 90, 10], -2)]
    assert {part.dtype for part in parts} == {torch.bfloat16}
    torch.testing.assert_close(torch.cat(parts, -2), rpb(v), rtol=2e-2, atol=2e-2)


def test_a_state_is_as_wide_as_the_weights():
    state = FastRPB(3, LENGTH, causal=True).double().init_state(torch.randn(2, 3, 1, 4))
    assert state.history.dtype == state.pending.dtype == torch.float64


def test_chosen_streams_take_the_sums_to_come_along():
    rpb = FastRPB(3, LENGTH, causal=True, init=init.normal(1.0))
    v, chosen = torch.randn(4, 3, LENGTH, 4), torch.tensor([2, 0, 0, 3])
    state = rpb.init_state(v)
    with torch.no_grad():
        rpb(v[..., :130, :], state=state)
        state = state.select(chosen)
        later = [rpb.step(v[chosen, :, t : t + 1], state)[0] for t in range(130, LENGTH)]
    torch.testing.assert_close(torch.cat(later, -2), rpb(v)[chosen, :, 130:], rtol=1e-4, atol=1e-4)


def test_a_chunk_that_fails_leaves_the_stream_where_it_was(monkeypatch):
    rpb, v = FastRPB(3, LENGTH, causal=True), torch.randn(2, 3, LENGTH, 4)
    state = rpb.init_state(v)
    with monkeypatch.context() as patch:
        patch.setattr("fastrpb.bias.toeplitz_matmul", None)
        with pytest.raises(TypeError):
            rpb(v[..., :100, :], state=state)
    assert state.tokens == 0
    torch.testing.assert_close(rpb(v, state=state), rpb(v))


def test_a_stream_holds_no_gradients():
    encoder = LanguageModel(config()).encoder
    streams = [Stream() for _ in encoder.blocks]
    for part in torch.randint(11, (2, 20)).split(9, 1):
        assert encoder(part, streams=streams).requires_grad
        for stream in streams:
            assert not stream.attention.sums.requires_grad
            assert not stream.bias.history.requires_grad


def test_a_cached_context_leaves_the_gradients_of_what_follows():
    config = FastRPBConfig(
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50},
        **{"max_position_embeddings": 64, "causal": True, "dropout": 0.0},
    )
    model = FastRPBForCausalLM(config)
    tokens = torch.randint(50, (2, 20))
    whole = model.get_input_embeddings()(tokens).detach().requires_grad_()
    later = whole[:, 10:].detach().requires_grad_()
    with torch.no_grad():
        cache = model(tokens[:, :10], use_cache=True).past_key_values
    model(inputs_embeds=later, past_key_values=cache).logits.square().sum().backward()
    model(inputs_embeds=whole).logits[:, 10:].square().sum().backward()
    torch.testing.assert_close(later.grad, whole.grad[:, 10:], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("features", ["sikf", "elu1"])
@pytest.mark.parametrize("position", ["none", "fastrpb"])
def test_a_stream_gives_what_the_whole_gives(position, features):
    settings = config(position=position, features=features)
    assert settings.streams
    encoder = LanguageModel(settings).eval().encoder
    tokens = torch.randint(11, (4, 24))
    mask = torch.arange(24) >= torch.tensor([[0], [5], [1], [9]])
    positions = mask.cumsum(-1).sub(1).clamp(min=0)
    whole = encoder(tokens, mask, positions=positions)
    streams, parts = [Stream() for _ in encoder.blocks], []
    for part in (slice(0, 10), slice(10, 11), slice(11, 24)):
        here = slice(None), part
        parts.append(encoder(tokens[here], mask[here], positions=positions[here], streams=streams))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    alone = encoder(tokens[1:2, 5:])
    torch.testing.assert_close(whole[1:2, 5:], alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="25 tokens exceed max_length=24"):
        encoder(tokens[:, :1], streams=streams)


def test_masked_tokens_in_later_chunks():
    encoder = LanguageModel(config()).eval().encoder
    tokens, mask = torch.randint(11, (3, 24)), torch.ones(3, 24, dtype=torch.bool)
    mask[0, 12], mask[1, 11:] = False, False
    streams, parts = [Stream() for _ in encoder.blocks], []
    for part in (slice(0, 8), slice(8, 16), slice(16, 24)):
        parts.append(encoder(tokens[:, part], mask[:, part], streams=streams))
    torch.testing.assert_close(torch.cat(parts, 1), encoder(tokens, mask), rtol=1e-4, atol=1e-5)


def test_a_stream_counts_positions_and_keeps_chosen_sequences():
    encoder = LanguageModel(config()).eval().encoder
    tokens = torch.randint(11, (4, 24))
    whole, streams = encoder(tokens), [Stream() for _ in encoder.blocks]
    encoder(tokens[:, :10], streams=streams)
    chosen = torch.tensor([2, 0, 0])
    for stream in streams:
        stream.select(chosen)
    later = encoder(tokens[chosen, 10:], streams=streams)
    torch.testing.assert_close(later, whole[chosen, 10:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"attention": "softmax"}, {"position": "rope"}, {"causal": False, "pooling": "cls"}],
)
def test_other_models_do_not_stream(changes):
    settings = config(**changes)
    assert not settings.streams
    encoder = Classifier(settings).encoder
    with pytest.raises(ValueError, match="only causal linear attention"):
        encoder(torch.randint(11, (4, 24)), streams=[Stream() for _ in encoder.blocks])


def test_gelu_token_by_token():
    encoder = LanguageModel(config(attention_gelu=True)).encoder
    tokens, streams = torch.randint(11, (4, 24)), [Stream() for _ in encoder.blocks]
    parts = [encoder(part, streams=streams) for part in tokens.split(9, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), encoder(tokens), rtol=1e-4, atol=1e-4)


def test_as_many_streams_as_layers():
    model = LanguageModel(config(layers=3)).eval()
    tokens = torch.randint(11, (2, 8))
    for streams in ([], [Stream()], [Stream() for _ in range(4)]):
        with pytest.raises(ValueError, match=f"{len(streams)} streams are not one for each of 3"):
            model.encoder(tokens, streams=streams)


@pytest.mark.parametrize("flags", [{}, {"causal": True}, {"symmetric": True}])
@pytest.mark.parametrize(("length", "first", "count"), [(1, 0, 1), (20, 19, 1), (17, 3, 9)])
def test_some_rows_are_those_of_all(flags, length, first, count):
    bias, v = FastRPB(3, 20, **flags).double(), torch.randn(2, 3, length, 5).double()
    mask = torch.rand(2, length) < 0.7
    v.requires_grad_()

    def gradients(y):
        return y, *torch.autograd.grad(y.square().sum(), (bias.w, v))

    wanted = gradients(bias(v, mask)[:, :, first : first + count])
    for place in (first, torch.tensor(first)):
        for mine, its in zip(gradients(bias(v, mask, rows=(place, count))), wanted, strict=True):
            torch.testing.assert_close(mine, its)


def test_rows_that_are_not_there():
    bias, v = FastRPB(3, 20, causal=True), torch.randn(3, 10, 5)
    for rows, words in (
        ((-1, 2), "the first of rows=-1"),
        ((9, 2), r"rows=\(9, 2\) are not among the 10 tokens of v"),
        ((0, 0), "the count of rows=0"),
    ):
        with pytest.raises(ValueError, match=words):
            bias(v, rows=rows)
    for place in (-1, 10, 25):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (DATA bounds|range)"):
            bias(v, rows=(torch.tensor(place), 1))
    torch.compiler.reset()
    compiled = torch.compile(lambda place: bias(v, rows=(place, 1)), fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.tensor(7)), bias(v)[:, 7:8])
        with pytest.raises((IndexError, RuntimeError), match=r"out of (DATA bounds|range)|bounds"):
            compiled(torch.tensor(12))
    with pytest.raises(TypeError, match="the first of rows must be a whole number"):
        bias(v, rows=(0.0, 1))
    with pytest.raises(ValueError, match="rows= is for a bias without a prefix"):
        bias(v, state=bias.init_state(v), rows=(0, 1))
    with pytest.raises(ValueError, match="rows= is for a bias without a prefix"):
        FastRPB(3, 20, prefix=1)(v, rows=(0, 1))


@pytest.mark.parametrize("step", [False, True])
@torch.no_grad()
def test_a_stream_in_what_is_compiled(step):
    """Past the blocks that a step sums, where the work depends on the number of the token."""
    torch.compiler.reset()
    rpb = FastRPB(2, 300, causal=True)
    v = torch.randn(1, 2, 140, 4)

    def run(x, state):
        x = 2 * x
        return (rpb.step(x, state)[0] if step else rpb(x, state=state)) + 1

    compiled, state = torch.compile(run, backend="aot_eager"), rpb.init_state(v)
    ys = [compiled(v[:, :, t : t + 1], state) for t in range(140)]
    torch.testing.assert_close(torch.cat(ys, 2), rpb(2 * v) + 1, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
    whole = torch.compile(run, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="leave out fullgraph=True, or use rows="):
        whole(v[:, :, :1], rpb.init_state(v))
