import io
from functools import partial

from rich.console import Console

from fastrpb.progress import Progress
from fastrpb.show import Display, in_words, outcome_in_words
from runs import record_of


def test_the_bars_of_a_terminal_end_with_their_runs(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr("fastrpb.show.Console", partial(Console, force_terminal=True, file=out))
    with Display() as display:
        display.progress("run", Progress(1, 2, 0.5, 0.75, 100.0, 3.0))
        display.done("run", "test accuracy 90.00%")
    hidden, shown = (out.getvalue().count(cursor) for cursor in ("\x1b[?25l", "\x1b[?25h"))
    assert hidden == shown == 1
    assert "run: test accuracy 90.00%" in out.getvalue()


def test_a_narrow_terminal_shows_the_accuracy(monkeypatch):
    out = io.StringIO()
    console = partial(Console, force_terminal=True, file=out, width=80)
    monkeypatch.setattr("fastrpb.show.Console", console)
    with Display() as display:
        display.progress(
            "listops-sikf-fastrpb2d-s10-8f3a1c", Progress(1000, 9000, 0.5, 0.975, 1e6, 4e3)
        )
    assert "step 1000/9000  loss 0.5000  accuracy 97.5%" in out.getvalue()


def test_a_terminal_that_cannot_move_its_cursor_has_lines(monkeypatch, capsys):
    monkeypatch.setattr("fastrpb.show.Console", partial(Console, force_terminal=True))
    monkeypatch.setenv("TERM", "dumb")
    with Display() as display:
        display.progress("run", Progress(2, 2, 0.5, 0.75, 100.0, 0.0))
    assert "run: evaluating  step 2/2" in capsys.readouterr().out


def test_a_finished_run_in_words(small):
    assert outcome_in_words(record_of(small())) == (
        "test accuracy 50.00%, macro F1 25.00%, 3.0 s of training, 4,321 tokens/s, "
        "7 MiB at the peak"
    )


def test_progress_in_words():
    rest = "loss 0.5000  accuracy 25.0%  4,321 tokens/s"
    assert in_words(Progress(3, 9, 0.5, 0.25, 4321.0, 61)) == f"0:01:01 left  step 3/9  {rest}"
    assert in_words(Progress(9, 9, 0.5, 0.25, 4321.0, 0)) == f"evaluating  step 9/9  {rest}"
    assert " days, " in in_words(Progress(3, 9, 0.5, 0.25, 4321.0, 1e30))
