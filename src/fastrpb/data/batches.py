"""Batches in a seeded order that can be saved, restored and shared between processes."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastrpb.checks import check_size
from fastrpb.data.dataset import DataError, Split


class Batch(NamedTuple):
    """Some examples, padded to a common length L, at least that of the longest.

    Attributes:
        tokens: (B, L) uint8, or (B, 2, L) for pairs; `tokens.long()` on the device embeds.
        mask: as tokens, bool; True where a token is real.
        labels: (B,) int64.
        rows: (B,) int64, the places of the examples in their split.
    """

    tokens: Tensor
    mask: Tensor
    labels: Tensor
    rows: Tensor


class Batches:
    """The batches of a split, epoch after epoch: to iterate gives the rest of the current epoch.

    An epoch uses every example once. Its order is a function of (seed, epoch). Examples of like
    length go together: `pool` batches' worth of the shuffled examples are sorted by length and cut
    into batches, and the batches are shuffled. Padding is small, and the batches stay random.

    Args:
        split: the examples.
        batch_size: of the global batch; each process takes every `world_size`-th example of it.
        pad_id: of the task.
        seed: of the shuffling.
        shuffle: False keeps the order of the split but for the sorting within a pool.
        drop_last: leave out the examples that do not fill a batch: others in every epoch.
        pool: how many batches are sorted together; 1 turns the sorting off.
        multiple: lengths L are multiples of it, or the length of the longest example of all.
        rank, world_size: of this process. All have the same number of batches, of the same length
            L; without `drop_last` the last can be empty for some.

    >>> from fastrpb.data import load
    >>> data = load("digits")
    >>> batches = Batches(data.train, 32, pad_id=0, seed=1)
    >>> first = next(iter(batches))
    >>> first.tokens.shape, batches.state_dict()["batch"]
    (torch.Size([32, 64]), 1)
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        pad_id: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        pool: int = 64,
        multiple: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_size("batch_size", batch_size)
        check_size("pool", pool)
        check_size("multiple", multiple)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be from 0 to world_size-1 = {world_size - 1}")
        if batch_size % world_size:
            raise ValueError(
                f"batch_size={batch_size} must be a multiple of the {world_size} processes"
            )
        if not 0 <= pad_id <= 255:
            raise ValueError(f"pad_id={pad_id} must be a token, from 0 to 255")
        if not len(split):
            raise DataError("the split has no examples, so there are no batches")
        if drop_last and len(split) < batch_size:
            raise DataError(
                f"{len(split)} examples do not fill one batch of {batch_size}; "
                "choose a smaller batch_size"
            )
        self.split, self.pad_id = split, pad_id
        self.batch_size, self.seed, self.pool = batch_size, seed, pool
        self.shuffle, self.drop_last = shuffle, drop_last
        self.rank, self.world_size = rank, world_size
        self.epoch = self.batch = 0
        self._longest = split.lengths.amax(1)
        self.multiple, self._most = multiple, int(self._longest.max())

    def __len__(self) -> int:
        """The batches of an epoch."""
        whole, rest = divmod(len(self.split), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        for rows in self._order()[self.batch :]:
            # Moved on before the batch is used: a state saved after its step starts at the next.
            self.batch += 1
            if self.batch == len(self):
                self.epoch, self.batch = self.epoch + 1, 0
            yield self._collate(rows)

    def state_dict(self) -> dict[str, int | bool]:
        """The position, and what the order depends on."""
        return {"epoch": self.epoch, "batch": self.batch, **self._identity()}

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Go to a saved position; refused where the order would be another one."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise DataError(
                    f"the saved position belongs to {name}={state.get(name)}, these batches have "
                    f"{name}={value}: their order differs"
                )
        epoch, batch = state.get("epoch", -1), state.get("batch", -1)
        if epoch < 0 or not 0 <= batch < len(self):
            raise DataError(
                f"the saved position, batch {batch} of epoch {epoch}, is none of an epoch of "
                f"{len(self)} batches"
            )
        self.epoch, self.batch = epoch, batch

    def _identity(self) -> dict[str, int | bool]:
        names = ("batch_size", "seed", "shuffle", "drop_last", "pool")
        return {"examples": len(self.split), **{name: getattr(self, name) for name in names}}

    def _order(self) -> list[Tensor]:
        """The rows of each global batch of the present epoch."""
        # Multiplied, so that no two pairs of small numbers meet.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        examples = len(self.split)
        rows = (
            torch.randperm(examples, generator=generator)
            if self.shuffle
            else torch.arange(examples)
        )
        rows = rows[: len(self) * self.batch_size]
        pools = rows.split(self.batch_size * self.pool)
        batches = [
            batch
            for pool in pools
            for batch in pool[self._longest[pool].argsort(stable=True)].split(self.batch_size)
        ]
        if self.shuffle:
            batches = [batches[i] for i in torch.randperm(len(batches), generator=generator)]
        return batches

    def _collate(self, rows: Tensor) -> Batch:
        longest = int(self._longest[rows].max())
        length = min(-(-longest // self.multiple) * self.multiple, self._most)
        rows = rows[self.rank :: self.world_size]
        index = self.split.index[rows]
        if index.shape[1] == 1:
            index = index.squeeze(1)
        tokens, mask = self.split.sequences.padded(index, length, self.pad_id)
        return Batch(tokens, mask, self.split.labels[rows], rows)
