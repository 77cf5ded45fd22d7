"""retrieval: LRA Retrieval, pairs of papers as bytes (AAN); does one cite the other?

Tokens as in `text`; an example is two documents, which the paper cuts at 4000 bytes each. Every
document is held once, however many pairs use it.
"""

from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from fastrpb.data import text
from fastrpb.data.cache import Files
from fastrpb.data.dataset import DataError, Sequences, Split, check_labels
from fastrpb.data.sources import Layout, Source, check_text, quote, read_parquet

TASK = replace(
    text.TASK, name="retrieval", classes=("unrelated", "cites"), max_length=4000, pair=True
)

_SPLITS = ("train", "validation", "test")
_LRA_NAMES = {"train": "train", "validation": "eval", "test": "test"}


def _from_parquet(files: Files) -> dict[str, Split]:
    (path,) = files["documents"]
    table = read_parquet(path, ["id", "text"])
    documents = [check_text(paper, f"{path}, row {i}") for i, paper in enumerate(table["text"])]
    _check_ids(table["id"], path)
    number = {name: i for i, name in enumerate(table["id"])}
    if len(number) != len(documents):
        raise DataError(f"{path}: {len(documents) - len(number)} of the ids appear more than once")
    pairs = {}
    for split in _SPLITS:
        (path,) = files[split]
        table = read_parquet(path, ["label", "id1", "id2"])
        check_labels(table["label"], len(TASK.classes), path)
        _check_ids(table["id1"] + table["id2"], path)
        for row, names in enumerate(zip(table["id1"], table["id2"], strict=True)):
            for name in names:
                if name not in number:
                    raise DataError(
                        f"{path}: row {row} names {quote(name)}, which docs.parquet lacks"
                    )
        pairs[split] = (
            [[number[a], number[b]] for a, b in zip(table["id1"], table["id2"], strict=True)],
            table["label"],
        )
    return _splits(documents, pairs)


def _check_ids(names: list, path: Path) -> None:
    for name in names:
        if not isinstance(name, Hashable):
            raise DataError(f"{path}: the id {quote(name)} is no text or number")


def _from_tsv(files: Files) -> dict[str, Split]:
    documents: dict[bytes, int] = {}
    pairs: dict[str, tuple[list[list[int]], list[float]]] = {}
    for split, (path,) in files.items():
        index, labels = pairs[split] = [], []
        for label, *papers in _rows(path):
            index.append([documents.setdefault(paper, len(documents)) for paper in papers])
            labels.append(label)
        check_labels(labels, len(TASK.classes), path)
    return _splits(list(documents), pairs)


def _rows(path: Path) -> Iterator[tuple[float, bytes, bytes]]:
    """(label, text1, text2) of each line `label id1 id2 text1 text2`, separated by tabs."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            fields = line.rstrip(b"\r\n").split(b"\t")
            where = f"{path}, line {number}"
            if len(fields) != 5:
                raise DataError(
                    f"{where}: {len(fields)} columns, not 5 (label, id1, id2, text1, text2)"
                )
            if number == 1 and fields[0] == b"label":
                continue
            try:
                label = float(fields[0])  # the release writes 1.0
            except ValueError:
                raise DataError(f"{where}: the label {quote(fields[0])} is not a number") from None
            yield label, check_text(fields[3], where), check_text(fields[4], where)


def _splits(
    documents: list[bytes], pairs: dict[str, tuple[list[list[int]], list[float]]]
) -> dict[str, Split]:
    sequences = Sequences.pack(documents)
    return {
        split: Split(sequences, torch.tensor(index), torch.tensor(labels, dtype=torch.int64))
        for split, (index, labels) in pairs.items()
    }


read = Source(
    "retrieval",
    folders=["aan", "retrieval", "tsv_data"],
    layouts=[
        Layout(
            {
                "documents": ("docs.parquet",),
                **{split: (f"{split}.parquet",) for split in _SPLITS},
            },
            _from_parquet,
        ),
        Layout(
            {split: (f"new_aan_pairs.{name}.tsv",) for split, name in _LRA_NAMES.items()},
            _from_tsv,
        ),
    ],
    get=(
        "unpack the Long Range Arena release (lra_release.gz, its folder tsv_data) "
        "and pass that folder with --data-dir"
    ),
).read
