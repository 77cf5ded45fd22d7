"""Norms of tokens (batch, length, dim) that know which of them are padding."""

import torch
from torch import Tensor, nn

from fastrpb.checks import compute_dtype


class LayerNorm(nn.LayerNorm):
    """Each token by itself: what the others are does not matter."""

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(input)


class BatchNorm(nn.BatchNorm1d):
    """Each channel by its mean and variance over all kept tokens of the batch.

    Unlike LayerNorm it keeps how large a token is next to the others, such as bright and dark.
    Evaluated, it uses the averages of training. Several processes, and the parts of a batch that is
    accumulated, have statistics each of its own; a batch that gradient checkpointing computes again
    counts twice in the averages.

    >>> x = torch.randn(4, 100, 8) * 5 + 3
    >>> y = BatchNorm(8)(x)
    >>> bool(y.mean((0, 1)).abs().max() < 1e-5), bool((y.std((0, 1)) - 1).abs().max() < 0.01)
    (True, True)
    """

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None or not self.training:
            return super().forward(input.flatten(0, 1)).view_as(input)
        kept = mask.unsqueeze(-1)
        x = input.to(compute_dtype(input)).masked_fill(~kept, 0)  # 0 times NaN would be NaN
        count = kept.sum().clamp(min=1)
        mean = x.sum((0, 1)) / count
        variance = ((x - mean).square() * kept).sum((0, 1)) / count
        self._track(mean, variance * count / (count - 1).clamp(min=1))
        y = (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias
        return y.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Move the averages as torch does where nothing is masked."""
        self.num_batches_tracked.add_(1)  # pyright: ignore[reportOptionalMemberAccess]
        for average, x in ((self.running_mean, mean), (self.running_var, variance)):
            # As data: torch may have kept them for the gradients of a batch without a mask.
            average.data.lerp_(x.to(average.dtype), self.momentum)  # pyright: ignore


class PooledNorm(nn.BatchNorm1d):
    """Each channel of one vector a sequence (batch, dim) by its mean and variance over the batch.

    A batch of one, such as the rest of an epoch, has no variance: it uses the averages so far.

    >>> norm = PooledNorm(8)
    >>> norm(torch.randn(100, 8)).std(0, correction=0).allclose(torch.ones(8), atol=1e-3)
    True
    >>> norm(torch.randn(1, 8)).shape
    torch.Size([1, 8])
    """

    def forward(self, input: Tensor) -> Tensor:
        # Not by len(): a batch of any size is exported too, and that would fix it.
        if not self.training or input.shape[0] > 1:
            return super().forward(input)
        averages = self.running_mean, self.running_var
        return nn.functional.batch_norm(input, *averages, self.weight, self.bias, eps=self.eps)
