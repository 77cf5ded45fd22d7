"""Runs that are killed, stopped, or fail: what is saved of them, and that they go on."""

import os
import random
import resource
import shutil
import signal
import threading
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.exc import InductorError

from apart import APART
from fastrpb import PairClassifier, save_model
from fastrpb.config import override
from fastrpb.evaluate import evaluate, load_run
from fastrpb.parts import build, classify
from fastrpb.run import Run
from fastrpb.train import DivergedError, Interruption, _Trainer, train
from runs import assert_same, stop_at, weights

pytestmark = pytest.mark.usefixtures("one_thread")


def train_apart(*arguments):
    """In a process that can be killed."""
    torch.set_num_threads(1)
    train(*arguments, cpu=True)


def train_and_die(config, folder, save):
    """Killed inside the given save, when the file is written but not in its place."""
    torch.set_num_threads(1)
    original, saves = Path.replace, []

    def replace(path, target):
        if "step-" in str(target):
            saves.append(target)
            if len(saves) == save:
                os.kill(os.getpid(), signal.SIGKILL)
        return original(path, target)

    Path.replace = replace
    train(config, folder, cpu=True)


@pytest.mark.parametrize(("position", "norm"), [("fastrpb", "batch"), ("sinespe", "layer")])
def test_killed_at_random_it_ends_as_if_it_never_was(small, tmp_path, position, norm):
    """Dropout, noise, the order of the data, the optimiser and the best weights: all go on."""
    config = small(steps=250, save_every=7, eval_every=50, keep="best", position=position)
    config = override(config, {"learning_rate": 1e-2, "realizations": 4, "norm": norm})
    whole = APART.Process(target=train_apart, args=(config, tmp_path / "whole"))
    whole.start()
    whole.join()
    folder, moments, resumed = tmp_path / "killed", random.Random(time.time()), []
    while len(resumed) < 5:
        before = Run(folder).steps()
        process = APART.Process(target=train_apart, args=(config, folder))
        process.start()
        while Run(folder).steps() == before and process.is_alive():
            time.sleep(0.005)  # it has begun, or gone on, and saved
        process.join(moments.uniform(0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, "finished before the fifth kill"
        resumed.append(Run(folder).steps()[-1])
    assert resumed == sorted({*resumed}), "each went on from where the last was killed"
    last = APART.Process(target=train_apart, args=(config, folder))
    last.start()
    last.join()
    assert_same(weights(tmp_path / "whole"), weights(folder))
    lines = [[x for x in Run(f).metrics() if "loss" not in x] for f in (tmp_path / "whole", folder)]
    assert lines[0] == lines[1] != []


@pytest.mark.parametrize("save", [1, 2, 4])
def test_killed_while_it_saves(small, tmp_path, save):
    config, folder = small(steps=30, save_every=10), tmp_path / "killed"
    process = APART.Process(target=train_and_die, args=(config, folder, save))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert Run(folder).steps() == [10 * s for s in range(save - 1)][-2:]
    assert list(folder.rglob("*.part"))
    train(config, tmp_path / "whole", cpu=True)
    train(config, folder, cpu=True)
    assert_same(weights(tmp_path / "whole"), weights(folder))
    assert not list(folder.rglob("*.part"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_names_the_resume_command(small, tmp_path, number):
    config, folder = small(steps=40), tmp_path / "run"

    def stop(progress):
        if progress.step == 20:
            os.kill(os.getpid(), number)

    before = signal.signal(number, signal.SIG_DFL)  # under nohup, one would be ignored
    try:
        with pytest.raises(Interruption, match=r"step 2\d of 40, and saved") as stopped:
            train(config, folder, cpu=True, on_progress=stop)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert stopped.value.number == number
    train(config, folder, cpu=True)
    train(config, tmp_path / "whole", cpu=True)
    assert_same(weights(tmp_path / "whole"), weights(folder))


def test_nohup_is_obeyed(small, tmp_path):
    def hang_up(progress):
        os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train(small(steps=20), tmp_path / "run", cpu=True, on_progress=hang_up)["metrics"]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_also_ends_the_compiler(small, tmp_path, monkeypatch):
    """It goes to all processes of a terminal: what fails then is not the compiler's fault."""
    config, folder, calls = small(steps=9, save_every=4), tmp_path / "run", []

    def compile_here(*inputs):
        calls.append(inputs)
        if len(calls) < 7:
            return classify(*inputs)
        os.kill(os.getpid(), signal.SIGINT)
        raise InductorError(RuntimeError("C++ compile error"), None)

    with monkeypatch.context() as patch:
        patch.setattr("fastrpb.step.classify", compile_here)
        with pytest.raises(Interruption, match="stopped at step 4 of 9, and saved"):
            train(config, folder, cpu=True)
    train(config, folder, cpu=True)
    train(config, tmp_path / "whole", cpu=True)
    assert_same(weights(tmp_path / "whole"), weights(folder))


def test_a_signal_in_a_validation_loses_nothing(small, tmp_path):
    config, folder = small(steps=20, eval_every=10, keep="best"), tmp_path / "run"
    armed = [True]

    def stop(progress):  # the report comes just before the validation
        if progress.step == 10 and armed.pop():
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interruption):
        train(config, folder, cpu=True, on_progress=stop)
    train(config, folder, cpu=True)
    train(config, tmp_path / "whole", cpu=True)
    steps = [
        [x["step"] for x in Run(f).metrics() if "validation" in x]
        for f in (folder, tmp_path / "whole")
    ]
    assert steps == [[10, 20], [10, 20]]
    assert_same(weights(tmp_path / "whole"), weights(folder))


@pytest.mark.parametrize("error", [OSError("no space"), SystemExit(1)])
@pytest.mark.parametrize("asked", [False, True])
def test_saved_where_nobody_can_look_any_more(small, tmp_path, error, asked):
    """A closed pipe or a full disk; also if that is found while it stops for another reason."""
    run = Run(tmp_path / "run")

    def show(progress):
        if progress.step > 15:
            raise error

    def stop(step, metrics):
        if asked:
            os.kill(os.getpid(), signal.SIGTERM)

    config = small(steps=40, eval_every=15, save_every=1000)
    with pytest.raises(Interruption, match=r"stopped at step \d+ of 40, and saved") as stopped:
        train(config, run.folder, cpu=True, on_progress=show, on_validation=stop)
    assert stopped.value.number == (signal.SIGTERM if asked else signal.SIGPIPE)
    last = 16 if asked else 20
    assert run.steps()[-1] == last
    assert [x["step"] for x in run.metrics() if "loss" in x] == [10, 15, last]


@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("later", [0.0, 1.1])
def test_a_second_ctrl_c_ends_at_once(small, tmp_path, again, later):
    """But for what comes with the first: a launcher hands on what the terminal has sent, too."""

    def stop(progress):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(later)
        os.kill(os.getpid(), again)

    at_once = again == signal.SIGINT and later
    with pytest.raises(KeyboardInterrupt if at_once else Interruption):
        train(small(), tmp_path / "run", cpu=True, on_progress=stop)
    assert (Run(tmp_path / "run").steps()[-1] > 0) is not bool(at_once)


def test_saved_before_a_scaler_let_the_optimiser_step(small, tmp_path, monkeypatch):
    """As a scaler of fp16 skips the first steps, whose gradients overflow."""
    config, folder = small(steps=20), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("accelerate.optimizer.AcceleratedOptimizer.step", lambda *_: None)
        with pytest.raises(Interruption):
            train(config, folder, cpu=True, on_progress=stop_at(10))
    assert Run(folder).steps()[-1] == 10
    assert train(config, folder, cpu=True)["steps"] == 20


def test_no_signals_in_another_thread(small, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(
        target=train, args=(small(steps=2), tmp_path / "run"), kwargs={"cpu": True}
    )
    thread.start()
    thread.join()
    assert Run(tmp_path / "run").result()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_loss_that_is_no_number(small, tmp_path):
    config = small(steps=200, learning_rate=1e30, warmup=0)
    with pytest.raises(
        DivergedError, match=r"the loss is (nan|inf) at step \d+; the state of step 0"
    ):
        train(config, tmp_path / "run", cpu=True)
    _, model = load_run(tmp_path / "run")
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_loss_that_is_no_number_in_a_share_of_a_gpu(small, tmp_path, monkeypatch):
    """Not the learning rate's fault, so a sweep must not go on to the next one."""
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "33")
    config = small(steps=200, learning_rate=1e30, warmup=0)
    with pytest.raises(DivergedError):
        train(config, tmp_path / "cpu", cpu=True)
    diverged = _Trainer._diverged

    def on_a_gpu(trainer, what):
        trainer.accelerator = SimpleNamespace(device=torch.device("cuda"))
        diverged(trainer, what)

    monkeypatch.setattr(_Trainer, "_diverged", on_a_gpu)
    with pytest.raises(ValueError, match=r"AGE=33 products .* NaN on a GPU: resume without") as got:
        train(config, tmp_path / "run", cpu=True)
    assert not isinstance(got.value, DivergedError)


def fill(config, folder):
    """The first saves fit, then the disk is full."""
    torch.set_num_threads(1)

    def full(progress):
        if progress.step == 20:
            size = max(p.stat().st_size for p in Path(folder, "checkpoints").iterdir())
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, resource.RLIM_INFINITY))

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        train(config, folder, cpu=True, on_progress=full)
    except ValueError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        Path(f"{folder}.error").write_text(str(error))


def test_a_folder_that_is_gone_is_not_called_safe(small, tmp_path):
    def remove(progress):
        if progress.step == 20:
            shutil.rmtree(tmp_path / "run")

    with pytest.raises(ValueError, match=r"run is gone, with what was saved in it; if it was mov"):
        train(small(steps=30, save_every=10), tmp_path / "run", cpu=True, on_progress=remove)


def test_a_full_disk_leaves_the_last_good_checkpoint(small, tmp_path):
    config, folder = small(steps=30, save_every=10), tmp_path / "run"
    process = APART.Process(target=fill, args=(config, folder))
    process.start()
    process.join()
    message = Path(f"{folder}.error").read_text()
    assert message.startswith(f"cannot write to {folder}: ")
    assert "step 10 is safe; free some space and resume" in message
    assert Run(folder).steps() == [0, 10]
    train(config, folder, cpu=True)
    train(config, tmp_path / "whole", cpu=True)
    assert_same(weights(tmp_path / "whole"), weights(folder))


def test_results_that_are_damaged_are_told_before_a_run_and_at_its_end(small, tmp_path):
    config, folder, results = small(steps=20), tmp_path / "run", tmp_path / "results.jsonl"

    def spoil(progress):
        results.write_text('{"a": 1}\n"a"\n{"b": 1}\n')

    with pytest.raises(
        ValueError, match=r"results.jsonl: line 2 is damaged; remove it, then resume; step 20 is s"
    ):
        train(config, folder, cpu=True, on_progress=spoil)
    with pytest.raises(ValueError, match=r"results.jsonl: line 2 is damaged; remove it$"):
        train(config, tmp_path / "other", cpu=True, on_progress=pytest.fail)
    results.unlink()
    results.mkdir()
    with pytest.raises(IsADirectoryError):
        train(config, folder, cpu=True)
    results.rmdir()
    seen = []
    train(config, folder, cpu=True, on_progress=seen.append)
    assert not seen  # all steps were safe


@pytest.mark.parametrize(("steps", "saved"), [(1, 1), (2, 0)])
def test_a_loss_that_is_no_number_at_the_end(small, tmp_path, steps, saved):
    """That of an evaluation, of weights that are numbers still; that of a step."""
    config = small(steps=steps, learning_rate=1e30, warmup=0)
    with pytest.raises(DivergedError, match=f"the state of step {saved} is saved"):
        train(config, tmp_path / "run", cpu=True)
    assert Run(tmp_path / "run").result() is None


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_evaluation_that_fails_loses_nothing(small, tmp_path, monkeypatch, failing):
    """That of a batch before the first step, and those of both splits after the last."""
    config, folder = small(steps=20, eval_every=20, save_every=1000, keep="best"), tmp_path / "run"
    calls = []

    def fails(*args):
        calls.append(args)
        if len(calls) == failing:
            raise ValueError("no memory")
        return evaluate(*args)

    with monkeypatch.context() as patch:
        patch.setattr("fastrpb.train.evaluate", fails)
        with pytest.raises(ValueError, match="no memory"):
            train(config, folder, cpu=True)
    seen = []
    train(config, folder, cpu=True, on_progress=seen.append)
    assert len(seen) == (2 if failing == 1 else 0)  # no step was taken again
    assert [x["step"] for x in Run(folder).metrics() if "validation" in x] == [20]
    train(config, tmp_path / "whole", cpu=True)
    assert_same(weights(tmp_path / "whole"), weights(folder))


def test_the_time_left_is_by_the_speed_of_this_machine(small, tmp_path):
    config, run = small(steps=40, save_every=10), Run(tmp_path / "run")
    with pytest.raises(Interruption):
        train(config, run.folder, cpu=True, on_progress=stop_at(20))
    tensors, state = run.load(20)
    run.save(20, tensors, {**state, "seconds": 1e6})  # the first half ran on a slower one
    seen = []
    record = train(config, run.folder, cpu=True, on_progress=seen.append)
    assert seen[0].step == 30
    assert 0 < seen[0].seconds_left < 1e3
    assert record["seconds"] > 1e6


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "moved"])
def test_a_damaged_checkpoint_is_one_sentence(small, tmp_path, damage):
    config, folder = small(steps=40, save_every=10), tmp_path / "run"
    with pytest.raises(Interruption):
        train(config, folder, cpu=True, on_progress=stop_at(20))
    older, newer = Run(folder).steps()
    path = Run(folder).checkpoint(newer)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    moved = path.read_bytes().replace(b'\\"batch\\": ', b'\\"batch\\":1', 1)
    assert moved != path.read_bytes()
    new = {"cut": content[:-7], "flip": content, "empty": b"", "moved": moved}[damage]
    path.write_bytes(new)
    with pytest.raises(
        ValueError, match=f"damaged checkpoint: .*; remove it to go on from step {older}"
    ):
        train(config, folder, cpu=True)
    with pytest.raises(ValueError, match="damaged"):
        load_run(folder)
    path.unlink()
    train(config, folder, cpu=True)


def test_checkpoints_rotate_and_go_when_the_run_is_finished(small, tmp_path):
    seen = []

    def look(progress):
        seen.append(Run(tmp_path / "run").steps())

    train(small(steps=50, save_every=10), tmp_path / "run", cpu=True, on_progress=look)
    assert seen == [[0], [0, 10], [10, 20], [20, 30], [30, 40]]
    assert Run(tmp_path / "run").steps() == []


def test_two_at_once_in_one_folder(small, tmp_path):
    run, said = Run(tmp_path / "run"), []

    def again(progress):
        with pytest.raises(ValueError, match="another process is training in") as busy:
            run.locked().__enter__()
        said.append(str(busy.value))

    train(small(steps=10), run.folder, cpu=True, on_progress=again)
    assert said == [f"another process is training in {run.folder}"]
    assert not run.busy()


def test_killed_before_the_config_was_written(small, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").write_text("")
    (tmp_path / "run" / "config.json.77.part").write_text("{")
    train(small(steps=2), tmp_path / "run", cpu=True)
    assert not list((tmp_path / "run").glob("*.part"))


def test_a_checkpoint_that_is_none(small, tmp_path):
    config, run = small(steps=20, save_every=10), Run(tmp_path / "run")
    with pytest.raises(Interruption):
        train(config, run.folder, cpu=True, on_progress=stop_at(10))
    save_model(build(config), run.checkpoint(15))
    words = r"step-00000015.safetensors holds no state of a run; remove it to go on from step 10"
    with pytest.raises(ValueError, match=words):
        train(config, run.folder, cpu=True)


@pytest.mark.parametrize("begin_anew", [False, True])
def test_a_config_that_is_lost_is_found_in_the_checkpoint(small, tmp_path, begin_anew):
    config, run = small(steps=20), Run(tmp_path / "run")
    with pytest.raises(Interruption):
        train(config, run.folder, cpu=True, on_progress=stop_at(10))
    run.config_file.write_text("{")
    with pytest.raises(ValueError, match="remove it and give its options again with --out"):
        train(config, run.folder, cpu=True)
    run.config_file.unlink()
    with pytest.raises(ValueError, match="started with another config: seed"):
        train(override(config, {"seed": 1}), run.folder, cpu=True)
    assert not run.exists()
    if begin_anew:
        run.forget()
    train(config, run.folder, cpu=True)
    train(config, tmp_path / "whole", cpu=True)
    assert_same(weights(tmp_path / "whole"), weights(run.folder))


def test_lines_of_metrics_that_are_none_are_left_out(small, tmp_path):
    config, run = small(steps=20), Run(tmp_path / "run")
    with pytest.raises(Interruption):
        train(config, run.folder, cpu=True, on_progress=stop_at(10))
    before = run.metrics()
    for line in (
        *({"step": "x"}, {"step": None, "accuracy": 1}, {"a": 1}),
        *({"step": 5, "validation": 3}, {"step": 5, "validation": {}}),
    ):
        run.log(line)
    assert run.metrics() == before
    train(config, run.folder, cpu=True)
    assert run.metrics()[: len(before)] == before


def test_a_finished_run_whose_model_is_lost_or_anothers(small, tmp_path):
    config, run = small(steps=2), Run(tmp_path / "run")
    train(config, run.folder, cpu=True)
    good = run.model_file.read_bytes()
    trained = {name: x.clone() for name, x in weights(run.folder).items()}  # the file will change

    run.model_file.write_bytes(b"")
    uses = load_run, lambda folder: train(config, folder, cpu=True)
    for use in uses:
        with pytest.raises(ValueError, match=r"model.safetensors is not .*remove it and train it"):
            use(run.folder)
    run.model_file.unlink()
    train(config, run.folder, cpu=True)
    assert_same(trained, weights(run.folder))

    others = build(override(config, {"layers": 1})), PairClassifier(config.model)
    for other, use in product(others, uses):
        save_model(other, run.model_file)
        with pytest.raises(ValueError, match=r"safetensors is not the model of .*config.json"):
            use(run.folder)
    run.model_file.write_bytes(good)
    run.result_file.write_text("{")
    assert load_run(run.folder)  # which needs no record
