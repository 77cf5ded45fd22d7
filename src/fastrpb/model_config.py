"""What a model is made of, in words and sizes: `ModelConfig`."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from fastrpb.bias2d import Kind
from fastrpb.checks import check_choice, check_flag, check_number, check_size

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
ON_OUTPUT = ("fastrpb", "fastrpb2d")
_SIZES = (
    *("vocab_size", "max_length", "num_classes", "dim", "layers", "heads", "qkv_dim", "mlp_dim"),
    *("filters", "nu", "num_features", "realizations", "sines", "kernel_size"),
)
_NUMBERS = ("bias_reach", "bias_threshold", "bias_dropout", "dropout", "attention_dropout")
_FLAGS = ("head_norm", "causal", "bias_envelope", "bias_symmetric", "attention_gelu", "checkpoint")
_MOST_LAYERS = 10_000  # more would be built for minutes before memory runs out
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
    heads: Annotated[int, "attention heads"] = 8
    qkv_dim: Annotated[int | None, "width of q, k and v; default: dim"] = None
    mlp_dim: Annotated[int | None, "hidden channels of the MLP; default: 4·dim"] = None
    attention: Annotated[Attention, "kind of attention"] = "linear"
    features: Annotated[Features, "feature map of linear attention"] = "sikf"
    position: Annotated[Position, "relative positions of every layer"] = "fastrpb"
    absolute: Annotated[Absolute, "positions added to the embedding"] = "learned"
    pooling: Annotated[Pooling, "what is classified: a CLS token, or the mean"] = "cls"
    pairing: Annotated[
        Pairing, "retrieval: the head sees two vectors, or also their product and difference"
    ] = "concat"
    head_norm: Annotated[bool, "batch norm between pooling and the head"] = False
    norm: Annotated[Norm, "norm before attention and MLP, over the channels or the batch"] = "layer"
    embedding_init: Annotated[
        EmbeddingInit, "first embeddings: independent, or alike for near ids, such as grey levels"
    ] = "normal"
    causal: Annotated[bool, "each token sees only itself and earlier ones"] = False
    image: Annotated[tuple[int, int] | None, "height and width, for fastrpb2d"] = None
    bias_kind: Annotated[Kind, "fastrpb2d: w_dy + w_dx, or one for each (dy, dx)"] = "additive"
    bias_init: Annotated[BiasInit, "first weights of the bias"] = "local"
    bias_reach: Annotated[float, "longest scale of local init and envelope, in tokens"] = 16.0
    bias_envelope: Annotated[
        bool, "multiply weights by exp(-distance/scale), the scales those of the local init"
    ] = False
    bias_symmetric: Annotated[
        bool, "one weight for both directions; of fastrpb2d, for left and right"
    ] = False
    bias_dropout: Annotated[float, "dropout of the weights of the bias"] = 0.0
    bias_threshold: Annotated[float, "soft threshold of the weights of the bias"] = 0.0
    filters: Annotated[
        int | None, "sets of weights of the bias, a divisor of the width; default: heads"
    ] = None
    nu: Annotated[int, "rolls of dpfp"] = 1
    num_features: Annotated[int, "random features of favor"] = 128
    realizations: Annotated[int, "noise realisations of sinespe and convspe"] = 64
    sines: Annotated[int, "sines of sinespe, for each channel"] = 10
    kernel_size: Annotated[int, "length of the kernels of convspe"] = 128
    dropout: Annotated[float, "dropout of embeddings, attention layers and MLPs"] = 0.1
    attention_dropout: Annotated[
        float, "dropout of the weights of softmax attention; linear attention has none"
    ] = 0.0
    attention_gelu: Annotated[bool, "GELU of attention + bias, before the projection"] = False
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
        if self.attention == "softmax":  # has no features; of equal models the configs are equal
            object.__setattr__(self, "features", ModelConfig.features)
        for name in _SIZES:
            if name not in _BY_DEFAULT or getattr(self, name) is not None:
                check_size(name, getattr(self, name))
                if getattr(self, name) >= 2**31:
                    raise ValueError(f"{name}={getattr(self, name)} must be below 2³¹")
        if self.layers > _MOST_LAYERS:
            raise ValueError(f"layers={self.layers} must be at most {_MOST_LAYERS}")
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        self._check_numbers()
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
        if self.features == "dpfp" and self.attention == "linear" and self.nu >= 2 * self.head_dim:
            raise ValueError(
                f"nu={self.nu} must be below 2·{self.head_dim}, the channels of a head"
            )
        self._check_bias()

    def _check_numbers(self) -> None:
        for name in ("dropout", "attention_dropout", "bias_dropout"):
            check_number(name, getattr(self, name))
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be from 0 to below 1")
        for name in ("bias_reach", "bias_threshold"):
            check_number(name, getattr(self, name))
        if not 1 <= self.bias_reach <= 1e9:
            raise ValueError(f"bias_reach={self.bias_reach} must be from 1 to 1e9 tokens")
        if not 0 <= self.bias_threshold <= 1e9:
            raise ValueError(f"bias_threshold={self.bias_threshold} must be from 0 to 1e9")
        for name in _NUMBERS:  # 1 and 1.0 are equal, but not as JSON
            object.__setattr__(self, name, float(getattr(self, name)))

    def _check_bias(self) -> None:
        if self.position == "fastrpb2d":
            self._check_image()
        if self.bias_symmetric and self.causal and self.position == "fastrpb":
            raise ValueError(
                "a causal bias has no future to be symmetric with; choose one of causal and "
                "bias_symmetric"
            )

    def _check_image(self) -> None:
        image = self.image
        sizes = image if isinstance(image, tuple) else ()
        if len(sizes) != 2 or not all(isinstance(x, int) and x > 0 for x in sizes):
            raise ValueError(
                f"position='fastrpb2d' is for images: it needs image=(height, width), got {image!r}"
            )
        height, width = sizes
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
    def head_dim(self) -> int:
        """Channels of a query and a key as features see them: SPE gives others."""
        spe = self.position in ("sinespe", "convspe")
        return self.realizations if spe else self.width // self.heads

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
