import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fastrpb.data import DataError, cache, load, text
from samples import review_members, write_parquet, write_reviews

LOADER = """
import hashlib, pathlib, sys, time
from fastrpb.data import load, text
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.001)
split = load("text", sys.argv[1]).train
print(hashlib.sha256(split.sequences.tokens.numpy().tobytes()).hexdigest(), len(split))
"""


@pytest.fixture
def builds(monkeypatch):
    """How often reviews were tokenised."""
    calls = []
    check = text.check_text

    def counted(content, where):
        calls.append(where)
        return check(content, where)

    monkeypatch.setattr(text, "check_text", counted)
    return calls


def test_tokens_are_made_once_for_a_content(tmp_path, own_cache, builds, monkeypatch):
    write_reviews(tmp_path / "one")
    first = load("text", tmp_path / "one")
    made = len(builds)
    assert made == 14
    again = load("text", tmp_path / "one", max_length=3)
    elsewhere = load("text", write_reviews(tmp_path / "two"))
    assert len(builds) == made
    assert len(list(own_cache.iterdir())) == 1
    assert torch.equal(again.train.sequences.tokens, first.train.sequences.tokens)
    assert torch.equal(elsewhere.train.labels, first.train.labels)

    path = write_parquet(tmp_path / "one/test.parquet", text=["bad", "well"], label=[0, 1])
    assert load("text", tmp_path / "one").test[1][0][0].tolist() == list(b"well")
    assert len(builds) == 2 * made
    path.rename(tmp_path / "one/spare")
    monkeypatch.setattr(cache, "VERSION", -1)
    load("text", tmp_path / "two")
    assert len(builds) == 3 * made
    assert len(list(own_cache.iterdir())) == 3


def test_a_review_that_moves_to_the_other_class(tmp_path):
    """The files have the same content in the same order, but not the same names."""
    for name, content in review_members().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    before = load("text", tmp_path, validation="test").train.labels
    (tmp_path / "aclImdb/train/pos/06_9.txt").rename(tmp_path / "aclImdb/train/neg/06_9.txt")
    after = load("text", tmp_path, validation="test").train.labels
    assert (before[6].item(), after[6].item()) == (1, 0)


def test_tokens_are_memory_mapped_and_the_cache_is_never_written_through(tmp_path):
    folder = write_reviews(tmp_path)
    tokens = load("text", folder).train.sequences.tokens
    tokens[0] = 0
    assert load("text", folder).train.sequences.tokens[0] == ord("d")


def test_two_processes_at_once_make_one_whole_entry(tmp_path, own_cache):
    reviews = ["x" * (1 + i % 700) for i in range(6000)]
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", text=reviews, label=[0, 1] * 3000)
    go = tmp_path / "go"
    command = [sys.executable, "-c", LOADER, str(tmp_path), str(go)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    time.sleep(2)  # until all wait for the file
    go.touch()
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(set(outputs)) == 1
    assert [path.name.startswith("text-") for path in own_cache.iterdir()] == [True]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device; free some space, or set FASTRPB_CACHE to another"),
        (errno.EACCES, "Permission denied; set FASTRPB_CACHE to another folder"),
        (None, "784 requested and 10 written; free some space, or set FASTRPB_CACHE"),  # by numpy
    ],
)
def test_a_failed_write_is_one_sentence_and_leaves_nothing(
    number, words, tmp_path, own_cache, monkeypatch
):
    def save(file, array):
        file.write(b"half of it")
        if number is None:
            raise OSError("784 requested and 10 written")
        raise OSError(number, os.strerror(number))

    folder = write_reviews(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", save)
        with pytest.raises(DataError, match=f"cannot write to .*: {words}"):
            load("text", folder)
    assert list(own_cache.iterdir()) == []
    assert len(load("text", folder).test) == 2


def test_a_cache_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FASTRPB_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot write to .*/file: File exists; set FASTRPB"):
        load("text", write_reviews(tmp_path / "imdb"))


def damage(file):
    file.write_bytes(b"\x93NUMPY")


def empty(file):
    file.write_bytes(b"")


@pytest.mark.parametrize("name", ["tokens", "train.labels", "test.index", "splits"])
@pytest.mark.parametrize("harm", [damage, empty, Path.unlink])
def test_a_damaged_entry_says_what_to_remove(tmp_path, own_cache, name, harm):
    folder = write_reviews(tmp_path)
    load("text", folder)
    (entry,) = own_cache.iterdir()
    harm(entry / f"{name}.npy")
    with pytest.raises(DataError, match=rf"{entry} is damaged \(.*\); remove it and run again"):
        load("text", folder)


def test_a_split_that_is_lost_whole(tmp_path, own_cache):
    """Else a tenth of train would stand in for a validation split that the source has."""
    folder = write_reviews(tmp_path)
    load("text", folder)
    (entry,) = own_cache.iterdir()
    for name in ("index", "labels"):
        (entry / f"test.{name}.npy").unlink()
    with pytest.raises(DataError, match=r"is damaged \(.*test\.index\.npy"):
        load("text", folder)


@pytest.mark.parametrize("place", ["FASTRPB_CACHE", "FASTRPB_DATA", "data_dir"])
def test_a_home_that_is_not_known(tmp_path, monkeypatch, place):
    folder = write_reviews(tmp_path)
    if place != "data_dir":
        monkeypatch.setenv(place, "~nobody-has-this/x")
    data_dir = {"FASTRPB_CACHE": folder, "FASTRPB_DATA": None}.get(place, "~nobody-has-this/x")
    with pytest.raises(ValueError, match=r"home folder of ~nobody-has-this/x is not known; give"):
        load("text", data_dir)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("FASTRPB_CACHE", str(tmp_path / "own"))
    assert cache.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("FASTRPB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir() == tmp_path / "xdg/fastrpb"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.cache_dir() == tmp_path / "home/.cache/fastrpb"


def test_importing_the_library_needs_torch_alone():
    code = (
        "import sys, fastrpb, fastrpb.data; fastrpb.data.load('digits');"
        "print(sys.modules.keys() & {'pyarrow', 'PIL', 'huggingface_hub', 'typer', 'rich'})"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "set()"
