"""`fastrpb.hf.attach` where a model is not as it comes: wrapped, offloaded, parted, prefixed."""

import subprocess
import sys

import pytest
import torch
from accelerate import cpu_offload
from peft import PrefixTuningConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.models.bert.modeling_bert import BertSelfAttention

from fastrpb import init
from fastrpb.hf import attach, biases, detach, load, save

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 32, "initializer_range": 0.5}
WIDE = init.normal(0.5)


def bert(head=BertModel, **changes):
    return head(BertConfig(**SIZES, **changes)).eval()


def llama(head=LlamaModel, **changes):
    return head(LlamaConfig(**SIZES, **changes)).eval()


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@torch.no_grad()
def test_keys_before_the_first_token_of_a_bidirectional_model(attn):
    """Padding after it changes nothing, whatever the mask is made of."""
    settings = PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=5)
    model = bert(BertForSequenceClassification, attn_implementation=attn)
    model = attach(get_peft_model(model, settings).eval(), 64, init=WIDE)
    tokens, mask = torch.randint(50, (1, 12)), torch.ones(1, 12, dtype=torch.long)
    alone = model(tokens, attention_mask=mask).logits
    padded, shown = (nn.functional.pad(x, (0, 4)) for x in (tokens, mask))
    torch.testing.assert_close(model(padded, attention_mask=shown).logits, alone)
    detach(model)
    assert (model(tokens, attention_mask=mask).logits - alone).abs().max() > 0.01


@torch.no_grad()
def test_a_bidirectional_model_with_a_cache():
    """The keys of a cache count, with a mask or without one."""
    tokens = torch.randint(50, (1, 12))
    outputs = []
    for attn in ("sdpa", "eager"):
        torch.manual_seed(0)
        model = llama(is_causal=False, attn_implementation=attn)
        for layer in model.layers:
            layer.self_attn.is_causal = False
        attach(model, 64, init=WIDE)
        assert not any(bias.causal for bias in biases(model))
        cache = DynamicCache(config=model.config)
        mask = torch.zeros(1, 1, 5, 5)
        model(tokens[:, :5], attention_mask=mask, past_key_values=cache)
        every = torch.zeros(1, 1, 7, 12) if attn == "eager" else None
        positions = torch.arange(5, 12)[None]
        values = {"past_key_values": cache, "position_ids": positions}
        outputs.append(model(tokens[:, 5:], attention_mask=every, **values).last_hidden_state)
    torch.testing.assert_close(*outputs)


def test_of_two_models_none_is_taken_for_both(tmp_path):
    two = nn.ModuleDict({"query": bert(), "document": bert()})
    with pytest.raises(ValueError, match="ModuleDict holds 2 Transformers models; give them one"):
        attach(two, 64)
    assert not biases(two)
    for model in two.values():
        attach(model, 64)
    with pytest.raises(ValueError, match="holds 2 Transformers models"):
        save(two, tmp_path)


class Own(BertSelfAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Another(BertSelfAttention):
    def forward(self, hidden_states, *args, **kwargs):  # without what it has inherited
        return hidden_states, None


class Tanh(nn.Module):
    forward = torch.tanh


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_layers_of_ones_own():
    model = bert()
    first, second = (layer.attention.self for layer in model.encoder.layer)
    first.__class__ = Own
    model.pooler.activation = Tanh()
    model.pooler.other = torch.jit.script(nn.Tanh())
    assert len(biases(attach(model, 64))) == 2
    detach(model)
    second.__class__ = Another
    assert len(biases(attach(model, 64))) == 1  # what does not ask for a function gets no bias


@pytest.mark.filterwarnings("ignore")  # torch's own, of what is to come instead
def test_a_quantised_model():
    model = torch.ao.quantization.quantize_dynamic(bert(), {nn.Linear})
    tokens = torch.randint(50, (2, 9))
    with torch.no_grad():
        before = model(tokens).last_hidden_state
        after = attach(model, 64, init=WIDE)(tokens).last_hidden_state
    assert (after - before).abs().max() > 0.1


def resized():
    model = attach(bert(), 32, init=WIDE)
    for layer in model.encoder.layer:
        layer.attention.self.fastrpb = layer.attention.self.fastrpb.resize(64)
    return model


@pytest.mark.parametrize("make", [lambda: attach(llama(), 64, init=WIDE), resized])
def test_a_pickled_model_keeps_its_biases_in_another_process(make, tmp_path):
    model, tokens = make(), torch.randint(50, (1, 9))
    with torch.no_grad():
        wanted = model(tokens).last_hidden_state
    torch.save((model, tokens, wanted), tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "model, tokens, wanted = torch.load(sys.argv[1], weights_only=False)\n"
        "with torch.no_grad(): got = model(tokens).last_hidden_state\n"
        "torch.testing.assert_close(got, wanted)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], check=True)


def test_offloaded_afterwards_it_generates(tmp_path):
    model = attach(llama(LlamaForCausalLM), 64, init=WIDE)
    tokens, settings = torch.randint(3, 50, (1, 6)), {"max_new_tokens": 4, "do_sample": False}
    wanted = model.generate(tokens, **settings)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(model.generate(tokens, **settings), wanted)
    with pytest.raises(ValueError, match="the biases are offloaded"):
        save(model, tmp_path)


def test_biases_do_not_go_where_there_is_no_memory(tmp_path):
    save(attach(bert(), 32), tmp_path)
    with torch.device("meta"):
        model = bert()
    with pytest.raises(ValueError, match="on the meta device; give it its weights, then load"):
        load(model, tmp_path)
    assert not biases(model)


@pytest.fixture
def mesh(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_biases_in_parts_are_saved_whole(mesh, tmp_path):
    model = attach(bert(), 32, init=WIDE)
    for bias in biases(model):
        bias.w = nn.Parameter(distribute_tensor(bias.w.detach(), mesh, [Replicate()]))
    save(model, tmp_path)
    for mine, saved in zip(biases(model), biases(load(bert(), tmp_path)), strict=True):
        assert torch.equal(mine.w.full_tensor(), saved.w)


@pytest.mark.parametrize("make", [bert, llama])
def test_exported_for_any_batch(make):
    model, tokens = attach(make(), 64, init=WIDE), torch.randint(50, (3, 8))
    sizes = {"input_ids": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    settings = {"use_cache": False} if make is llama else {}
    shapes = {**sizes, **dict.fromkeys(settings)}
    with torch.no_grad():
        values = {"input_ids": tokens, **settings}
        program = torch.export.export(model, (), values, dynamic_shapes=shapes).module()
        other = torch.randint(50, (5, 11))
        got = program(input_ids=other, **settings).last_hidden_state
        torch.testing.assert_close(got, model(other, **settings).last_hidden_state)
