"""FastRPB in Hugging Face Transformers, 5.1 or later: `pip install '.[hf]'`.

- `FastRPBConfig`, `FastRPBModel` and the models with heads: linear or softmax attention with any of
  the encodings, as Transformers' own models, in its Auto classes once this module is imported;
- `attach`: a bias for every attention layer of a model that exists.
"""

try:
    import transformers  # noqa: F401
except ModuleNotFoundError:
    how = "pip install '.[hf]' in a clone of fastrpb"
    raise ImportError(f"fastrpb.hf needs Transformers: {how}") from None

from fastrpb.hf.adapter import SUPPORTED, attach, biases, detach, load, save
from fastrpb.hf.models import (
    FastRPBCache,
    FastRPBConfig,
    FastRPBForCausalLM,
    FastRPBForMaskedLM,
    FastRPBForSequenceClassification,
    FastRPBModel,
)

__all__ = [
    "SUPPORTED",
    "FastRPBCache",
    "FastRPBConfig",
    "FastRPBForCausalLM",
    "FastRPBForMaskedLM",
    "FastRPBForSequenceClassification",
    "FastRPBModel",
    "attach",
    "biases",
    "detach",
    "load",
    "save",
]
