"""Models as ONNX files, for any batch, any length up to the model's: `pip install '.[onnx]'`.

W·v stays O(N log N): the operator `fastrpb::toeplitz_fft` becomes ONNX's DFT. Causal linear
attention sums its chunks of 64 tokens by a matrix of all chunks instead of a scan, whose steps the
length would number.
"""

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from fastrpb.files import replacing, shipped_or
from fastrpb.model import MODELS, PairClassifier, load_model
from fastrpb.model_config import ModelConfig

_OPSET = 20  # the first whose DFT runs along any axis
_PAIR = ("first", "second", "first_mask", "second_mask")


def export(model: nn.Module | str | os.PathLike, path: str | os.PathLike) -> Path:
    """Write a model, or the one that `save_model` saved, as an ONNX file, atomically.

    Args:
        model: a `Classifier`, `PairClassifier` or `LanguageModel`; or its file; or a folder with
            its `model.safetensors`; or the name of a shipped one, "mnist".
        path: the file to write, whose name ends in .onnx.

    The inputs are `tokens` (batch, length) int64 and `mask` (batch, length) bool, True = keep; of a
    pair, `first`, `second`, `first_mask` and `second_mask`. The output is `logits`, float32.

    >>> from fastrpb import Classifier, ModelConfig
    >>> model = Classifier(ModelConfig(vocab_size=9, max_length=64, dim=16, layers=1, heads=2))
    >>> folder = getfixture("tmp_path")
    >>> export(model, folder / "model.onnx").name
    'model.onnx'
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for {path.name}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it, as {path / 'model.onnx'}")
    if path.suffix != ".onnx":  # nor is any other file replaced, such as the weights themselves
        raise ValueError(f"the name of an ONNX file ends in .onnx, got {path}")
    if not isinstance(model, nn.Module):
        model = load_model(_weights_file(Path(model)))
    if type(model).__name__ not in MODELS:
        raise TypeError(
            f"export one of {', '.join(MODELS)}, not {type(model).__name__}; a model of your own "
            "by torch.onnx.export, with custom_translation_table=fastrpb.onnx.translations()"
        )
    config: ModelConfig = model.config  # pyright: ignore[reportAssignmentType]
    if config.position in ("sinespe", "convspe"):
        raise ValueError(
            f"position={config.position!r} draws new random codes at every call, so no two "
            "programs can give equal outputs; it is not exported"
        )
    table = translations()
    inputs = _inputs(model, config)
    with _quiet():
        shapes = [_dynamic(name, config) for name in inputs]
        any_size = [dict.fromkeys(axes, Dim.DYNAMIC) for axes in shapes]
        # Here: what this refuses, the exporter would trace in another way, for other branches.
        traced = torch.export.export(
            _exportable(model, config),
            tuple(inputs.values()),
            dynamic_shapes=tuple(any_size),
            strict=False,
        )
        program = torch.onnx.export(
            traced,
            dynamo=True,
            verbose=False,
            opset_version=_OPSET,
            input_names=list(inputs),
            output_names=["logits"],
            dynamic_shapes=tuple(shapes),
            custom_translation_table=table,
        )
    with replacing(path) as part:
        program.save(part)  # pyright: ignore[reportOptionalMemberAccess]
    return path


def _weights_file(run: Path) -> Path:
    run = shipped_or(run)
    return run / "model.safetensors" if run.is_dir() else run


def _inputs(model: nn.Module, config: ModelConfig) -> dict[str, Tensor]:
    """What to trace the model with."""
    # Sizes of 0 and 1 are special to the tracer.
    length = config.max_length if _one_length(config) else max(2, config.max_length // 2)
    tokens = torch.zeros(2, length, dtype=torch.int64)
    mask = torch.ones(2, length, dtype=torch.bool)
    if not isinstance(model, PairClassifier):
        return {"tokens": tokens, "mask": mask}
    tokens, mask = (torch.stack([x, x]) for x in (tokens, mask))
    return dict(zip(_PAIR, (*tokens, *mask), strict=True))


def _dynamic(name: str, config: ModelConfig) -> dict[int, str]:
    """The axes of an input that may have any size, by their names."""
    length = f"{name.removesuffix('_mask')}_length" if name in _PAIR else "length"
    return {0: "batch"} if _one_length(config) else {0: "batch", 1: length}


def _one_length(config: ModelConfig) -> bool:
    return config.position == "fastrpb2d" or config.max_length <= 2  # of which one is too few


def _exportable(model: nn.Module, config: ModelConfig) -> nn.Module:
    model = copy.deepcopy(model).float().cpu().eval()
    # ONNX has no errors to raise, but to look a token up beyond the end of a table is one; before
    # its beginning is none, it goes on from the end.
    places = torch.zeros(config.max_length, dtype=torch.int64)

    def look_up(_, args):
        (tokens,) = args
        tokens = tokens.masked_fill(tokens < 0, config.vocab_size)
        return tokens + places[torch.arange(tokens.shape[1])]

    model.encoder.embedding.register_forward_pre_hook(look_up)  # pyright: ignore
    return model


def translations() -> dict[Callable, Callable]:
    """What the operators of this library are in ONNX, for `torch.onnx.export` of your own models.

    Needs `dynamo=True` and at least `opset_version=20`, whose DFT runs along any axis.

    >>> from fastrpb import FastRPB
    >>> model, v = torch.nn.Sequential(FastRPB(4, 2048)).eval(), torch.randn(2, 4, 2048, 8)
    >>> settings = {"dynamo": True, "opset_version": 20, "verbose": False}
    >>> table = translations()
    >>> program = torch.onnx.export(model, (v,), custom_translation_table=table, **settings)
    >>> program.save(getfixture("tmp_path") / "model.onnx")
    """
    try:
        import onnxscript  # noqa: PLC0415  (an extra)
    except ModuleNotFoundError:
        raise ImportError(
            "models are exported by onnxscript: pip install '.[onnx]' in a clone of fastrpb"
        ) from None

    op: Any = getattr(onnxscript, f"opset{_OPSET}")

    def shape(*parts):
        known = (op.Constant(value_ints=x) if isinstance(x, list) else x for x in parts)
        return op.Concat(*known, axis=0)

    def toeplitz_fft(w, v, out_length):
        """y[n] = (flip(w) * v)[N-1+n], * being a circular convolution over at least M+N-1 entries.

        Two channels travel as one complex number where they are even in number.
        """
        heads, dim = v.shape[1], v.shape[3]
        pair = 2 - dim % 2
        batch, n = op.Shape(v, end=1), op.Shape(v, start=2, end=3)
        m = op.Reshape(op.Cast(out_length, to=7), [1])
        before = op.Sub(n, [1])
        total = op.Add(before, m)
        log2 = op.Div(op.Log(op.Cast(total, to=1)), op.Constant(value_floats=[0.69314718]))
        power = op.Pow(op.Constant(value_ints=[2]), op.Cast(op.Ceil(log2), to=7))
        size = op.Squeeze(op.Where(op.Less(power, total), op.Mul(power, [2]), power))
        axis = op.Constant(value_int=2)
        flipped = op.Slice(w, [-1], [-(2**62)], [1], [-1])
        kernel = op.Reshape(flipped, shape([1, heads], total, [1, 1]))
        values = op.Reshape(v, shape(batch, [heads], n, [dim // pair, pair]))
        product = _multiply(op, op.DFT(kernel, size, axis), op.DFT(values, size, axis))
        y = op.Slice(op.DFT(product, size, axis, inverse=1), before, total, [2])
        y = y if pair == 2 else op.Slice(y, [0], [1], [4])
        return op.Reshape(y, shape(batch, [heads], m, [dim]))

    return {torch.ops.fastrpb.toeplitz_fft.default: toeplitz_fft}


def _multiply(op: Any, a, b):
    """The product of complex numbers, (..., 2) each."""
    a_re, a_im = op.Slice(a, [0], [1], [-1]), op.Slice(a, [1], [2], [-1])
    b_re, b_im = op.Slice(b, [0], [1], [-1]), op.Slice(b, [1], [2], [-1])
    real = op.Sub(op.Mul(a_re, b_re), op.Mul(a_im, b_im))
    imaginary = op.Add(op.Mul(a_re, b_im), op.Mul(a_im, b_re))
    return op.Concat(real, imaginary, axis=-1)


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells of packages that it could use, and of its own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", "# The axis name", UserWarning)
            yield
    finally:
        logger.setLevel(level)
