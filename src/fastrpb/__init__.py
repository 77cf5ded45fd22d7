"""Relative positions for long sequences: exact Toeplitz biases on any attention."""

from fastrpb.toeplitz import toeplitz, toeplitz_2d, toeplitz_matmul, toeplitz_matmul_2d

__all__ = ["toeplitz", "toeplitz_2d", "toeplitz_matmul", "toeplitz_matmul_2d"]
