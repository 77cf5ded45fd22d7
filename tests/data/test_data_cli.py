import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import version

import pytest

from fastrpb.__main__ import main
from fastrpb.data.listops import generate
from samples import write_listops, write_mnist, write_papers, write_reviews


def fastrpb(*arguments, encoding="utf-8", **options):
    """The command in a process of its own: (exit code, stdout, stderr)."""
    command = [sys.executable, "-m", "fastrpb", *map(str, arguments)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "120", "PYTHONIOENCODING": encoding},
        **options,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def run(monkeypatch, capsys):
    """The command in this process: the output, or (exit code, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fastrpb", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "120")
        with pytest.raises(SystemExit) as done:
            main()
        output = capsys.readouterr()
        return output.out if done.value.code == 0 else (done.value.code, output.err)

    return call


def test_version(run):
    assert run("--version").strip() == version("fastrpb")


def test_more_samples_than_examples(run):
    assert run("data", "digits", "--samples", 0).count("╭") == 0
    assert run("data", "digits", "--samples", 10**9).count("╭") == 1259


def test_a_terminal_without_unicode():
    code, _, error = fastrpb("data", "digits", encoding="ascii")
    assert (code, error) == (0, "")


def within(seconds, condition):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def generating(tmp_path):
    """A process, in a session of its own, that is writing expressions by two others."""
    command = [sys.executable, "-m", "fastrpb", "data", "listops", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    assert within(60, lambda: [*tmp_path.glob("out/.partial-*/basic_train.tsv")])
    yield process
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_ended_by_a_signal_nothing_stays(generating, tmp_path):
    generating.terminate()
    assert generating.wait(60) == 143
    assert not list((tmp_path / "out").iterdir())


def test_ended_by_ctrl_c_twice_nothing_stays(generating, tmp_path):
    os.killpg(generating.pid, signal.SIGINT)
    time.sleep(0.4)
    os.killpg(generating.pid, signal.SIGINT)
    assert generating.wait(60) == 130
    assert not list((tmp_path / "out").iterdir())


def test_the_workers_of_a_killed_generator_end(generating):
    def ended():
        try:
            os.killpg(generating.pid, 0)
        except ProcessLookupError:
            return True
        return False

    generating.kill()
    generating.wait()
    assert within(60, ended)


def test_digits_are_shown(run):
    output = run("data", "digits")
    assert "1,259" in output
    assert "10 classes, vocabulary 17, at most 64 tokens, images of 8×8" in output
    assert "%" in output


def test_every_task_is_shown(run, tmp_path):
    write_mnist(tmp_path / "mnist")
    write_reviews(tmp_path / "imdb")
    write_papers(tmp_path / "aan")
    write_listops(tmp_path / "listops")
    assert "images of 28×28" in run("data", "mnist", "--data-dir", tmp_path)
    assert "great movie" in run("data", "text", "--data-dir", tmp_path, "--samples", 10)
    papers = run("data", "retrieval", "--data-dir", tmp_path)
    assert "at most 4000 tokens in each of two documents" in papers
    assert "second  paper" in papers  # the control character of the sample is not sent out
    assert "[MAX 4 3 [MIN 2 3 ] ]" in run("data", "listops", "--data-dir", tmp_path)
    assert "movie" not in run("data", "text", "--data-dir", tmp_path, "--samples", 0)


def test_the_numbers_of_a_split(run, tmp_path):
    write_listops(tmp_path)
    shown = run("data", "listops", "--data-dir", tmp_path)
    (train,) = [line for line in shown.splitlines() if line.startswith("│ train")]
    wanted = ["train", "2", "4", "6.0", "8", "50.0%"]
    assert [word.strip() for word in train.split("│")[1:-1]] == wanted


def test_samples_are_from_all_of_a_split_and_cut_as_asked(run, tmp_path):
    write_reviews(tmp_path)
    options = ("--samples", 2, "--max-length", 5)
    shown = run("data", "text", "--data-dir", tmp_path, *options)
    assert "negative" in shown
    assert "positive" in shown  # though the file has all negative ones first
    assert "at most 5 tokens" in shown


def test_listops_are_generated_and_shown(tmp_path):
    sizes = ("--sizes", 30, 5, 5)
    code, output, _ = fastrpb("data", "listops", "--out", tmp_path / "new", "--seed", 1, *sizes)
    assert code == 0
    assert "10 classes, vocabulary 16" in output
    assert len((tmp_path / "new/basic_train.tsv").read_text().splitlines()) == 31
    generate(tmp_path / "same", 1, (30, 5, 5), workers=1)
    for name in ("basic_train.tsv", "basic_test.tsv"):
        new, same = (tmp_path / folder / name for folder in ("new", "same"))
        assert new.read_bytes() == same.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["mnits"], "unknown task='mnits'; did you mean mnist?"),
        (["text", "--data-dir", "nowhere"], "text: there is no folder nowhere; "),
        (["text", "--out", "x"], "--out generates listops only; text is read, see --data-dir"),
        (["listops", "--out", "x", "--data-dir", "y"], "give one of the two"),
        (["listops"], "listops needs its files: `fastrpb data listops --out DIR` makes them"),
        (["digits", "--max-length", "9"], "digits always has 64 pixels"),
    ],
)
def test_mistakes_are_one_sentence(run, arguments, sentence):
    code, error = run("data", *arguments)
    assert code == 2
    assert error.startswith("fastrpb: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_a_full_disk_while_generating(tmp_path):
    """A limit on the size of a file makes the write itself fail, as a full disk does."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    sizes = ("--sizes", 300, 5, 5)
    out = tmp_path / "new"
    code, _, error = fastrpb("data", "listops", "--out", out, *sizes, preexec_fn=limit)
    assert code == 2
    assert error == (
        f"fastrpb: cannot write to {out}: File too large; "
        "free some space, or choose another folder with --out\n"
    )
    assert list(out.iterdir()) == []


def test_without_typer_the_extra_is_named():
    code = "import sys; sys.modules['typer'] = None; import fastrpb.__main__"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "fastrpb: the command needs the package typer: pip install '.[train]' in a clone of "
        "fastrpb\n"
    )
