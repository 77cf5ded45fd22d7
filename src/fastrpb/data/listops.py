"""listops: LRA ListOps, nested list operations with their brackets; what is the value?

    [MAX 4 3 [MIN 2 3 ] 1 [MED 1 5 8 9 2 ] ]   is 5

The grammar, from the root at depth 1: a node is an operator with probability 1/4 while its depth is
below 10, and a digit otherwise; an operator (MIN, MAX, MED, SM, equally likely) has 2 to 10
arguments. MED is the integer part of the median, SM the sum modulo 10. Expressions of 501 to 1999
tokens are kept, each once. A token is a digit, an operator with its bracket, or the closing one.
"""

import hashlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from torch import Tensor

from fastrpb.data.cache import Files, staging
from fastrpb.data.dataset import DataError, Split, Task, check_labels, corpus
from fastrpb.data.sources import Layout, Source, quote
from fastrpb.processes import ctrl_c_ignored, end_with_parent

# The place of a word is its token; 0 is the padding.
WORDS = ("", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
DIGIT, MIN, MAX, MED, SM, CLOSE = 1, 11, 12, 13, 14, 15
FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
FOLDERS = ("listops", "listops-1000")  # in a folder of data, what is looked for first
SIZES = (96_000, 2_000, 2_000)

_HEADER = b"Source\tTarget"
_TOKENS = {word.encode(): token for token, word in enumerate(WORDS) if word}
_ROOTS = 20_000  # a chunk: its arrays stay in the cache of the processor


def tokenize(source: bytes, where: object = "the input") -> bytes:
    """The tokens of an expression, checked; LRA's parentheses, which repeat the brackets, go.

    >>> list(tokenize(b"[MAX 4 [MIN 2 3 ] ]"))
    [12, 5, 11, 3, 4, 15, 15]
    >>> tokenize(b"( ( ( [MAX 4 ) 3 ) ] )") == tokenize(b"[MAX 4 3 ]")
    True
    """
    try:
        tokens = bytes(map(_TOKENS.__getitem__, source.translate(None, b"()").split()))
    except KeyError as error:
        raise DataError(
            f"{where}: {quote(error.args[0])} is not a word of ListOps; they are "
            f"{' '.join(WORDS[1:])}, with spaces between them"
        ) from None
    codes = np.frombuffer(tokens, dtype=np.uint8)
    depth = np.cumsum((codes >= MIN) - 2 * (codes == CLOSE))
    if not tokens or depth[-1] != 0 or (depth[:-1] <= 0).any():
        raise DataError(f"{where}: the brackets do not close one expression")
    if re.search(rb"[\x0b-\x0e]\x0f", tokens):
        raise DataError(f"{where}: an operator has no arguments")
    return tokens


def _show(tokens: Tensor) -> str:
    return " ".join(WORDS[token] for token in tokens.tolist())


TASK = Task(
    name="listops",
    classes=tuple("0123456789"),
    vocabulary=len(WORDS),
    max_length=2000,
    tokenize=lambda text: tokenize(text.strip().encode()),
    show=_show,
)


def _from_tsv(files: Files) -> dict[str, Split]:
    parts: dict[str, tuple[list[bytes], list[int]]] = {}
    for split, (path,) in files.items():
        header, *lines = path.read_bytes().splitlines() or [b""]
        if header != _HEADER:
            raise DataError(f"{path} begins with {quote(header)}, not with {quote(_HEADER)}")
        items, labels = parts[split] = [], []
        for number, line in enumerate(lines, start=2):
            source, _, target = line.partition(b"\t")
            if not target.isdigit():
                raise DataError(f"{path}, line {number}: no tab and number at its end")
            items.append(tokenize(source, f"{path}, line {number}"))
            labels.append(int(target))
        check_labels(labels, len(TASK.classes), path)
    return corpus(parts)


read = Source(
    "listops",
    folders=FOLDERS,
    layouts=[Layout({split: (name,) for split, name in FILES.items()}, _from_tsv)],
    get="`fastrpb data listops --out DIR` makes them; then pass --data-dir DIR",
).read


@dataclass(frozen=True)
class Grammar:
    """LRA's numbers: `min_length < length < max_length`, in tokens with brackets."""

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_arguments: int = 10
    operator_probability: float = 0.25


def generate(
    out: Path,
    seed: int = 0,
    sizes: Sequence[int] = SIZES,
    grammar: Grammar = Grammar(),  # noqa: B008, frozen
    workers: int | None = None,
) -> None:
    """Writes LRA's three files into `out`: `sizes` distinct expressions with their values.

    Chunk i is a function of (seed, i) alone and chunks are used in order, so the files depend on
    the seed and not on `workers`. All three appear when the last one is whole. Processes are
    started afresh: a script that calls this needs the usual `if __name__ == "__main__"`.
    """
    if min(sizes) < 1 or len(sizes) != len(FILES):
        raise DataError(f"sizes={tuple(sizes)} must be three numbers of at least 1")
    if not 0 <= seed < 2**32:
        raise DataError(f"seed={seed} must be from 0 to {2**32 - 1}")
    _refuse_existing(out)
    for inside in FOLDERS:
        if any((out / inside / name).exists() for name in FILES.values()):
            raise DataError(
                f"{out} has files in {inside} already, which would be read in place of new ones "
                "beside it; remove them or choose another folder by --out"
            )
    elsewhere = "choose another folder with --out"
    workers = workers or os.cpu_count() or 1
    chunk = partial(_chunk, seed, grammar)
    with staging(out, elsewhere) as temporary, _in_order(chunk, workers) as chunks:
        lines = _distinct(chunks)
        for name, size in zip(FILES.values(), sizes, strict=True):
            with (temporary / name).open("wb") as file:
                file.write(_HEADER + b"\n")
                file.writelines(islice(lines, size))
        _claim(out)
        for name in FILES.values():
            os.replace(temporary / name, out / name)


def _claim(out: Path) -> None:
    """Of several processes that generate into one folder, the first alone moves its files there."""
    try:
        (out / FILES["train"]).touch(exist_ok=False)
    except FileExistsError:
        _refuse_existing(out)


def _refuse_existing(out: Path) -> None:
    there = ", ".join(name for name in FILES.values() if (out / name).exists())
    if there:
        raise DataError(f"{out} has {there} already; remove them or choose another folder by --out")


@contextmanager
def _in_order(
    function: Callable[[int], list[bytes]], workers: int
) -> Iterator[Iterator[list[bytes]]]:
    """function(0), function(1), ... in that order, worked out ahead by `workers` processes."""
    if workers == 1:
        yield map(function, count())
        return
    # Spawned: a forked process would inherit the threads of torch in an unknown state.
    pool = ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=end_with_parent
    )
    with ctrl_c_ignored():
        pending = deque(pool.submit(function, i) for i in range(2 * workers))

    def results() -> Iterator[list[bytes]]:
        for i in count(len(pending)):
            yield pending.popleft().result()
            pending.append(pool.submit(function, i))

    try:
        yield results()
    finally:
        with ctrl_c_ignored():  # a second one would cut off what ends the processes
            pool.shutdown(cancel_futures=True)


def _distinct(chunks: Iterator[list[bytes]]) -> Iterator[bytes]:
    seen: set[bytes] = set()
    barren = 0
    for chunk in chunks:
        before = len(seen)
        for line in chunk:
            key = hashlib.blake2b(line, digest_size=16).digest()
            if key not in seen:
                seen.add(key)
                yield line
        barren = 0 if len(seen) > before else barren + 1
        if barren == 10:
            raise DataError(
                f"only {before} distinct expressions came out, and no new one among the last "
                f"{10 * _ROOTS}; ask for fewer"
            )


def _chunk(seed: int, grammar: Grammar, number: int) -> list[bytes]:
    """The lines of a TSV file that chunk `number` holds."""
    # RandomState: what it gives for a seed is promised never to change.
    trees = _grow(np.random.RandomState([seed, number]), grammar)
    tokens, lengths, values = _flatten(trees)
    words = [word.encode() for word in WORDS]
    ends = np.cumsum(lengths)
    return [
        b"%b\t%d\n" % (b" ".join(map(words.__getitem__, tokens[start:end])), value)
        for start, end, value in zip(ends - lengths, ends, values, strict=True)
    ]


@dataclass
class _Level:
    """The nodes of one depth, left to right, of all trees at once.

    Children of one node lie together in the next level, in the order of their parents; `first` is
    the place of the first child of each operator.
    """

    tree: np.ndarray  # of each node
    token: np.ndarray  # a digit or an operator
    arguments: np.ndarray  # their number, for the operators only

    @property
    def operators(self) -> np.ndarray:
        return self.token >= MIN

    @property
    def first(self) -> np.ndarray:
        return np.cumsum(self.arguments) - self.arguments

    def keep(self, trees: np.ndarray) -> "_Level":
        nodes = trees[self.tree]
        return _Level(self.tree[nodes], self.token[nodes], self.arguments[nodes[self.operators]])


def _grow(generator: np.random.RandomState, grammar: Grammar) -> list[_Level]:
    """Random trees of the wanted lengths, depth by depth."""
    levels, tree, lengths = [], np.arange(_ROOTS), np.zeros(_ROOTS, dtype=np.int64)
    for depth in range(1, grammar.max_depth + 1):
        chance = grammar.operator_probability if depth < grammar.max_depth else 0
        operators = generator.random_sample(len(tree)) < chance
        number = operators.sum()
        token = generator.randint(DIGIT, DIGIT + 10, len(tree), dtype=np.uint8)
        token[operators] = generator.randint(MIN, CLOSE, number, dtype=np.uint8)
        arguments = generator.randint(2, grammar.max_arguments + 1, number)
        levels.append(_Level(tree, token, arguments))
        # An operator is two tokens, with its closing bracket.
        lengths += np.bincount(tree, 1 + operators, minlength=_ROOTS).astype(np.int64)
        tree = np.repeat(tree[operators], arguments)
        tree = tree[lengths[tree] < grammar.max_length]  # what is too long already need not grow
    wanted = (grammar.min_length < lengths) & (lengths < grammar.max_length)
    return [level.keep(wanted) for level in levels]


def _flatten(levels: list[_Level]) -> tuple[bytes, np.ndarray, np.ndarray]:
    """The tokens of all trees end to end, and the length and the value of each tree."""
    sizes, values = _sizes_and_values(levels)
    place = np.cumsum(sizes[0]) - sizes[0]
    tokens = np.empty(sizes[0].sum(), dtype=np.uint8)
    for level, size, below in zip(levels, sizes, [*sizes[1:], None], strict=True):
        tokens[place] = level.token
        tokens[(place + size - 1)[level.operators]] = CLOSE
        if below is not None:
            before = np.cumsum(below) - below
            inner = place[level.operators] + 1 - before[level.first]
            place = np.repeat(inner, level.arguments) + before
    return tokens.tobytes(), sizes[0], values


def _sizes_and_values(levels: list[_Level]) -> tuple[list[np.ndarray], np.ndarray]:
    """The tokens under each node, level by level, and the values of the roots; from the leaves."""
    sizes: list[np.ndarray] = []
    size = value = np.empty(0, dtype=np.int64)
    for level in reversed(levels):
        below, children = size, value
        size = np.ones(len(level.token), dtype=np.int64)
        value = level.token.astype(np.int64) - DIGIT
        if len(level.arguments):
            operators, first = level.operators, level.first
            size[operators] = 2 + np.add.reduceat(below, first)
            value[operators] = _apply(level.token[operators], children, first, level.arguments)
        sizes.insert(0, size)
    return sizes, value


def _apply(
    operator: np.ndarray, children: np.ndarray, first: np.ndarray, arguments: np.ndarray
) -> np.ndarray:
    """The value of each operator over its own children, `children[first : first + arguments]`."""
    owner = np.repeat(np.arange(len(operator)), arguments)
    ordered = np.sort(owner * 10 + children) % 10  # sorted within each operator's children
    middle = ordered[first + (arguments - 1) // 2] + ordered[first + arguments // 2]
    return np.select(
        [operator == MIN, operator == MAX, operator == MED],
        [ordered[first], ordered[first + arguments - 1], middle // 2],
        np.add.reduceat(children, first) % 10,
    )
