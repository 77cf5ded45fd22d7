"""What the attention masks of Transformers say about the keys, and which of them biases refuse."""

import torch
from torch import Tensor

_HIDDEN = -1e4  # a mask that adds so little to a logit, or less, hides the key


def refuse_packed(
    implementation: str, query: Tensor, attention_mask: Tensor | None, settings: dict
) -> None:
    """Refuse rows that hold several sequences.

    Flash kernels see that by the positions of a batch of one; the masks of the others show it.
    """
    sentence = "biases do not go with sequences packed into one row; pad them instead"
    if settings.get("cu_seq_lens_q") is not None or settings.get("cache") is not None:
        raise ValueError(sentence)
    positions = settings.get("position_ids")
    flash = attention_mask is None and implementation.startswith("flash")
    if flash and positions is not None and len(query) == 1 < query.shape[2]:
        _require((positions.diff() == 1).all(), sentence)


def kept_keys(mask: Tensor, causal: bool) -> Tensor:
    """Which keys are no padding, (batch, N), of a mask (batch, N) or (batch, 1, M, N).

    The last query sees all of them. One mask goes to all layers: it is checked once.
    """
    if mask.dim() == 2:
        return mask.bool()
    last = mask[:, 0, -1]
    keep = last if last.dtype == torch.bool else last == 0
    if torch.compiler.is_compiling() or mask.is_inference():
        _check_visible(mask, keep, causal)
        return keep
    if getattr(mask, "_fastrpb_checked", None) != (mask._version, causal):  # or filled anew
        _check_visible(mask, keep, causal)
        mask._fastrpb_checked = mask._version, causal  # pyright: ignore[reportAttributeAccessIssue]
    return keep


def _check_visible(mask: Tensor, keep: Tensor, causal: bool) -> None:
    is_bool = mask.dtype == torch.bool
    visible, hidden = (mask, ~mask) if is_bool else (mask == 0, mask <= _HIDDEN)
    expected = keep[:, None, None]
    if causal:
        queries, n = mask.shape[-2:]
        order = torch.arange(n, device=mask.device)
        expected = expected & (order <= order[:queries, None] + keys_before(mask))
    # Some versions let queries that are padding see everything, since NaN comes of nothing.
    padding = ~expected.any(-1) & visible.all(-1)
    _require(
        (((visible == expected).all(-1) | padding) & (visible | hidden).all(-1)).all(),
        "biases support padding and causal masks only, but this attention mask hides other keys "
        "too, or weighs them (packed sequences, a sliding window or a mask of your own)",
    )


def keys_before(mask: Tensor) -> int | Tensor:
    """How many keys stand before the first query, of a mask (batch, 1, M, N).

    The last key that a query sees is at its own place, if that is no padding. A static cache has
    empty slots after the last query.
    """
    queries, n = mask.shape[-2:]
    if queries == n:
        return 0
    visible = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    order = torch.arange(n, device=mask.device)
    before = (visible * order).amax(-1) - order[:queries]
    # Some versions let queries that are padding see everything.
    padding = visible.all(-1) & (order[:queries] < queries - 1)
    return before.masked_fill(padding, 0).amax().clamp(min=0)


def _require(condition: Tensor, sentence: str) -> None:
    """Raise where it does not hold; in a compiled program, when that runs: on a GPU it ends it."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, sentence)  # pyright: ignore[reportPrivateImportUsage]
    elif not condition:
        raise ValueError(sentence)
