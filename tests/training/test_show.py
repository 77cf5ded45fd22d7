import io
from functools import partial

from rich.console import Console

from fastrpb.progress import Progress
from fastrpb.show import Display


def test_the_bars_of_a_terminal_end_with_their_runs(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr("fastrpb.show.Console", partial(Console, force_terminal=True, file=out))
    with Display() as display:
        display.progress("run", Progress(1, 2, 0.5, 0.75, 100.0, 3.0))
        display.done("run", "test accuracy 90.00%")
    hidden, shown = (out.getvalue().count(cursor) for cursor in ("\x1b[?25l", "\x1b[?25h"))
    assert hidden == shown == 1
    assert "run: test accuracy 90.00%" in out.getvalue()
