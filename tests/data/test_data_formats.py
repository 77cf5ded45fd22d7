"""Every format of every task, from hand-made files; what is read must be what was written."""

import numpy as np
import pyarrow as pa
import pytest
import torch

import fastrpb.data
from fastrpb.data import TASKS, DataError, load, sources, task
from fastrpb.data.cache import cache_dir
from fastrpb.data.images import luminance
from samples import (
    LISTOPS,
    PAIRS,
    PAPERS,
    REVIEWS,
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


def contents(dataset, split):
    """All examples of a split: (tuple of bytes, label)."""
    part = getattr(dataset, split)
    rows = (part[i] for i in range(len(part)))
    return [(tuple(bytes(s.tolist()) for s in sequences), label) for sequences, label in rows]


def whole(name, folder):
    """Train, not split further, and test."""
    dataset = load(name, folder, validation="test")
    return contents(dataset, "train"), contents(dataset, "test")


def test_mnist_in_every_layout(tmp_path):
    images, labels = write_mnist(tmp_path / "plain/mnist")
    hub = tmp_path / "hub/mnist"
    write_images(hub / "train-00000-of-00002.parquet", images["train"][:15], labels["train"][:15])
    write_images(hub / "train-00001-of-00002.parquet", images["train"][15:], labels["train"][15:])
    write_images(hub / "test-00000-of-00001.parquet", images["test"], labels["test"])
    write_idx(tmp_path / "gz", images, labels, ".gz")
    write_idx(tmp_path / "raw/mnist", images, labels, "")
    expected = tuple(
        [((image.tobytes(),), label) for image, label in zip(images[s], labels[s], strict=True)]
        for s in ("train", "test")
    )
    for root in ("plain", "plain/mnist", "hub", "gz", "raw"):
        assert whole("mnist", tmp_path / root) == expected, root


def test_cifar10_is_grey_as_tensorflow_computes_it(tmp_path):
    colour, grey = pixels((32, 32, 3), 12), pixels((32, 32), 12, seed=2)
    write_images(tmp_path / "train.parquet", colour, [i % 10 for i in range(12)], "img")
    write_images(tmp_path / "test.parquet", grey, [0] * 12, "img")
    train, test = whole("cifar10", tmp_path)
    assert [image for (image,), _ in test] == [image.tobytes() for image in grey]
    exact = 255.5 / 255 * (colour.astype(np.float64) @ [0.2989, 0.5870, 0.1140])
    got = np.frombuffer(b"".join(image for (image,), _ in train), np.uint8).reshape(exact.shape)
    # Float32 decides within 1e-4 of a whole number; everywhere else the cut is certain.
    certain = np.abs(exact - exact.round()) > 1e-4
    assert (got == np.floor(exact))[certain].all()
    assert certain.mean() > 0.99


def test_luminance_keeps_every_grey():
    values = np.arange(256, dtype=np.uint8)
    assert (luminance(np.stack([values] * 3, -1)) == values).all()


def test_text_in_every_layout(tmp_path):
    write_reviews(tmp_path / "parquet/imdb")
    for split, (texts, labels) in REVIEWS.items():
        hub = tmp_path / f"hub/plain_text/{split}-00000-of-00001.parquet"
        write_parquet(hub, text=texts, label=labels)
    for name, content in review_members().items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "tar").mkdir()
    # In another order, with members that are no reviews.
    members = dict(reversed(review_members().items()))
    others = {"aclImdb/README": b"hello", "aclImdb/train/unsup/0_0.txt": b"no label"}
    write_tar(tmp_path / "tar/aclImdb_v1.tar.gz", members | others)
    expected = tuple(
        [((text.encode(),), label) for text, label in zip(*REVIEWS[split], strict=True)]
        for split in ("train", "test")
    )
    for root in ("parquet", "hub", "folder", "folder/aclImdb", "tar"):
        assert whole("text", tmp_path / root) == expected, root


def test_the_folder_of_a_task_comes_before_the_one_around_it(tmp_path):
    write_reviews(tmp_path / "imdb")
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", other=[1])
    assert len(load("text", tmp_path).test) == 2


def test_retrieval_in_every_layout(tmp_path):
    write_papers(tmp_path / "parquet/aan")
    lra = tmp_path / "lra/tsv_data"
    lra.mkdir(parents=True)
    for split, name in (("train", "train"), ("validation", "eval"), ("test", "test")):
        lines = [f"{y}.0\t{a}\t{b}\t{PAPERS[a]}\t{PAPERS[b]}\n" for y, a, b in PAIRS[split]]
        (lra / f"new_aan_pairs.{name}.tsv").write_text("".join(lines))
    for root in ("parquet", "lra"):
        dataset = load("retrieval", tmp_path / root)
        for split, pairs in PAIRS.items():
            expected = [((PAPERS[a].encode(), PAPERS[b].encode()), y) for y, a, b in pairs]
            assert contents(dataset, split) == expected
        assert len(dataset.train.sequences) == len(PAPERS)  # each document once


def test_retrieval_tsv_may_have_a_header(tmp_path):
    for name in ("train", "eval", "test"):
        path = tmp_path / f"new_aan_pairs.{name}.tsv"
        path.write_text("label\tid1\tid2\ttext1\ttext2\n1\ta\tb\tone\ttwo\n")
    assert contents(load("retrieval", tmp_path), "test") == [((b"one", b"two"), 1)]


def test_listops_with_and_without_parentheses(tmp_path):
    nested = {
        **LISTOPS,
        "train": [("( ( ( [MAX 4 ) 3 ) ( ( ( [MIN 2 ) 3 ) ] ) ) ] )", 4), LISTOPS["train"][1]],
    }
    plain = load("listops", write_listops(tmp_path / "plain/listops").parent)
    lra = load("listops", write_listops(tmp_path / "lra/listops-1000", nested).parent)
    for split, rows in LISTOPS.items():
        assert contents(plain, split) == contents(lra, split)
        shown = [plain.task.show(getattr(plain, split)[i][0][0]) for i in range(len(rows))]
        assert list(zip(shown, getattr(plain, split).labels.tolist(), strict=True)) == rows


def test_the_hub_is_asked_only_without_a_folder(tmp_path, monkeypatch):
    images, labels = write_mnist(tmp_path / "own")
    hub = tmp_path / "snapshot/mnist"
    write_images(hub / "train-00000-of-00001.parquet", images["train"], labels["train"])
    write_images(hub / "test-00000-of-00001.parquet", images["test"], labels["test"])
    asked = []

    def snapshot_download(repo, *, repo_type, allow_patterns):
        asked.append((repo, repo_type))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(sources.huggingface_hub, "snapshot_download", snapshot_download)
    expected = whole("mnist", tmp_path / "own")
    monkeypatch.setenv("FASTRPB_DATA", str(tmp_path / "own"))
    assert whole("mnist", None) == expected
    assert asked == []
    monkeypatch.delenv("FASTRPB_DATA")
    assert whole("mnist", None) == expected
    assert asked == [("ylecun/mnist", "dataset")]


def test_data_dir_goes_before_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTRPB_DATA", str(tmp_path / "nothing"))
    assert len(load("text", write_reviews(tmp_path / "own")).test) == 2


def test_encode_is_how_the_splits_were_made(tmp_path):
    image = pixels((28, 28), 1)[0]
    path = tmp_path / "one.png"
    path.write_bytes(png(image))
    assert bytes(task("mnist").encode(str(path)).tolist()) == image.tobytes()
    for name, folder, source in (
        ("text", write_reviews(tmp_path / "imdb"), REVIEWS["train"][0][0]),
        ("retrieval", write_papers(tmp_path / "aan"), PAPERS["A"]),
        ("listops", write_listops(tmp_path / "listops"), LISTOPS["train"][0][0]),
    ):
        dataset = load(name, folder, validation="train")
        index = 0 if name != "text" else REVIEWS["train"][0].index(source)
        assert torch.equal(dataset.task.encode(source), dataset.train.sequences[index])


def test_digits_encode_scales_grey_to_its_17_values(tmp_path):
    path = tmp_path / "digit.png"
    path.write_bytes(
        png(np.repeat(np.array([[0, 255, 128, 16, 8, 7, 240, 100]], np.uint8), 8, axis=0))
    )
    assert task("digits").encode(str(path))[:8].tolist() == [0, 16, 8, 1, 1, 0, 15, 6]


def test_max_length_cuts_text_and_refuses_to_cut_an_expression(tmp_path):
    folder = write_reviews(tmp_path)
    cut = load("text", folder, max_length=5, validation="test")
    assert contents(cut, "train")[1] == ((b"na\xc3\xafv",), 0)
    assert cut.task.show(cut.train[7][0][0]) == "fine "  # byte 5 begins a character: left out
    assert cut.task.encode("abcdefgh").tolist() == list(b"abcde")
    with pytest.raises(DataError, match=r"8 tokens, more than max_length=5"):
        load("listops", write_listops(tmp_path / "listops"), max_length=5)
    with pytest.raises(DataError, match="mnist always has 784 pixels"):
        task("mnist", max_length=100)
    with pytest.raises(DataError, match="max_length=0"):
        task("text", max_length=0)


def test_validation_is_a_fixed_tenth_of_every_class_of_train(tmp_path):
    write_mnist(tmp_path)
    carved, papers_way = load("mnist", tmp_path), load("mnist", tmp_path, validation="test")
    assert len(papers_way.train) == 20
    assert contents(papers_way, "validation") == contents(papers_way, "test")
    assert sorted(carved.validation.labels.tolist()) == [0, 1]
    rows = torch.cat([carved.train.index, carved.validation.index]).flatten()
    assert rows.sort().values.tolist() == list(range(20))
    assert carved.validation.index.flatten().tolist() == [12, 15]  # the same for ever
    write_parquet(tmp_path / "few/train.parquet", text=["a", "b"], label=[0, 1])
    write_parquet(tmp_path / "few/test.parquet", text=["a", "b"], label=[0, 1])
    with pytest.raises(DataError, match="the 2 examples of train are too few to hold out a tenth"):
        load("text", tmp_path / "few")
    with pytest.raises(DataError, match="validation split of its own"):
        load("digits", validation="test")
    with pytest.raises(DataError, match="must be"):
        load("mnist", tmp_path, validation="tset")  # pyright: ignore[reportArgumentType]


def test_digits_are_whole_and_their_splits_fixed():
    dataset = load("digits")
    parts = [dataset.train, dataset.validation, dataset.test]
    assert sorted(row for part in parts for row in part.index.flatten().tolist()) == list(
        range(1797)
    )
    assert [len(part) for part in parts] == [1259, 269, 269]
    tokens = dataset.train.sequences.tokens
    assert (int(tokens.min()), int(tokens.max()), len(tokens)) == (0, 16, 1797 * 64)
    assert torch.cat([part.labels for part in parts]).bincount().tolist() == [
        *(178, 182, 177, 183, 181, 182, 181, 179, 174, 180)
    ]
    assert dataset.test.index[:5].flatten().tolist() == [25, 35, 40, 56, 75]


def test_the_facts_of_all_tasks_agree():
    for name in TASKS:
        facts = task(name)
        assert facts.name == name
        assert facts.pad_id < facts.vocabulary <= 256
        if facts.image_shape:
            assert facts.image_shape[0] * facts.image_shape[1] == facts.max_length


def test_unknown_task_suggests_the_nearest():
    with pytest.raises(DataError, match="unknown task='mnits'; did you mean mnist"):
        load("mnits")
    with pytest.raises(DataError, match="choose from digits, mnist, cifar10"):
        load("xyz")


def test_a_missing_package_names_the_extra(monkeypatch):
    def import_module(name):
        raise ModuleNotFoundError(name="pyarrow")

    monkeypatch.setattr(fastrpb.data, "import_module", import_module)
    with pytest.raises(DataError, match=r"mnist needs the package pyarrow: pip install '\.\[data"):
        load("mnist")


def test_large_strings_and_binary_columns_are_text_too(tmp_path):
    category = pa.dictionary(pa.int32(), pa.string())
    for kind in (pa.large_string(), pa.binary(), pa.string_view(), category):
        folder = tmp_path / str(kind.id)
        for split, (texts, labels) in REVIEWS.items():
            cells = pa.array([t.encode() for t in texts], pa.binary())
            cells = cells if kind == pa.binary() else cells.cast(pa.string()).cast(kind)
            write_parquet(folder / f"{split}.parquet", text=cells, label=labels)
        assert whole("text", folder)[1] == [((b"bad",), 0), ((b"good",), 1)]


def test_images_as_bytes_alone(tmp_path):
    """Without the struct that the Hub has around them."""
    image = pixels((28, 28), 1)[0]
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", image=10 * [png(image)], label=range(10))
    assert whole("mnist", tmp_path)[1][0] == ((image.tobytes(),), 0)


def test_the_cache_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FASTRPB_CACHE", "~/cache")
    assert cache_dir() == tmp_path / "cache"
