"""FastRPB on models that exist: a zero-initialised bias for every self-attention layer.

Transformers' models fetch their attention function from an `AttentionInterface`. `attach` lays one
of its own over that of the model's file: it hands out the same functions, and adds the bias of the
layer that calls, if it has one. Masks, caches, SDPA and flash kernels stay as they are.
"""

import inspect
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from fastrpb import init
from fastrpb.bias import FastRPB
from fastrpb.bias2d import FastRPB2d, Kind
from fastrpb.checks import check_flag
from fastrpb.files import read_tensors, write_tensors
from fastrpb.hf.masks import kept_keys, keys_before, refuse_packed
from fastrpb.init import Init

TEXT = (
    *("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert"),
    *("gpt2", "gpt_neox", "llama", "qwen2", "qwen3"),
)
IMAGE_PREFIX = {
    "vit": 1,
    "deit": 2,
}  # tokens before the patches: CLS, and DeiT's distillation token
SUPPORTED = (*TEXT, *IMAGE_PREFIX)

FILE = "fastrpb.safetensors"
_NAME = "fastrpb"  # of the bias in its attention layer
_OVERLAID = "fastrpb_overlaid"
_ASKS = {"ALL_ATTENTION_FUNCTIONS", "get_interface"}  # names in a layer that uses the interface
_IMPLEMENTATIONS = (
    *("eager", "sdpa"),
    *("flash_attention_2", "flash_attention_3", "flash_attention_4"),
)


def attach(
    model: nn.Module,
    max_length: int | None = None,
    *,
    kind: Kind | None = None,
    init: Init = init.zero,
    freeze: bool = False,
) -> nn.Module:
    """Add Y + W·V to every self-attention layer of `model`, in place; zero at first.

    With `init.zero` the outputs are bit-identical until `w` is trained. Causal layers get causal
    biases. With grouped-query attention each query head has weights of its own, over the values of
    its group. The cost is that of `FastRPB`; a step of `generate()` with a cache takes O(length).
    PEFT freezes all that is in a model: attach after `get_peft_model`, or call `requires_grad_()`
    on each of `biases(model)`.

    Args:
        model: one of `fastrpb.hf.SUPPORTED`, also with PEFT's adapters in it.
        max_length: the longest sequence, padding and generated tokens included. Default: the
            `max_position_embeddings` of its config. Images: not given, their grid of patches is
            known; with `interpolate_pos_encoding`, a grid of as many patches in another shape is
            not told from it.
        kind: images only, "additive" (the default) or "full": see `FastRPB2d`.
        init: fills `w` (see `fastrpb.init`).
        freeze: train only the biases. By default no other parameter is touched.

    Returns:
        The model.

    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = BertModel(BertConfig(vocab_size=9, intermediate_size=16, **sizes)).eval()
    >>> tokens = torch.randint(9, (2, 30))
    >>> before = model(tokens).last_hidden_state
    >>> model = attach(model, max_length=64)
    >>> torch.equal(model(tokens).last_hidden_state, before)
    True
    """
    check_flag("freeze", freeze)
    base = _pretrained(model)
    if biases(base):
        raise ValueError("the model has biases already; detach(model) them first")
    layers = _layers(base)
    new = [_bias(base.config, layer, max_length, kind, init) for layer in layers]
    for layer, bias in zip(layers, new, strict=True):
        setattr(layer, _OVERLAID, _Overlaid(type(layer)))
        layer.add_module(_NAME, bias.to(_device(layer), _dtype(layer)))
    return _freeze(model) if freeze else model


def detach(model: nn.Module) -> nn.Module:
    """Take the biases off again, in place: the model is what it was before `attach`.

    What `freeze=True` froze stays frozen.
    """
    for layer in _biased(model):
        delattr(layer, _NAME)
        delattr(layer, _OVERLAID)
    return model


def biases(model: nn.Module) -> list[FastRPB | FastRPB2d]:
    """The attached biases, one a layer in the model's order."""
    return [getattr(layer, _NAME) for layer in _biased(model)]


def save(model: nn.Module, folder: str | os.PathLike) -> Path:
    """Write the biases, and nothing of the model, into FOLDER/fastrpb.safetensors, atomically.

    About heads × (2·max_length - 1) numbers a layer; half of that where it is causal.
    `save_pretrained` and checkpoints of a Trainer hold them too, but `from_pretrained` knows no
    biases: it leaves them out.

    >>> from transformers import GPT2Config, GPT2Model
    >>> config = GPT2Config(vocab_size=9, n_embd=16, n_layer=2, n_head=2)
    >>> model, folder = attach(GPT2Model(config), max_length=64), getfixture("tmp_path")
    >>> save(model, folder).name
    'fastrpb.safetensors'
    >>> other = load(GPT2Model(config), folder)
    >>> [tuple(bias.w.shape) for bias in biases(other)]
    [(2, 64), (2, 64)]
    >>> biases(detach(other))
    []
    """
    attached = biases(model)
    if not attached:
        raise ValueError("the model has no biases to save; attach(model, ...) them first")
    first = attached[0]
    settings: dict = {"model_type": _pretrained(model).config.model_type}
    if isinstance(first, FastRPB2d):
        settings["kind"] = first.kind
    else:
        settings["max_length"] = first.max_length
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {f"{i}.w": _whole(bias.w.detach()) for i, bias in enumerate(attached)}
    write_tensors(weights, path, {"fastrpb": json.dumps(settings)})
    return path


def _whole(w: Tensor) -> Tensor:
    """All of a weight: FSDP parts it, and what accelerate has offloaded is elsewhere."""
    if w.is_meta:
        raise ValueError("the biases are offloaded; attach them after that, and they can be saved")
    return w.full_tensor() if hasattr(w, "full_tensor") else w  # pyright: ignore[reportAttributeAccessIssue]


def load(model: nn.Module, folder: str | os.PathLike, *, freeze: bool = False) -> nn.Module:
    """Attach the biases that `save` wrote to a model of the same type and shape, in place."""
    path = Path(folder)
    path = path / FILE if path.is_dir() else path
    weights, meta = read_tensors(path)
    try:
        settings = json.loads(meta["fastrpb"])
        model_type = settings.pop("model_type")
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} holds no biases of fastrpb: its metadata are {meta}") from None
    here = _pretrained(model).config.model_type
    if here != model_type:
        raise ValueError(f"{path} holds biases of a {model_type}, this model is a {here}")
    attach(model, **settings)
    mine = {f"{i}.w": bias.w for i, bias in enumerate(biases(model))}
    saved, here = ({key: tuple(w.shape) for key, w in x.items()} for x in (weights, mine))
    if saved != here:
        detach(model)
        raise ValueError(
            f"{path} holds biases of a {model_type} of {_shapes(saved)}; this model has "
            f"{_shapes(here)}"
        )
    if any(w.is_meta for w in mine.values()):
        detach(model)
        raise ValueError("the model is on the meta device; give it its weights, then load these")
    with torch.no_grad():
        for key, w in mine.items():
            w.copy_(weights[key])
    return _freeze(model) if freeze else model


def _freeze(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    for bias in biases(model):
        bias.requires_grad_()
    return model


def _shapes(shapes: dict[str, tuple[int, ...]]) -> str:
    sizes = " or ".join(dict.fromkeys("×".join(map(str, shape)) for shape in shapes.values()))
    return f"{len(shapes)} layers with w of {sizes}"


def _pretrained(model: nn.Module) -> PreTrainedModel:
    """The Transformers model itself, also from within a PEFT model."""
    outermost: list[PreTrainedModel] = []
    for module in _modules(model):
        if isinstance(module, PreTrainedModel) and not any(
            module in other.modules() for other in outermost
        ):
            outermost.append(module)
    if not outermost:
        raise TypeError(
            f"{type(model).__name__} holds no Transformers model; in your own model, add "
            "FastRPB(...)(v) to the output of its attention"
        )
    base, *others = outermost
    if others:
        raise ValueError(
            f"{type(model).__name__} holds {len(outermost)} Transformers models; give them one by "
            "one"
        )
    if base.config.model_type not in SUPPORTED:
        raise ValueError(
            f"{base.config.model_type!r} models take no biases; supported are "
            f"{', '.join(SUPPORTED)}"
        )
    return base


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"biases are for Transformers models, not for {type(model).__name__}")
    return model.modules()


def _layers(base: PreTrainedModel) -> list[nn.Module]:
    """The self-attention layers: what asks the interface for a function, but cross-attention."""
    layers = [
        module
        for module in base.modules()
        if _asking(type(module)) is not None
        and "Cross" not in type(module).__name__
        and not getattr(module, "is_cross_attention", False)
    ]
    if not layers:
        raise ValueError(
            f"{type(base).__name__} has no attention layers that use Transformers' attention "
            f"interface in transformers {transformers.__version__}; attach needs 5.1 or later"
        )
    return layers


def _biased(model: nn.Module) -> list[nn.Module]:
    return [module for module in _modules(model) if _NAME in module._modules]


def _asking(layer: type[nn.Module]) -> Callable | None:
    """The forward that asks the interface for a function, the layer's own or one that it calls."""
    for parent in layer.__mro__:
        forward = vars(parent).get("forward")
        code = getattr(inspect.unwrap(forward), "__code__", None) if forward else None
        names = set(code.co_names) if code else set()
        if names >= _ASKS:
            return inspect.unwrap(forward)  # pyright: ignore[reportArgumentType]
        if forward and "super" not in names:
            return None
    return None


def _device(layer: nn.Module) -> torch.device:
    """Where the layer computes; what accelerate has offloaded is on no device meanwhile."""
    device = next((p.device for p in layer.parameters()), torch.device("cpu"))
    hooks = (getattr(module, "_hf_hook", None) for module in layer.modules())
    placed = (getattr(hook, "execution_device", None) for hook in hooks)
    return device if device.type != "meta" else next((d for d in placed if d is not None), device)


def _dtype(layer: nn.Module) -> torch.dtype:
    """That of the layer; a quantised one has none."""
    return next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)


def _bias(
    config, layer: nn.Module, max_length: int | None, kind: Kind | None, init: Init
) -> FastRPB | FastRPB2d:
    heads = config.num_attention_heads
    if config.model_type in IMAGE_PREFIX:
        if max_length is not None:
            raise ValueError(
                f"the patches of a {config.model_type} image are known; leave max_length out"
            )
        height, width = (
            image // patch
            for image, patch in zip(_pair(config.image_size), _pair(config.patch_size), strict=True)
        )
        prefix = IMAGE_PREFIX[config.model_type]
        return FastRPB2d(heads, height, width, kind=kind or "additive", prefix=prefix, init=init)
    if kind is not None:
        raise ValueError(f"kind={kind!r} is for images; {config.model_type} reads sequences")
    if getattr(config, "reorder_and_upcast_attn", False):
        raise ValueError("reorder_and_upcast_attn=True goes around the attention interface")
    length = config.max_position_embeddings if max_length is None else max_length
    window = getattr(layer, "sliding_window", None)
    if window is not None and isinstance(length, int) and window < length:
        raise ValueError(
            f"the sliding window of this model, {window} tokens, is shorter than "
            f"max_length={length}; use max_length={window} at most, or a config without windows"
        )
    causal = layer.is_causal and getattr(config, "is_causal", True)
    return FastRPB(heads, length, causal=bool(causal), init=init)


def _pair(size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


class _Overlay(AttentionInterface):
    """The attention functions of a model's file; the bias of the layer that calls is added."""

    def __init__(self, below: AttentionInterface):
        super().__init__()
        self.below = below

    def get_interface(self, attn_implementation: str, default: Callable) -> Callable:
        function = self.below.get_interface(attn_implementation, default)
        return partial(_attention, attn_implementation, function)


class _Overlaid:
    """An `_Overlay` lies over the interface in the file of these layers, once.

    Every bias holds one: where a model is unpickled, in another process, it is laid again.
    """

    def __init__(self, layer: type[nn.Module]):
        self.layer = layer
        names = _asking(layer).__globals__  # pyright: ignore[reportOptionalMemberAccess]
        if not isinstance(names["ALL_ATTENTION_FUNCTIONS"], _Overlay):
            names["ALL_ATTENTION_FUNCTIONS"] = _Overlay(names["ALL_ATTENTION_FUNCTIONS"])

    def __reduce__(self):
        return _Overlaid, (self.layer,)


def _attention(
    implementation: str,
    function: Callable,
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings,
) -> tuple[Tensor, Tensor | None]:
    """What the interface asks for: (batch, length, heads, dim), and the weights or None."""
    bias = layer._modules.get(_NAME)
    if bias is None:
        return function(layer, query, key, value, attention_mask, **settings)
    if not isinstance(bias, FastRPB | FastRPB2d):
        raise TypeError(
            f"a {type(bias).__name__} stands in the place of a bias; leave {_NAME!r} out of what "
            "is wrapped (PEFT's modules_to_save and target_parameters, FSDP by size): after "
            "get_peft_model, requires_grad_() lets biases train, and save() writes them"
        )
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"biases do not support attn_implementation={implementation!r}; use one of "
            f"{', '.join(_IMPLEMENTATIONS)}"
        )
    refuse_packed(implementation, query, attention_mask, settings)
    output, weights = function(layer, query, key, value, attention_mask, **settings)
    groups = query.shape[1] // value.shape[1]
    if groups > 1:  # even a repetition by one would be a copy
        value = value.repeat_interleave(groups, dim=1)
    no_mask = implementation == "sdpa" and attention_mask is None
    if _causal(bias) and no_mask and query.shape[2] > 1:
        value = value[:, :, : query.shape[2]]  # the slots of a static cache that are empty yet
    y = _term(bias, value, query.shape[2], attention_mask)
    return output + y.transpose(1, 2).to(output.dtype), weights


def _term(
    bias: FastRPB | FastRPB2d, v: Tensor, queries: int, attention_mask: Tensor | None
) -> Tensor:
    """W·v for the last `queries` of the tokens so far."""
    n = v.shape[-2]
    if isinstance(bias, FastRPB) and n > bias.max_length:
        raise ValueError(
            f"{n} tokens, those of the cache and its empty places included, exceed the "
            f"max_length={bias.max_length} of the biases; attach them with a larger one"
        )
    keep = None
    if attention_mask is not None:
        keep = kept_keys(attention_mask, _causal(bias)).expand(v.shape[0], n)
    if queries == n or isinstance(bias, FastRPB2d):
        return bias(v, keep)
    before = n - queries
    if _causal(bias) and attention_mask is not None and attention_mask.dim() == 4:
        before = keys_before(attention_mask)
    return bias(v, keep, rows=(before, queries))


def _causal(bias: FastRPB | FastRPB2d) -> bool:
    return isinstance(bias, FastRPB) and bias.causal
