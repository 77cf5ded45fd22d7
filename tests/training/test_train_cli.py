"""The commands that train, as a user gives them."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commands import SMALL, start
from fastrpb import cli
from fastrpb.config import load_config, override
from fastrpb.presets import best
from fastrpb.records import read_lines
from fastrpb.run import Run
from fastrpb.train import Interruption

# Before a test puts another function in the place of train, which these would keep.
for name in ("compare", "sweep"):
    with suppress(ImportError):
        import_module(f"fastrpb.{name}")

pytestmark = pytest.mark.usefixtures("one_thread")


def test_train_evaluate_resume_and_config(run, tmp_path):
    code, out, _ = run("train", "digits", *SMALL, "--steps", 20, "--seed", 3, "--tracker", "none")
    assert code == 0
    (folder,) = (tmp_path / "runs").glob("digits-sikf-fastrpb-s3-*")
    assert re.search(r"test accuracy \d+\.\d\d%, macro F1 .* tokens/s, .* MiB at the peak", out)
    assert "step 20/20" in out
    config = load_config(folder)
    assert (config.seed, config.steps, config.model.layers) == (3, 20, 2)
    accuracy = Run(folder).result()["metrics"]["test"]["accuracy"]

    code, out, _ = run("evaluate", folder, "--cpu")
    assert code == 0
    assert f"accuracy {accuracy:.2%}" in out

    code, out, _ = run("train", "--resume", folder, "--cpu")  # finished: shown again
    assert code == 0
    assert f"test accuracy {accuracy:.2%}" in out

    code, _, error = run("train", "digits", *SMALL, "--steps", 20, "--seed", 3, "--cpu")
    assert code == 2
    again = f"fastrpb train --resume {folder.relative_to(tmp_path)} --cpu, or choose"
    assert f"has a run already; continue it with: {again}" in error

    code, _, error = run("train", "--resume", folder, "--learning-rate", 1, "--layers", 3)
    assert code == 2
    assert "layers 2 → 3; learning_rate 0.004 → 1.0" in error

    # Given back, a config makes the same run.
    assert run("train", "--config", folder, "--out", "again", "--cpu", "--tracker", "none")[0] == 0
    one, other = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "again"))
    assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_softmax_is_a_row_as_in_a_grid(run):
    values = [*SMALL, "--steps", 2, "--position", "none", "--cpu", "--tracker", "none"]
    assert run("train", "digits", *values, "--features", "softmax", "--out", "run")[0] == 0
    assert load_config("run").model.attention == "softmax"


def test_the_numbers_of_each_split_and_another_task_to_resume(run):
    values = [*SMALL, "--steps", 20, "--out", "run", "--tracker", "none"]
    assert run("train", "digits", *values)[0] == 0
    metrics = Run("run").result()["metrics"]
    assert metrics["validation"]["loss"] != metrics["test"]["loss"]
    for split, values in metrics.items():
        _, out, _ = run("evaluate", "run", "--cpu", "--split", split)
        assert f"{split}: accuracy {values['accuracy']:.2%}" in out
        assert f"loss {values['loss']:.4f}" in out
    code, _, error = run("train", "mnist", "--resume", "run")
    assert code == 2
    assert "run of digits, not of mnist\n" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "give one of TASK, --config FILE and, to continue a run, --resume RUN"),
        (["train", "digits", "--config", "x"], "give one of TASK"),
        (["train", "digts"], "unknown task='digts'; did you mean digits?"),
        (["train", "digits", "--postion", "none"], "--position"),
        (["train", "digits", "--features", "sikv"], "'sikv' is not one of 'softmax', 'sikf'"),
        (
            ["train", "digits", "--features", "softmax", "--attention", "linear"],
            "--features softmax is softmax attention: drop --attention linear",
        ),
        (
            ["train", "digits", "--attention", "softmax", "--features", "dpfp"],
            "softmax attention has no features='dpfp': drop --features",
        ),
        (["train", "digits", "--position", "rpe"], "linear attention never forms"),
        (["train", "text", "--position", "fastrpb2d"], "needs image=(height, width)"),
        (["train", "digits", "--max-length", "9"], "digits always has 64 pixels"),
        (["train", "digits", "--accumulate", "5"], "is not divisible by accumulate=5"),
        (["train", "digits", "--steps", "0"], "steps=0 must be at least 1"),
        (["train", "text", "--data-dir", "nowhere"], "there is no folder nowhere"),
        (["train", "--config", "none.json"], "cannot read the config none.json"),
        (["train", "--resume", "mnist"], "mnist comes with the package; train your own: --config"),
        (["train", "--resume", "nowhere"], "there is no folder nowhere; the package has"),
        (["train", "digits", "--best"], "no best set-up for 'digits', only for mnist"),
        (["train", "mnist", "--layers", "1"], "FastRPB would change nothing"),
        (["train", "--config", "none.json", "--best"], "drop --config"),
        (["train", "--resume", "nowhere", "--best"], "drop --config, --best and --out"),
        (["train", "digits", "--tracker", "wandb"], "needs the package wandb"),
        (["train", "digits", "--dim", 10**20], f"dim={10**20} must be below 2³¹"),
        (["train", "digits", "--dim", 2**30, "--cpu"], "too little memory for this model"),
        (["train", "digits", "--bias-threshold", "1e308"], "must be from 0 to 1e9"),
        (["train", "digits", "--features", "dpfp", "--nu", "99"], "nu=99 must be below 2·16"),
        (["data", "digits", "--seed", "7"], "--seed and --sizes are of listops"),
        (["evaluate", "nowhere"], "there is no folder nowhere"),
        (["predict", "nowhere", "x"], "there is no folder nowhere"),
        (["predict", "mnist", "-"], "mnist takes the path of an image; - reads texts only"),
        (["compare", "digits", "--features", "sikv"], "features='sikv'; did you mean sikf?"),
        (["compare", "digits", "--position", "fastrbp"], "did you mean fastrpb"),
        (["compare", "digits", "--seeds", "0;1"], "--seeds takes whole numbers"),
        (["compare", "digits", "--features", "sikf", "--position", "rpe"], "never forms"),
        (["compare", "digits", "--jobs", "0"], "'--jobs'"),
        (["compare", "digits", "--best"], "no best set-up for 'digits', only for mnist"),
        (["report", "nowhere", "--pixel", "1"], "--pixel takes a row and a column, as 12,10"),
        (["report", "nowhere", "--pixel", "1,2,3"], "as 12,10; got '1,2,3'"),
        (["sweep", "digits", "--low", "1", "--high", "0.1"], "low=1 and high=0.1"),
        (["sweep"], "give one of TASK"),
        (["sweep", "digits", "--best"], "no best set-up for 'digits', only for mnist"),
    ],
)
def test_bad_input_is_one_sentence(run, tmp_path, arguments, message):
    code, _, error = run(*arguments)
    assert code == 2
    assert message in " ".join(error.split())
    assert "Traceback" not in error
    assert not (tmp_path / "runs").exists()


def test_a_config_nested_too_deep(run, tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for command in (["train", "--config"], ["report"], ["report", "--bench"]):
        code, _, error = run(*command, "deep.json")
        assert code == 2
        assert "Traceback" not in error


def test_a_tracker_that_cannot_begin_says_why(run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tensorboard").touch()
    code, _, error = run("train", "digits", *SMALL, "--steps", 2, "--out", "run")
    assert code == 2
    assert "tensorboard" in error


def test_the_command_that_goes_on_can_be_pasted(run, tmp_path):
    name = "Läufe und mehr/mein Lauf"
    for _ in range(2):
        code, _, error = run("train", "digits", *SMALL, "--steps", 1, "--out", name)
    assert code == 2
    command = error.split("continue it with: ")[1].split(", or choose")[0]
    assert shlex.split(command)[:4] == ["fastrpb", "train", "--resume", name]


def test_the_command_that_goes_on_has_the_options_of_before(run, monkeypatch):
    def stopped(*_, **__):
        raise Interruption(3, 9, signal.SIGTERM)

    monkeypatch.setattr("fastrpb.train.train", stopped)
    given = ["--data-dir", "my data", "--tracker", "none", "--cpu"]
    code, _, error = run("train", "digits", "--out", "run", *given)
    assert code == 143
    assert "--resume run --data-dir 'my data' --tracker none --cpu\n" in error


def test_options_go_to_the_functions(run, monkeypatch):
    asked = {}

    def note(*_, **options):
        asked.clear()
        asked.update(options)
        raise ValueError("enough")

    for name in ("train", "compare", "sweep"):
        monkeypatch.setattr(f"fastrpb.{name}.{name}", note)
    common = ["digits", "--data-dir", "d", "--cpu"]
    run("train", *common, "--tracker", "none")
    assert (str(asked["data_dir"]), asked["cpu"], asked["trackers"]) == ("d", True, [])
    run("compare", *common, "--jobs", 3)
    assert (str(asked["data_dir"]), asked["cpu"], asked["jobs"]) == ("d", True, 3)
    run("sweep", *common, "--trials", 7, "--low", 0.25, "--high", 0.5)
    assert (str(asked["data_dir"]), asked["cpu"]) == ("d", True)
    assert (asked["trials"], asked["low"], asked["high"]) == (7, 0.25, 0.5)


def test_folders_that_are_files_or_read_only(run, tmp_path):
    (tmp_path / "file").write_text("")
    for command in (["train", "digits"], ["sweep", "digits"]):
        code, _, error = run(*command, *SMALL, "--out", "file/run")
        assert code == 2
        assert error.startswith("fastrpb: ")
        assert "Traceback" not in error


def test_no_launcher_for_what_starts_processes(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command in ("compare", "sweep"):
        code, _, error = run(command, "digits")
        assert code == 2
        assert "starts its own processes" in error


@pytest.mark.parametrize("command", ["train", "compare", "sweep", "evaluate", "predict", "demo"])
def test_help_has_examples(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert re.search(rf"Example.*fastrpb {command}", out, re.DOTALL)


def test_terminated_it_names_the_command_that_goes_on(tmp_path):
    arguments = ["train", "digits", *SMALL, "--steps", 100_000, "--save-every", 50, "--out", "run"]
    process = start(*arguments, cwd=tmp_path)
    while not Run(tmp_path / "run").steps()[1:]:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143
    assert re.search(r"stopped at step \d+ of 100000, and saved; .* --resume run --cpu\n", error)
    step = int(re.search(r"step (\d+)", error).group(1))
    assert Run(tmp_path / "run").steps()[-1] == step


@pytest.mark.parametrize("command", ["train", "compare"])
def test_terminated_with_all_its_processes_and_more_than_once_it_saves(tmp_path, command):
    """As `timeout` and job schedulers do it."""
    arguments = [command, "digits", *SMALL, "--steps", 100_000, "--save-every", 100_000]
    cell = ["--features", "sikf", "--position", "fastrpb"]
    if command == "compare":
        cell += ["--seeds", 0, "--jobs", 2, "--mlp-dim", 8192]  # which takes long to save
    out = "grid/run" if command == "train" else "grid"
    process = start(*arguments, *cell, "--out", out, cwd=tmp_path, start_new_session=True)
    while not [f for f in tmp_path.glob("grid/*/metrics.jsonl") if f.stat().st_size]:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    for _ in range(3):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.01)
    process.communicate(timeout=60)
    assert process.returncode in (143, -signal.SIGTERM)  # by the last of them, while it exits
    (folder,) = (path.parent for path in tmp_path.glob("grid/*/metrics.jsonl"))
    assert Run(folder).steps()[-1] > 0


@pytest.mark.parametrize("output", [">&-", "| head -1", "> /dev/full"])
def test_an_output_that_is_closed_or_full(tmp_path, output):
    arguments = ["train", "digits", *SMALL, "--steps", 600, "--save-every", 5000]
    command = [sys.executable, "-m", "fastrpb", *arguments, "--out", "run", "--tracker", "none"]
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shlex.join(map(str, command))} {output}"],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr
    made = Run(tmp_path / "run")
    if made.result() is None:  # else it was at its end before it had more to show
        assert output != ">&-"
        assert f"stopped at step {made.steps()[-1]} of 600, and saved" in done.stderr
        assert made.steps()[-1] > 0


def test_compare_of_the_strongest_set_up(run, monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "_compare", lambda configs, *_, **__: asked.extend(configs))
    run("compare", "cifar10", "--best", "--seeds", "0,3")
    assert asked == [replace(best("cifar10"), seed=seed) for seed in (0, 3)]
    asked.clear()
    run("compare", "mnist", "--best", "--position", "none,fastrpb2d", "--seeds", "0", "--epochs", 1)
    plain = override(best("mnist"), {"epochs": 1})
    assert asked == [override(plain, {"position": "none"}), plain]


def test_compare_prints_skips_and_appends(run, tmp_path):
    arguments = ["compare", "digits", *SMALL, "--steps", 5, "--seeds", "0,1"]
    arguments += ["--features", "softmax,sikf", "--position", "none,rpe", "--jobs", 2]
    code, out, error = run(*arguments)
    assert (code, error) == (0, "")
    records = list(read_lines(tmp_path / "runs" / "results.jsonl"))
    assert len(records) == 6
    assert out.startswith("skipped, not possible for digits: Linear, SIKF with RPE\n")
    row = next(line for line in out.splitlines() if "│ Linear, SIKF" in line)
    accuracies = [
        100 * r["metrics"]["test"]["accuracy"]
        for r in records
        if r["config"]["model"]["attention"] == "linear"
    ]
    assert f"{sum(accuracies) / 2:.2f} ± " in row
    assert "N/A" in row
    code, out, _ = run(*arguments)
    assert code == 0
    assert "6 of 6 runs are finished already" in out
    assert len(list(read_lines(tmp_path / "runs" / "results.jsonl"))) == 6


def test_what_is_exported(run, monkeypatch):
    """A file of weights as it is; else what a run has come to, finished or not."""
    monkeypatch.setattr("fastrpb.evaluate.load_run", lambda folder: ({}, f"newest of {folder}"))
    monkeypatch.setattr("fastrpb.onnx.export", lambda model, out: f"{out} from {model}")
    Path("run").mkdir()
    assert run("export", "run", "x.onnx")[1] == "written to x.onnx from newest of run\n"
    Path("run/model.safetensors").touch()
    assert run("export", "run", "x.onnx")[1] == "written to x.onnx from run\n"


def test_the_metric_of_a_printed_table(run, tmp_path):
    arguments = ["compare", "digits", *SMALL, "--steps", 5, "--seeds", "0", "--features", "sikf"]
    for metric in ("accuracy", "f1"):
        _, out, _ = run(*arguments, "--position", "none", "--metric", metric)
        (record,) = read_lines(tmp_path / "runs" / "results.jsonl")
        value = 100 * record["metrics"]["test"][metric]
        assert re.search(rf"│ Linear, SIKF +│ {value:.2f} +│", out)


def test_the_runs_end_when_the_grid_is_killed(tmp_path):
    arguments = ["compare", "digits", *SMALL, "--steps", 10**7, "--features", "sikf"]
    process = start(*arguments, "--position", "none", "--seeds", 0, cwd=tmp_path)
    while not list(tmp_path.glob("runs/*/metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.kill()
    process.communicate()
    (folder,) = (path.parent for path in tmp_path.glob("runs/*/config.json"))
    deadline = time.monotonic() + 30
    while len(Run(folder).steps()) < 2:  # saved by the run when it notices
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_sweep_goes_on_and_gives_a_config(run, tmp_path):
    pytest.importorskip("optuna")
    arguments = ["sweep", "digits", *SMALL, "--steps", 10, "--eval-every", 5, "--out", "study"]
    code, out, _ = run(*arguments, "--trials", 2)
    assert code == 0
    rate = float(re.search(r"best learning rate (\S+);", out).group(1))
    best = load_config(tmp_path / "study" / "best.json")
    assert best.learning_rate == pytest.approx(rate, rel=1e-2)
    assert len(list((tmp_path / "study").glob("rate-*"))) == 2
    assert run(*arguments, "--trials", 3)[0] == 0
    assert len(list((tmp_path / "study").glob("rate-*"))) == 3
    code, _, error = run(*arguments, "--trials", 4, "--seed", 1)
    assert code == 2
    assert "searches another config: seed 0 → 1" in error


def test_a_predicted_expression_from_the_standard_input(run, tmp_path, monkeypatch):
    from samples import write_listops  # noqa: PLC0415

    monkeypatch.setenv("FASTRPB_CACHE", str(tmp_path / "cache"))
    write_listops(tmp_path / "listops")
    values = ["--steps", 1, "--batch-size", 1, "--out", "run", "--tracker", "none"]
    assert run("train", "listops", *SMALL, *values, "--data-dir", tmp_path / "listops")[0] == 0
    code, out, _ = run("predict", "run", "[MAX 4 [MIN 2 3 ] ]")
    assert code == 0
    (tmp_path / "an expression").write_text("[MAX 4 3 ]")
    code, _, error = run("predict", "run", "an expression")
    assert code == 2
    assert "an expression is a file, not a text; to read it: fastrpb predict run - < 'an" in error
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdin", None)
        assert "standard input is closed" in run("predict", "run", "-")[2]
    assert re.fullmatch(r"( *\d+\.\d\d%  \d\n){5}", out)
    code, _, error = run("predict", "run", "[MAX 4 [MIN 2 3 ]")
    assert code == 2
    assert "the brackets do not close" in error
