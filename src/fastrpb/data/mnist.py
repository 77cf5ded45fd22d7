"""mnist: handwritten digits, 28×28 pixels as 784 tokens of grey (LeCun et al.)."""

import gzip
import zlib
from functools import partial
from math import prod
from pathlib import Path

from fastrpb.data.cache import Files
from fastrpb.data.dataset import DataError, Split, check_labels, corpus
from fastrpb.data.images import grey_cell, image_task
from fastrpb.data.sources import Layout, Source, parquet_corpus, parquet_layouts

SHAPE = (28, 28)
TASK = image_task("mnist", tuple("0123456789"), SHAPE)


def _from_parquet(files: Files) -> dict[str, Split]:
    return parquet_corpus(files, "image", partial(grey_cell, SHAPE), len(TASK.classes))


def _from_idx(files: Files) -> dict[str, Split]:
    parts: dict[str, tuple[list[bytes], list[int]]] = {}
    for split, (images_path, labels_path) in files.items():
        count, pixels = _idx(images_path, ("count", *SHAPE))
        labels_count, labels = _idx(labels_path, ("count",))
        if count != labels_count:
            raise DataError(
                f"{images_path} has {count} images, but {labels_path} has {labels_count} labels"
            )
        check_labels(labels, len(TASK.classes), labels_path)
        size = prod(SHAPE)
        parts[split] = [pixels[i : i + size] for i in range(0, len(pixels), size)], list(labels)
    return corpus(parts)


def _idx(path: Path, shape: tuple[int | str, ...]) -> tuple[int, bytes]:
    """The number of items and the bytes of an IDX file, plain or gz.

    Format: two zero bytes, 8 (unsigned bytes), the number of axes; each axis as four bytes, big
    end first; the bytes.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gz file ({error}); download it again") from error
    magic = bytes([0, 0, 8, len(shape)])
    if content[:4] != magic:
        raise DataError(
            f"{path} begins with {content[:4].hex(' ')}, not with {magic.hex(' ')}, the mark of an "
            f"IDX file with {len(shape)} axes of bytes"
        )
    axes = [int.from_bytes(content[4 * i : 4 * i + 4], "big") for i in range(1, len(shape) + 1)]
    data = content[4 + 4 * len(shape) :]
    if axes[1:] != list(shape[1:]) or len(data) != prod(axes):
        said, wanted = ("×".join(map(str, numbers)) for numbers in (axes, shape))
        raise DataError(
            f"{path} says it holds {said} bytes and holds {len(data)}; wanted are {wanted}; "
            "download it again"
        )
    return axes[0], data


read = Source(
    "mnist",
    folders=["mnist"],
    layouts=[
        *parquet_layouts(_from_parquet, ["train", "test"]),
        *(
            Layout(
                {
                    split: (f"{name}-images-idx3-ubyte{end}", f"{name}-labels-idx1-ubyte{end}")
                    for split, name in (("train", "train"), ("test", "t10k"))
                },
                _from_idx,
            )
            for end in (".gz", "")
        ),
    ],
    get="`fastrpb data mnist` without --data-dir and FASTRPB_DATA downloads ylecun/mnist",
    hub="ylecun/mnist",
).read
