"""Small files in every format that the readers take, all with the same content for a task."""

import gzip
import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

# Read here, before each test hides it.
_DATA = os.environ.get("FASTRPB_DATA")

REVIEWS = {
    "train": (
        [
            *("dull", "naïve and slow", *(f"poor movie {i}" for i in range(4))),
            *("a joy", "fine 映画", *(f"great movie {i}" for i in range(4))),
        ],
        [0] * 6 + [1] * 6,
    ),
    "test": (["bad", "good"], [0, 1]),
}
PAPERS = {"A": "first paper", "B": "second\x00 paper", "C": "third"}
PAIRS = {
    "train": [(1, "A", "B"), (0, "B", "C"), (0, "A", "C")],
    "validation": [(1, "C", "A")],
    "test": [(0, "C", "B"), (1, "A", "A")],
}
LISTOPS = {
    "train": [("[MAX 4 3 [MIN 2 3 ] ]", 4), ("[SM 9 8 ]", 7)],
    "validation": [("[MED 1 4 ]", 2)],
    "test": [("[MIN 5 6 7 ]", 5)],
}
LISTOPS_FILES = {"train": "basic_train", "validation": "basic_val", "test": "basic_test"}


def real_data(folder: str) -> Path:
    """The folder with the real files, or a skip that says where they were looked for."""
    root = _DATA or Path(__file__).parents[2] / "../shared/data"
    path = Path(root).resolve()
    if not (path / folder).is_dir():
        pytest.skip(f"no real {folder}: {path} lacks it; set FASTRPB_DATA to a folder that has it")
    return path


def pixels(shape: tuple[int, ...], count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def write_parquet(path: Path, **columns: Sequence) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def write_images(path: Path, images: np.ndarray, labels: Sequence, column: str = "image") -> Path:
    cells = [{"bytes": png(image), "path": f"{i}.png"} for i, image in enumerate(images)]
    return write_parquet(path, **{column: cells, "label": labels})


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim])
    return header + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def write_idx(
    folder: Path, images: dict[str, np.ndarray], labels: dict[str, list], end: str
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, name in (("train", "train"), ("test", "t10k")):
        for kind, array in (
            ("images-idx3", images[split]),
            ("labels-idx1", np.array(labels[split], dtype=np.uint8)),
        ):
            content = idx(array)
            path = folder / f"{name}-{kind}-ubyte{end}"
            path.write_bytes(gzip.compress(content) if end else content)


def review_members() -> dict[str, bytes]:
    """Path → content of the aclImdb folder; 00_9.txt and so on, in the order of REVIEWS."""
    return {
        f"aclImdb/{split}/{'pos' if label else 'neg'}/{i:02}_9.txt": text.encode()
        for split, (texts, labels) in REVIEWS.items()
        for i, (text, label) in enumerate(zip(texts, labels, strict=True))
    }


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def write_reviews(folder: Path) -> Path:
    for split, (texts, labels) in REVIEWS.items():
        write_parquet(folder / f"{split}.parquet", text=texts, label=labels)
    return folder


def write_papers(folder: Path) -> Path:
    write_parquet(folder / "docs.parquet", id=list(PAPERS), text=list(PAPERS.values()))
    for split, pairs in PAIRS.items():
        labels, first, second = zip(*pairs, strict=True)
        write_parquet(folder / f"{split}.parquet", label=labels, id1=first, id2=second)
    return folder


def write_listops(folder: Path, rows: dict[str, list[tuple[str, int]]] = LISTOPS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in rows.items():
        body = "".join(f"{source}\t{target}\n" for source, target in lines)
        (folder / f"{LISTOPS_FILES[split]}.tsv").write_text("Source\tTarget\n" + body)
    return folder


def write_mnist(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, list[int]]]:
    images = {"train": pixels((28, 28), 20), "test": pixels((28, 28), 4, seed=1)}
    labels = {"train": [i % 2 for i in range(20)], "test": [3, 1, 2, 9]}
    for split, arrays in images.items():
        write_images(folder / f"{split}.parquet", arrays, labels[split])
    return images, labels
