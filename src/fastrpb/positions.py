"""Positional encodings that the bias is compared with (§2.4), by where they act.

- token embeddings: `LearnedPositions`, `SinusoidalPositions`: `x + position(x)`;
- queries and keys: `SineSPE`, `ConvSPE`, `RoPE`: `q, k = position(q, k)`;
- the logits of softmax attention: `RelativeKeyQuery`, `T5Bias`, `ALiBi`:
  `softmax_attention(q, k, v, logits=position(q, k))`. Linear attention never forms logits, so these
  cannot go with it;
- the output of any attention: `fastrpb.FastRPB`, `fastrpb.FastRPB2d`: `y + position(v)`.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from fastrpb.checks import check_flag, check_number, check_size, check_values, compute_dtype
from fastrpb.modes import exporting
from fastrpb.toeplitz import toeplitz, toeplitz_matmul


class LearnedPositions(nn.Module):
    """One learned vector per absolute position, as in BERT."""

    def __init__(self, max_length: int, dim: int):
        super().__init__()
        check_size("max_length", max_length)
        check_size("dim", dim)
        self.weight = nn.Parameter(torch.empty(max_length, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """w ~ N(0, 0.02²)."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """The vectors of the positions of x (batch, length, dim): (length, dim).

        `positions` (batch, length) says which they are where they are not 0, 1, 2, ...
        """
        return _rows(self.weight, x, positions)


class SinusoidalPositions(nn.Module):
    """p[n, 2i] = sin(n/10000^(2i/dim)) and p[n, 2i+1] its cosine, as in the first Transformer."""

    table: Tensor

    def __init__(self, max_length: int, dim: int):
        super().__init__()
        check_size("max_length", max_length)
        check_size("dim", dim)
        self.register_buffer("table", torch.empty(max_length, dim), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        length, dim = self.table.shape
        angle = _angles(torch.arange(length, device=self.table.device), dim + dim % 2, 10000.0)
        self.table.copy_(torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[:, :dim])

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """The vectors of the positions of x (batch, length, dim): (length, dim).

        `positions` (batch, length) says which they are where they are not 0, 1, 2, ...
        """
        return _rows(self.table, x, positions).to(x.dtype)  # a model may be cast without its table


class RoPE(nn.Module):
    """Rotate pairs of channels by position·10000^(-2i/dim), so that q·k depends on the distance.

    >>> rope = RoPE()
    >>> q, k = torch.randn(2, 1, 1, 1, 8).expand(-1, -1, -1, 20, -1)
    >>> a, b = rope(q, k)
    >>> scores = (a @ b.mT)[0, 0]
    >>> torch.allclose(scores.diagonal(3), scores[0, 3].expand(17), atol=1e-4)
    True
    """

    def __init__(self, base: float = 10000.0):
        super().__init__()
        check_number("base", base)
        if not 0 < base < math.inf:
            raise ValueError(f"base={base} must be positive and finite")
        self.base = base

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, heads, length, dim) each, dim even."""
        for name, x in (("q", q), ("k", k)):
            check_values(name, x)
        if q.shape[-1] % 2 or q.shape[-1] != k.shape[-1]:
            raise ValueError(
                "RoPE rotates pairs of channels, so q and k need one even dim; "
                f"they have {q.shape[-1]} and {k.shape[-1]}"
            )
        return self._rotate(q), self._rotate(k)

    def _rotate(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[-2], device=x.device)
        angle = _angles(position, x.shape[-1], self.base)
        dtype = compute_dtype(x)
        even, odd = x.unflatten(-1, (-1, 2)).to(dtype).unbind(-1)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
        return turned.flatten(-2).to(x.dtype)


class _SPE(nn.Module, ABC):
    """Stochastic positional encoding: codes q̄, k̄ with E[q̄_d(m)·k̄_d(n)] = P_d(m, n).

    q̂[m, r] = Σ_d q[m, d]·q̄[m, d, r], the same for keys, for R realisations r. Then q̂·k̂ᵀ is
    Σ_d q_d·P_d(m, n)·k_d on average, with R in the place of dim: the factor (R/dim)^(1/4) makes up
    for the scaling by 1/√R that an attention does. A gate mixes in noise that both share,
    √(1-g)·code + √g·noise, which stands for content without position (P = 1).
    """

    gate: nn.Parameter | None

    def __init__(self, num_heads: int, dim: int, num_realizations: int, gated: bool):
        super().__init__()
        check_size("num_heads", num_heads)
        check_size("dim", dim)
        check_size("num_realizations", num_realizations)
        check_flag("gated", gated)
        self.num_heads = num_heads
        self.dim = dim
        self.num_realizations = num_realizations
        self.gate = nn.Parameter(torch.empty(num_heads, dim, 1, 1)) if gated else None

    def reset_parameters(self) -> None:
        """As much noise as code; what the code is, a subclass says."""
        if self.gate is not None:
            nn.init.zeros_(self.gate)

    @abstractmethod
    def codes(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """New q̄ and k̄, without the gate, of noise in this dtype: (heads, dim, length, R) each."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, heads, length, dim) each → (batch, heads, length, R), new codes for each call."""
        for name, x in (("q", q), ("k", k)):
            check_values(name, x)
        if q.shape[1] != self.num_heads or q.shape[-1] != self.dim or q.shape != k.shape:
            raise ValueError(
                f"q and k must be (batch, {self.num_heads}, length, {self.dim}), "
                f"got {tuple(q.shape)} and {tuple(k.shape)}"
            )
        code_q, code_k = self.codes(q.shape[-2], q.dtype)
        if self.gate is not None:
            gate = torch.sigmoid(self.gate)
            noise = torch.randn_like(code_q[:, :, :1])
            code_q, code_k = (
                (1 - gate).sqrt() * code + gate.sqrt() * noise for code in (code_q, code_k)
            )
        scale = self.num_realizations**-0.5 * (self.num_realizations / self.dim) ** 0.25
        q, k = (
            torch.einsum("bhnd,hdnr->bhnr", x, code.to(x.dtype)) * scale
            for x, code in ((q, code_q), (k, code_k))
        )
        return q, k


class SineSPE(_SPE):
    """P_d(m, n) = Σ_j λ_j²·cos(2π·f_j·(m-n) + θ_j): sums of K sines, learned for (head, feature).

    f = sigmoid(.)/2, λ = softplus(.) scaled so that Σλ² = 1; the phase θ is on the queries' side.

    Args:
        num_heads, dim: of the queries.
        num_sines: K.
        num_realizations: R.
        gated: mix in shared noise by a learned gate.
    """

    def __init__(
        self,
        num_heads: int,
        dim: int,
        *,
        num_sines: int = 10,
        num_realizations: int = 64,
        gated: bool = True,
    ):
        super().__init__(num_heads, dim, num_realizations, gated)
        check_size("num_sines", num_sines)
        shape = (num_heads, dim, num_sines)
        self.frequency = nn.Parameter(torch.empty(shape))
        self.phase = nn.Parameter(torch.empty(shape))
        self.gain = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Slow waves, sigmoid(-4)/2 = 1/110, in any phase."""
        super().reset_parameters()
        nn.init.normal_(self.frequency, -4.0)
        nn.init.normal_(self.phase)
        nn.init.normal_(self.gain)

    def covariance(self, length: int) -> Tensor:
        """P: (heads, dim, length, length), without the gate."""
        lag = torch.arange(length, device=self.gain.device)
        lag = (lag[:, None] - lag)[..., None]
        angle = lag * self._omega()[:, :, None, None] + self.phase[:, :, None, None]
        return (self._gains().square()[:, :, None, None] * angle.cos()).sum(-1)

    def codes(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        n = torch.arange(length, device=self.gain.device)[:, None]
        angle = n * self._omega().unsqueeze(-2)  # (heads, dim, length, K)
        shape = (*self.gain.shape[:2], 2 * self.gain.shape[-1], self.num_realizations)
        noise = torch.randn(shape, device=self.gain.device, dtype=dtype)

        def waves(angle: Tensor) -> Tensor:
            gains = self._gains().unsqueeze(-2)
            both = torch.cat([gains * angle.cos(), gains * angle.sin()], -1)
            return both.to(dtype) @ noise

        return waves(angle + self.phase.unsqueeze(-2)), waves(angle)

    def _omega(self) -> Tensor:
        # Angles grow with the length, and half precisions do not hold them.
        return math.pi * torch.sigmoid(self.frequency.to(compute_dtype(self.frequency)))

    def _gains(self) -> Tensor:
        return nn.functional.normalize(nn.functional.softplus(self.gain), dim=-1)


class ConvSPE(_SPE):
    """P_d(m, n) = Σ_p a_d[p]·b_d[p + m-n]: both codes filter one noise, by learned kernels a and b.

    Args:
        num_heads, dim: of the queries.
        kernel_size: length of a and b; P vanishes at that distance.
        num_realizations: R.
        gated: mix in shared noise by a learned gate.
    """

    def __init__(
        self,
        num_heads: int,
        dim: int,
        *,
        kernel_size: int = 128,
        num_realizations: int = 64,
        gated: bool = True,
    ):
        super().__init__(num_heads, dim, num_realizations, gated)
        check_size("kernel_size", kernel_size)
        self.kernel_size = kernel_size
        self.kernel_q = nn.Parameter(torch.empty(num_heads, dim, kernel_size))
        self.kernel_k = nn.Parameter(torch.empty(num_heads, dim, kernel_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Kernels of norm 1 on average."""
        super().reset_parameters()
        for kernel in (self.kernel_q, self.kernel_k):
            nn.init.normal_(kernel, std=self.kernel_size**-0.5)

    def covariance(self, length: int) -> Tensor:
        """P: (heads, dim, length, length), without the gate."""
        size = self.kernel_size
        full = nn.functional.pad(self.kernel_k, (length, length))
        lags = full.unfold(-1, size, 1) @ self.kernel_q.unsqueeze(-1)  # lag -length .. length
        n = torch.arange(length, device=full.device)
        return lags.squeeze(-1)[..., n[:, None] - n + length]

    def codes(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # A filter is Toeplitz; in windows of a few kernels most of its zeros are left out. Exported
        # for a range of lengths, their number would not be known.
        whole = exporting() or length <= 2 * self.kernel_size
        window = length if whole else 2 * self.kernel_size
        count = 1 if whole else -(-length // window)
        size = window + self.kernel_size - 1
        shape = (self.num_heads * self.dim, size + (count - 1) * window, self.num_realizations)
        noise = torch.randn(shape, device=self.kernel_q.device, dtype=dtype)
        windows = noise[None] if whole else noise.unfold(1, size, window).permute(1, 0, 3, 2)

        def filtered(kernel: Tensor) -> Tensor:
            w = nn.functional.pad(kernel.flatten(0, 1), (window - 1, window - 1))
            y = toeplitz_matmul(w, windows, out_length=window)
            y = y.transpose(0, 1).flatten(1, 2)[:, :length]
            return y.unflatten(0, (self.num_heads, self.dim))

        return filtered(self.kernel_q), filtered(self.kernel_k)


class RelativeKeyQuery(nn.Module):
    """logits[n, m] = (q_n·r_{m-n} + k_m·r_{m-n})/√dim with one table r per layer (RPE).

    The `relative_key_query` of Huang et al. 2020. O(N²) time and memory, softmax attention only.
    """

    def __init__(self, dim: int, max_length: int):
        super().__init__()
        check_size("dim", dim)
        check_size("max_length", max_length)
        self.dim = dim
        self.max_length = max_length
        self.table = nn.Parameter(torch.empty(2 * max_length - 1, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """r ~ N(0, 0.02²)."""
        nn.init.normal_(self.table, std=0.02)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """q (batch, heads, M, dim) of the first M of k's N positions → (batch, heads, M, N)."""
        m, n = _lengths(q, k)
        _within(n, self.max_length)
        table = self.table[self.max_length - n : self.max_length + n - 1].to(q.dtype)
        by_query = _by_place(q, table, n)
        by_key = _by_place(k, table.flip(0), m).mT
        return (by_query + by_key) * self.dim**-0.5


class T5Bias(nn.Module):
    """logits[n, m] = b[bucket(m-n)]: exact distances when near, logarithmic ones when far (T5).

    Args:
        num_heads: heads, each with biases of its own.
        num_buckets: half of them for each direction; all for the past where `causal`.
        max_distance: all larger distances share the last bucket.
        causal: only the past.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        causal: bool = False,
    ):
        super().__init__()
        check_size("num_heads", num_heads)
        check_size("num_buckets", num_buckets)
        check_size("max_distance", max_distance)
        check_flag("causal", causal)
        exact = num_buckets // (2 if causal else 4)
        if exact < 1 or max_distance <= exact:
            raise ValueError(
                f"num_buckets={num_buckets} and max_distance={max_distance} leave no bucket for "
                f"near distances or none for far ones ({exact} are exact)"
            )
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.causal = causal
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """b ~ N(0, 0.02²)."""
        nn.init.normal_(self.weight, std=0.02)

    def buckets(self, queries: int, keys: int) -> Tensor:
        """The bucket of every pair of positions: (queries, keys), both from the first on."""
        return self._bucket(_distance(queries, keys, self.weight.device))

    def _bucket(self, d: Tensor) -> Tensor:
        count = self.num_buckets if self.causal else self.num_buckets // 2
        offset = 0 if self.causal else (d > 0) * count
        far = d.clamp(max=0).neg() if self.causal else d.abs()
        exact = count // 2
        share = torch.log(far.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        logarithmic = exact + (share * (count - exact)).long()  # in T5's order: it rounds so
        return offset + torch.where(far < exact, far, logarithmic.clamp(max=count - 1))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """(heads, M, N) for q of the first M of k's N positions."""
        m, n = _lengths(q, k)
        d = torch.arange(1 - m, n, device=self.weight.device)
        return toeplitz(self.weight[self._bucket(d)].mT, m).to(q.dtype)


class ALiBi(nn.Module):
    """logits[n, m] = -slope_h·|m-n|: nothing learned; slopes 2^(-8h/H) (Press et al. 2022)."""

    slopes: Tensor

    def __init__(self, num_heads: int):
        super().__init__()
        check_size("num_heads", num_heads)
        self.register_buffer("slopes", torch.empty(num_heads), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.slopes.copy_(torch.tensor(_slopes(len(self.slopes))))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """(heads, M, N) for q of the first M of k's N positions."""
        distance = _distance(*_lengths(q, k), q.device).abs()
        return (-self.slopes[:, None, None] * distance).to(q.dtype)


def _slopes(num_heads: int) -> list[float]:
    """The published slopes: a geometric series, filled up from the next one for odd counts."""
    power = 1 << (num_heads.bit_length() - 1)
    series = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2.0 ** (-4 * (h + 1) / power) for h in range(0, 2 * power, 2)]
    return series + between[: num_heads - power]


def _distance(queries: int, keys: int, device: torch.device) -> Tensor:
    """d = m - n for output n and input m: (queries, keys)."""
    return torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]


def _by_place(x: Tensor, table: Tensor, columns: int) -> Tensor:
    """x_n·table[N-1 + m-n] for x (..., rows, dim), a table (2N-1, dim), m < columns.

    Their product has it at (n, N-1 + m-n), so rows of L end to end at n·(L-1) + N-1 + m. Copies
    suffice; the gradients of a gather would be sums.
    """
    rows, middle = x.shape[-2], table.shape[0] // 2
    if exporting():  # for a range of lengths, which the copies below would fix
        index = _distance(rows, columns, x.device) + middle
        return (x @ table.mT).gather(-1, index.expand(*x.shape[:-1], columns))
    width = -(-len(table) // 8) * 8  # tensor cores want rows of 16 bytes
    y = x @ nn.functional.pad(table, (0, 0, 0, width - len(table))).mT
    if torch.compiler.is_dynamo_compiling():
        # Compiled, the copies below would divide for the place of every element.
        y = y.contiguous()
        shape, strides = (*y.shape[:-1], columns), (*y.stride()[:-2], width - 1, 1)
        return y.as_strided(shape, strides, middle)
    flat = nn.functional.pad(y.flatten(-2), (-middle, middle - rows))
    return flat.unflatten(-1, (rows, width - 1))[..., :columns]


def _angles(position: Tensor, dim: int, base: float) -> Tensor:
    """position·base^(-2i/dim): (length, dim/2), in float64: they grow with the length."""
    exponent = torch.arange(0, dim, 2, device=position.device, dtype=torch.float64) / dim
    return position[:, None] * base**-exponent


def _lengths(q: Tensor, k: Tensor) -> tuple[int, int]:
    for name, x in (("q", q), ("k", k)):
        check_values(name, x)
    if q.shape[-2] > k.shape[-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must have one dim, and q no more positions"
        )
    return q.shape[-2], k.shape[-2]


def _rows(table: Tensor, x: Tensor, positions: Tensor | None) -> Tensor:
    check_values("x", x)
    length = _within(x.shape[-2], table.shape[0])
    return table[:length] if positions is None else table[positions]


def _within(length: int, max_length: int) -> int:
    if length > max_length:
        raise ValueError(f"length {length} exceeds max_length={max_length}")
    return length
