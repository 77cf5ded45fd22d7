"""Where the files of a task are: a folder of the user's, or the Hub; and parquet tables."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq

from fastrpb.data.cache import Files, cached
from fastrpb.data.dataset import DataError, Split, check_labels, corpus
from fastrpb.files import expanded, first_line


@dataclass(frozen=True)
class Layout:
    """One way the files of a task lie in a folder.

    Attributes:
        patterns: for each part, the globs that must each match, relative to the folder.
        build: reads the files found.
    """

    patterns: dict[str, tuple[str, ...]]
    build: Callable[[Files], dict[str, Split]]

    def find(self, folder: Path) -> Files | None:
        found = {
            part: [sorted(folder.glob(pattern)) for pattern in patterns]
            for part, patterns in self.patterns.items()
        }
        if not all(paths for lists in found.values() for paths in lists):
            return None
        return {part: [path for paths in lists for path in paths] for part, lists in found.items()}


def parquet_layouts(
    build: Callable[[Files], dict[str, Split]], splits: Sequence[str]
) -> list[Layout]:
    """`train.parquet` and so on, as in a plain folder, or `*/train-00000-of-00001.parquet`."""
    return [
        Layout({split: (form.format(split),) for split in splits}, build)
        for form in ("{}.parquet", "{}-*-of-*.parquet", "*/{}-*-of-*.parquet")
    ]


@dataclass(frozen=True)
class Source:
    """Where the files of a task come from.

    Attributes:
        name: of the task, for errors and for the cache.
        folders: the names that the folder of this task goes by, inside the user's.
        layouts: in order of preference.
        get: how to come by the files, for the error that says they are missing.
        hub: the dataset on the Hub, used only where the user names no folder.
    """

    name: str
    folders: Sequence[str]
    layouts: Sequence[Layout]
    get: str
    hub: str | None = None

    def read(self, data_dir: Path | None) -> dict[str, Split]:
        """The splits of the first layout found in `data_dir`, in `FASTRPB_DATA` or on the Hub."""
        root = self._root(data_dir)
        if not root.is_dir():
            raise DataError(f"{self.name}: there is no folder {root}; {self.get}")
        for folder in (*(root / inside for inside in self.folders), root):
            for layout in self.layouts:
                files = layout.find(folder)
                if files:
                    return cached(self.name, files, layout.build)
        wanted = "; or ".join(
            ", ".join(pattern for patterns in layout.patterns.values() for pattern in patterns)
            for layout in self.layouts
        )
        raise DataError(
            f"{self.name}: {root} lacks the files (neither it nor {', '.join(self.folders)} in it "
            f"has {wanted}); {self.get}"
        )

    def _root(self, data_dir: Path | None) -> Path:
        own = data_dir or os.environ.get("FASTRPB_DATA")
        if own:
            return expanded(own)
        if self.hub is None:
            raise DataError(f"{self.name} needs its files: {self.get}")
        return download(self.hub, ["*/train-*.parquet", "*/test-*.parquet"])


def download(repo: str, patterns: list[str]) -> Path:
    """The folder of a dataset of the Hub, fetched once; the client checks every file it fetches."""
    try:
        return Path(
            huggingface_hub.snapshot_download(repo, repo_type="dataset", allow_patterns=patterns)
        )
    except Exception as error:  # the client lets through errors of whatever it transfers with
        raise DataError(
            f"the download of {repo} from the Hub failed ({first_line(error)}); run again to go on "
            "where it stopped, or fetch the files elsewhere and pass their folder with --data-dir"
        ) from error


def read_parquet(path: Path, columns: Sequence[str]) -> dict[str, list]:
    """The named columns as lists, no cell empty; text stays bytes, unchecked."""
    try:
        schema = pq.read_schema(path)
        missing = [name for name in columns if name not in schema.names]
        if missing:
            raise DataError(
                f"{path} lacks the column {', '.join(missing)}; it has {', '.join(schema.names)}"
            )
        table = pq.read_table(path, columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is not a whole parquet file ({first_line(error)}); download it again"
        ) from error
    for name in columns:
        if table[name].null_count:
            raise DataError(
                f"{path}: {table[name].null_count} cells of the column {name} are empty"
            )
    return {name: _plain(table[name]).to_pylist() for name in columns}


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Text as bytes, however the file holds it; other columns as they are."""
    if pa.types.is_dictionary(column.type):  # a category of pandas
        column = column.cast(column.type.value_type)
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(is_kind(column.type) for is_kind in kinds):
        return column
    return column.cast(pa.string()).cast(pa.binary())


def parquet_corpus(
    files: Files, column: str, convert: Callable[[Any, str], bytes], classes: int
) -> dict[str, Split]:
    """The splits of parquet files with labels and one column of inputs.

    `convert(cell, where)` gives the tokens of a cell; `where` names it in an error.
    """
    parts: dict[str, tuple[list[bytes], list[int]]] = {}
    for split, paths in files.items():
        _check_shards(paths)
        items, labels = parts[split] = [], []
        for path in paths:
            table = read_parquet(path, [column, "label"])
            check_labels(table["label"], classes, path)
            items += [convert(cell, f"{path}, row {i}") for i, cell in enumerate(table[column])]
            labels += table["label"]
    return corpus(parts)


def _check_shards(paths: list[Path]) -> None:
    """All of `train-00000-of-00002.parquet` and its like, or an error."""
    shard = re.search(r"-\d+-of-(\d+)\.parquet$", paths[0].name)
    if shard and int(shard[1]) != len(paths):
        raise DataError(
            f"{paths[0].parent} has {len(paths)} of the {int(shard[1])} files that "
            f"{paths[0].name} belongs to; download the others too"
        )


def check_text(text: bytes, where: object) -> bytes:
    """The bytes, if they are UTF-8 and at least one."""
    if not isinstance(text, bytes):
        raise DataError(f"{where}: {quote(text)} is no text")
    if not text:
        raise DataError(f"{where}: the text is empty")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start} is {text[error.start]:#04x}, which is not UTF-8 text"
        ) from error
    return text


def quote(raw: Any) -> str:
    """A cell of a file as an error message shows it."""
    return repr(raw[:40].decode("utf-8", errors="replace") if isinstance(raw, bytes) else raw)
