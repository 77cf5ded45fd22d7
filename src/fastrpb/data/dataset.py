"""What a task is and how its examples are held: tokens in one array, splits as indices into it."""

import hashlib
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path

import torch
from torch import Tensor


class DataError(ValueError):
    """A file, a folder or an option is not what it must be: one sentence that says what to do."""


@dataclass(frozen=True)
class Sequences:
    """N sequences end to end: sequence i is `tokens[starts[i] : starts[i] + lengths[i]]`.

    One flat uint8 array, memory-mapped when it comes from the cache, so that short sequences cost
    no padding and a cut one costs no copy.

    >>> texts = Sequences.pack([b"a", b"bcd"])
    >>> texts[1], texts.clip(2)[1]
    (tensor([ 98,  99, 100], dtype=torch.uint8), tensor([98, 99], dtype=torch.uint8))
    """

    tokens: Tensor
    starts: Tensor
    lengths: Tensor

    @classmethod
    def pack(cls, items: Sequence[bytes]) -> "Sequences":
        lengths = torch.tensor([len(item) for item in items], dtype=torch.int64)
        tokens = torch.frombuffer(bytearray(b"".join(items)), dtype=torch.uint8)
        return cls(tokens, lengths.cumsum(0) - lengths, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Tensor:
        start = int(self.starts[i])
        return self.tokens[start : start + int(self.lengths[i])]

    def clip(self, max_length: int) -> "Sequences":
        return replace(self, lengths=self.lengths.clamp(max=max_length))

    def checksums(self, rows: Tensor) -> Tensor:
        """A number for the content of each of these sequences."""
        tokens = self.tokens.numpy()
        places = zip(self.starts[rows].tolist(), self.lengths[rows].tolist(), strict=True)
        codes = [zlib.crc32(tokens[start : start + length].data) for start, length in places]
        return torch.tensor(codes, dtype=torch.int64)

    def padded(self, index: Tensor, length: int, pad_id: int) -> tuple[Tensor, Tensor]:
        """The sequences of `index` (...), padded to (..., length), and the mask of real tokens."""
        lengths = self.lengths[index]
        tokens = torch.full((*index.shape, length), pad_id, dtype=torch.uint8)
        # Row by row: a copy of bytes, where a gather would make eight bytes of index for each.
        rows = zip(self.starts[index].flatten().tolist(), lengths.flatten().tolist(), strict=True)
        for row, (start, size) in zip(tokens.view(-1, length), rows, strict=True):
            row[:size] = self.tokens[start : start + size]
        return tokens, torch.arange(length) < lengths.unsqueeze(-1)


@dataclass(frozen=True)
class Split:
    """Examples: `index` (n, 1), or (n, 2) for pairs, says which sequences; `labels` (n,)."""

    sequences: Sequences
    index: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[tuple[Tensor, ...], int]:
        """The sequences of example i, one or two, and its label."""
        return tuple(self.sequences[int(j)] for j in self.index[i]), int(self.labels[i])

    @property
    def lengths(self) -> Tensor:
        """(n, 1), or (n, 2) for pairs."""
        return self.sequences.lengths[self.index]

    @property
    def padded(self) -> float:
        """The share of sequences that are shorter than the longest."""
        lengths = self.lengths
        return (lengths < lengths.max()).double().mean().item()

    def take(self, rows: Tensor) -> "Split":
        return replace(self, index=self.index[rows], labels=self.labels[rows])


@dataclass(frozen=True)
class Task:
    """The facts of a task, known without its data.

    Attributes:
        name: as in `fastrpb.data.load(name)`.
        classes: their names; a label is an index into them.
        vocabulary: tokens are 0..vocabulary-1, `pad_id` among them.
        max_length: of one sequence; an image always has this length.
        tokenize: a new input as tokens: the path of an image, a text, a ListOps expression.
        show: tokens as a person reads them: a drawing, a text, an expression.
        pad_id: stands where the mask is False.
        image_shape: (height, width), or None where the input is no image.
        pair: an example is two sequences.
        cuts: a sequence over `max_length` is cut; if False it is refused, since the rest would be
            another example.
    """

    name: str
    classes: tuple[str, ...]
    vocabulary: int
    max_length: int
    tokenize: Callable[[str], bytes]
    show: Callable[[Tensor], str]
    pad_id: int = 0
    image_shape: tuple[int, int] | None = None
    pair: bool = False
    cuts: bool = False

    def encode(self, item: str) -> Tensor:
        """One new input as (length,) uint8 tokens, exactly as the splits hold theirs."""
        return self.fit(Sequences.pack([self.tokenize(item)]))[0]

    def fit(self, sequences: Sequences) -> Sequences:
        """The sequences cut to `max_length`, or refused where a cut would change their meaning."""
        longest = int(sequences.lengths.max())
        if longest > self.max_length and not self.cuts:
            raise DataError(
                f"{self.name}: an input has {longest} tokens, more than max_length="
                f"{self.max_length}, and cutting it would change its meaning: "
                f"that takes data and a model of max_length={longest} or more"
            )
        return sequences.clip(self.max_length)


@dataclass(frozen=True)
class Dataset:
    """A task with its three splits."""

    task: Task
    train: Split
    validation: Split
    test: Split

    def digest(self) -> str:
        """A hash of all examples in their order, from whatever files they came."""
        result = hashlib.blake2b(digest_size=8)
        for split in (self.train, self.validation, self.test):
            rows, places = split.index.unique(return_inverse=True)
            codes = split.sequences.checksums(rows)[places]
            for array in (codes, split.lengths, split.labels):
                result.update(f"{tuple(array.shape)}".encode())
                result.update(array.contiguous().numpy().data)
        return result.hexdigest()


def corpus(parts: Mapping[str, tuple[Sequence[bytes], Sequence[int]]]) -> dict[str, Split]:
    """Splits over one shared array, from the sequences and labels of each.

    >>> splits = corpus({"train": ([b"ab", b"c"], [0, 1]), "test": ([b"d"], [1])})
    >>> splits["test"][0]
    ((tensor([100], dtype=torch.uint8),), 1)
    """
    sequences = Sequences.pack([item for items, _ in parts.values() for item in items])
    splits, first = {}, 0
    for name, (items, labels) in parts.items():
        index = torch.arange(first, first + len(items)).unsqueeze(1)
        splits[name] = Split(sequences, index, torch.tensor(labels, dtype=torch.int64))
        first += len(items)
    return splits


def stratified(labels: Tensor, fractions: Sequence[float]) -> list[Tensor]:
    """Rows cut into parts that each hold their fraction of every class, and a last part: the rest.

    The same on every machine and version: `random.Random(0).random()` is the one generator whose
    sequence Python promises to keep.

    >>> labels = torch.tensor([0, 1] * 10)
    >>> held_out, rest = stratified(labels, [0.1])
    >>> labels[held_out].tolist(), len(rest)
    ([0, 1], 18)
    """
    generator = random.Random(0)
    numbers = [generator.random() for _ in range(len(labels))]
    shuffled = torch.tensor(numbers, dtype=torch.float64).argsort()
    parts: list[list[Tensor]] = [[] for _ in range(len(fractions) + 1)]
    for label in labels.unique():
        rows = shuffled[labels[shuffled] == label]
        sizes = [round(fraction * len(rows)) for fraction in fractions]
        for part, piece in zip(parts, rows.split([*sizes, len(rows) - sum(sizes)]), strict=True):
            part.append(piece)
    return [torch.cat(part).sort().values for part in parts]


def check_labels(labels: Sequence[float], classes: int, path: Path) -> None:
    if not labels:
        raise DataError(f"{path} has no examples")
    for row, label in enumerate(labels):
        if not isinstance(label, Real) or label not in range(classes):
            raise DataError(
                f"{path}: row {row} has the label {label!r}, but labels are 0 to {classes - 1}"
            )
