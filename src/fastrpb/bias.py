"""FastRPB: the learned w as a module, a term to add to any attention (§3.2).

>>> import torch
>>> from fastrpb import FastRPB
>>> rpb = FastRPB(num_heads=4, max_length=512)
>>> q = k = v = torch.randn(2, 4, 300, 16)
>>> y = torch.nn.functional.scaled_dot_product_attention(q, k, v) + rpb(v)
>>> y.shape
torch.Size([2, 4, 300, 16])
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastrpb.bias_base import Bias
from fastrpb.checks import check_flag, check_size, compute_dtype, kept
from fastrpb.init import Init, local, zero
from fastrpb.modes import exact, exporting
from fastrpb.toeplitz import toeplitz, toeplitz_matmul

_FEW = 1 / 8  # of the tokens before them: so many more of a stream take steps
_BLOCK = 64  # tokens of a stream that are summed directly: below, products cost more than they save


class FastRPB(Bias):
    """Y = W·V with W[n, m] = w_{m-n}: one learned weight per head and relative distance.

    O(N log N) time and O(N) parameters. Sequences may be shorter than `max_length`: they use the
    weights of the distances they have.

    Args:
        num_heads: heads, each with weights of its own.
        max_length: the longest sequence, prefix tokens not counted.
        causal: only the past, m <= n; stores N weights instead of 2N-1.
        symmetric: w_d = w_{-d}; stores N weights.
        prefix: tokens at the front (CLS) outside the bias: their rows are zero, they contribute
            nothing, and positions are counted after them.
        init: fills `w` (see `fastrpb.init`). `zero` leaves a trained model as it is. The module
            keeps it, so one made with a lambda cannot be pickled.
        envelope: (shortest, longest) scales s_h of a decay, spread over the heads as by
            `init.local`: the effective weight is w_d·exp(-|d|/s_h). So far weights learn slowly,
            and the sum of many of them cannot become noise. One pass over the weights for every
            forward. None: w is used as it is.
        dropout: probability that a weight is dropped in a step of training, for the whole batch.
        threshold: λ of a soft threshold, sign(w)·max(|w|-λ, 0): long filters learn to be sparse.

    Attributes:
        w: (num_heads, 2N-1), by ascending distance; causal: (num_heads, N), the distances
            -(N-1)..0; symmetric: (num_heads, N), the distances 0..N-1.

    >>> rpb = FastRPB(8, max_length=784, prefix=1)
    >>> v = torch.randn(2, 8, 785, 32)
    >>> torch.allclose(rpb(v), rpb.matrix(785) @ v, atol=1e-4)
    True
    """

    def __init__(
        self,
        num_heads: int,
        max_length: int,
        *,
        causal: bool = False,
        symmetric: bool = False,
        prefix: int = 0,
        init: Init = local(),  # noqa: B008  (a function, not state)
        envelope: tuple[float, float] | None = None,
        dropout: float = 0.0,
        threshold: float = 0.0,
    ):
        super().__init__(num_heads, prefix, init, envelope, dropout, threshold, symmetric)
        check_size("max_length", max_length)
        check_flag("causal", causal)
        if causal and symmetric:
            raise ValueError(
                "a causal bias has no future to be symmetric with; choose one of causal and "
                "symmetric"
            )
        self.max_length = max_length
        self.causal = causal
        self.w = nn.Parameter(torch.empty(num_heads, *map(len, self._distances())))
        self.reset_parameters()

    def _distances(self) -> list[range]:
        n = self.max_length
        return [range(0 if self.symmetric else 1 - n, 1 if self.causal else n)]

    def _distance(self) -> Tensor:
        return self._distance_of(0, self.w.shape[1])

    def _distance_of(self, first: int, last: int) -> Tensor:
        start, dtype = self._distances()[0].start, compute_dtype(self.w)
        return torch.arange(start + first, start + last, dtype=dtype, device=self.w.device).abs()

    def _part(self, first: int, last: int) -> Tensor:
        """The effective weights `first` to before `last` of those stored."""
        distance = None if self.envelope is None else self._distance_of(first, last)
        part = slice(first, last)
        if exporting():  # to slice to the end would be a case of its own
            part = torch.arange(first, last, device=self.w.device)
        return self._effective(self.w[:, part], distance)

    def weights(self, length: int) -> Tensor:
        """w for `length` positions: (heads, 2·length-1), the distances -(length-1)..length-1.

        The effective ones: under the envelope, past the threshold and, while training, with some
        dropped.
        """
        n = self.max_length
        check_size("length", length)
        if length > n:
            raise ValueError(f"length {length} is not within 1..max_length={n}; see resize()")
        if self.causal:
            return nn.functional.pad(self._part(n - length, n), (0, length - 1))
        if self.symmetric:
            return self._both_sides(self._part(0, length))
        return self._part(n - length, n + length - 1)

    def _dense(self, length: int) -> Tensor:
        return toeplitz(self.weights(length))

    def _multiply(self, v: Tensor) -> Tensor:
        weights = self.weights(v.shape[-2] - self.prefix)
        return toeplitz_matmul(weights, v, prefix=self.prefix)

    def forward(
        self,
        v: Tensor,
        mask: Tensor | None = None,
        state: "BiasState | None" = None,
        *,
        rows: tuple[int | Tensor, int] | None = None,
    ) -> Tensor:
        """W·v, a term for the output of any attention.

        Args:
            v: (batch, heads, length, dim), or without batch. Prefix tokens come first.
            mask: (batch, length) bool, True = keep: the others (padding) contribute nothing.
            state: of a causal stream (see `init_state`); v continues its tokens. It is changed in
                place; gradients reach v and w, not earlier tokens. A few tokens without gradients
                take steps; else the product over all L tokens so far is computed, O(L log L).
            rows: (first, count): only these rows of the output, for a v that holds all values so
                far (a KV cache). Needs prefix=0. One row takes O(length) time.

        Returns:
            (batch, heads, length or count, dim) in the dtype of v. Rows of prefix tokens are zero.

        >>> rpb, v = FastRPB(4, 100, causal=True), torch.randn(2, 4, 100, 8)
        >>> torch.allclose(rpb(v, rows=(97, 2)), rpb(v)[:, :, 97:99], atol=1e-5)
        True
        >>> state = rpb.init_state(v)
        >>> parts = [rpb(v[:, :, :90], state=state), rpb(v[:, :, 90:], state=state)]
        >>> torch.allclose(torch.cat(parts, 2), rpb(v), atol=1e-5)
        True
        """
        if rows is not None:
            return self._rows(v, mask, state, *rows)
        if state is None:
            return super().forward(v, mask)
        self._check_stream(v, mask, state)
        v = kept(v, mask)
        learns = torch.is_grad_enabled() and (v.requires_grad or self.w.requires_grad)
        if learns or v.shape[-2] >= _FEW * state.tokens:
            return self._go_on(v, state)
        steps = [self.step(v[..., t : t + 1, :], state)[0] for t in range(v.shape[-2])]
        return torch.cat(steps, -2)

    def _rows(
        self,
        v: Tensor,
        mask: Tensor | None,
        state: "BiasState | None",
        first: int | Tensor,
        count: int,
    ) -> Tensor:
        self._check(v, mask)
        n = v.shape[-2]
        if self.prefix or state is not None:
            raise ValueError("rows= is for a bias without a prefix, and without a stream's state=")
        check_size("the count of rows", count)
        if not isinstance(first, Tensor):
            check_size("the first of rows", first, least=0)
            if first > n - count:
                raise ValueError(f"rows=({first}, {count}) are not among the {n} tokens of v")
        places = torch.arange(n - count, 2 * n - 1, device=v.device) - first
        impl = "dense" if count == 1 else "auto"  # of one token, the matrix is one row
        # index_select refuses what is not there; compiled, it takes negative places for others.
        places = places.masked_fill(places < 0, 2 * n - 1)
        weights = self.weights(n).index_select(1, places)
        return toeplitz_matmul(weights, kept(v, mask), out_length=count, impl=impl)

    def _go_on(self, v: Tensor, state: "BiasState") -> Tensor:
        """As many steps at once: one product over all tokens so far."""
        prefix = min(v.shape[-2], max(0, self.prefix - state.tokens))
        start = max(0, state.tokens - self.prefix)
        v, zeros = v[..., prefix:, :], torch.zeros_like(v[..., :prefix, :])
        if not v.shape[-2]:
            state.tokens += prefix
            return zeros
        end, n = start + v.shape[-2], self.max_length
        values = v
        if start:
            values = torch.cat([state.history[..., :start, :], v.to(state.history.dtype)], -2)
        weights = nn.functional.pad(self._part(n - end, n), (0, end - start - 1))
        y = toeplitz_matmul(weights, values, out_length=end - start).to(v.dtype)
        with torch.no_grad():
            state.history[..., start:end, :] = v
            state.tokens += prefix + v.shape[-2]
            t = end // _BLOCK * _BLOCK
            while t > start:  # of all the shares that the steps give, these reach outputs to come
                self._share(state, t)
                t &= t - 1
        return torch.cat([zeros, y], -2) if prefix else y

    def init_state(self, v: Tensor) -> "BiasState":
        """The state before the first token of a stream; v (batch, heads, ..., dim) gives the sizes.

        Takes the memory of two sequences of `max_length`: the values so far and the sums to come.
        """
        self._check_stream(v)
        shape = *v.shape[:-2], self.max_length, v.shape[-1]
        dtype = compute_dtype(self.w, v)
        return BiasState(v.new_zeros(shape, dtype=dtype), v.new_zeros(shape, dtype=dtype))

    @torch.no_grad()
    def step(self, v: Tensor, state: "BiasState") -> tuple[Tensor, "BiasState"]:
        """The next output of a causal bias for the next v (batch, heads, 1, dim).

        O(log² N) time a token on average, against O(N) for the sum over the history. After token
        t, the last b tokens (b the largest power of two that divides t, if it is at least 64) give
        their share to the next b outputs in one product; the tokens since the last multiple of 64
        are summed directly. Every pair of tokens counts once. The state is changed in place; no
        gradients.

        >>> rpb, v = FastRPB(4, 100, causal=True), torch.randn(2, 4, 100, 8)
        >>> state, ys = rpb.init_state(v), []
        >>> for t in range(100):
        ...     y, state = rpb.step(v[:, :, t : t + 1], state)
        ...     ys.append(y)
        >>> torch.allclose(torch.cat(ys, 2), rpb(v), atol=1e-5)
        True
        """
        self._check_stream(v, None, state)
        if v.shape[-2] != 1:
            raise ValueError(f"a step takes one token, got {v.shape[-2]}")
        history, pending, n = state.history, state.pending, self.max_length
        t = state.tokens - self.prefix
        state.tokens += 1
        if t < 0:
            return torch.zeros_like(v), state
        history[..., t : t + 1, :] = v
        t += 1
        first = (t - 1) // _BLOCK * _BLOCK
        with exact(v):
            w = self._part(n - (t - first), n).unsqueeze(1)
            near = w.to(history.dtype) @ history[..., first:t, :]
        y = pending[..., t - 1 : t, :] + near
        self._share(state, t)
        return y.to(v.dtype), state

    def _share(self, state: "BiasState", t: int) -> None:
        """After token t, give the share of the last tokens to as many outputs to come."""
        block = t & -t
        outputs = min(block, self.max_length - t)
        if block >= _BLOCK and outputs:
            first = self.max_length - block - outputs
            state.pending[..., t : t + outputs, :] += toeplitz_matmul(
                self._part(first, self.max_length - 1),
                state.history[..., t - block : t, :],
                out_length=outputs,
            )

    def _check_stream(
        self, v: Tensor, mask: Tensor | None = None, state: "BiasState | None" = None
    ) -> None:
        if not self.causal:
            raise ValueError("only a causal bias can run step by step; pass causal=True")
        self._check(v, mask)
        if state is None:
            return
        if torch.compiler.is_dynamo_compiling():  # what raises is left to Python
            raise RuntimeError(
                "the work of a stream differs from token to token, which no one graph can hold: "
                "leave out fullgraph=True, or use rows= with all values so far"
            )
        (*lead, length, dim), n = state.history.shape, self.max_length
        if lead != [*v.shape[:-2]] or dim != v.shape[-1]:
            size = tuple(state.history.shape)
            raise ValueError(f"the state is of a stream like {size}, v is {tuple(v.shape)}")
        if length != n:
            raise ValueError(f"the state is of a bias of max_length={length}, this one has {n}")
        if not v.shape[-2]:
            raise ValueError("v has no tokens to go on with")
        if state.tokens + v.shape[-2] - self.prefix > n:
            raise ValueError(
                f"{v.shape[-2]} tokens after {state.tokens} make the stream longer than "
                f"max_length={n}; see resize()"
            )

    @torch.no_grad()
    def resize(self, max_length: int) -> "FastRPB":
        """A new bias for another length: the weights of common distances kept, others zero."""
        new = FastRPB(
            self.num_heads,
            max_length,
            causal=self.causal,
            init=zero,
            **self._settings(),
        ).to(self.w)
        self._give_to(new)
        return new

    def _mismatch(self, saved: torch.Size) -> str:
        heads, count = saved if len(saved) == 2 else (0, 0)
        half = self.causal or self.symmetric
        other = 2 * self.max_length - 1 if half else self.max_length
        if (heads, count) == (self.num_heads, other):
            kinds = ("neither causal nor symmetric", "causal or symmetric")
            return (
                f"the saved weights {tuple(saved)} are of a bias that is {kinds[not half]}, this "
                f"one with its {tuple(self.w.shape)} is {kinds[half]}; make it as that one was"
            )
        length = count if half else (count + 1) // 2
        return (
            f"the saved weights {tuple(saved)} are of {heads} heads and max_length={length}, "
            f"this bias has {self.num_heads} heads and max_length={self.max_length}; load them "
            "into a FastRPB of their own size and resize() it"
        )

    def extra_repr(self) -> str:
        causal = ", causal=True" if self.causal else ""
        return f"{self.num_heads}, max_length={self.max_length}{causal}{self._shown_settings()}"


@dataclass
class BiasState:
    """What a causal FastRPB remembers of a stream."""

    history: Tensor  # (batch, heads, max_length, dim), float32 or float64: the values so far
    pending: Tensor  # the same: what they have given to later outputs
    tokens: int = 0

    def select(self, streams: Tensor) -> "BiasState":
        """The states of these streams of the batch, a copy of each (beam search)."""
        return BiasState(self.history[streams], self.pending[streams], self.tokens)
