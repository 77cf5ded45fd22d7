"""An attention layer of any attention, and what it remembers of a stream."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastrpb.attention import (
    LinearState,
    linear_attention,
    linear_attention_state,
    linear_attention_step,
    softmax_attention,
)
from fastrpb.bias import BiasState, FastRPB
from fastrpb.bias2d import FastRPB2d
from fastrpb.features import Phi


class SoftmaxAttention(nn.Module):
    """`softmax_attention` with its settings; `logits(q, k)` gives relative positions."""

    def __init__(self, causal: bool, dropout: float, logits: nn.Module | None = None):
        super().__init__()
        self.causal = causal
        self.dropout = dropout
        self.logits = logits

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, plus: Tensor | None = None
    ) -> Tensor:
        """Attention, plus what is to be added to it."""
        logits = None if self.logits is None else self.logits(q, k)
        dropout = self.dropout if self.training else 0.0
        y = softmax_attention(
            q, k, v, mask=mask, causal=self.causal, logits=logits, dropout=dropout
        )
        return y if plus is None else y + plus


class LinearAttention(nn.Module):
    """`linear_attention` with its settings."""

    def __init__(self, causal: bool, phi: Phi):
        super().__init__()
        self.causal = causal
        self.phi = phi

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, plus: Tensor | None = None
    ) -> Tensor:
        """Attention, plus what is to be added to it."""
        return linear_attention(q, k, v, phi=self.phi, mask=mask, causal=self.causal, plus=plus)

    def stream(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: LinearState | None
    ) -> tuple[Tensor, LinearState]:
        """`forward` for tokens that go on from `state`; None: the first ones."""
        if state is None:
            first = linear_attention_state(k.detach(), v.detach(), phi=self.phi, mask=mask)
            return self(q, k, v, mask), first
        ys = []
        for t in range(q.shape[-2]):
            token_q, token_k, token_v = (x[..., t : t + 1, :] for x in (q, k, v))
            here = None if mask is None else mask[..., t : t + 1]
            y, state = linear_attention_step(
                token_q, token_k, token_v, state, phi=self.phi, mask=here
            )
            ys.append(y)
        return torch.cat(ys, -2), state


@dataclass
class Stream:
    """What one layer of a model that `streams` remembers of the tokens so far; empty before them.

    It is changed in place; what it holds carries no gradients.
    """

    attention: LinearState | None = None
    bias: BiasState | None = None
    tokens: int = 0

    def select(self, streams: Tensor) -> None:
        """Keep these streams of the batch, some of them perhaps more than once (beam search)."""
        if self.attention is not None:
            streams = streams.to(self.attention.sums.device)  # a layer may be on another one
            self.attention = LinearState(*(x[streams] for x in self.attention))
        if self.bias is not None:
            self.bias = self.bias.select(streams)


class SelfAttention(nn.Module):
    """Y = f(Attention(Q, K, V) + W·V)·O: projections, any attention, an optional bias on V.

    The bias has `filters` sets of weights, each for width/filters channels of V; the attention has
    `heads`. They need not be equal. f is the `activation`, none by default.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        heads: int,
        attend: nn.Module,
        encoding: nn.Module | None = None,
        bias: FastRPB | FastRPB2d | None = None,
        activation: nn.Module | None = None,
    ):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * width)
        self.attend = attend
        self.encoding = encoding
        self.bias = bias
        self.activation = nn.Identity() if activation is None else activation
        self.out = nn.Linear(width, dim)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        stream: Stream | None = None,
        *,
        cls_alone: bool = False,
    ) -> Tensor:
        """x (batch, length, dim); with a `stream`, x goes on from the tokens that it has seen.

        `cls_alone`: only the output of the first token, a CLS, (batch, 1, dim).
        """
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        queries, keys, values = (split_heads(x, self.heads) for x in (q, k, v))
        if stream is not None:
            return self._project(self._stream(queries, keys, values, v, mask, stream))
        if self.encoding is not None:
            queries, keys = self.encoding(queries, keys)
        plus = None
        if cls_alone:
            queries = queries[:, :, :1]
        elif self.bias is not None:
            plus = merge_heads(self.bias(split_heads(v, self.bias.num_heads), mask))
            plus = split_heads(plus, self.heads)
        y = self._project(merge_heads(self.attend(queries, keys, values, mask, plus)))
        if cls_alone and self.bias is not None and self.training:
            y = y + 0 * self.bias.w.flatten()[0]  # CLS gets none, but DDP wants all gradients
        return y

    def _project(self, y: Tensor) -> Tensor:
        return self.out(self.activation(y))

    def _stream(
        self, q: Tensor, k: Tensor, values: Tensor, v: Tensor, mask: Tensor | None, stream: Stream
    ) -> Tensor:
        if (
            not isinstance(self.attend, LinearAttention)
            or not self.attend.causal
            or self.encoding is not None
            or isinstance(self.bias, FastRPB2d)
        ):
            raise ValueError(
                "only causal linear attention with FastRPB or without positions runs token by token"
            )
        y, after = self.attend.stream(q, k, values, mask, stream.attention)
        stream.attention = LinearState(*(x.detach() for x in after))
        y = merge_heads(y)
        if self.bias is not None:
            v = split_heads(v, self.bias.num_heads)
            if stream.bias is None:
                stream.bias = self.bias.init_state(v)
            y = y + merge_heads(self.bias(v, mask, stream.bias))
        stream.tokens += q.shape[-2]
        return y


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, length, width) → (batch, heads, length, width/heads)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Undo `split_heads`."""
    return x.transpose(1, 2).flatten(2)
