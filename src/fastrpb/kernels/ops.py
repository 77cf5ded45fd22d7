"""The operators that Triton computes, known to torch without importing Triton.

`torch.compile` sees one node for each. What products and attention give has the memory order of the
values, `heads_inside` or not. Operators are told which: a compiled program may hand them values in
another order than it was traced with, and relies on results in the order of then.
"""

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

from fastrpb.kernels.autograd import apply, into_axis
from fastrpb.kernels.launch import favor_features, tile_width
from fastrpb.kernels.registry import operator

# Measured on an NVIDIA H200, with torch 2.11 and Triton 3.6. In distances of a head:
CROSSOVER = 5000  # above, the hierarchical product is faster than the direct one
FLOAT16_LIMIT = 262_144  # above, the FFT is faster than the one step that float16 takes
# In pixels of an image:
MOST_PIXELS = 2500  # above, the hierarchical product over padded rows is faster than that of rows

PACKED_BELOW = 16  # channels a head, to make the batch columns
WIDEST_LINE = 64  # pixels, so that tiles hold whole rows
SIDES = 2**16  # of a coin: it shows 16 bits
HALF = (torch.float16, torch.bfloat16)
INSTALLED = importlib.util.find_spec("triton") is not None
NEEDS = "a GPU of compute capability 8.0 (Ampere) or more and the package triton"
ROOMY = 160 * 1024  # bytes of shared memory for the widest heads: an A100 has them, an RTX has not


def runs_on(x: Tensor) -> bool:
    """Whether Triton can compute with x here: see `NEEDS`; or anywhere in its interpreter."""
    on_gpu = x.is_cuda and room(x) > 0
    return INSTALLED and (on_gpu or os.environ.get("TRITON_INTERPRET") == "1")


def room(x: Tensor) -> int:
    """Bytes of shared memory of the GPU where x is, 0 if it is too old; elsewhere enough."""
    if not x.is_cuda:
        return ROOMY
    # Asked before every launch, where microseconds count; Dynamo asks once, and dislikes caches.
    return _room(x.device) if torch.compiler.is_compiling() else _known_room(x.device)


def _room(gpu: torch.device) -> int:
    if not torch.cuda.is_available():  # what is traced for one
        return ROOMY
    properties = torch.cuda.get_device_properties(gpu)
    if properties.major < 8:  # its tensor cores know no bfloat16
        return 0
    usual = properties.shared_memory_per_block  # and all there is, but for those of NVIDIA
    return getattr(properties, "shared_memory_per_block_optin", usual)


_known_room = cache(_room)


def wins(w: Tensor, v: Tensor) -> bool:
    """Whether these operators are the fastest for a product on a GPU: in half precisions."""
    fits = v.dtype in HALF and w.dtype != torch.float64
    fits = fits and (v.dtype == torch.bfloat16 or w.shape[-1] <= FLOAT16_LIMIT)
    return fits and runs_on(v)


def heads_inside(v: Tensor) -> bool:
    """Whether v lies as (batch, length, heads, dim), as a model's projections give it."""
    return v.shape[1] > 1 and v.stride(1) < v.stride(2)


def _like(v: Tensor, length: int, inside: bool) -> Tensor:
    """A fresh (batch, heads, length, dim) tensor, in memory with the heads inside or not."""
    batch, heads, _, dim = v.shape
    if inside:
        return v.new_empty(batch, length, heads, dim).transpose(1, 2)
    return v.new_empty(batch, heads, length, dim)


def _rows(x: Tensor) -> Tensor:
    """The kernels read vectors: the last axis contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _packs(v: Tensor) -> bool:
    return v.shape[-1] < PACKED_BELOW and len(v) > 1


def takes_image(pixels: int, line: int) -> bool:
    """Whether the product over pixels in rows of `line` is faster than one over padded rows."""
    return line <= WIDEST_LINE and pixels <= MOST_PIXELS


def _is_long(v: Tensor, distances: int) -> bool:
    return v.dtype in HALF and distances > CROSSOVER


@operator("toeplitz_triton")
def _toeplitz(
    w: Tensor, v: Tensor, first: int, out_length: int, prefix: int, line: int, inside: bool
) -> Tensor:
    result = _like(v, prefix + out_length, inside)
    if not result.numel():
        return result
    from fastrpb.kernels import direct, hierarchical, layout, plane  # noqa: PLC0415

    w, v, y = w.contiguous(), _rows(v), result
    if prefix:
        result[:, :, :prefix] = 0
        v, y = v[:, :, prefix:], y[:, :, prefix:]
    packs, is_long = _packs(v), _is_long(v, w.shape[1])
    x, out = (layout.pack(v), layout.empty_packed(y, out_length)) if packs else (v, y)
    if line:
        plane.product(w, x, out, line)
    elif is_long:
        hierarchical.product(w, x, out, first)
    else:
        direct.product(w, x, out, first)
    if packs:
        layout.unpack(out, y)
    return result


@operator("toeplitz_triton_backward")
def _toeplitz_backward(
    g: Tensor, w: Tensor, v: Tensor, first: int, prefix: int, line: int, inside: bool
) -> tuple[Tensor, Tensor]:
    result = dv = _like(v, v.shape[2], inside)
    if not v.numel():
        return torch.zeros_like(w), dv
    from fastrpb.kernels import direct, hierarchical, layout, plane  # noqa: PLC0415

    w, g, v = w.contiguous(), _rows(g), _rows(v)
    if prefix:
        dv[:, :, :prefix] = 0
        g, v, dv = (x[:, :, prefix:] for x in (g, v, dv))
    packs, is_long = _packs(v), _is_long(v, w.shape[1])
    out = layout.empty_packed(dv, v.shape[2]) if packs else dv
    if packs:
        g, v = layout.pack(g), layout.pack(v)
    if line:
        plane.product(w, g, out, line, sign=-1)
        dw = plane.lags(g, v, line).flatten(1)
    elif is_long:
        dw = hierarchical.gradients(w, v, g, out, first)
    else:
        direct.product(w, g, out, first, sign=-1)
        dw = direct.lags(g, v, first, w.shape[1])
    if packs:
        layout.unpack(out, dv)
    return dw, result


def _attention_state(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, projection: Tensor | None
) -> list[Tensor]:
    """Room for what the gradients of linear attention need."""
    if causal:
        shapes = [q.shape[:3]]
    else:
        features = tile_width(k.shape[3]) if projection is None else favor_features(len(projection))
        rows = *k.shape[:2], features
        last = rows if projection is None else q.shape[:3]
        shapes = [(*rows, tile_width(v.shape[3])), rows, last]
    return [k.new_empty(x, dtype=torch.float32) for x in shapes]


@operator("linear_attention_triton")
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    plus: Tensor | None,
    projection: Tensor | None,
    kind: int,
    causal: bool,
    inside: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Attention + plus, and what its gradients need; `projection` is that of FAVOR+."""
    from fastrpb.kernels import causal as causal_attention  # noqa: PLC0415
    from fastrpb.kernels import favor, linear  # noqa: PLC0415

    y = _like(v, q.shape[2], inside)
    if not len(q):
        return y, _attention_state(q, k, v, causal, projection)
    mask = None if mask is None else mask.contiguous()
    plus = None if plus is None else _rows(plus)
    q, k, v = (_rows(x) for x in (q, k, v))
    if projection is not None:
        return y, favor.forward(q, k, v, mask, plus, y, projection.contiguous())
    form = causal_attention if causal else linear
    return y, form.forward(q, k, v, mask, plus, y, kind)


@operator("linear_attention_triton_backward")
def _attention_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    projection: Tensor | None,
    state: list[Tensor],
    kind: int,
    causal: bool,
    inside: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from fastrpb.kernels import causal_gradients, favor_gradients, linear  # noqa: PLC0415

    dq, dk, dv = (_like(x, x.shape[2], inside) for x in (q, k, v))
    if not len(q):
        return dq, dk, dv
    mask = None if mask is None else mask.contiguous()
    g, q, k, v = (_rows(x) for x in (g, q, k, v))
    if projection is not None:
        favor_gradients.backward(g, q, k, v, mask, state, dq, dk, dv, projection.contiguous())
    else:
        form = causal_gradients if causal else linear
        form.backward(g, q, k, v, mask, state, dq, dk, dv, kind)
    return dq, dk, dv


@operator("image_sums_triton")
def _image_sums(v: Tensor, height: int, width: int) -> Tensor:
    from fastrpb.kernels import image  # noqa: PLC0415

    return image.sums(_rows(v), height, width)


@operator("image_spread_triton")
def _image_spread(sums: Tensor, height: int, width: int, dtype: torch.dtype) -> Tensor:
    from fastrpb.kernels import image  # noqa: PLC0415

    _, batch, heads, _, dim = sums.shape
    y = sums.new_empty(batch, heads, height * width, dim, dtype=dtype)
    image.spread(sums.contiguous(), height, width, y)
    return y


@operator("coins_triton")
def _coins(seed: Tensor, size: list[int], dropped: int) -> Tensor:
    from fastrpb.kernels import coins  # noqa: PLC0415

    return coins.coins(seed, size, dropped)


@_toeplitz
def _(w, v, first, out_length, prefix, line, inside):
    return _like(v, prefix + out_length, inside)


@_toeplitz_backward
def _(g, w, v, first, prefix, line, inside):
    return w.new_empty(w.shape), _like(v, v.shape[2], inside)


@_attention
def _(q, k, v, mask, plus, projection, kind, causal, inside):
    return _like(v, q.shape[2], inside), _attention_state(q, k, v, causal, projection)


@_attention_backward
def _(g, q, k, v, mask, projection, state, kind, causal, inside):
    return tuple(_like(x, x.shape[2], inside) for x in (q, k, v))


@_image_sums
def _(v: Tensor, height: int, width: int) -> Tensor:
    batch, heads, _, dim = v.shape
    return v.new_empty(2, batch, heads, max(height, width), dim, dtype=torch.float32)


@_image_spread
def _(sums: Tensor, height: int, width: int, dtype: torch.dtype) -> Tensor:
    _, batch, heads, _, dim = sums.shape
    return sums.new_empty(batch, heads, height * width, dim, dtype=dtype)


@_coins
def _(seed: Tensor, size: list[int], dropped: int) -> Tensor:
    return seed.new_empty(size, dtype=torch.uint8)


class ImageSums(torch.autograd.Function):
    """Row and column sums of images, (2, batch, heads, max(H, W), dim) with zeros beyond H or W.

    `ImageSpread` is the adjoint: each is the other's gradient.
    """

    @staticmethod
    def forward(v, height, width):
        return torch.ops.fastrpb.image_sums_triton(v, height, width)

    @staticmethod
    def setup_context(ctx, inputs, output):
        v, *ctx.shape = inputs
        ctx.dtype = v.dtype

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return apply(ImageSpread, g, *ctx.shape, ctx.dtype), None, None

    @staticmethod
    def tangent(tangents, _, height, width):
        return apply(ImageSums, tangents[0], height, width)

    @staticmethod
    def vmap(info, in_dims, v, height, width):  # pyright: ignore[reportIncompatibleMethodOverride]
        sums = apply(ImageSums, into_axis(v, in_dims[0], info.batch_size, 0), height, width)
        return sums.unflatten(1, (info.batch_size, -1)), 1


class ImageSpread(torch.autograd.Function):
    """y[i, j] = rows[i] + columns[j]."""

    @staticmethod
    def forward(sums, height, width, dtype):
        return torch.ops.fastrpb.image_spread_triton(sums, height, width, dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, *ctx.shape, _ = inputs

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return apply(ImageSums, g, *ctx.shape), None, None, None

    @staticmethod
    def tangent(tangents, _, *rest):
        return apply(ImageSpread, tangents[0], *rest)

    @staticmethod
    def vmap(info, in_dims, sums, *rest):  # pyright: ignore[reportIncompatibleMethodOverride]
        count = info.batch_size
        sums = into_axis(sums, in_dims[0], count, 1)
        return apply(ImageSpread, sums, *rest).unflatten(0, (count, -1)), 0
