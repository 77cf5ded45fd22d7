import os
import sys

import pytest

from fastrpb.files import read_tensors, replacing, write_tensors


def test_a_failed_save_names_the_file_that_was_asked_for(tmp_path):
    path = tmp_path / "missing" / "model.txt"
    with pytest.raises(FileNotFoundError) as raised, replacing(path) as part:
        part.write_text("")
    assert raised.value.filename == str(path)


def test_tensors_where_no_file_or_folder_is(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nothing"):
        read_tensors(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nothing"):
        write_tensors({}, tmp_path / "nothing" / "model.safetensors", {})


def test_what_a_link_points_to_is_replaced(tmp_path):
    target, link = tmp_path / "shared" / "x.txt", tmp_path / "x.txt"
    target.parent.mkdir()
    link.symlink_to(target)
    with replacing(link) as part:
        part.write_text("whole")
    assert link.is_symlink()
    assert target.read_text() == "whole"
    assert [path.name for path in target.parent.iterdir()] == ["x.txt"]


def test_a_file_is_for_those_whom_the_umask_lets(tmp_path):
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "x") as part:
            part.touch(0o600)
        assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_a_device_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"), replacing(pipe):
        pytest.fail("it was opened")
    assert pipe.is_fifo()


def test_without_numpy_the_way_on_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ImportError, match=r"needs the package numpy: pip install '\.\[model\]'"):
        write_tensors({}, tmp_path / "x.safetensors", {})
