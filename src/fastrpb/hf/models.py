"""The models of `fastrpb.model` as Transformers' own: configs, Auto classes, caches, losses."""

# Transformers annotates tensors by the old names of their dtypes, and `self` by protocols.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleMethodOverride=false

from dataclasses import fields
from difflib import get_close_matches

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    Cache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndCrossAttentions,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from fastrpb.layers import Stream
from fastrpb.model import Encoder, head, reset_embedding, shrink_tied
from fastrpb.model_config import ModelConfig

# Where Transformers has a name of its own.
_NAMES = {
    "max_length": "max_position_embeddings",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp_dim": "intermediate_size",
}
# Words that mean something else to it, or are no setting of a model.
_ELSEWHERE = {
    "max_length": "max_position_embeddings=",
    "num_classes": "num_labels=",
    "checkpoint": "model.gradient_checkpointing_enable()",
    "pairing": "fastrpb.PairClassifier",
}
_FIELDS = {
    _NAMES.get(field.name, field.name): field
    for field in fields(ModelConfig)
    if field.name not in ("num_classes", "checkpoint", "pairing")
}


class FastRPBConfig(PreTrainedConfig):
    """A `fastrpb.ModelConfig` for Transformers, sizes under its names; the same combinations raise.

    Args:
        vocab_size: of the tokens. Default: 256, bytes.
        max_position_embeddings: the longest sequence, `max_length` of `ModelConfig`.
        settings: `hidden_size`, `num_hidden_layers`, `num_attention_heads`, `intermediate_size`,
            the other settings of `ModelConfig` by their names, and those of any config.

    >>> config = FastRPBConfig(hidden_size=64, num_hidden_layers=2, num_labels=3, features="elu1")
    >>> config.model_config.dim
    64
    """

    model_type = "fastrpb"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012  (Transformers' own annotation)
        ours: theirs for ours, theirs in _NAMES.items() if ours not in _ELSEWHERE
    }

    def __init__(self, vocab_size: int = 256, max_position_embeddings: int = 512, **settings):
        for ours in _ELSEWHERE.keys() & settings:
            raise ValueError(f"{ours} is no setting of FastRPBConfig; use {_ELSEWHERE[ours]}")
        settings |= {"vocab_size": vocab_size, "max_position_embeddings": max_position_embeddings}
        for ours, theirs in self.attribute_map.items():
            if ours in settings:
                settings[theirs] = settings.pop(ours)
        settings.setdefault("pooling", "mean" if settings.get("causal") else "cls")
        for name, field in _FIELDS.items():
            setattr(self, name, settings.pop(name, field.default))
        settings.setdefault("tie_word_embeddings", True)
        if "transformers_version" not in settings:  # else it was saved, with whatever it held
            self._refuse_misspelt(settings)
        super().__init__(**settings)
        self.model_config  # noqa: B018  (raises here for what cannot be)

    def _refuse_misspelt(self, settings: dict) -> None:
        """Transformers keeps what it does not know, and the default would count."""
        known = [*_FIELDS, *self.attribute_map, *_ELSEWHERE]
        for name in settings:
            near = get_close_matches(name, known, n=1, cutoff=0.8)
            if near and not hasattr(PreTrainedConfig(), name):
                meant = _ELSEWHERE.get(near[0], near[0])
                raise ValueError(f"FastRPBConfig has no setting {name!r}; did you mean {meant}?")

    @property
    def model_config(self) -> ModelConfig:
        settings = {field.name: getattr(self, name) for name, field in _FIELDS.items()}
        if settings["image"] is not None:
            settings["image"] = tuple(settings["image"])
        return ModelConfig(**settings, num_classes=self.num_labels or 2)


class FastRPBCache(Cache):
    """A `Stream` a layer: what `generate()` remembers, O(1) a layer but for the bias's history.

    It is changed in place, and cannot go back to fewer tokens.

    >>> config = FastRPBConfig(hidden_size=32, num_hidden_layers=1, causal=True)
    >>> model, tokens = FastRPBForCausalLM(config).eval(), torch.randint(256, (2, 10))
    >>> cache = model(tokens[:, :7], use_cache=True).past_key_values
    >>> later = model(tokens[:, 7:], past_key_values=cache).logits
    >>> torch.allclose(later, model(tokens).logits[:, 7:], atol=1e-4), cache.get_seq_length()
    (True, 10)
    """

    def __init__(self, layers: int):
        super().__init__(layers=[])
        self.streams = [Stream() for _ in range(layers)]

    def __len__(self) -> int:
        return len(self.streams)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.streams[layer_idx].tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        for stream in self.streams:
            stream.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        first = self.streams[0].attention
        if first is not None:
            streams = torch.arange(len(first.sums), device=first.sums.device)
            self.batch_select_indices(streams.repeat_interleave(repeats))

    def reset(self) -> None:
        self.streams = [Stream() for _ in self.streams]

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("a stream cannot forget its last tokens; generate without an assistant")


class FastRPBPreTrainedModel(PreTrainedModel):
    """What the models share: their config, and how weights begin that no file holds."""

    config_class = FastRPBConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "streams", "stream"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if all(getattr(x, "_is_hf_initialized", False) for x in tensors):
            return
        if isinstance(module, nn.Embedding):
            reset_embedding(module, self.config.model_config)
        elif isinstance(module, Encoder):
            nn.init.zeros_(module.cls)
        else:
            module.reset_parameters()  # pyright: ignore[reportCallIssue]


class FastRPBModel(FastRPBPreTrainedModel):
    """Tokens to vectors, and one for the whole: `fastrpb.model.Encoder`.

    The mask (batch, length) is 1 for tokens to keep; with padding on the left, positions are
    counted from the first token kept; but RoPE and SPE, and softmax attention's distances to a CLS
    token, count the padding too. A causal linear model with FastRPB or without positions has a
    cache; others are computed anew for every token that is generated.

    >>> config = FastRPBConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    >>> FastRPBModel(config)(torch.randint(256, (2, 10))).last_hidden_state.shape
    torch.Size([2, 10, 32])
    """

    def __init__(self, config: FastRPBConfig):
        super().__init__(config)
        self.encoder = Encoder(config.model_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embedding = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: FastRPBCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        tokens = inputs_embeds if input_ids is None else input_ids
        if tokens is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("pass one of input_ids and inputs_embeds")
        cache = self._cache(past_key_values, use_cache)
        seen = cache.get_seq_length() if cache is not None else 0
        mask, positions = _mask_and_positions(attention_mask, seen, tokens.shape[1])
        hidden: list[Tensor] = []
        hooks = [
            block.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
            for block in (self.encoder.blocks if self._wants(output_hidden_states) else ())
        ]
        try:
            x = self.encoder(
                tokens,
                mask,
                positions=positions if position_ids is None else position_ids,
                streams=None if cache is None else cache.streams,
            )
        finally:
            for hook in hooks:
                hook.remove()
        prefix = 0 if self.encoder.cls is None else 1
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=x[:, prefix:],
            pooler_output=self.encoder.pooled(x, mask),
            past_key_values=cache,
            hidden_states=tuple(h[:, prefix:] for h in (*hidden, x)) if hooks else None,
        )

    def _wants(self, output_hidden_states: bool | None) -> bool | None:
        default = self.config.output_hidden_states
        return default if output_hidden_states is None else output_hidden_states

    def _cache(self, cache: FastRPBCache | None, wanted: bool | None) -> FastRPBCache | None:
        if cache is not None and not isinstance(cache, FastRPBCache):
            raise TypeError(f"past_key_values must be a FastRPBCache, got {type(cache).__name__}")
        config = self.config.model_config
        if wanted and not config.streams:
            raise ValueError(
                f"only causal linear attention with FastRPB or without positions has a cache, not "
                f"{config.attention} with position={config.position!r}, causal={config.causal}; "
                "pass use_cache=False"
            )
        return FastRPBCache(config.layers) if cache is None and wanted else cache


def _mask_and_positions(
    attention_mask: Tensor | None, seen: int, length: int
) -> tuple[Tensor | None, Tensor | None]:
    """Of a mask over all tokens so far: that of the last `length`, and where they stand."""
    if attention_mask is None:
        return None, None
    if attention_mask.dim() != 2 or attention_mask.shape[1] != seen + length:
        raise ValueError(
            f"attention_mask must be (batch, length) with length {seen + length}, of all tokens so "
            f"far; got {tuple(attention_mask.shape)}"
        )
    keep = attention_mask != 0
    return keep[:, seen:], (keep.cumsum(-1) - 1).clamp(min=0)[:, seen:]


class FastRPBForSequenceClassification(FastRPBPreTrainedModel):
    """Logits of the classes, (batch, num_labels): pooled → mlp → ReLU → logits.

    >>> config = FastRPBConfig(hidden_size=32, num_hidden_layers=1, num_labels=3)
    >>> model = FastRPBForSequenceClassification(config)
    >>> output = model(torch.randint(256, (2, 10)), labels=torch.tensor([0, 2]))
    >>> output.logits.shape, output.loss.dim()
    (torch.Size([2, 3]), 0)
    """

    def __init__(self, config: FastRPBConfig):
        super().__init__(config)
        settings = config.model_config
        self.model = FastRPBModel(config)
        sizes = settings.dim, settings.mlp, settings.num_classes
        self.head = head(*sizes, norm=settings.head_norm)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        output = self.model(input_ids, attention_mask, **kwargs)
        logits = self.head(output.pooler_output)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=output.hidden_states,
        )


class _FastRPBForTokens(FastRPBPreTrainedModel):
    """Logits of tokens, by the weights of the embedding."""

    _tied_weights_keys = {"lm_head.weight": "model.encoder.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: FastRPBConfig, causal: bool):
        super().__init__(config)
        if config.causal != causal:
            way = "looks back only" if causal else "looks both ways"
            raise ValueError(f"{type(self).__name__} {way}; it needs causal={causal}")
        self.model = FastRPBModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        shrink_tied(self.model.encoder)

    def _loss(
        self, logits: Tensor, labels: Tensor | None, num_items_in_batch: Tensor | None
    ) -> Tensor | None:
        if labels is None:
            return None
        return self.loss_function(
            logits,
            labels,
            vocab_size=self.config.vocab_size,
            num_items_in_batch=num_items_in_batch,
        )


class FastRPBForMaskedLM(_FastRPBForTokens):
    """Logits of every token, (batch, length, vocab_size), by the weights of the embedding.

    >>> model = FastRPBForMaskedLM(FastRPBConfig(hidden_size=32, num_hidden_layers=1))
    >>> model(torch.randint(256, (2, 10))).logits.shape
    torch.Size([2, 10, 256])
    """

    def __init__(self, config: FastRPBConfig):
        super().__init__(config, causal=False)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
        **kwargs,
    ) -> MaskedLMOutput:
        output = self.model(input_ids, attention_mask, **kwargs)
        logits = self.lm_head(output.last_hidden_state)
        loss = self._loss(logits, labels, num_items_in_batch)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=output.hidden_states)


class FastRPBForCausalLM(_FastRPBForTokens, GenerationMixin):
    """Logits of the next token, (batch, length, vocab_size); a causal config.

    `generate()` takes the prompt at once, then O(log² N) time a token for a bias of N, from the
    streaming state.

    >>> model = FastRPBForCausalLM(
    ...     FastRPBConfig(hidden_size=32, num_hidden_layers=1, causal=True)
    ... )
    >>> model.generate(torch.randint(256, (2, 10)), max_new_tokens=5, do_sample=False).shape
    torch.Size([2, 15])
    """

    def __init__(self, config: FastRPBConfig):
        super().__init__(config, causal=True)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        output = self.model(input_ids, attention_mask, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        return CausalLMOutputWithPast(
            loss=self._loss(logits, labels, num_items_in_batch),
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
        )

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the model makes its own

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict, *args
    ) -> None:
        config = self.config.model_config
        if not config.streams:
            generation_config.use_cache = model_kwargs["use_cache"] = False
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = FastRPBCache(config.layers)


AutoConfig.register(FastRPBConfig.model_type, FastRPBConfig)
AutoModel.register(FastRPBConfig, FastRPBModel)
AutoModelForSequenceClassification.register(FastRPBConfig, FastRPBForSequenceClassification)
AutoModelForMaskedLM.register(FastRPBConfig, FastRPBForMaskedLM)
AutoModelForCausalLM.register(FastRPBConfig, FastRPBForCausalLM)
