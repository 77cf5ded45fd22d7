"""What a run that goes on still knows of the part before: its numbers, logs and scales."""

import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastrpb.parts import classify, make_accelerator
from fastrpb.run import Run
from fastrpb.train import DivergedError, Interruption, train
from runs import stop_at

pytestmark = pytest.mark.usefixtures("one_thread")


def test_what_was_logged_after_the_last_save_is_logged_once(small, tmp_path):
    config, run, trackers = small(steps=30, save_every=100), Run(tmp_path / "run"), ["tensorboard"]

    def die(progress):
        if progress.step == 20:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        train(config, run.folder, cpu=True, trackers=trackers, on_progress=die)
    assert run.steps() == [0]
    train(config, run.folder, cpu=True, trackers=trackers)
    (events,) = (run.folder / "tensorboard").iterdir()
    shown = EventAccumulator(str(events)).Reload().Scalars("train/loss")
    assert [x.step for x in shown] == [10, 20, 30]
    assert [x["step"] for x in run.metrics() if "loss" in x] == [10, 20, 30]


def test_a_save_between_two_reports_holds_its_tokens(small, tmp_path):
    run = Run(tmp_path / "run")
    with pytest.raises(Interruption):
        train(small(steps=20, save_every=5), run.folder, cpu=True, on_progress=stop_at(10))
    _, state = run.load(5)
    assert state["tokens"] == 5 * 8 * 64


def test_what_is_safe_after_a_run_has_gone_on(small, tmp_path, monkeypatch):
    config, folder = small(steps=30), tmp_path / "run"
    with pytest.raises(Interruption):
        train(config, folder, cpu=True, on_progress=stop_at(10))
    monkeypatch.setattr("fastrpb.step.classify", lambda *x: classify(*x) * math.nan)
    with pytest.raises(DivergedError, match="step 10 is saved"):
        train(config, folder, cpu=True)


def test_the_peak_is_that_of_all_processes_of_a_run(small, tmp_path):
    config, run = small(steps=20), Run(tmp_path / "run")
    with pytest.raises(Interruption):
        train(config, run.folder, cpu=True, on_progress=stop_at(10))
    tensors, state = run.load(10)
    run.save(10, tensors, {**state, "memory": 2**50})
    assert train(config, run.folder, cpu=True)["peak_memory_bytes"] == 2**50


def test_the_scale_of_a_scaler_goes_on(small, tmp_path, monkeypatch):
    scalers = []

    def with_scaler(*args, **options):
        accelerator = make_accelerator(*args, **options)
        scalers.append(torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=5))
        accelerator.scaler = scalers[-1]
        return accelerator

    monkeypatch.setattr("fastrpb.train.make_accelerator", with_scaler)
    config = small(steps=20)
    train(config, tmp_path / "whole", cpu=True)
    with pytest.raises(Interruption):
        train(config, tmp_path / "run", cpu=True, on_progress=stop_at(10))
    train(config, tmp_path / "run", cpu=True)
    assert scalers[2].get_scale() == scalers[0].get_scale() == 2.0 * 2**4
