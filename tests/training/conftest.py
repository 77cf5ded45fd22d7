import signal
import sys

import pytest

from fastrpb.__main__ import main


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """The command in this process and an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # main's handler must not stay

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fastrpb", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        return done.value.code or 0, *capsys.readouterr()

    return call
