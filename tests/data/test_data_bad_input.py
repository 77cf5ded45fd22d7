"""Files that are not what they must be: one sentence with file and reason, nothing left behind."""

import gzip
import io
import struct
import tarfile
import zlib
from decimal import Decimal
from functools import partial

import pytest
import torch
from PIL import Image

from fastrpb.data import DataError, load, sources, task
from samples import (
    LISTOPS,
    idx,
    pixels,
    png,
    review_members,
    write_idx,
    write_images,
    write_listops,
    write_mnist,
    write_papers,
    write_parquet,
    write_reviews,
    write_tar,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")

# Without the time, which would be in the names of tests: workers must find the same ones.
compress = partial(gzip.compress, mtime=0)


def chunk(kind, content):
    """Of a PNG file."""
    code = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", code)


SIZE = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 0, 0, 0, 0)
BOMB = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", SIZE) + chunk(b"IDAT", b"")


@pytest.fixture
def nothing_is_left(own_cache):
    yield
    assert list(own_cache.iterdir()) == []


def refused(name, folder, reason):
    """Loading fails with one line that matches `reason`."""
    with pytest.raises(DataError, match=reason) as caught:
        load(name, folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("mnist", "`fastrpb data mnist` .* downloads ylecun/mnist"),
        ("cifar10", "downloads uoft-cs/cifar10"),
        ("text", "downloads stanfordnlp/imdb"),
        ("retrieval", "unpack the Long Range Arena release"),
        ("listops", "`fastrpb data listops --out DIR` makes them"),
    ],
)
def test_missing_files_say_how_to_get_them(tmp_path, name, how):
    refused(name, tmp_path, f"{name}: {tmp_path} lacks the files .*{how}")
    refused(name, tmp_path / "nowhere", f"there is no folder .*nowhere; .*{how}")


@pytest.mark.parametrize("name", ["retrieval", "listops"])
def test_tasks_without_a_download_say_so(name):
    refused(name, None, f"{name} needs its files: ")


def test_half_of_the_files_is_not_enough(tmp_path):
    write_reviews(tmp_path)
    (tmp_path / "test.parquet").unlink()
    refused("text", tmp_path, "lacks the files .*test.parquet")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("reset"),
        RuntimeError("peer closed\nmore"),
        OSError(28, "No space left on device"),
    ],
)
def test_interrupted_download(monkeypatch, error):
    def snapshot_download(*_, **__):
        raise error

    monkeypatch.setattr(sources.huggingface_hub, "snapshot_download", snapshot_download)
    reason = str(error).splitlines()[0]
    with pytest.raises(DataError) as caught:
        load("mnist")
    assert "\n" not in str(caught.value)
    assert f"the download of ylecun/mnist from the Hub failed ({reason})" in str(caught.value)


def test_a_download_that_lacks_a_shard(tmp_path):
    write_images(tmp_path / "train-00000-of-00002.parquet", pixels((28, 28), 2), [0, 1])
    write_images(tmp_path / "test-00000-of-00001.parquet", pixels((28, 28), 2), [0, 1])
    refused("mnist", tmp_path, "has 1 of the 2 files that train-00000-of-00002.parquet belongs to")


def test_truncated_parquet(tmp_path):
    write_mnist(tmp_path)
    path = tmp_path / "train.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    refused("mnist", tmp_path, r"train.parquet is not a whole parquet file \(.*download it again")


def test_damaged_parquet(tmp_path):
    """A page of the right size and wrong content."""
    write_parquet(tmp_path / "train.parquet", text=["a" * 50, "b" * 50] * 50, label=[0, 1] * 50)
    write_parquet(tmp_path / "test.parquet", text=["a"], label=[0])
    path = tmp_path / "train.parquet"
    content = bytearray(path.read_bytes())
    content[8:40] = b"\xff" * 32
    path.write_bytes(content)
    refused("text", tmp_path, "train.parquet is not a whole parquet file")


def test_parquet_without_the_columns(tmp_path):
    write_mnist(tmp_path)
    refused("text", tmp_path, "train.parquet lacks the column text; it has image, label")


def test_parquet_with_an_empty_cell(tmp_path):
    write_reviews(tmp_path)
    write_parquet(tmp_path / "train.parquet", text=["a", None], label=[0, 1])
    refused("text", tmp_path, "train.parquet: 1 cells of the column text are empty")


def test_parquet_without_rows(tmp_path):
    write_reviews(tmp_path)
    write_parquet(tmp_path / "train.parquet", text=[], label=[])
    refused("text", tmp_path, "train.parquet has no examples")


@pytest.mark.parametrize("label", [-1, 2, 0.5])
def test_labels_out_of_range_in_parquet(tmp_path, label):
    write_reviews(tmp_path)
    write_parquet(tmp_path / "test.parquet", text=["a", "b"], label=[0, label])
    refused("text", tmp_path, f"test.parquet: row 1 has the label {label}, but labels are 0 to 1")


def test_labels_that_are_decimals(tmp_path):
    write_reviews(tmp_path)
    write_parquet(tmp_path / "test.parquet", text=["a"], label=[Decimal(1)])
    refused("text", tmp_path, "row 0 has the label Decimal.'1'., but labels are 0 to 1")


def test_text_that_is_no_text(tmp_path):
    write_reviews(tmp_path)
    write_parquet(tmp_path / "test.parquet", text=[b"fine", b"caf\xe9!"], label=[0, 1])
    refused("text", tmp_path, "test.parquet, row 1: byte 3 is 0xe9, which is not UTF-8 text")


def test_numbers_for_text(tmp_path):
    write_reviews(tmp_path)
    write_parquet(tmp_path / "test.parquet", text=[7, 0], label=[0, 1])
    refused("text", tmp_path, "test.parquet, row 0: 7 is no text")


def test_numbers_for_images(tmp_path):
    write_mnist(tmp_path)
    for cell, kind in ((7, "int"), ([7], "list"), ({"path": "x"}, "NoneType")):
        write_parquet(tmp_path / "test.parquet", image=[cell], label=[0])
        refused("mnist", tmp_path, f"row 0: there are no bytes of an image, but {kind}")


def test_empty_text(tmp_path):
    write_reviews(tmp_path)
    write_parquet(tmp_path / "test.parquet", text=["fine", ""], label=[0, 1])
    refused("text", tmp_path, "test.parquet, row 1: the text is empty")


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (png(pixels((28, 29), 1)[0]), "the image is 28×29, not 28×28"),
        (b"GIF89a nonsense", "not a readable image"),
        (png(pixels((28, 28), 1)[0])[:60], "not a readable image"),
        (b"", "not a readable image"),
        (b"P5 28x 28 255 " + bytes(784), "not a readable image .invalid literal for int"),
        (b"qoif" + struct.pack(">IIBB", 28, 28, 3, 0), "not a readable image"),
        (BOMB, "not a readable image .Image size .400000000 pixels. exceeds limit"),
    ],
)
def test_images_that_are_none(tmp_path, blob, reason):
    write_mnist(tmp_path)
    write_parquet(tmp_path / "test.parquet", image=[{"bytes": blob, "path": "x"}], label=[0])
    refused("mnist", tmp_path, f"test.parquet, row 0: {reason}")
    path = tmp_path / "one.png"
    path.write_bytes(blob)
    with pytest.raises(DataError, match=f"one.png: {reason}"):
        task("mnist").encode(str(path))


def test_images_that_have_no_one_grey(tmp_path):
    colours = torch.randint(256, (28, 28, 4), dtype=torch.uint8).numpy()
    colours[..., 3] = 255
    path = tmp_path / "one.png"
    Image.fromarray(colours[..., :3].copy()).save(path)
    wanted = task("mnist").encode(str(path))
    Image.fromarray(colours).save(path)
    assert torch.equal(task("mnist").encode(str(path)), wanted)  # nothing shines through
    colours[3, 4, 3] = 254
    Image.fromarray(colours).save(path)
    with pytest.raises(DataError, match=r"one\.png: the image has transparent pixels; put it"):
        task("mnist").encode(str(path))
    Image.fromarray(colours[..., 0].astype("uint16") * 200).save(path)
    with pytest.raises(DataError, match=r"one\.png: the image has over 8 bits a channel; save it"):
        task("mnist").encode(str(path))


def test_an_image_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"cannot read the image .*none.png: No such file"):
        task("digits").encode(str(tmp_path / "none.png"))


@pytest.fixture
def idx_folder(tmp_path):
    images = {split: pixels((28, 28), 3) for split in ("train", "test")}
    write_idx(tmp_path, images, {"train": [1, 2, 3], "test": [4, 5, 6]}, ".gz")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "train-images-idx3",
            compress(idx(pixels((28, 28), 3)))[:-900],
            "not a whole gz file",
        ),
        ("train-images-idx3", b"no gzip at all", "not a whole gz file"),
        ("train-images-idx3", compress(b""), "begins with , not with 00 00 08 03"),
        (
            "train-labels-idx1",
            compress(idx(pixels((3,), 3))),
            "begins with 00 00 08 02, not with 00 00 08 01",
        ),
        (
            "train-images-idx3",
            compress(b"\0\0\x0d\3" + b"x" * 99),
            "begins with 00 00 0d 03, not with 00 00 08 03",
        ),
        (
            "train-images-idx3",
            compress(idx(pixels((28, 28), 3))[:-1]),
            "says it holds 3×28×28 bytes and holds 2351",
        ),
        (
            "train-images-idx3",
            compress(idx(pixels((8, 8), 3))),
            "says it holds 3×8×8 .* wanted are count×28×28",
        ),
        (
            "train-labels-idx1",
            compress(idx(pixels((), 2))),
            "has 3 images, but .* has 2 labels",
        ),
        (
            "t10k-labels-idx1",
            compress(b"\0\0\x08\1\0\0\0\3\1\x0a\2"),
            "row 1 has the label 10, but labels are 0 to 9",
        ),
    ],
)
def test_idx_files_that_are_wrong(idx_folder, name, content, reason):
    (idx_folder / f"{name}-ubyte.gz").write_bytes(content)
    refused("mnist", idx_folder, reason)


def test_a_review_that_is_no_text(tmp_path):
    for name, content in review_members().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "aclImdb/test/pos/01_9.txt").write_bytes(b"\xff\xfe")
    refused("text", tmp_path, "01_9.txt: byte 0 is 0xff, which is not UTF-8 text")


@pytest.mark.parametrize(
    "evil", ["../../evil.txt", "/evil.txt", "aclImdb/train/pos/../../../evil.txt"]
)
def test_archives_never_write_outside(tmp_path, evil):
    folder = tmp_path / "a/b/data"
    folder.mkdir(parents=True)
    write_tar(folder / "aclImdb_v1.tar.gz", {evil: b"got you", **review_members()})
    before = set(tmp_path.rglob("*"))
    refused("text", folder, "the member .*evil.txt points outside; not used")
    assert set(tmp_path.rglob("*")) == before


def test_links_in_an_archive_are_not_followed(tmp_path, own_cache):
    secret = tmp_path / "secret.txt"
    secret.write_text("not a review")
    path = tmp_path / "aclImdb_v1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo("aclImdb/train/pos/9_9.txt")
            link.type, link.linkname = kind, str(secret)
            archive.addfile(link)
        for name, content in review_members().items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    dataset = load("text", tmp_path)
    assert b"not a review" not in bytes(dataset.train.sequences.tokens.tolist())
    for path in sorted(own_cache.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def test_archives_that_are_cut_or_hold_no_reviews(tmp_path):
    path = write_tar(tmp_path / "aclImdb_v1.tar.gz", review_members())
    content = path.read_bytes()
    for cut in (len(content) // 2, len(content) - 40, len(content) - 1):
        path.write_bytes(content[:cut])
        refused("text", tmp_path, "aclImdb_v1.tar.gz is not a whole tar.gz")
    path.write_bytes(b"no archive")
    refused("text", tmp_path, "aclImdb_v1.tar.gz is not a whole tar.gz")
    write_tar(path, {"aclImdb/README": b"hello"})
    refused("text", tmp_path, "has no review in aclImdb/train/pos")


def test_pairs_that_name_no_document(tmp_path):
    write_papers(tmp_path)
    write_parquet(tmp_path / "test.parquet", label=[1], id1=["A"], id2=["Z"])
    refused("retrieval", tmp_path, "test.parquet: row 0 names 'Z', which docs.parquet lacks")
    write_parquet(tmp_path / "docs.parquet", id=["A", "B", "A"], text=["one", "two", "three"])
    refused("retrieval", tmp_path, "docs.parquet: 1 of the ids appear more than once")
    write_parquet(tmp_path / "docs.parquet", id=[["A"], ["B"]], text=["one", "two"])
    refused("retrieval", tmp_path, r"docs.parquet: the id \['A'\] is no text or number")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"1.0\ta\tb\tone\n", "line 2: 4 columns, not 5"),
        (b"yes\ta\tb\tone\ttwo\n", "line 2: the label 'yes' is not a number"),
        (b"0.5\ta\tb\tone\ttwo\n", "row 1 has the label 0.5, but labels are 0 to 1"),
        (b"7\ta\tb\tone\ttwo\n", "row 1 has the label 7.0, but labels are 0 to 1"),
        (b"1.0\ta\tb\t\xff\ttwo\n", "line 2: byte 0 is 0xff, which is not UTF-8 text"),
        (b"1.0\ta\tb\t\ttwo\n", "line 2: the text is empty"),
    ],
)
def test_lra_pairs_that_are_wrong(tmp_path, line, reason):
    for name in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_bytes(b"1.0\ta\tb\tone\ttwo\n" + line)
    refused("retrieval", tmp_path, reason)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("[MAX 4 12 ]", "line 2: '12' is not a word of ListOps"),
        ("[AVG 4 1 ]", r"line 2: '\[AVG' is not a word of ListOps"),
        ("[MAX 4 1", "line 2: the brackets do not close one expression"),
        ("[MAX 4 1 ] ]", "line 2: the brackets do not close one expression"),
        ("[MAX 4 1 ] 3", "line 2: the brackets do not close one expression"),
        ("", "line 2: the brackets do not close one expression"),
        ("[MAX 4 [MIN ] ]", "line 2: an operator has no arguments"),
    ],
)
def test_expressions_that_are_wrong(tmp_path, source, reason):
    refused("listops", write_listops(tmp_path, {**LISTOPS, "test": [(source, 1)]}), reason)
    with pytest.raises(DataError, match=reason.replace("line 2", "the input")):
        task("listops").encode(source)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "begins with '', not with 'Source"),
        ("[MAX 4 3 ]\t4\n", r"begins with '\[MAX 4 3 \].t4'"),
        ("Source\tTarget\n[MAX 4 3 ]\n", "line 2: no tab and number at its end"),
        ("Source\tTarget\n[MAX 4 3 ]\t10\n", "row 0 has the label 10, but labels are 0 to 9"),
        ("Source\tTarget\n", "basic_val.tsv has no examples"),
    ],
)
def test_listops_files_that_are_wrong(tmp_path, content, reason):
    write_listops(tmp_path)
    (tmp_path / "basic_val.tsv").write_text(content)
    refused("listops", tmp_path, reason)


def test_a_file_that_cannot_be_read(tmp_path):
    write_reviews(tmp_path)
    (tmp_path / "test.parquet").unlink()
    (tmp_path / "test.parquet").mkdir()
    refused("text", tmp_path, "cannot read .*test.parquet: Is a directory")


def test_a_text_from_the_shell_that_is_no_text():
    with pytest.raises(DataError, match="the input: byte 1 is 0xff"):
        task("text").encode("a\udcff")
