"""The models of `fastrpb.hf` as Transformers' own: Auto classes, `generate`, losses, outputs."""

import math

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, pad
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from fastrpb import Classifier, LanguageModel
from fastrpb.hf import (
    FastRPBCache,
    FastRPBConfig,
    FastRPBForCausalLM,
    FastRPBForMaskedLM,
    FastRPBForSequenceClassification,
    FastRPBModel,
)
from small_models import N, causal, config, tokens

HEADS = {
    AutoModel: FastRPBModel,
    AutoModelForSequenceClassification: FastRPBForSequenceClassification,
    AutoModelForMaskedLM: FastRPBForMaskedLM,
    AutoModelForCausalLM: FastRPBForCausalLM,
}


def first(output):
    return output.logits if "logits" in output else output.last_hidden_state


@pytest.mark.parametrize("auto", HEADS)
@pytest.mark.parametrize("size", ["50GB", "20KB"])
def test_save_and_load_by_the_auto_classes(auto, size, tmp_path):
    model = auto.from_config(config(causal=auto is AutoModelForCausalLM)).eval()
    assert type(model) is HEADS[auto]
    model.save_pretrained(tmp_path, max_shard_size=size)
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) == 1 if size == "50GB" else len(shards) > 1
    other = auto.from_pretrained(tmp_path)
    assert type(other) is type(model)
    assert not other.training
    x = tokens()
    assert torch.equal(first(other(x)), first(model(x)))
    assert AutoConfig.from_pretrained(tmp_path).model_config == model.config.model_config


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "sinespe"},
        {"position": "convspe"},
        {"position": "fastrpb2d", "image": (10, 15), "bias_kind": "full"},
        {"attention": "softmax", "position": "rpe"},
        {"attention": "softmax", "position": "alibi"},
        {"features": "favor", "absolute": "sinusoidal"},
        {"features": "favor", "absolute": "sinusoidal", "dtype": torch.bfloat16},
    ],
)
def test_every_part_comes_back_as_it_was(changes, tmp_path):
    dtype = {"dtype": changes.pop("dtype", torch.float32)}
    model = FastRPBModel(config(**changes)).to(**dtype).eval()
    model.save_pretrained(tmp_path)
    other = FastRPBModel.from_pretrained(tmp_path, **dtype)
    x = tokens(2, N)
    results = []
    for m in (model, other):
        torch.manual_seed(1)
        results.append(m(x).last_hidden_state)
    assert results[0].dtype == dtype["dtype"]
    torch.testing.assert_close(
        *results, rtol=0, atol=0 if dtype["dtype"] == torch.float32 else 0.05
    )


def test_weights_that_are_missing_begin_as_new_ones_do(tmp_path):
    FastRPBModel(config()).save_pretrained(tmp_path)
    model = FastRPBForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    assert model(tokens()).logits.shape == (3, 5)
    assert model.head[0].weight.std() > 0.01
    weights = load_file(tmp_path / "model.safetensors")
    kept = {key: x for key, x in weights.items() if "blocks" in key and "bias.w" not in key}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    fresh = FastRPBModel.from_pretrained(tmp_path)
    assert all(torch.equal(x, fresh.state_dict()[key]) for key, x in kept.items())
    assert torch.equal(fresh.encoder.cls, torch.zeros(16))
    assert 0.015 < fresh.encoder.embedding.weight.std() < 0.025
    norm = fresh.encoder.blocks[0].attention.bias.w.norm(dim=-1)
    torch.testing.assert_close(norm, torch.ones(2))


@pytest.mark.parametrize("changes", [{"pooling": "cls"}, {"pooling": "mean"}, {"head_norm": True}])
def test_they_are_the_models_of_this_package(changes):
    model = FastRPBForSequenceClassification(config(num_labels=4, **changes)).eval()
    plain = Classifier(model.config.model_config).eval()
    weights = {key.removeprefix("model."): x for key, x in model.state_dict().items()}
    plain.load_state_dict(weights)
    x = tokens()
    mask = torch.arange(20) < torch.tensor([[20], [9], [15]])
    torch.testing.assert_close(model(x, mask.long()).logits, plain(x, mask))
    language = causal()
    plain = LanguageModel(language.config.model_config).eval()
    weights = {key.removeprefix("model."): x for key, x in language.state_dict().items()}
    plain.load_state_dict({key: x for key, x in weights.items() if key != "lm_head.weight"})
    torch.testing.assert_close(language(x).logits, plain(x))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [lambda: FastRPBModel(config()).eval(), lambda: causal().model])
def test_padding_leaves_no_trace(make, side):
    model, x = make(), tokens()
    space = (6, 0) if side == "left" else (0, 6)
    short = x[:1, :14]
    mask = torch.cat([pad(torch.ones(1, 14), space), torch.ones(2, 20)]).long()
    batch = torch.cat([pad(short, space), x[1:]])
    output, alone = model(batch, mask), model(short)
    here = slice(6, None) if side == "left" else slice(14)
    for a, b in (
        (output.last_hidden_state[:1, here], alone.last_hidden_state),
        (output.pooler_output[:1], alone.pooler_output),
        (output.last_hidden_state[1:], model(x[1:]).last_hidden_state),
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("features", ["sikf", "elu1", "favor"])
@pytest.mark.parametrize("position", ["fastrpb", "none"])
@pytest.mark.parametrize("length", [5, 70])
def test_generation_from_the_stream_equals_recomputing(features, position, length):
    model = causal(features=features, position=position)
    x = tokens(3, length)
    mask = torch.ones_like(x)
    x[0, :3], mask[0, :3] = 0, 0
    settings = {"attention_mask": mask, "max_new_tokens": 70, "do_sample": False}
    wanted = model.generate(x, use_cache=False, **settings)
    got = model.generate(x, **settings, return_dict_in_generate=True)
    assert isinstance(got.past_key_values, FastRPBCache)
    assert got.past_key_values.get_seq_length() == length + 69
    assert torch.equal(got.sequences, wanted)
    assert len(set(wanted[0, length:].tolist())) > 2
    alone = model.generate(x[:1, 3:], max_new_tokens=70, do_sample=False)
    assert torch.equal(alone[0], wanted[0, 3:])


def test_beams_and_samples_take_their_streams_along():
    model, x = causal(), tokens(2, 9)
    common = {"max_new_tokens": 30, "num_beams": 4, "do_sample": False, "num_return_sequences": 2}
    wanted = model.generate(x, use_cache=False, **common)
    assert torch.equal(model.generate(x, **common), wanted)
    results = []
    for cached in (True, False):
        torch.manual_seed(0)
        results.append(
            model.generate(
                x, use_cache=cached, max_new_tokens=20, do_sample=True, num_return_sequences=3
            )
        )
    assert torch.equal(*results)


def test_a_conversation_goes_on_from_its_cache():
    model, x = causal(), tokens(2, 30)
    begun = model.generate(
        x[:, :10], max_new_tokens=5, do_sample=False, return_dict_in_generate=True
    )
    later = torch.cat([begun.sequences, x[:, 10:]], 1)
    got = model.generate(
        later, past_key_values=begun.past_key_values, max_new_tokens=5, do_sample=False
    )
    assert torch.equal(
        got, model.generate(later, use_cache=False, max_new_tokens=5, do_sample=False)
    )


@pytest.mark.parametrize("absolute", ["learned", "sinusoidal", "none"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_first_guess_of_a_token_is_even(absolute, causal):
    model = (FastRPBForCausalLM if causal else FastRPBForMaskedLM)(
        config(causal=causal, absolute=absolute, hidden_size=256)
    )
    x = torch.randint(30, (4, 20))
    assert model(x, labels=x).loss < 2 * math.log(30)


def test_prompts_may_come_in_chunks_or_as_embeddings():
    model, x = causal(), tokens(2, 11)
    mask = torch.ones_like(x)
    x[0, :3], mask[0, :3] = 0, 0
    common = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False}
    wanted = model.generate(x, use_cache=False, **common)
    assert torch.equal(model.generate(x, prefill_chunk_size=4, **common), wanted)
    embeds = model.get_input_embeddings()(x)
    assert torch.equal(model.generate(inputs_embeds=embeds, **common), wanted[:, 11:])


def test_the_cache_by_hand():
    model, x = causal(), tokens(2, 10)
    whole = model(x).logits
    cache = model(x[:, :6], use_cache=True).past_key_values
    assert len(cache) == 2
    assert cache.get_mask_sizes(4, 0) == (10, 0)
    cache.batch_repeat_interleave(2)
    later = model(x[:, 6:].repeat_interleave(2, 0), past_key_values=cache).logits
    torch.testing.assert_close(later, whole[:, 6:].repeat_interleave(2, 0), rtol=1e-4, atol=1e-4)
    kept = model(x, logits_to_keep=1).logits
    torch.testing.assert_close(kept, whole[:, -1:])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="cannot forget"):
        cache.crop(1)


@pytest.mark.parametrize("changes", [{"attention": "softmax"}, {"position": "rope"}])
def test_models_that_do_not_stream_generate_all_the_same(changes):
    model, x = causal(**changes), tokens(2, 9)
    mask = torch.ones_like(x)
    x[0, :3], mask[0, :3] = 0, 0
    got = model.generate(x, attention_mask=mask, max_new_tokens=9, do_sample=False)
    for n in range(9, 18):
        keep = pad(mask, (0, n - 9), value=1)
        logits = model(got[:, :n], keep).logits[:, -1]
        assert torch.equal(logits.argmax(-1), got[:, n])
    with pytest.raises(ValueError, match=r"has a cache, not .*; pass use_cache=False"):
        model(x, use_cache=True)


def test_gradient_checkpointing_changes_nothing():
    x, gradients = tokens(), []
    for checkpointing in (False, True):
        model = causal().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
        model(x, labels=x).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    with_cache = causal().train()
    with_cache.gradient_checkpointing_enable()
    output = with_cache(x, labels=x, use_cache=True)
    assert output.past_key_values.get_seq_length() == 20
    output.loss.backward()
    for a, p in zip(gradients[0], with_cache.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)


@pytest.mark.parametrize("where", ["cpu", "auto", "disk"])
def test_device_map(where, tmp_path):
    model = causal()
    model.save_pretrained(tmp_path)
    places = {"": "cpu"} if where == "cpu" else where
    if where == "disk":
        names = ("embedding", "positions", "dropout", "norm", "blocks.0")
        places = {f"model.encoder.{name}": "cpu" for name in names} | {
            "lm_head": "cpu",
            "model.encoder.blocks.1": "disk",
        }
    other = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "offload"
    )
    x = tokens()
    torch.testing.assert_close(other(x).logits, model(x).logits)
    settings = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(other.generate(x, **settings), model.generate(x, **settings))


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype(dtype, name, tmp_path):
    model = causal()
    model.save_pretrained(tmp_path)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, **{name: dtype})
    assert {p.dtype for p in other.parameters()} == {dtype}
    x = tokens()
    assert other(x).logits.dtype == dtype
    cached = other.generate(x, max_new_tokens=5, do_sample=False)
    assert cached.shape == (3, 25)


@pytest.mark.parametrize("model", HEADS.values())
def test_outputs_in_the_forms_users_ask_for(model):
    model = model(config(causal=model is FastRPBForCausalLM)).eval()
    x = tokens()
    output = model(x, output_hidden_states=True)
    assert [h.shape for h in output.hidden_states] == [(3, 20, 16)] * 3
    as_tuple = model(x, return_dict=False)
    assert torch.equal(as_tuple[0], first(output))
    embedded = model(inputs_embeds=model.get_input_embeddings()(x))
    torch.testing.assert_close(first(embedded), first(output))
    model.resize_token_embeddings(40)
    assert model.config.vocab_size == 40
    assert model(torch.full((1, 5), 39)) is not None


def test_hidden_states_that_the_config_asks_for():
    model, x = FastRPBModel(config(output_hidden_states=True)).eval(), tokens()
    assert len(model(x).hidden_states) == 3
    assert model(x, output_hidden_states=False).hidden_states is None


def test_position_ids_may_be_given():
    model, x = causal(), tokens()
    there = model(x, position_ids=torch.arange(20).expand(3, -1) + 7).logits
    torch.testing.assert_close(
        model(x, position_ids=torch.arange(20).expand(3, -1)).logits, model(x).logits
    )
    assert (there - model(x).logits).abs().max() > 1e-3


def test_a_loss_over_the_items_of_several_batches():
    """As a Trainer that accumulates gradients asks for it."""
    model, x = FastRPBForMaskedLM(config()).eval(), tokens()
    wanted = cross_entropy(model(x).logits.flatten(0, 1), x.flatten(), reduction="sum") / 100
    torch.testing.assert_close(model(x, labels=x, num_items_in_batch=100).loss, wanted)


def test_masked_language_model_learns():
    torch.manual_seed(0)
    model = FastRPBForMaskedLM(config())
    x = torch.arange(20).remainder(5).add(3).expand(4, -1)
    hidden = torch.rand(4, 20) < 0.3
    labels = torch.where(hidden, x, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(x.masked_fill(hidden, 2), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_a_saved_config_may_hold_what_is_none_of_its_settings(tmp_path):
    saved = config()
    saved.max_len = 100
    saved.save_pretrained(tmp_path)
    assert FastRPBConfig.from_pretrained(tmp_path).max_len == 100


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: config(position="rpe"), ValueError, "adds to the logits of softmax"),
        (lambda: config(hidden_size=15), ValueError, "heads=2 must divide the width 15"),
        (lambda: config(causal=True, pooling="cls"), ValueError, "CLS token comes first"),
        (lambda: config(max_length=20), ValueError, "use max_position_embeddings="),
        (lambda: config(num_classes=3), ValueError, "num_classes is no setting .* use num_labels="),
        (lambda: config(checkpoint=True), ValueError, r"use model.gradient_checkpointing_enable"),
        (
            lambda: causal(eos_token_id=1).generate(
                tokens(1), max_new_tokens=9, prompt_lookup_num_tokens=2
            ),
            ValueError,
            "generate without an assistant",
        ),
        (lambda: FastRPBForCausalLM(config()), ValueError, "looks back only; it needs causal=True"),
        (
            lambda: FastRPBForMaskedLM(config(causal=True)),
            ValueError,
            "looks both ways; it needs causal=False",
        ),
        (lambda: FastRPBModel(config())(None), ValueError, "one of input_ids and inputs_embeds"),
        (
            lambda: FastRPBModel(config())(tokens(1, N + 1)),
            ValueError,
            f"{N + 1} tokens exceed max_length={N}",
        ),
        (
            lambda: FastRPBConfig(postion="none"),
            ValueError,
            "no setting 'postion'; did you mean position",
        ),
        (lambda: FastRPBConfig(layerss=2), ValueError, "did you mean layers"),
        (lambda: FastRPBConfig(max_len=9), ValueError, "did you mean max_position_embeddings="),
        (
            lambda: FastRPBModel(config())(tokens(), torch.ones(3, 19)),
            ValueError,
            r"with length 20, .* got \(3, 19\)",
        ),
        (
            lambda: causal()(tokens(), past_key_values=transformers.DynamicCache()),
            TypeError,
            "must be a FastRPBCache, got DynamicCache",
        ),
        (
            lambda: causal().generate(tokens(1, 140), max_new_tokens=20, do_sample=False),
            ValueError,
            "tokens exceed max_length=150",
        ),
    ],
)
def test_mistakes_get_one_sentence(call, error, words):
    with pytest.raises(error, match=words):
        call()
