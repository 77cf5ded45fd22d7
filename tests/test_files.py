import pytest

from fastrpb.files import replacing


def test_a_failed_save_names_the_file_that_was_asked_for(tmp_path):
    path = tmp_path / "missing" / "model.txt"
    with pytest.raises(FileNotFoundError) as raised, replacing(path) as part:
        part.write_text("")
    assert raised.value.filename == str(path)
