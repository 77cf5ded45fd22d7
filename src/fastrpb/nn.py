"""`MultiheadAttention`: PyTorch's own, with linear attention and FastRPB to choose."""

import torch
from torch import Tensor, nn

from fastrpb.attention import linear_attention, linear_attention_weights
from fastrpb.bias import FastRPB
from fastrpb.bias2d import FastRPB2d
from fastrpb.features import Phi
from fastrpb.layers import merge_heads, split_heads


class MultiheadAttention(nn.MultiheadAttention):
    """Y = (Attention(Q, K, V) + W·V)·O: `torch.nn.MultiheadAttention` with two more choices.

    All its arguments, shapes and masks mean what they mean there (key_padding_mask and attn_mask:
    True = ignore), and its state dicts load, strictly too: `rpb` and `features` then keep the
    weights that they have. Without `features` and `rpb` it is the original.
    `torch.compile(fullgraph=True)` needs bool padding and is_causal=True beside a causal attn_mask:
    what stands in other masks is looked at.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first,
            device, dtype: as in `torch.nn.MultiheadAttention`; `bias` is that of its projections.
        features: a feature map such as `fastrpb.sikf`, for linear attention: O(N) with
            need_weights=False. It has no weights to drop, and of attn_masks knows the causal one,
            which is_causal=True may stand for.
        rpb: a `FastRPB` or `FastRPB2d`, for self-attention. Its `num_heads` divide embed_dim; they
            need not be those of the attention. Zero-initialised (`init.zero`), it changes nothing.
            A causal attn_mask needs a causal one. The keys and values that add_bias_kv and
            add_zero_attn append have no position, so they take no part in it.

    >>> from fastrpb import sikf
    >>> rpb = FastRPB(4, max_length=100)
    >>> attention = MultiheadAttention(32, 4, batch_first=True, features=sikf, rpb=rpb)
    >>> x = torch.randn(2, 60, 32)
    >>> y, _ = attention(x, x, x, need_weights=False)
    >>> y.shape
    torch.Size([2, 60, 32])
    >>> _ = attention.load_state_dict(nn.MultiheadAttention(32, 4).state_dict())
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device=None,
        dtype=None,
        *,
        features: Phi | None = None,
        rpb: FastRPB | FastRPB2d | None = None,
    ):
        if not isinstance(bias, bool):
            raise TypeError(
                f"bias={bias!r} must be True or False, as in torch: whether the projections have "
                "biases; a FastRPB goes into rpb"
            )
        if features is not None and not isinstance(features, Phi):
            raise TypeError(
                f"features must be a feature map such as fastrpb.sikf, got {features!r}"
            )
        if features is not None and dropout:
            raise ValueError(
                f"linear attention has no weights to drop; use dropout=0, not {dropout}"
            )
        if rpb is not None and not isinstance(rpb, FastRPB | FastRPB2d):
            raise TypeError(f"rpb must be a FastRPB or FastRPB2d, got {type(rpb).__name__}")
        if rpb is not None and embed_dim % rpb.num_heads:
            raise ValueError(f"the {rpb.num_heads} heads of rpb must divide embed_dim={embed_dim}")
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        # The features compute in float32 in any case, and may be those of other layers too.
        self.features = features.to(device) if isinstance(features, nn.Module) else features
        self.rpb = None if rpb is None else rpb.to(device=device, dtype=dtype)
        if features is not None or rpb is not None:
            # nn.TransformerEncoderLayer would read the weights and go around this module's forward,
            # but not where there are hooks.
            self.register_forward_hook(_nothing)
        self.register_load_state_dict_pre_hook(_keep_own)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `torch.nn.MultiheadAttention.forward`."""
        causal, keep = False, None
        if self.features is not None or self.rpb is not None:
            if query.is_nested:
                raise ValueError(
                    "pass padded tensors; in nn.TransformerEncoder, by enable_nested_tensor=False"
                )
            self._check(query, key, value)
            pairs = self._batched(query).shape[1], self._batched(key).shape[1]
            causal, keep = _causal(attn_mask, is_causal, pairs), _keep(key_padding_mask)
        if self.features is None:
            y, weights = super().forward(
                query,
                key,
                value,
                key_padding_mask=key_padding_mask,
                need_weights=need_weights,
                attn_mask=attn_mask,
                average_attn_weights=average_attn_weights,
                is_causal=is_causal,
            )
        else:
            q, k, v = (self._batched(x) for x in (query, key, value))
            y, weights = self._linear_attention(q, k, v, keep, causal, self.features, need_weights)
            y = self._like(query, y)
            if weights is not None:
                weights = weights.mean(1) if average_attn_weights else weights
                weights = weights if query.dim() == 3 else weights.squeeze(0)
        if self.rpb is not None:
            q, v = self._batched(query), self._batched(value)
            y = y + self._like(query, self._bias_term(q, v, keep, causal, self.rpb))
        return y, weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        sizes = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, size), x in zip(sizes.items(), (query, key, value), strict=True):
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != size:
                raise ValueError(
                    f"{name} must have 3 axes with a batch or 2 without, as the query, the last of "
                    f"size {size}; got {tuple(x.shape)}"
                )

    def _linear_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keep: Tensor | None,
        causal: bool,
        phi: Phi,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self._project(i, x) for i, x in enumerate((query, key, value)))
        for extra_k, extra_v in self._appended(k):
            if causal:
                raise ValueError(
                    "causal linear attention cannot show all queries one more key; leave out "
                    "add_bias_kv and add_zero_attn"
                )
            k, v = torch.cat([k, extra_k], 1), torch.cat([v, extra_v], 1)
            keep = None if keep is None else nn.functional.pad(keep, (0, 1), value=True)
        q, k, v = (split_heads(x, self.num_heads) for x in (q, k, v))
        y = linear_attention(q, k, v, phi=phi, mask=keep, causal=causal)
        weights = None
        if need_weights:
            weights = linear_attention_weights(q, k, phi=phi, mask=keep, causal=causal)
        return self.out_proj(merge_heads(y)), weights

    def _bias_term(
        self,
        query: Tensor,
        value: Tensor,
        keep: Tensor | None,
        causal: bool,
        rpb: FastRPB | FastRPB2d,
    ) -> Tensor:
        """(W·V)·O. The output projection is linear: what is added before it can be added after."""
        if query.shape[1] != value.shape[1]:
            raise ValueError(
                f"rpb is for self-attention; {query.shape[1]} queries over {value.shape[1]} values "
                "are not one sequence"
            )
        if causal and not (isinstance(rpb, FastRPB) and rpb.causal):
            raise ValueError("attn_mask is causal but rpb is not; use FastRPB(..., causal=True)")
        v = split_heads(self._project(2, value), rpb.num_heads)
        return nn.functional.linear(merge_heads(rpb(v, keep)), self.out_proj.weight)

    def _project(self, which: int, x: Tensor) -> Tensor:
        """(batch, length, dim) → q (0), k (1) or v (2), all heads together."""
        if self._qkv_same_embed_dim:
            weight = self.in_proj_weight.chunk(3)[which]
        else:
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)[which]
        bias = None if self.in_proj_bias is None else self.in_proj_bias.chunk(3)[which]
        return nn.functional.linear(x, weight, bias)

    def _appended(self, k: Tensor):
        """The keys and values that are appended to those of every sequence."""
        if self.bias_k is not None and self.bias_v is not None:
            yield self.bias_k.expand(len(k), -1, -1), self.bias_v.expand(len(k), -1, -1)
        if self.add_zero_attn:
            yield torch.zeros_like(k[:, :1]), torch.zeros_like(k[:, :1])

    def _batched(self, x: Tensor) -> Tensor:
        """As (batch, length, dim)."""
        if x.dim() == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _like(self, query: Tensor, y: Tensor) -> Tensor:
        if query.dim() == 2:
            return y.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1)


def _nothing(module: nn.Module, args: tuple, output: object) -> None:
    """A hook that only stands there."""


def _keep_own(module: MultiheadAttention, state_dict: dict, prefix: str, *_) -> None:
    """A state dict of the original has nothing for `rpb` and `features`: theirs stay."""
    for name, x in module.state_dict().items():
        if name.startswith(("rpb.", "features.")):
            state_dict.setdefault(prefix + name, x)


def _keep(key_padding_mask: Tensor | None) -> Tensor | None:
    """True = keep, (batch, length), of a mask that is True or -inf to ignore."""
    if key_padding_mask is None:
        return None
    if key_padding_mask.dtype == torch.bool:
        keep = ~key_padding_mask
    else:
        keep = key_padding_mask == 0
        if not (keep | (key_padding_mask == -torch.inf)).all():
            raise ValueError(
                "linear attention and rpb need a key_padding_mask of bool, or of 0 and -inf only"
            )
    return keep if keep.dim() == 2 else keep.unsqueeze(0)


def _causal(attn_mask: Tensor | None, is_causal: bool, pairs: tuple[int, int]) -> bool:
    """Whether the mask over (queries, keys) is the causal one; no other can be followed."""
    if attn_mask is None:
        return is_causal
    if attn_mask.shape != pairs:
        raise ValueError(
            f"with linear attention or rpb, attn_mask must be (queries, keys) = {pairs}, "
            f"got {tuple(attn_mask.shape)}"
        )
    if is_causal:
        return True
    hidden = attn_mask if attn_mask.dtype == torch.bool else attn_mask == -torch.inf
    others = attn_mask.dtype != torch.bool and bool((attn_mask.masked_fill(hidden, 0) != 0).any())
    if not others and not hidden.any():
        return False
    if others or not torch.equal(hidden, torch.ones_like(hidden).triu(1)):
        raise ValueError(
            "linear attention and rpb can follow no attn_mask but the causal one, with True or "
            "-inf above the diagonal"
        )
    return True
