"""Tokens made once: a folder of .npy files for each content, renamed into place when whole.

The name of the folder is the hash of the source files and of `VERSION`. So a changed file gives a
new entry, an old one is never wrong, and two processes that make the same entry at once write the
same bytes: the first to rename wins, the other takes what is there.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from fastrpb.data.dataset import DataError, Sequences, Split
from fastrpb.files import expanded, is_full

# To be raised whenever a reader gives other tokens for the same files, or an entry has other files.
VERSION = 2

Files = dict[str, list[Path]]


def cache_dir() -> Path:
    """`FASTRPB_CACHE`, or `fastrpb` in `XDG_CACHE_HOME`, or in `~/.cache`."""
    own = os.environ.get("FASTRPB_CACHE")
    if own:
        return expanded(own)
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fastrpb"


def cached(name: str, files: Files, build: Callable[[Files], dict[str, Split]]) -> dict[str, Split]:
    """The splits of `build(files)`, memory-mapped; `build` runs when no entry has this content."""
    folder = cache_dir() / f"{name}-{_digest(files)}"
    if not folder.is_dir():
        _save(build(files), folder)
    return _open(folder)


@contextmanager
def staging(folder: Path, elsewhere: str) -> Iterator[Path]:
    """A temporary folder inside `folder`, for files that are renamed into place when whole.

    It is gone afterwards, whatever happens. A failed write (a full disk, a folder that is read
    only) becomes one sentence that ends with `elsewhere`: how to choose another place.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".partial-", dir=folder) as temporary:
            yield Path(temporary)
    except OSError as error:
        free = "free some space, or " if is_full(error) else ""
        reason = f"{error.strerror or error}; {free}{elsewhere}"
        raise DataError(f"cannot write to {folder}: {reason}") from error


def _digest(files: Files) -> str:
    digest = hashlib.blake2b(f"{VERSION}".encode(), digest_size=16)
    root = os.path.commonpath([path.parent for paths in files.values() for path in paths])
    for split, paths in files.items():
        for path in paths:
            try:
                # The names count too: a review's label is the name of its folder.
                name, size = path.relative_to(root).as_posix(), path.stat().st_size
                digest.update(f"\n{split} {name} {size}\n".encode())
                with path.open("rb") as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def _save(splits: dict[str, Split], folder: Path) -> None:
    sequences = next(iter(splits.values())).sequences
    tensors = {name: getattr(sequences, name) for name in ("tokens", "starts", "lengths")}
    for name, split in splits.items():
        tensors |= {f"{name}.index": split.index, f"{name}.labels": split.labels}
    arrays = {name: x.numpy() for name, x in tensors.items()}
    arrays["splits"] = np.array(list(splits))  # files alone would not tell of one that was lost
    elsewhere = "set FASTRPB_CACHE to another folder"
    with staging(folder.parent, elsewhere) as temporary:
        entry = temporary / folder.name
        entry.mkdir()
        for name, array in arrays.items():
            with (entry / f"{name}.npy").open("wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        try:
            entry.rename(folder)
        except OSError:
            if not folder.is_dir():  # not another process's entry of the same content
                raise


def _open(folder: Path) -> dict[str, Split]:
    try:
        names = np.load(folder / "splits.npy").tolist()
        sequences = Sequences(*(_map(folder, name) for name in ("tokens", "starts", "lengths")))
        return {
            name: Split(sequences, _map(folder, f"{name}.index"), _map(folder, f"{name}.labels"))
            for name in names
        }
    except (EOFError, OSError, ValueError) as error:
        raise DataError(f"{folder} is damaged ({error}); remove it and run again") from error


def _map(folder: Path, name: str) -> Tensor:
    # "c": the array counts as writable, as torch wants it, and no write reaches the file.
    return torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c"))
