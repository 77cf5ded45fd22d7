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
