"""Models: pre-norm block, encoder, and the heads of the paper's tasks.

A `ModelConfig` names the parts; `_attend`, `_encoding` and `_bias` make objects of its words, once.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, repeat
from math import inf, pi
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastrpb import init
from fastrpb.attention import Phi
from fastrpb.bias import FastRPB
from fastrpb.bias2d import FastRPB2d, Kind
from fastrpb.checks import check_choice, check_mask, check_number, check_size, check_tensor
from fastrpb.features import DPFP, FavorPlus, elu1, relu, sikf
from fastrpb.files import read_tensors, write_tensors
from fastrpb.layers import LinearAttention, SelfAttention, SoftmaxAttention, Stream
from fastrpb.norms import BatchNorm, LayerNorm, PooledNorm
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

Attention = Literal["softmax", "linear"]
Features = Literal["sikf", "elu1", "relu", "dpfp", "favor"]
Position = Literal[
    "none", "fastrpb", "fastrpb2d", "sinespe", "convspe", "rope", "rpe", "t5", "alibi"
]
Absolute = Literal["none", "learned", "sinusoidal"]
Pooling = Literal["cls", "mean"]
Pairing = Literal["concat", "interact"]
Norm = Literal["layer", "batch"]
EmbeddingInit = Literal["normal", "smooth"]
BiasInit = Literal["local", "normal", "zero"]

ON_LOGITS = ("rpe", "t5", "alibi")
_ID_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SIZES = (
    *("vocab_size", "max_length", "num_classes", "dim", "layers", "heads", "qkv_dim", "mlp_dim"),
    *("filters", "nu", "num_features", "realizations", "sines", "kernel_size"),
)
_BY_DEFAULT = ("qkv_dim", "mlp_dim", "filters")  # None: another size decides


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides a model's shape. Impossible combinations raise.

    >>> ModelConfig(vocab_size=256, max_length=1024, attention="linear", position="rpe")
    Traceback (most recent call last):
    ...
    ValueError: position='rpe' adds to the logits of softmax attention, which linear attention \
never forms; use fastrpb, fastrpb2d, sinespe, convspe or rope, or attention='softmax'
    """

    vocab_size: int
    max_length: Annotated[int, "tokens, CLS not counted"]
    num_classes: int = 2
    dim: Annotated[int, "width of the residual stream"] = 256
    layers: Annotated[int, "blocks of attention and MLP"] = 4
    heads: Annotated[int, "of the attention"] = 8
    qkv_dim: Annotated[int | None, "default: dim"] = None
    mlp_dim: Annotated[int | None, "default: 4·dim"] = None
    attention: Annotated[Attention, "kind of attention"] = "linear"
    features: Annotated[Features, "of linear attention"] = "sikf"
    position: Annotated[Position, "relative positions of every layer"] = "fastrpb"
    absolute: Annotated[Absolute, "positions added to the embedding"] = "learned"
    pooling: Annotated[Pooling, "what is classified: a CLS token, or the mean"] = "cls"
    pairing: Annotated[
        Pairing, "of retrieval's two vectors: they alone, or also product and difference"
    ] = "concat"
    head_norm: Annotated[bool, "of classifiers: batch norm of what is pooled"] = False
    norm: Annotated[Norm, "before attention and MLP, over channels or over the batch"] = "layer"
    embedding_init: Annotated[
        EmbeddingInit, "first embeddings: independent, or alike for near ids as of grey levels"
    ] = "normal"
    causal: Annotated[bool, "each token sees the earlier ones alone"] = False
    image: Annotated[tuple[int, int] | None, "height and width, for fastrpb2d"] = None
    bias_kind: Annotated[Kind, "of fastrpb2d"] = "additive"
    bias_init: Annotated[BiasInit, "first weights of the bias"] = "local"
    bias_reach: Annotated[float, "longest scale of local init and envelope, in tokens"] = 16.0
    bias_envelope: Annotated[
        bool, "weights of the bias fade with distance, by the scales of local init"
    ] = False
    bias_dropout: Annotated[float, "of the weights of the bias"] = 0.0
    bias_threshold: Annotated[float, "soft threshold of the weights of the bias"] = 0.0
    filters: Annotated[int | None, "of the bias: a divisor of the width; default: heads"] = None
    nu: Annotated[int, "of dpfp"] = 1
    num_features: Annotated[int, "of favor"] = 128
    realizations: Annotated[int, "of sinespe and convspe"] = 64
    sines: Annotated[int, "of sinespe"] = 10
    kernel_size: Annotated[int, "of convspe"] = 128
    dropout: Annotated[float, "of embeddings, attention layers and MLPs"] = 0.1
    attention_dropout: Annotated[
        float, "of softmax attention; linear attention has no weights to drop"
    ] = 0.0
    checkpoint: Annotated[bool, "recompute blocks in the backward pass to save memory"] = False

    def __post_init__(self):
        for name, kind in (
            ("attention", Attention),
            ("features", Features),
            ("position", Position),
            ("absolute", Absolute),
            ("pooling", Pooling),
            ("pairing", Pairing),
            ("norm", Norm),
            ("embedding_init", EmbeddingInit),
            ("bias_kind", Kind),
            ("bias_init", BiasInit),
        ):
            check_choice(name, getattr(self, name), get_args(kind))
        for name in _SIZES:
            if name not in _BY_DEFAULT or getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        for name in ("causal", "checkpoint", "bias_envelope", "head_norm"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be true or false")
        for name in ("dropout", "attention_dropout", "bias_dropout"):
            check_number(name, getattr(self, name))
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be from 0 to below 1")
        if self.causal and self.pooling == "cls":
            raise ValueError(
                "a causal model's CLS token comes first and sees nothing; use pooling='mean'"
            )
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} must divide the width {self.width} of q, k and v")
        if self.width % self.num_filters:
            raise ValueError(f"filters={self.num_filters} must divide the width {self.width} of v")
        if self.attention == "linear" and self.position in ON_LOGITS:
            raise ValueError(
                f"position={self.position!r} adds to the logits of softmax attention, which linear "
                "attention never forms; use fastrpb, fastrpb2d, sinespe, convspe or rope, or "
                "attention='softmax'"
            )
        self._check_bias()

    def _check_bias(self) -> None:
        for name in ("bias_reach", "bias_threshold"):
            check_number(name, getattr(self, name))
        if not 1 <= self.bias_reach <= 1e9:
            raise ValueError(f"bias_reach={self.bias_reach} must be from 1 to 1e9 tokens")
        if not 0 <= self.bias_threshold < inf:
            raise ValueError(f"bias_threshold={self.bias_threshold} must be from 0 to below inf")
        if self.position == "fastrpb2d":
            self._check_image()

    def _check_image(self) -> None:
        if not isinstance(self.image, tuple) or len(self.image) != 2 or min(self.image) < 1:
            raise ValueError(
                f"position='fastrpb2d' needs image=(height, width), got {self.image!r}"
            )
        height, width = self.image
        if height * width != self.max_length:
            raise ValueError(
                f"an image of {height}×{width} has {height * width} pixels, "
                f"but max_length={self.max_length}"
            )
        if self.causal:
            raise ValueError("position='fastrpb2d' looks in all directions; it cannot be causal")

    @property
    def width(self) -> int:
        """Channels of q, k and v, all heads together."""
        return self.dim if self.qkv_dim is None else self.qkv_dim

    @property
    def num_filters(self) -> int:
        return self.heads if self.filters is None else self.filters

    @property
    def streams(self) -> bool:
        """Whether the model can go on token by token from a `Stream` a layer."""
        linear = self.causal and self.attention == "linear"
        return linear and self.position in ("none", "fastrpb")

    @property
    def embedding_std(self) -> float:
        """Of the first embeddings: as large as the positions that are added to them."""
        return 0.02 if self.absolute == "learned" else 1.0

    @property
    def mlp(self) -> int:
        return 4 * self.dim if self.mlp_dim is None else self.mlp_dim


class Block(nn.Module):
    """x + Attention(Norm(x)), then x + MLP(Norm(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        norm = {"layer": LayerNorm, "batch": BatchNorm}[config.norm]
        self.attention_norm = norm(config.dim)
        self.attention = SelfAttention(
            config.dim,
            config.width,
            config.heads,
            _attend(config),
            _encoding(config),
            _bias(config),
        )
        self.mlp_norm = norm(config.dim)
        self.mlp = nn.Sequential(
            nn.Linear(config.dim, config.mlp),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.mlp, config.dim),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, stream: Stream | None = None
    ) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x, mask), mask, stream))
        return x + self.dropout(self.mlp(self.mlp_norm(x, mask)))


class Encoder(nn.Module):
    """Tokens to vectors: embedding, absolute positions, CLS where pooling asks for it, blocks."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        reset_embedding(self.embedding, config)
        self.cls = nn.Parameter(torch.zeros(config.dim)) if _prefix(config) else None
        self.positions = _absolute(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        # By these two names Transformers switches it on and off.
        self.gradient_checkpointing = config.checkpoint
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        streams: Sequence[Stream] | None = None,
    ) -> Tensor:
        """(batch, length) ids, mask (batch, length) True = keep → (batch, CLS + length, dim).

        Args:
            tokens: ids, or their embeddings (batch, length, dim).
            mask: True = keep; None keeps all.
            positions: (batch, length) absolute positions where they are not 0, 1, 2, ...
            streams: one a layer, of a config that `streams`: the tokens go on from theirs.
        """
        seen = streams[0].tokens if streams else 0
        self._check(tokens, mask, seen)
        x = tokens if tokens.is_floating_point() else self.embedding(tokens.long())
        if self.positions is not None:
            if positions is None and seen:
                positions = torch.arange(seen, seen + x.shape[1], device=x.device)
            x = x + self.positions(x, positions)
        if self.cls is not None:
            x = torch.cat([self.cls.expand(x.shape[0], 1, -1), x], dim=1)
            mask = None if mask is None else nn.functional.pad(mask, (1, 0), value=True)
        x = self.dropout(x)
        for block, stream in zip(self.blocks, streams or repeat(None), strict=False):
            if self.gradient_checkpointing and self.training and stream is None:
                x = self._gradient_checkpointing_func(block, x, mask)
            else:
                x = block(x, mask, stream)
        return self.norm(x)

    def pool(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """One vector a sequence: CLS, or the mean over the kept tokens. (batch, dim)."""
        return self.pooled(self(tokens, mask), mask)

    def pooled(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`pool`, given what `forward` gave."""
        if self.cls is not None:
            return x[:, 0]
        if mask is None:
            return x.mean(1)
        kept = mask.unsqueeze(-1).to(x.dtype)
        return (x * kept).sum(1) / kept.sum(1).clamp(min=1)

    def _check(self, tokens: Tensor, mask: Tensor | None, seen: int) -> None:
        check_tensor("tokens", tokens)
        embedded = tokens.dim() == 3 and tokens.is_floating_point()
        ids = tokens.dim() == 2 and tokens.dtype in _ID_DTYPES
        if not (ids or embedded) or not tokens.shape[1]:
            raise ValueError(
                f"tokens must be (batch, length) ids, got {tokens.dtype} {tuple(tokens.shape)}"
            )
        on_cpu = tokens.device.type == "cpu" and not torch.compiler.is_compiling()
        if ids and on_cpu and tokens.numel():
            low, high = (int(x) for x in tokens.aminmax())
            if low < 0 or high >= self.embedding.num_embeddings:
                raise ValueError(
                    f"tokens are from {low} to {high}, "
                    f"beyond vocab_size={self.embedding.num_embeddings}"
                )
        if seen + tokens.shape[1] > self.config.max_length:
            raise ValueError(
                f"{seen + tokens.shape[1]} tokens exceed max_length={self.config.max_length}"
            )
        check_mask(mask, tuple(tokens.shape[:2]))


class Classifier(nn.Module):
    """Sequence → logits (batch, num_classes): pooled → mlp → ReLU → logits."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.head = head(config.dim, config.mlp, config.num_classes, norm=config.head_norm)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.encoder.pool(tokens, mask))


class PairClassifier(nn.Module):
    """Two sequences → logits: one encoder for both, concatenated → mlp → mlp/2 → logits (AAN).

    With pairing="interact" the head sees (a, b, a·b, a-b) instead of (a, b): whether two vectors
    are alike need not be learned from a concatenation.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        vectors = {"concat": 2, "interact": 4}[config.pairing]
        sizes = vectors * config.dim, config.mlp, config.mlp // 2, config.num_classes
        self.head = head(*sizes, norm=config.head_norm)

    def forward(
        self,
        first: Tensor,
        second: Tensor,
        first_mask: Tensor | None = None,
        second_mask: Tensor | None = None,
    ) -> Tensor:
        if first.shape[0] != second.shape[0]:
            raise ValueError(
                f"{first.shape[0]} first and {second.shape[0]} second sequences make no pairs"
            )
        a, b = self.encoder.pool(first, first_mask), self.encoder.pool(second, second_mask)
        pair = [a, b] if self.config.pairing == "concat" else [a, b, a * b, a - b]
        return self.head(torch.cat(pair, dim=-1))


class LanguageModel(nn.Module):
    """Sequence → logits of the next token (batch, length, vocab_size); a causal config."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if not config.causal:
            raise ValueError("a language model needs causal=True")
        self.config = config
        self.encoder = Encoder(config)
        shrink_tied(self.encoder)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return nn.functional.linear(self.encoder(tokens, mask), self.encoder.embedding.weight)


@torch.no_grad()
def reset_embedding(embedding: nn.Embedding, config: ModelConfig) -> None:
    """Draw embeddings anew: normal, or smooth, √2·cos(2π(f·i/(V-1) + p)) of the id i = 0..V-1.

    With f ~ N(0, 1) and p ~ U(0, 1) for each channel, near ids are alike, far ones are not.
    """
    weight = embedding.weight
    weight.normal_()
    if config.embedding_init == "smooth":
        ids = torch.linspace(0, 1, len(weight), dtype=weight.dtype, device=weight.device)
        phase = ids.unsqueeze(1) * weight[0] + torch.rand_like(weight[0])
        weight.copy_(2**0.5 * torch.cos(2 * pi * phase))
    weight *= config.embedding_std


@torch.no_grad()
def shrink_tied(encoder: Encoder) -> None:
    """First embeddings that give the logits of tokens too are small, whatever is added to them."""
    encoder.embedding.weight *= 0.02 / encoder.config.embedding_std


MODELS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "Classifier": Classifier,
    "PairClassifier": PairClassifier,
    "LanguageModel": LanguageModel,
}


def save_model(model: nn.Module, path: str | os.PathLike) -> None:
    """Write weights and config into one safetensors file, atomically."""
    if type(model).__name__ not in MODELS:
        raise TypeError(
            f"save one of {', '.join(MODELS)}, not {type(model).__name__}; "
            "unwrap a compiled or distributed model first"
        )
    meta = {"model": type(model).__name__, "config": json.dumps(asdict(model.config))}  # pyright: ignore[reportArgumentType]
    write_tensors(model.state_dict(), Path(path), meta)


def load_model(path: str | os.PathLike, device: str | torch.device = "cpu") -> nn.Module:
    """The model that `save_model` wrote, in its dtype and in eval mode.

    A damaged file, unknown or missing keys raise ValueError.
    """
    weights, meta = read_tensors(Path(path))
    if meta.get("model") not in MODELS:
        raise ValueError(f"{path} holds no model of fastrpb: its metadata are {meta}")
    try:
        config = json.loads(meta["config"])
        if config.get("image") is not None:
            config["image"] = tuple(config["image"])
        model = MODELS[meta["model"]](ModelConfig(**config))
        model.load_state_dict(weights, assign=True)  # assign: in the dtype of the file
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} does not fit its own config: {reason}") from None
    return model.to(device).eval()


def head(*sizes: int, norm: bool) -> nn.Sequential:
    """Linear layers of these sizes with ReLU between them; a batch norm before them if `norm`.

    A mean over a thousand tokens hardly differs from one sequence to the next: unnormed, most of
    the first steps go into weights that are large enough to see it.
    """
    layers: list[nn.Module] = [PooledNorm(sizes[0])] if norm else []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _prefix(config: ModelConfig) -> int:
    return 1 if config.pooling == "cls" else 0


def _attend(config: ModelConfig) -> nn.Module:
    if config.attention == "linear":
        return LinearAttention(config.causal, _phi(config))
    head_dim, length = config.width // config.heads, config.max_length + _prefix(config)
    logits = {
        "rpe": lambda: RelativeKeyQuery(head_dim, length),
        "t5": lambda: T5Bias(config.heads, causal=config.causal),
        "alibi": lambda: ALiBi(config.heads),
    }.get(config.position, lambda: None)()
    return SoftmaxAttention(config.causal, config.attention_dropout, logits)


def _phi(config: ModelConfig) -> Phi:
    if config.features == "favor":
        spe = config.position in ("sinespe", "convspe")
        dim = config.realizations if spe else config.width // config.heads
        # Features of their own for every layer, by torch's seed as all initial weights.
        seed = int(torch.randint(2**31, (), device="cpu"))
        return FavorPlus(dim, config.num_features, seed=seed)
    if config.features == "dpfp":
        return DPFP(config.nu)
    return {"sikf": sikf, "elu1": elu1, "relu": relu}[config.features]


def _encoding(config: ModelConfig) -> nn.Module | None:
    size = config.heads, config.width // config.heads
    if config.position == "sinespe":
        return SineSPE(*size, num_sines=config.sines, num_realizations=config.realizations)
    if config.position == "convspe":
        return ConvSPE(*size, kernel_size=config.kernel_size, num_realizations=config.realizations)
    return RoPE() if config.position == "rope" else None


def _bias(config: ModelConfig) -> FastRPB | FastRPB2d | None:
    if config.position not in ("fastrpb", "fastrpb2d"):
        return None
    scales = 1.0, config.bias_reach
    fill = {
        "local": init.local(*scales),
        "normal": init.normal(),
        "zero": init.zero,
    }[config.bias_init]
    filters = config.num_filters
    shared: dict[str, Any] = {
        "prefix": _prefix(config),
        "init": fill,
        "envelope": scales if config.bias_envelope else None,
        "dropout": config.bias_dropout,
        "threshold": config.bias_threshold,
    }
    if config.position == "fastrpb2d" and config.image is not None:
        return FastRPB2d(filters, *config.image, kind=config.bias_kind, **shared)
    return FastRPB(filters, config.max_length, causal=config.causal, **shared)


def _absolute(config: ModelConfig) -> nn.Module | None:
    if config.absolute == "none":
        return None
    kind = LearnedPositions if config.absolute == "learned" else SinusoidalPositions
    return kind(config.max_length, config.dim)
