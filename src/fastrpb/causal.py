"""The sums of causal linear attention in plain torch, by chunks: O(N)."""

import torch
from torch import Tensor

from fastrpb.features import HIDDEN, ExpFeatureMap, Phi

_CHUNK = 64  # positions that are handled by their quadratic definition


def causal_sums(phi: Phi, q: Tensor, k: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Σ_{m<=n} φ(q_n)ᵀφ(k_m)·values_m, up to a factor for each n, for M queries and N keys."""
    m, n = q.shape[-2], k.shape[-2]
    keys = min(m, n)  # no query sees the keys after its own place
    k, mask = k[..., :keys, :], None if mask is None else mask[..., :keys]
    if isinstance(phi, ExpFeatureMap):
        (first, second), run, hidden = phi.logs(q, k, mask), _causal_exp, HIDDEN
    else:
        (first, second), run, hidden = phi(q, k, mask), _causal_plain, 0.0
    length = -(-m // _CHUNK) * _CHUNK
    first = _pad_length(first, length, 0.0)
    second = _pad_length(second, length, hidden)
    values = _pad_length(values[..., :keys, :], length, 0.0)
    return run(first, second, values)[..., :m, :]


def _causal_plain(phi_q: Tensor, phi_k: Tensor, values: Tensor) -> Tensor:
    phi_q, phi_k, values = (x.unflatten(-2, (-1, _CHUNK)) for x in (phi_q, phi_k, values))
    before = _delay((phi_k.mT @ values).cumsum(-3), 1, 0.0)
    return (phi_q @ before + (phi_q @ phi_k.mT).tril() @ values).flatten(-3, -2)


def _causal_exp(log_q: Tensor, log_k: Tensor, values: Tensor) -> Tensor:
    """The causal sums for φ = exp(log φ), every exponent at most 0.

    Row n is scaled by exp(-top_n), its largest single term. A group of keys that lies before row n
    takes off its own largest for each feature, s_f, which the row adds: exp(k_f - s_f) <= 1, and
    exp(q_f + s_f - top_n) <= 1 because that term is among those of the row. The groups are, for
    each row, all earlier chunks; then, within the chunk, the left half if the row is in the right
    one, and so on down to single keys; and the row's own key.
    """
    top = (log_q + log_k.cummax(-2).values).amax(-1, keepdim=True).detach()
    y = torch.exp(log_q + log_k - top).sum(-1, keepdim=True) * values
    half = _CHUNK // 2
    while half:
        left, right = _halves(log_k, half)[0], _halves(log_q - top, half)[1]
        shift = left.detach().amax(-2, keepdim=True)
        sim = torch.exp(right + shift) @ torch.exp(left - shift).mT
        block = sim @ _halves(values, half)[0]
        y = y + torch.stack([torch.zeros_like(block), block], -3).flatten(-4, -2)
        half //= 2
    sums, shift = _earlier_chunks(log_k, values)
    queries = (log_q - top).unflatten(-2, (-1, _CHUNK))
    return y + (torch.exp(queries + shift.mT) @ sums).flatten(-3, -2)


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    left, right = x.unflatten(-2, (-1, 2, half)).unbind(-3)
    return left, right


def _earlier_chunks(log_k: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Σ exp(k - shift)·values over all chunks before each, by a scan of log2(chunks) steps."""
    log_k, values = (x.unflatten(-2, (-1, _CHUNK)) for x in (log_k, values))
    shift = log_k.detach().amax(-2).unsqueeze(-1)  # (..., chunks, features, 1)
    sums = torch.exp(log_k - shift.mT).mT @ values
    sums, shift = _delay(sums, 1, 0.0), _delay(shift, 1, HIDDEN)
    step = 1
    while step < sums.shape[-3]:
        sums, shift = add_shifted(sums, shift, _delay(sums, step, 0.0), _delay(shift, step, HIDDEN))
        step *= 2
    return sums, shift


def _delay(x: Tensor, chunks: int, fill: float) -> Tensor:
    return torch.nn.functional.pad(x[..., :-chunks, :, :], (0, 0, 0, 0, chunks, 0), value=fill)


def add_shifted(a: Tensor, shift_a: Tensor, b: Tensor, shift_b: Tensor) -> tuple[Tensor, Tensor]:
    """a·exp(shift_a) + b·exp(shift_b), again as sums and their shift."""
    shift = torch.maximum(shift_a, shift_b)
    return a * torch.exp(shift_a - shift) + b * torch.exp(shift_b - shift), shift


def _pad_length(x: Tensor, length: int, value: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, length - x.shape[-2]), value=value)
