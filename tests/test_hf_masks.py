"""Attention masks that a bias cannot know are refused, compiled or not."""

import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

from fastrpb import init
from fastrpb.hf import attach, detach

REFUSED = "this attention mask hides other keys"


def llama():
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
    return LlamaModel(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_rows(compiled):
    model = attach(llama(), 64, init=init.normal(0.5))
    run = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    tokens, places = torch.randint(1, 50, (1, 10)), torch.arange(5).repeat(2)[None]
    own = torch.block_diag(torch.ones(5, 5), torch.ones(5, 5)).tril().bool()[None, None]
    error = RuntimeError if compiled else ValueError
    with torch.no_grad():
        for inputs in ({"position_ids": places}, {"attention_mask": own}):
            with pytest.raises(error, match=REFUSED):
                run(tokens, use_cache=False, **inputs)
        padded = torch.arange(10) < torch.tensor([[10], [7]])
        tokens = tokens.expand(2, 10)
        got = run(tokens, attention_mask=padded).last_hidden_state
        wanted = model(tokens, attention_mask=padded).last_hidden_state
        torch.testing.assert_close(got, wanted)
        base = detach(model)(tokens, attention_mask=padded).last_hidden_state
        assert (got - base).abs().max() > 0.1


def test_the_cache_of_packed_sequences():
    with pytest.raises(ValueError, match="packed into one row"):
        attach(llama(), 64)(torch.randint(50, (1, 9)), use_cache=False, cache=object())


def test_a_mask_that_another_model_may_take():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    bert = attach(BertModel(BertConfig(vocab_size=50, **sizes, intermediate_size=32)).eval(), 64)
    gpt2 = attach(GPT2Model(GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=4)).eval(), 64)
    tokens, causal = torch.randint(50, (1, 10)), torch.ones(1, 1, 10, 10).tril().bool()
    gpt2(tokens, attention_mask=causal)
    with pytest.raises(ValueError, match=REFUSED):
        bert(tokens, attention_mask=causal)


def test_a_mask_that_weighs_keys():
    model = attach(llama(), 64, init=init.normal(0.5))
    tokens, mask = torch.randint(1, 50, (1, 10)), torch.full((10, 10), -torch.inf).triu(1)
    model(tokens, attention_mask=mask[None, None])
    with pytest.raises(ValueError, match="or weighs them"):
        model(tokens, attention_mask=mask[None, None] - 0.5 * (torch.arange(10) == 3))


def test_a_mask_filled_anew_where_nothing_counts_changes():
    model, tokens = attach(llama(), 64), torch.randint(1, 50, (1, 10))
    with torch.inference_mode():
        mask = torch.ones(1, 1, 10, 10).tril().bool()
        model(tokens, attention_mask=mask)
        mask[..., 5:, :5] = False
        with pytest.raises(ValueError, match=REFUSED):
            model(tokens, attention_mask=mask)
