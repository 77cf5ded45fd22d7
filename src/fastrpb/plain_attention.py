"""Linear attention in plain torch, on any device: O(N), the causal form by chunks."""

import torch
from torch import Tensor

from fastrpb.checks import compute_dtype, kept
from fastrpb.features import HIDDEN, ExpFeatureMap, Phi
from fastrpb.modes import exact, exporting

_CHUNK = 64  # positions that are handled by their quadratic definition


def plain_attention(
    phi: Phi, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> Tensor:
    """`linear_attention`, of inputs that were checked."""
    dtype = v.dtype
    with exact(v):
        q, k, v = widened(q, kept(k, mask), v)
        values = with_ones(v, mask)
        if not causal:
            phi_q, phi_k = phi(q, k, mask)
            sums = phi_q @ (phi_k.mT @ values)
        else:
            sums = _causal_sums(phi, q, k, values, mask)
        return divide(sums[..., :-1], sums[..., -1:]).to(dtype)


def with_ones(v: Tensor, mask: Tensor | None) -> Tensor:
    """[v, 1], so that one product gives numerator and denominator; zero where masked."""
    return kept(torch.nn.functional.pad(v, (0, 1), value=1.0), mask)


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where there is nothing to attend to."""
    return numerator / denominator.masked_fill(denominator == 0, 1)


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = compute_dtype(*tensors)
    return tuple(x.to(dtype) for x in tensors)


def _causal_sums(phi: Phi, q: Tensor, k: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Σ_{m<=n} φ(q_n)ᵀφ(k_m)·values_m, up to a factor for each n, for M queries and N keys."""
    m, n = q.shape[-2], k.shape[-2]
    keys = min(m, n)  # no query sees the keys after its own place
    k, mask = k[..., :keys, :], None if mask is None else mask[..., :keys]
    if isinstance(phi, ExpFeatureMap):
        (first, second), run, hidden = phi.logs(q, k, mask), _causal_exp, HIDDEN
    else:
        (first, second), run, hidden = phi(q, k, mask), _causal_plain, 0.0
    chunks = _chunks(first, m, 0.0), _chunks(second, m, hidden)
    return run(*chunks, _chunks(values[..., :keys, :], m, 0.0)).flatten(-3, -2)[..., :m, :]


def _chunks(x: Tensor, length: int, fill: float) -> Tensor:
    """(..., positions, features) → (..., chunks, _CHUNK, features), for at least `length`."""
    # To a tracer no padding, one chunk, or one chunk before the last would be cases of their own.
    count = (length + _CHUNK - 1) // _CHUNK + 2 * exporting()
    *lead, there, features = x.shape
    # Not by `pad`: Inductor's gradient of it keeps the first length that is compiled.
    x = torch.cat([x, x.new_full((*lead, count * _CHUNK - there, features), fill)], dim=-2)
    return x.unflatten(-2, (-1, _CHUNK))


def _causal_plain(phi_q: Tensor, phi_k: Tensor, values: Tensor) -> Tensor:
    before = _delay((phi_k.mT @ values).cumsum(-3), 1, 0.0)
    return phi_q @ before + (phi_q @ phi_k.mT).tril() @ values


def _causal_exp(log_q: Tensor, log_k: Tensor, values: Tensor) -> Tensor:
    """The causal sums for φ = exp(log φ), every exponent at most 0.

    Row n is scaled by exp(-top_n), its largest single term. A group of keys that lies before row n
    takes off its own largest for each feature, s_f, which the row adds: exp(k_f - s_f) <= 1, and
    exp(q_f + s_f - top_n) <= 1 because that term is among those of the row. The groups are, for
    each row, all earlier chunks; then, within the chunk, the left half if the row is in the right
    one, and so on down to single keys; and the row's own key.
    """
    sums, shift = _earlier_chunks(log_k, values)
    highest = torch.maximum(_highest_so_far(log_k), shift.mT)
    queries = log_q - (log_q + highest).amax(-1, keepdim=True).detach()
    y = torch.exp(queries + shift.mT) @ sums
    y = y + torch.exp(queries + log_k).sum(-1, keepdim=True) * values
    half = _CHUNK // 2
    while half:
        left, right = _halves(log_k, half)[0], _halves(queries, half)[1]
        most = left.detach().amax(-2, keepdim=True)
        sim = torch.exp(right + most) @ torch.exp(left - most).mT
        block = sim @ _halves(values, half)[0]
        y = y + torch.stack([torch.zeros_like(block), block], -3).flatten(-4, -2)
        half //= 2
    return y


def _highest_so_far(x: Tensor) -> Tensor:
    """The largest of each position and those before it in its chunk; ONNX has no cummax."""
    x = x.detach()
    step = 1
    while step < _CHUNK:
        earlier = torch.nn.functional.pad(x[..., :-step, :], (0, 0, step, 0), value=HIDDEN)
        x = torch.maximum(x, earlier)
        step *= 2
    return x


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    left, right = x.unflatten(-2, (_CHUNK // (2 * half), 2, half)).unbind(-3)
    return left, right


def _earlier_chunks(log_k: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Σ exp(k - shift)·values over all chunks before each, by a scan of log2(chunks) steps."""
    shift = log_k.detach().amax(-2).unsqueeze(-1)  # (..., chunks, features, 1)
    sums = torch.exp(log_k - shift.mT).mT @ values
    if exporting():  # for any number of chunks, and so of steps
        return _all_earlier(sums, shift)
    sums, shift = _delay(sums, 1, 0.0), _delay(shift, 1, HIDDEN)
    step = 1
    while step < sums.shape[-3]:
        sums, shift = add_shifted(sums, shift, _delay(sums, step, 0.0), _delay(shift, step, HIDDEN))
        step *= 2
    return sums, shift


def _all_earlier(sums: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over all chunks before each, by a matrix of all chunks."""
    order = torch.arange(sums.shape[-3], device=sums.device)
    later = (order[:, None] <= order)[:, :, None, None]
    each = shift.unsqueeze(-4).masked_fill(later, HIDDEN)  # (..., chunks, chunks, features, 1)
    highest = each.amax(-3)
    weights = torch.exp(each - highest.unsqueeze(-3)).masked_fill(later, 0).squeeze(-1)
    return torch.einsum("...cjf,...jfd->...cfd", weights, sums), highest


def _delay(x: Tensor, chunks: int, fill: float) -> Tensor:
    return torch.nn.functional.pad(x[..., :-chunks, :, :], (0, 0, 0, 0, chunks, 0), value=fill)


def add_shifted(a: Tensor, shift_a: Tensor, b: Tensor, shift_b: Tensor) -> tuple[Tensor, Tensor]:
    """a·exp(shift_a) + b·exp(shift_b), again as sums and their shift."""
    shift = torch.maximum(shift_a, shift_b)
    return a * torch.exp(shift_a - shift) + b * torch.exp(shift_b - shift), shift
