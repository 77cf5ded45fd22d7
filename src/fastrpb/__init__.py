"""Relative positions for long sequences: exact Toeplitz biases on any attention."""

from fastrpb import init
from fastrpb.attention import (
    LinearState,
    linear_attention,
    linear_attention_init_state,
    linear_attention_state,
    linear_attention_step,
    linear_attention_weights,
    softmax_attention,
)
from fastrpb.bias import FastRPB
from fastrpb.bias2d import FastRPB2d
from fastrpb.features import DPFP, ExpFeatureMap, FavorPlus, FeatureMap, elu1, relu, sikf
from fastrpb.model import (
    Classifier,
    LanguageModel,
    PairClassifier,
    load_model,
    save_model,
)
from fastrpb.model_config import ModelConfig
from fastrpb.positions import (
    ALiBi,
    ConvSPE,
    LearnedPositions,
    RelativeKeyQuery,
    RoPE,
    SineSPE,
    SinusoidalPositions,
    T5Bias,
)
from fastrpb.toeplitz import toeplitz, toeplitz_2d, toeplitz_matmul, toeplitz_matmul_2d

__version__ = "0.1.0"

__all__ = [
    "DPFP",
    "ALiBi",
    "Classifier",
    "ConvSPE",
    "ExpFeatureMap",
    "FastRPB",
    "FastRPB2d",
    "FavorPlus",
    "FeatureMap",
    "LanguageModel",
    "LearnedPositions",
    "LinearState",
    "ModelConfig",
    "PairClassifier",
    "RelativeKeyQuery",
    "RoPE",
    "SineSPE",
    "SinusoidalPositions",
    "T5Bias",
    "elu1",
    "init",
    "linear_attention",
    "linear_attention_init_state",
    "linear_attention_state",
    "linear_attention_step",
    "linear_attention_weights",
    "load_model",
    "relu",
    "save_model",
    "sikf",
    "softmax_attention",
    "toeplitz",
    "toeplitz_2d",
    "toeplitz_matmul",
    "toeplitz_matmul_2d",
]
