"""Relative positions for long sequences: exact Toeplitz biases on any attention."""

from fastrpb import init
from fastrpb.bias import FastRPB, FastRPB2d
from fastrpb.toeplitz import toeplitz, toeplitz_2d, toeplitz_matmul, toeplitz_matmul_2d

__all__ = [
    "FastRPB",
    "FastRPB2d",
    "init",
    "toeplitz",
    "toeplitz_2d",
    "toeplitz_matmul",
    "toeplitz_matmul_2d",
]
