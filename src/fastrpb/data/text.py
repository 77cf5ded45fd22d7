"""text: LRA Text, IMDB reviews as bytes (Maas et al. 2011); is the review positive?

A token is a byte of UTF-8; 255, which UTF-8 never uses, is the padding. The paper cuts a review at
1000 bytes; the longest have 13 700.
"""

import gzip
import re
import tarfile
import zlib
from pathlib import PurePosixPath

from torch import Tensor

from fastrpb.data.cache import Files
from fastrpb.data.dataset import DataError, Split, Task, corpus
from fastrpb.data.sources import Layout, Source, check_text, parquet_corpus, parquet_layouts


def _tokenize(text: str) -> bytes:
    return check_text(text.encode("utf-8", errors="surrogateescape"), "the input")


def _show(tokens: Tensor) -> str:
    # A cut can fall inside a character.
    return bytes(tokens.tolist()).decode("utf-8", errors="ignore")


TASK = Task(
    name="text",
    classes=("negative", "positive"),
    vocabulary=256,
    max_length=1000,
    tokenize=_tokenize,
    show=_show,
    pad_id=255,
    cuts=True,
)

_FOLDERS = {"neg": 0, "pos": 1}
_MEMBER = re.compile(r"(?:\./)?aclImdb/(train|test)/(neg|pos)/([^/]+\.txt)")


def _from_parquet(files: Files) -> dict[str, Split]:
    return parquet_corpus(files, "text", check_text, len(TASK.classes))


def _from_folder(files: Files) -> dict[str, Split]:
    return corpus(
        {
            split: (
                [check_text(path.read_bytes(), path) for path in paths],
                [_FOLDERS[path.parent.name] for path in paths],
            )
            for split, paths in files.items()
        }
    )


def _from_archive(files: Files) -> dict[str, Split]:
    """Reads the archive as it stands: nothing is unpacked, so no member can land anywhere."""
    (path,) = files["archive"]
    reviews: dict[str, list[tuple[int, str, bytes]]] = {"train": [], "test": []}
    try:
        # gzip and not tarfile's own reader, which takes a file that is cut for one that ends.
        with gzip.open(path) as content, tarfile.open(fileobj=content, mode="r|") as archive:
            for member in archive:
                place = PurePosixPath(member.name)
                if place.is_absolute() or ".." in place.parts:
                    raise DataError(f"{path}: the member {member.name} points outside; not used")
                match = _MEMBER.fullmatch(member.name)
                review = archive.extractfile(member) if match and member.isfile() else None
                if match and review:
                    split, folder, name = match.groups()
                    text = check_text(review.read(), f"{path}, {member.name}")
                    reviews[split].append((_FOLDERS[folder], name, text))
            while content.read(1 << 20):  # to the end, where the checksum is
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is not a whole tar.gz ({error}); download it again") from error
    for split, rows in reviews.items():
        if not rows:
            raise DataError(f"{path} has no review in aclImdb/{split}/pos or aclImdb/{split}/neg")
        rows.sort()
    return corpus(
        {
            split: ([text for _, _, text in rows], [label for label, _, _ in rows])
            for split, rows in reviews.items()
        }
    )


read = Source(
    "text",
    folders=["imdb", "aclImdb", "text"],
    layouts=[
        *parquet_layouts(_from_parquet, ["train", "test"]),
        Layout(
            {
                split: tuple(f"{split}/{name}/*.txt" for name in _FOLDERS)
                for split in ("train", "test")
            },
            _from_folder,
        ),
        Layout({"archive": ("aclImdb_v1.tar.gz",)}, _from_archive),
    ],
    get="`fastrpb data text` without --data-dir and FASTRPB_DATA downloads stanfordnlp/imdb",
    hub="stanfordnlp/imdb",
).read
