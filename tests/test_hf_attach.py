"""`fastrpb.hf.attach` on small random models of every supported architecture."""

import copy

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fastrpb import FastRPB, FastRPB2d, init
from fastrpb.hf import SUPPORTED, attach, biases, detach, load, save
from fastrpb.hf.adapter import IMAGE_PREFIX
from fastrpb.hf.masks import keys_before

N, HEADS, LAYERS = 40, 4, 2
SIZES = {
    "vocab_size": 30,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 2 * N,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": None,
}
CHANGES = {
    "gpt_neox": {"num_key_value_heads": HEADS},
    **{name: {"num_key_value_heads": 2, "head_dim": 8} for name in ("llama", "qwen2", "qwen3")},
    "distilbert": {"dim": 32, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 48},
    **{name: {"image_size": (24, 16), "patch_size": 4} for name in IMAGE_PREFIX},
}
CAUSAL = ("gpt2", "gpt_neox", "llama", "qwen2", "qwen3")
CROSS = {"is_decoder": True, "add_cross_attention": True}
architectures = pytest.mark.parametrize("name", SUPPORTED)
texts = pytest.mark.parametrize("name", [x for x in SUPPORTED if x not in IMAGE_PREFIX])
causals = pytest.mark.parametrize("name", CAUSAL)


def make(name, head=AutoModel, attn="sdpa", **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **CHANGES.get(name, {}), **changes})
    return head.from_config(config, attn_implementation=attn).eval()


def inputs(name, batch=3, length=21):
    if name in IMAGE_PREFIX:
        return {"pixel_values": torch.randn(batch, 3, 24, 16)}
    return {"input_ids": torch.randint(3, 30, (batch, length))}


def randomize(model, std=0.3):
    for bias in biases(model):
        torch.nn.init.normal_(bias.w, std=std)
    return model


def hidden(model, **inputs):
    with torch.no_grad():
        return model(**inputs).last_hidden_state


@architectures
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_identical_until_trained_and_after_detach(name, attn, dtype):
    model, x = make(name, attn=attn).to(dtype), inputs(name)
    if "pixel_values" in x:
        x["pixel_values"] = x["pixel_values"].to(dtype)
    before, keys = hidden(model, **x), set(model.state_dict())
    assert attach(model) is model
    assert len(biases(model)) == LAYERS
    assert all(bias.w.dtype == dtype for bias in biases(model))
    assert torch.equal(hidden(model, **x), before)
    randomize(model)
    assert (hidden(model, **x) - before).abs().max() > 1e-3
    assert detach(model) is model
    assert torch.equal(hidden(model, **x), before)
    assert set(model.state_dict()) == keys


@architectures
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_what_is_added_is_w_times_v(name, attn):
    """The attention of one layer, against the dense matrix of its bias and the values it got."""
    model, x = randomize(attach(make(name, attn=attn))), inputs(name)
    layer = next(m for m in model.modules() if "fastrpb" in m._modules)
    values, outputs = [], []
    multiply = layer.fastrpb.forward

    def spy(v, mask):
        values.append(v)
        outputs.append(multiply(v, mask))
        return outputs[-1]

    layer.fastrpb.forward = spy
    hidden(model, **x)
    matrix = layer.fastrpb.matrix(values[0].shape[-2])
    torch.testing.assert_close(outputs[0], matrix @ values[0], rtol=1e-4, atol=1e-4)
    causal = isinstance(layer.fastrpb, FastRPB) and layer.fastrpb.causal
    assert causal == (name in CAUSAL)


@texts
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_leaves_no_trace(name, attn, side):
    model = randomize(attach(make(name, attn=attn)))
    tokens = inputs(name)["input_ids"]
    short = tokens[:1, :15]
    space = (6, 0) if side == "left" else (0, 6)
    mask = torch.cat([pad(torch.ones(1, 15), space), torch.ones(2, 21)])
    batch = torch.cat([pad(short, space, value=1), tokens[1:]])
    absolute = {"position_ids": mask.long().cumsum(-1).sub(1).clamp(min=0)}
    if name in ("roberta", "xlm-roberta", "camembert"):  # they skip padding by themselves
        absolute = {}
    y = hidden(model, input_ids=batch, attention_mask=mask, **absolute)
    here = slice(6, None) if side == "left" else slice(15)
    alone = hidden(model, input_ids=short)
    torch.testing.assert_close(y[:1, here], alone, rtol=1e-4, atol=1e-4)
    whole = hidden(model, input_ids=tokens[1:])
    torch.testing.assert_close(y[1:], whole, rtol=1e-4, atol=1e-4)


@causals
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3}, {"cache_implementation": "static", "disable_compile": True}]
)
def test_generation_with_a_cache_equals_recomputing(name, attn, settings):
    model = randomize(attach(make(name, AutoModelForCausalLM, attn)))
    tokens = inputs(name, 2, 12)["input_ids"]
    mask = torch.ones_like(tokens)
    tokens[0, :5], mask[0, :5] = 1, 0
    common = {"attention_mask": mask, "max_new_tokens": 15, "do_sample": False}
    beams = {k: v for k, v in settings.items() if k == "num_beams"}
    wanted = model.generate(tokens, use_cache=False, **common, **beams)
    got = model.generate(tokens, use_cache=True, **common, **settings)
    assert torch.equal(got, wanted)
    plain = detach(model).generate(tokens, **common)
    assert not torch.equal(plain, wanted)


@causals
def test_a_static_cache_without_padding(name):
    """No mask comes with the prompt; the cache has empty slots."""
    model = randomize(attach(make(name, AutoModelForCausalLM)))
    tokens, common = inputs(name, 2, 12)["input_ids"], {"max_new_tokens": 15, "do_sample": False}
    static = {"cache_implementation": "static", "disable_compile": True}
    wanted = model.generate(tokens, use_cache=False, **common)
    assert torch.equal(model.generate(tokens, **static, **common), wanted)


@causals
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_prompt_in_chunks_of_which_the_first_are_padding(name, attn):
    model = randomize(attach(make(name, AutoModelForCausalLM, attn)))
    tokens = pad(inputs(name, 2, 12)["input_ids"], (9, 0), value=1)
    common = {"attention_mask": (tokens != 1).long(), "max_new_tokens": 15, "do_sample": False}
    wanted = model.generate(tokens, use_cache=False, **common)
    assert torch.equal(model.generate(tokens, prefill_chunk_size=4, **common), wanted)


@causals
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_last_part_that_ends_in_padding(name, attn, compiled):
    model = randomize(attach(make(name, AutoModelForCausalLM, attn)))
    tokens = inputs(name, 2, 12)["input_ids"]
    mask = torch.ones_like(tokens)
    mask[:, 10:] = 0
    with torch.no_grad():
        wanted = model(tokens, attention_mask=mask).logits[:, 6:10]
        first = model(tokens[:, :6], attention_mask=mask[:, :6], use_cache=True)
        call = torch.compile(model, backend="eager") if compiled else model
        last = call(tokens[:, 6:], attention_mask=mask, past_key_values=first.past_key_values)
    torch.testing.assert_close(last.logits[:, :4], wanted, rtol=1e-4, atol=1e-5)


def test_queries_that_are_padding_may_see_everything():
    """As some versions have it; the other queries tell where they stand."""
    mask = torch.zeros(1, 1, 3, 8, dtype=torch.bool)  # two tokens before, three slots empty
    mask[0, 0, 0, :3] = mask[0, 0, 2, [0, 1, 2, 4]] = mask[0, 0, 1] = True
    assert keys_before(mask) == 2
    assert keys_before(mask.float().log()) == 2  # as numbers to add to the logits


@causals
def test_a_cache_may_be_filled_in_parts(name):
    model = randomize(attach(make(name, AutoModelForCausalLM)))
    tokens = inputs(name, 2, 20)["input_ids"]
    with torch.no_grad():
        whole = model(tokens).logits
        cache, parts = None, []
        for part in (slice(0, 7), slice(7, 8), slice(8, 20)):
            out = model(tokens[:, part], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_grouped_queries_have_weights_each_over_the_values_of_their_group():
    model = randomize(attach(make("llama"), 24))
    assert model.config.num_key_value_heads == 2
    assert [tuple(bias.w.shape) for bias in biases(model)] == [(HEADS, 24)] * LAYERS
    layer, seen = model.layers[0].self_attn, {}
    layer.o_proj.register_forward_pre_hook(lambda _, args: seen.update(y=args[0]))
    layer.v_proj.register_forward_hook(lambda *args: seen.update(v=args[-1]))
    tokens = torch.randint(30, (1, 24))
    hidden(model, input_ids=tokens)
    biased, v = seen["y"], seen["v"].unflatten(-1, (2, 8)).transpose(1, 2)
    term = torch.cat([layer.fastrpb.matrix(24)[h] @ v[:, h // 2] for h in range(HEADS)], -1)
    detach(model)
    hidden(model, input_ids=tokens)
    torch.testing.assert_close(biased, seen["y"] + term, rtol=1e-4, atol=1e-4)


def test_images_keep_their_class_token_out():
    for name, prefix in IMAGE_PREFIX.items():
        for kind, shape in (("additive", (HEADS, 11)), ("full", (HEADS, 11, 7))):
            model = attach(make(name), kind=kind)
            for bias in biases(model):
                assert isinstance(bias, FastRPB2d)
                assert bias.prefix == prefix
                assert (bias.height, bias.width) == (6, 4)
                assert bias.w.shape == shape


def test_cross_attention_gets_no_bias():
    for name in ("bert", "gpt2"):
        model = attach(make(name, **CROSS))
        assert len(biases(model)) == LAYERS
        assert all(bias.causal for bias in biases(model))
        encoded = torch.randn(3, 9, 32)
        randomize(model)
        model(**inputs(name), encoder_hidden_states=encoded)


@architectures
def test_only_the_biases_train_if_so_wished(name):
    model, x = attach(make(name), freeze=True).train(), inputs(name)
    model(**x).last_hidden_state.square().sum().backward()
    trained = {key for key, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == LAYERS
    assert all(key.endswith("fastrpb.w") for key in trained)
    assert all(bias.w.grad.abs().max() > 0 for bias in biases(model))
    assert all(p.requires_grad for p in attach(make(name)).parameters())


@architectures
def test_gradient_checkpointing_changes_nothing(name):
    x = inputs(name)
    gradients = []
    for checkpointing in (False, True):
        model = randomize(attach(make(name, **dict.fromkeys(DROPOUT, 0.0))))
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        if name not in IMAGE_PREFIX:
            x["attention_mask"] = pad(torch.ones(3, 15), (0, 6))
        model(**x).last_hidden_state.square().sum().backward()
        gradients.append([bias.w.grad for bias in biases(model)])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


DROPOUT = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout"),
    *("dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout"),
)


@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_saved_biases_are_small_and_load_into_the_same_base(name, tmp_path):
    model, x = make(name), inputs(name)
    base = copy.deepcopy(model)
    randomize(attach(model))
    path = save(model, tmp_path / "adapter")
    numbers = sum(bias.w.numel() for bias in biases(model))
    assert numbers * 4 < path.stat().st_size < numbers * 4 + 1000
    assert load(base, tmp_path / "adapter") is base
    assert torch.equal(hidden(base, **x), hidden(model, **x))
    load(detach(base), path, freeze=True)
    assert sum(p.requires_grad for p in base.parameters()) == LAYERS
    assert [p.name for p in path.parent.iterdir()] == ["fastrpb.safetensors"]


@pytest.mark.parametrize("kind", ["additive", "full"])
def test_biases_of_images_come_back_in_their_kind(kind, tmp_path):
    save(attach(make("vit"), kind=kind), tmp_path)
    assert [bias.kind for bias in biases(load(make("vit"), tmp_path))] == [kind] * LAYERS


def test_biases_that_do_not_fit_are_refused(tmp_path):
    save(attach(make("bert"), 30), tmp_path)
    other = make("bert", num_attention_heads=2, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"bert of 2 layers with w of 4×59; .* 3 layers .* 2×59"):
        load(other, tmp_path, freeze=True)
    assert not biases(other)
    assert all(p.requires_grad for p in other.parameters())
    with pytest.raises(ValueError, match=r"holds biases of a bert, this model is a distilbert"):
        load(make("distilbert"), tmp_path)
    save_file(load_file(tmp_path / "fastrpb.safetensors"), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="holds no biases of fastrpb"):
        load(other, tmp_path / "other.safetensors")
    with pytest.raises(FileNotFoundError, match="no file"):
        load(other, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no biases to save"):
        save(other, tmp_path)


@pytest.mark.parametrize("first", ["attach", "peft"])
def test_with_lora_in_place(first, tmp_path):
    settings = LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    model, x = make("bert"), inputs("bert")
    if first == "attach":
        attach(model)
        lora = get_peft_model(model, settings)
        for bias in biases(lora):
            bias.requires_grad_()
    else:
        lora = attach(get_peft_model(model, settings))
    lora.eval()
    before = hidden(lora, **x)
    randomize(lora)
    after = hidden(lora, **x)
    assert (after - before).abs().max() > 1e-3
    lora(**x).last_hidden_state.sum().backward()
    trained = {k.split(".")[-2] for k, p in lora.named_parameters() if p.grad is not None}
    assert trained == {"default", "fastrpb"}
    save(lora, tmp_path)
    detach(lora)
    assert torch.equal(hidden(lora, **x), before)
    load(lora, tmp_path)
    assert torch.equal(hidden(lora, **x), after)
    merged = lora.merge_and_unload()
    torch.testing.assert_close(hidden(merged, **x), after, rtol=1e-4, atol=1e-4)


def test_lora_must_not_wrap_the_biases():
    """A wrapper would be passed over, and the biases would do nothing."""
    settings = LoraConfig(r=2, target_modules=["query"], modules_to_save=["fastrpb"])
    model = get_peft_model(attach(make("bert")), settings)
    with pytest.raises(TypeError, match=r"ModulesToSaveWrapper .* leave 'fastrpb' out"):
        hidden(model, **inputs("bert"))


def test_flash_attention_masks(monkeypatch):
    """Flash kernels need a GPU; here SDPA stands in for one, with the 2D masks they get."""

    def flash(module, query, key, value, mask, **settings):
        assert mask.shape == (3, 21)
        return sdpa_attention_forward(module, query, key, value, mask[:, None, None], **settings)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_attention_2", flash)
    model, x = randomize(attach(make("bert"))), inputs("bert")
    x["attention_mask"] = torch.arange(21) < torch.tensor([[15], [21], [18]])
    wanted = hidden(model, **x)
    model.config._attn_implementation = "flash_attention_2"
    torch.testing.assert_close(hidden(model, **x)[:, :15], wanted[:, :15])


def test_flash_attention_packs_by_positions(monkeypatch):
    """Flash kernels get no mask then, but the positions tell them."""
    monkeypatch.setitem(
        transformers.AttentionInterface._global_mapping, "flash_attention_2", sdpa_attention_forward
    )
    model, x = attach(make("llama")), inputs("llama", batch=1)
    model.config._attn_implementation = "flash_attention_2"
    hidden(model, **x, position_ids=torch.arange(21)[None] + 5)
    packed = torch.tensor([[*range(11), *range(10)]])
    with pytest.raises(ValueError, match="packed into one row"):
        hidden(model, **x, position_ids=packed, use_cache=False)


def test_a_mask_may_be_filled_anew():
    model, x = randomize(attach(make("bert"))), inputs("bert")["input_ids"]
    mask = torch.ones(3, 1, 21, 21, dtype=torch.bool)
    hidden(model, input_ids=x, attention_mask=mask)
    mask[..., 15:] = False
    alone = hidden(model, input_ids=x[:, :15])
    got = hidden(model, input_ids=x, attention_mask=mask)[:, :15]
    torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-4)
    mask[:, :, 3, 4] = False
    with pytest.raises(ValueError, match="hides other keys"):
        hidden(model, input_ids=x, attention_mask=mask)


def test_the_implementation_may_change_later():
    model, x = randomize(attach(make("bert"))), inputs("bert")
    wanted = hidden(model, **x)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(hidden(model, **x), wanted, rtol=1e-4, atol=1e-4)
    attentions = model(**x, output_attentions=True).attentions
    assert attentions[0].shape == (3, HEADS, 21, 21)
    model.config._attn_implementation = "paged|eager"
    with pytest.raises(ValueError, match=r"do not support attn_implementation='paged\|eager'"):
        hidden(model, **x)


def test_models_without_a_bias_are_left_alone():
    model, other, x = make("bert"), make("bert"), inputs("bert")
    before = hidden(other, **x)
    randomize(attach(model))
    assert torch.equal(hidden(other, **x), before)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_compiles_to_one_graph(name):
    torch.compiler.reset()
    model, x = randomize(attach(make(name))), inputs(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for masks in ({}, {"attention_mask": pad(torch.ones(3, 15), (6, 0)).long()}):
        wanted = hidden(model, **x, **masks)[:, 6:]
        got = hidden(compiled, **x, **masks)[:, 6:]
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_device_map_and_dtype(tmp_path):
    make("bert").save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, device_map={"": "cpu"}, dtype=torch.float16)
    x = inputs("bert")
    before = hidden(model, **x)
    attach(model)
    assert {bias.w.dtype for bias in biases(model)} == {torch.float16}
    assert torch.equal(hidden(model, **x), before)


def test_offloaded_layers(tmp_path):
    base = make("llama", AutoModelForCausalLM)
    base.save_pretrained(tmp_path)
    names = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    places = {**dict.fromkeys(names, "cpu"), "model.layers.1": "disk"}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "offload"
    )
    randomize(attach(model))
    save(model, tmp_path)
    load(base, tmp_path)
    x = inputs("llama")["input_ids"]
    settings = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(x, **settings), base.generate(x, **settings))


def test_attached_models_save_and_load_as_their_base(tmp_path):
    model, x = randomize(attach(make("bert"))), inputs("bert")
    model.save_pretrained(tmp_path)
    save(model, tmp_path)
    other = AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(hidden(load(other, tmp_path), **x), hidden(model, **x))


def test_mistakes_get_one_sentence():
    with pytest.raises(ValueError, match=r"'t5' models take no biases; supported are bert, ro"):
        attach(transformers.T5Model(transformers.T5Config(d_model=8, d_ff=8, num_layers=1)))
    with pytest.raises(TypeError, match="Linear holds no Transformers model"):
        attach(torch.nn.Linear(2, 2))
    for call in (attach, detach, biases):
        with pytest.raises(TypeError, match="for Transformers models, not for str"):
            call("bert")
    with pytest.raises(TypeError, match="freeze='no' must be true or false"):
        attach(make("bert"), freeze="no")
    model = attach(make("bert"), 20)
    with pytest.raises(ValueError, match=r"21 tokens, .* exceed the max_length=20 .* attach them"):
        model(**inputs("bert"))
    with pytest.raises(ValueError, match="has biases already"):
        attach(model, 20)
    with pytest.raises(ValueError, match="leave max_length out"):
        attach(make("vit"), 20)
    with pytest.raises(ValueError, match="kind='full' is for images"):
        attach(make("bert"), kind="full")
    with pytest.raises(ValueError, match="reorder_and_upcast_attn"):
        attach(make("gpt2", reorder_and_upcast_attn=True))
    causal = attach(make("llama"))
    packed = torch.tensor([[*range(11), *range(10)]])
    with pytest.raises(ValueError, match="hides other keys"):
        causal(torch.randint(30, (1, 21)), position_ids=packed, use_cache=False)
    with pytest.raises(ValueError, match="packed into one row"):
        causal(torch.randint(30, (1, 21)), cu_seq_lens_q=torch.tensor([0, 11, 21]))
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    with pytest.raises(
        ValueError, match=r"window of this model, 4 tokens, .* max_length=5; use max"
    ):
        attach(make("qwen2", **windows), 5)
    attach(make("qwen2", **windows), 4)
    image = attach(make("vit", image_size=24))
    with pytest.raises(ValueError, match="do not make an image of 6×6"):
        image(torch.randn(1, 3, 32, 32), interpolate_pos_encoding=True)
    local = attach(make("bert"), init=init.local())
    assert biases(local)[0].w.norm() > 0
