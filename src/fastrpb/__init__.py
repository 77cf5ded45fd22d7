"""Relative positions for long sequences: exact Toeplitz biases on any attention."""

from fastrpb import init
from fastrpb.attention import (
    LinearState,
    linear_attention,
    linear_attention_init_state,
    linear_attention_step,
    linear_attention_weights,
    softmax_attention,
)
from fastrpb.bias import FastRPB, FastRPB2d
from fastrpb.features import DPFP, FavorPlus, elu1, relu, sikf
from fastrpb.toeplitz import toeplitz, toeplitz_2d, toeplitz_matmul, toeplitz_matmul_2d

__all__ = [
    "DPFP",
    "FastRPB",
    "FastRPB2d",
    "FavorPlus",
    "LinearState",
    "elu1",
    "init",
    "linear_attention",
    "linear_attention_init_state",
    "linear_attention_step",
    "linear_attention_weights",
    "relu",
    "sikf",
    "softmax_attention",
    "toeplitz",
    "toeplitz_2d",
    "toeplitz_matmul",
    "toeplitz_matmul_2d",
]
