"""FastRPB in Hugging Face Transformers 5 (tested with 5.22): `pip install 'fastrpb[hf]'`."""

from fastrpb.hf.adapter import SUPPORTED, attach, biases, detach, load, save

__all__ = ["SUPPORTED", "attach", "biases", "detach", "load", "save"]
