"""Models: pre-norm block, encoder, and the heads of the paper's tasks.

A `ModelConfig` names the parts; `_attend`, `_encoding` and `_bias` make objects of its words, once.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise, repeat
from math import pi
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastrpb import init
from fastrpb.bias import FastRPB
from fastrpb.bias2d import FastRPB2d
from fastrpb.checks import check_mask, check_tensor, compute_dtype
from fastrpb.dropout import Dropout
from fastrpb.features import DPFP, FavorPlus, Phi, elu1, relu, sikf
from fastrpb.files import read_tensors, write_tensors
from fastrpb.layers import LinearAttention, SelfAttention, SoftmaxAttention, Stream
from fastrpb.model_config import ON_OUTPUT, ModelConfig
from fastrpb.modes import exporting
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

_ID_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


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
            nn.GELU() if config.attention_gelu else None,
        )
        self.mlp_norm = norm(config.dim)
        self.mlp = nn.Sequential(
            nn.Linear(config.dim, config.mlp),
            nn.GELU(),
            Dropout(config.dropout),
            nn.Linear(config.mlp, config.dim),
        )
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        stream: Stream | None = None,
        cls_alone: bool = False,
    ) -> Tensor:
        """(batch, length, dim), or of the first token alone, (batch, 1, dim), with `cls_alone`."""
        y = self.attention(self.attention_norm(x, mask), mask, stream, cls_alone=cls_alone)
        if cls_alone:
            x, mask = x[:, :1], None
        x = x + self.dropout(y)
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
        self.dropout = Dropout(config.dropout)
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
        cls_alone: bool = False,
    ) -> Tensor:
        """(batch, length) ids, mask (batch, length) True = keep → (batch, CLS + length, dim).

        Args:
            tokens: ids, or their embeddings (batch, length, dim).
            mask: True = keep; None keeps all.
            positions: (batch, length) absolute positions where they are not 0, 1, 2, ...
            streams: one a layer, of a config that `streams`: the tokens go on from theirs.
            cls_alone: the last block is for the CLS token alone; the result is (batch, 1, dim).
        """
        if streams is not None and len(streams) != len(self.blocks):
            raise ValueError(
                f"{len(streams)} streams are not one for each of {len(self.blocks)} layers"
            )
        seen = streams[0].tokens if streams else 0
        self._check(tokens, mask, seen)
        if cls_alone and not self._cls_can_be_alone:
            raise ValueError(
                "cls_alone=True needs pooling='cls' and norm='layer', got "
                f"{self.config.pooling!r} and {self.config.norm!r}"
            )
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
            alone = cls_alone and block is self.blocks[-1]
            if self.gradient_checkpointing and self.training and stream is None:
                x = self._gradient_checkpointing_func(block, x, mask, None, alone)
            else:
                x = block(x, mask, stream, alone)
        return self.norm(x)

    @property
    def _cls_can_be_alone(self) -> bool:
        return self.cls is not None and self.config.norm == "layer"

    def pool(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """One vector a sequence: CLS, or the mean over the kept tokens. (batch, dim).

        Nobody reads what the last block makes of other tokens than CLS, so it does not; but a
        batch norm in it needs them all.
        """
        return self.pooled(self(tokens, mask, cls_alone=self._cls_can_be_alone), mask)

    def pooled(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`pool`, given what `forward` gave."""
        if self.cls is not None:
            return x[:, 0]
        if mask is None:
            return x.mean(1)
        kept = mask.unsqueeze(-1)
        total = x.masked_fill(~kept, 0).sum(1, dtype=compute_dtype(x))  # half precisions overflow
        return (total / kept.sum(1).clamp(min=1)).to(x.dtype)

    def _check(self, tokens: Tensor, mask: Tensor | None, seen: int) -> None:
        check_tensor("tokens", tokens)
        embedded = tokens.dim() == 3 and tokens.is_floating_point()
        ids = tokens.dim() == 2 and tokens.dtype in _ID_DTYPES
        if not (ids or embedded) or not tokens.shape[1]:
            raise ValueError(
                f"tokens must be (batch, length) ids, got {tokens.dtype} {tuple(tokens.shape)}"
            )
        traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        if ids and tokens.device.type == "cpu" and tokens.numel() and not traced:
            low, high = (int(x) for x in tokens.aminmax())
            if low < 0 or high >= self.embedding.num_embeddings:
                last = self.embedding.num_embeddings - 1
                raise ValueError(f"tokens are from {low} to {high}; vocab_size allows 0 to {last}")
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
        a, b = self._pool((first, second), (first_mask, second_mask))
        pair = [a, b] if self.config.pairing == "concat" else [a, b, a * b, a - b]
        return self.head(torch.cat(pair, dim=-1))

    def _pool(
        self, tokens: tuple[Tensor, Tensor], masks: tuple[Tensor | None, Tensor | None]
    ) -> Sequence[Tensor]:
        """Of one shape, as one batch: half as many launches, of twice the work.

        Not where a batch norm in training takes the statistics of each.
        """
        apart = exporting() or (self.training and self.config.norm == "batch")
        given = [mask for mask in masks if mask is not None]
        if apart or len(given) == 1 or not _alike(tokens, given):
            return [self.encoder.pool(x, mask) for x, mask in zip(tokens, masks, strict=True)]
        return self.encoder.pool(torch.cat(tokens), torch.cat(given) if given else None).chunk(2)


def _alike(tokens: tuple[Tensor, Tensor], masks: list[Tensor]) -> bool:
    """Of one shape, which ids and embeddings never are."""
    first, second = tokens
    return first.shape == second.shape and all(mask.shape == first.shape[:2] for mask in masks)


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
        # Features of their own for every layer, by torch's seed as all initial weights.
        seed = int(torch.randint(2**31, (), device="cpu"))
        return FavorPlus(config.head_dim, config.num_features, seed=seed)
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
    if config.position not in ON_OUTPUT:
        return None
    scales = 1.0, config.bias_reach
    fill = {
        "local": init.local(*scales),
        "normal": init.normal(),
        "zero": init.zero,
    }[config.bias_init]
    filters = config.num_filters
    shared: dict[str, Any] = {
        "symmetric": config.bias_symmetric,
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
