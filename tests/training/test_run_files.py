"""The files of a run where a disk, a tracker or a permission fails."""

import errno
from pathlib import Path

import pytest
from accelerate.tracking import TensorBoardTracker

from fastrpb.compare import compare
from fastrpb.files import read_tensors
from fastrpb.presets import name_of
from fastrpb.records import append_result, read_records
from fastrpb.run import Run
from fastrpb.train import Interruption, train
from runs import stop_at

pytestmark = pytest.mark.usefixtures("one_thread")


class Killed(BaseException):
    """Nothing can be done about it."""


@pytest.mark.parametrize("written", [False, True])
def test_killed_between_the_files_of_its_end(small, tmp_path, monkeypatch, written):
    """Whether or not the line of the results was written, the next grid makes good the rest."""

    def die(*arguments):
        if written:
            append_result(*arguments)
        raise Killed

    config = small(steps=2)
    run = Run(tmp_path / name_of(config))
    with monkeypatch.context() as patch:
        patch.setattr("fastrpb.run.append_result", die)
        with pytest.raises(Killed):
            train(config, run.folder, cpu=True)
    assert len(list(read_records(run.results_file))) == written
    (record,) = compare([config], tmp_path, cpu=True)
    assert [record] == list(read_records(run.results_file))
    assert run.result() == record
    assert run.steps() == []


def test_a_tracker_on_a_full_disk(small, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill(progress):
        if progress.step == 10:
            monkeypatch.setattr(TensorBoardTracker, "log", full)
            monkeypatch.setattr(TensorBoardTracker, "finish", full)

    config, folder = small(steps=30, save_every=10), tmp_path / "run"
    with pytest.raises(ValueError, match=r"No space left on device; step 10 is safe; free some"):
        train(config, folder, cpu=True, trackers=["tensorboard"], on_progress=fill)
    monkeypatch.undo()
    assert train(config, folder, cpu=True)["steps"] == 30


def test_what_may_not_be_read_is_not_called_damaged(small, tmp_path, monkeypatch):
    run = Run(tmp_path / "run")
    with pytest.raises(Interruption):
        train(small(steps=20), run.folder, cpu=True, on_progress=stop_at(10))
    opened, private = Path.open, run.checkpoint(10)

    def refused(path, *arguments):
        if path == private:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments)

    monkeypatch.setattr(Path, "open", refused)
    for read in (lambda: read_tensors(private), lambda: run.load(10)):
        with pytest.raises(PermissionError):
            read()
