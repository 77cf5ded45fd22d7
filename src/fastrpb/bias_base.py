"""What the biases over sequences and over images share: the learned w, its prefix and mask."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from fastrpb.checks import (
    check_flag,
    check_floating,
    check_mask,
    check_number,
    check_scales,
    check_size,
    kept,
)
from fastrpb.init import Copies, Init, decay, local, normal

_LEAST = 0.1  # where the envelope is less, first weights are effectively less than init says


class Bias(nn.Module, ABC):
    """A learned `w`, and W·v by it, zero for the prefix; subclasses say what W is."""

    w: nn.Parameter

    def __init__(
        self,
        num_heads: int,
        prefix: int,
        init: Init,
        envelope: tuple[float, float] | None,
        dropout: float,
        threshold: float,
        symmetric: bool,
    ):
        super().__init__()
        check_size("num_heads", num_heads)
        check_size("prefix", prefix, least=0)
        if not callable(init):
            raise TypeError(f"init must be a function such as fastrpb.init.zero, got {init!r}")
        if init in (local, normal):
            raise TypeError(f"init={init.__name__} makes an init: pass {init.__name__}()")
        check_flag("symmetric", symmetric)
        if envelope is not None:
            check_scales("the scales of envelope", envelope)
        check_number("dropout", dropout)
        check_number("threshold", threshold)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} must be from 0 to below 1")
        if not 0 <= threshold <= 1e9:
            raise ValueError(f"threshold={threshold} must be from 0 to 1e9")
        self.num_heads = num_heads
        self.prefix = prefix
        self.init = init
        self.envelope = None if envelope is None else tuple(envelope)
        self.dropout = dropout
        self.threshold = threshold
        self.symmetric = symmetric

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw `w` anew, so that its effective weights are those of `init`, but for far ones.

        Those would have to be huge under an envelope, and no rate could move them.
        """
        distance, tracked = self._distance(), not self.w.is_inference()
        before = self.w._version if tracked else None
        try:
            self.init(self.w, distance, self._copies())
        except TypeError as error:  # such as those of torch.nn.init, which take w alone
            raise TypeError(
                f"init must be a function of (w, distance, copies), see fastrpb.init: {error}"
            ) from error
        if tracked and self.w._version == before:
            raise ValueError(
                "init did not fill w: it must do so in place, as fastrpb.init.zero does, and not "
                "through w.data"
            )
        if self.envelope is not None:
            self.w.div_(decay(self.num_heads, distance, *self.envelope).clamp(min=_LEAST))

    def _effective(self, w: Tensor, distance: Tensor | None) -> Tensor:
        """The effective ones of these weights: under the envelope, past the threshold, not dropped.

        `distance` is how far they reach; it is needed for an envelope alone.
        """
        if self.envelope is not None and distance is not None:
            w = (w * decay(self.num_heads, distance, *self.envelope)).to(w.dtype)
        if self.threshold:
            w = nn.functional.softshrink(w, self.threshold)
        return nn.functional.dropout(w, self.dropout) if self.dropout and self.training else w

    def _settings(self) -> dict[str, Any]:
        names = ("symmetric", "prefix", "envelope", "dropout", "threshold")
        return {name: getattr(self, name) for name in names}

    def _shown_settings(self) -> str:
        return "".join(f", {name}={value}" for name, value in self._settings().items() if value)

    @abstractmethod
    def _distances(self) -> list[range]:
        """The distances that `w` stores, by axis."""

    def _give_to(self, new: "Bias") -> None:
        """The init, the weights of common distances (others are zero), and whether it trains."""
        new.init = self.init
        new.train(self.training)
        new.w.requires_grad_(self.w.requires_grad)
        mine, its = self.w.detach(), new.w.detach()
        axes = zip(self._distances(), new._distances(), strict=True)
        for axis, (here, there) in enumerate(axes, 1):
            first = max(here.start, there.start)
            count = min(here.stop, there.stop) - first
            mine = mine.narrow(axis, first - here.start, count)
            its = its.narrow(axis, first - there.start, count)
        its.copy_(mine)

    @abstractmethod
    def _distance(self) -> Tensor:
        """How far every stored weight reaches, in tokens or pixels."""

    def _copies(self) -> Copies:
        """How often a weight stands in a row of W."""
        if not self.symmetric:
            return 1
        copies = torch.full(self.w.shape[1:], 2.0).to(self.w)
        copies[..., 0] = 1
        return copies

    def _both_sides(self, w: Tensor) -> Tensor:
        """The weights of all distances of the last axis, if one half is stored for both."""
        return torch.cat([w[..., 1:].flip(-1), w], dim=-1) if self.symmetric else w

    @abstractmethod
    def _dense(self, length: int) -> Tensor:
        """W over `length` tokens after the prefix."""

    @abstractmethod
    def _multiply(self, v: Tensor) -> Tensor:
        """W·v, zero for the prefix."""

    @abstractmethod
    def _mismatch(self, saved: torch.Size) -> str:
        """Say what weights of the shape `saved` belong to, and how to bring them here."""

    def forward(self, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """W·v, a term for the output of any attention.

        Args:
            v: (batch, heads, length, dim), or without batch. Prefix tokens come first.
            mask: (batch, length) bool, True = keep: the others (padding) contribute nothing.

        Returns:
            (batch, heads, length, dim) in the dtype of v. Rows of prefix tokens are zero.
        """
        self._check(v, mask)
        if v.shape[-2] <= self.prefix:
            raise ValueError(f"v has {v.shape[-2]} tokens, none after the prefix of {self.prefix}")
        return self._multiply(kept(v, mask))

    def matrix(self, length: int) -> Tensor:
        """W for a sequence of `length` tokens, prefix included: `matrix(length) @ v == forward(v)`.

        Returns (heads, length, length): for plots and tests. While training with dropout, every
        call drops other weights.
        """
        check_size("length", length)
        if length <= self.prefix:
            raise ValueError(f"length {length} has no tokens after the prefix of {self.prefix}")
        return nn.functional.pad(self._dense(length - self.prefix), (self.prefix, 0) * 2)

    def _check(self, v: Tensor, mask: Tensor | None = None) -> None:
        check_floating("v", v)
        if v.dim() < 3 or v.shape[-3] != self.num_heads:
            raise ValueError(
                f"v must be (batch, {self.num_heads} heads, length, dim), got {tuple(v.shape)}"
            )
        check_mask(mask, (*v.shape[:-3], v.shape[-2]))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # Beside the weights, as torch keeps its versions: causal and symmetric ones have one shape.
        if hasattr(destination, "_metadata"):
            destination._metadata.setdefault(prefix[:-1], {})["distances"] = self._bounds()

    def _bounds(self) -> list[list[int]]:
        return [[axis[0], axis[-1]] for axis in self._distances()]

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        saved = state_dict.get(prefix + "w")
        if saved is not None and saved.shape != self.w.shape:
            error_msgs.append(f"{prefix}w: {self._mismatch(saved.shape)}")
            return
        mine, its = self._bounds(), local_metadata.get("distances")
        # The tensor may have been replaced since, as by one that was resized.
        described = its and [b - a + 1 for a, b in its] == [*self.w.shape[1:]]
        if saved is not None and described and its != mine:
            theirs, ours = (" by ".join(f"{a}..{b}" for a, b in x) for x in (its, mine))
            error_msgs.append(
                f"{prefix}w: the saved weights are of the distances {theirs}, those of this bias "
                f"are {ours}; make it as that one was"
            )
            return
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
