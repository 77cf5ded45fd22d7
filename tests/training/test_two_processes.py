"""Training in two processes, as a launcher starts them."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from commands import SMALL, start
from fastrpb.run import Run

pytestmark = pytest.mark.usefixtures("one_thread")

TWO = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")


def test_two_processes_train_as_one_does(run, tmp_path):
    """The same global batch: the same weights, but for the order in which gradients are summed."""
    values = [*SMALL, "--steps", 60, "--eval-every", 25, "--keep", "best", "--save-every", 20]
    values = ["train", "digits", *values, "--learning-rate", "1e-2", "--tracker", "none"]
    values += ["--norm", "layer"]  # batch norm has the statistics of each process
    assert run(*values, "--out", "one")[0] == 0
    process = start(*values, "--out", "two", launcher=TWO, cwd=tmp_path)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert out.count("test accuracy") == 1  # said once
    one, two = (Run(tmp_path / name) for name in ("one", "two"))
    assert two.result()["processes"] == 2
    assert one.result()["weights_of_step"] == two.result()["weights_of_step"]
    mine, its = load_file(one.model_file), load_file(two.model_file)
    for name, x in mine.items():
        torch.testing.assert_close(its[name], x, rtol=1e-3, atol=1e-5)
    assert one.result()["metrics"]["test"] == pytest.approx(
        two.result()["metrics"]["test"], rel=1e-4
    )


def test_two_processes_killed_go_on_as_two_or_as_one(run, tmp_path):
    values = ["train", "digits", *SMALL, "--steps", 1000, "--eval-every", 500, "--save-every", 10]
    values += ["--tracker", "none", "--keep", "best", "--out", "run"]
    process = start(*values, launcher=TWO, cwd=tmp_path)
    while not Run(tmp_path / "run").steps()[1:]:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # to the launcher, which hands it on
    _, error = process.communicate(timeout=60)
    step = Run(tmp_path / "run").steps()[-1]
    assert f"stopped at step {step} of 1000, and saved" in error
    # Without a GPU they train together unasked.
    cpu = ["--cpu"] * torch.accelerator.is_available()
    resume = start("train", "--resume", "run", *cpu, launcher=TWO, cwd=tmp_path)
    while Run(tmp_path / "run").steps()[-1] <= step:
        assert resume.poll() is None, resume.communicate()
        time.sleep(0.05)
    resume.send_signal(signal.SIGTERM)
    resume.communicate(timeout=60)
    last = Run(tmp_path / "run").steps()[-1]
    assert last > step
    code, out, _ = run("train", "--resume", "run", "--cpu")
    assert code == 0
    assert "step 1000/1000" in out


def test_two_processes_of_slow_steps_stop_soon(tmp_path):
    """Their launcher kills them after half a minute."""
    values = ["train", "digits", *SMALL, "--dim", 256, "--mlp-dim", 2048, "--batch-size", 256]
    values += ["--steps", 100, "--save-every", 100, "--tracker", "none", "--out", "run"]
    process = start(*values, launcher=TWO, cwd=tmp_path)
    while not Run(tmp_path / "run").steps():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert re.search(r"stopped at step \d of 100, and saved", error), error


SLOW_VALIDATION = """
import time
import fastrpb.evaluate
from fastrpb.__main__ import main

classify, batches = fastrpb.evaluate.classify, []

def slowly(model, *inputs):
    if not model.training:
        batches.append(1)
        time.sleep(5 * (len(batches) > 1))  # the first is a trial
    return classify(model, *inputs)

fastrpb.evaluate.classify = slowly
main()
"""


def test_two_processes_stop_within_a_validation(tmp_path):
    """It may take longer than their launcher waits before it kills them."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW_VALIDATION)
    values = ["digits", *SMALL, "--steps", 40, "--eval-every", 15, "--save-every", 100]
    command = [sys.executable, *TWO[:-1], str(script), "train", *map(str, values)]
    process = subprocess.Popen(
        [*command, "--tracker", "none", "--out", "run"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    metrics = tmp_path / "run/metrics.jsonl"
    while not metrics.exists() or '"step": 15' not in metrics.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert "stopped at step 15 of 40, and saved" in error, error
    assert Run(tmp_path / "run").steps()[-1] == 15


def test_what_the_first_process_refuses_all_refuse(tmp_path):
    values = ["train", "digits", *SMALL, "--tracker", "none"]
    whole = start(*values, "--steps", 2, "--out", "run", cwd=tmp_path)
    whole.communicate(timeout=60)
    for options, reason in (
        (["--resume", "run", "--steps", 3, "--cpu"], "was started with another config"),
        (["digits", *SMALL, "--steps", 2, "--out", "run"], "has a run already"),
    ):
        began = time.monotonic()
        process = start("train", *options, launcher=TWO, cwd=tmp_path)
        _, error = process.communicate(timeout=120)
        assert error.count(reason) == 1
        assert "[rank1]" not in error
        assert time.monotonic() - began < 25
