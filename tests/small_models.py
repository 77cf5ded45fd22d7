"""Small models of `fastrpb.hf`."""

import torch

from fastrpb.hf import FastRPBConfig, FastRPBForCausalLM

N = 150
SMALL = {
    "vocab_size": 30,
    "max_position_embeddings": N,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_features": 8,
    "realizations": 4,
    "dropout": 0.0,
    "pad_token_id": 0,
}


def config(**changes):
    return FastRPBConfig(**{**SMALL, **changes})


def causal(**changes):
    torch.manual_seed(0)
    model = FastRPBForCausalLM(config(causal=True, **changes)).eval()
    for p in model.parameters():  # at its beginning, a model says the same token again and again
        torch.nn.init.normal_(p, std=0.3)
    return model


def tokens(batch=3, length=20):
    return torch.randint(3, 30, (batch, length))
