"""What a step of training does, and what is shown of the last ones."""

import math
import statistics

import pytest
from accelerate import Accelerator

from fastrpb.data import Batches, load
from fastrpb.parts import make_accelerator
from fastrpb.run import Run
from fastrpb.step import Stepper
from fastrpb.train import train

pytestmark = pytest.mark.usefixtures("one_thread")


def stepper(config):
    return Stepper(config, make_accelerator(config, True), load("digits").train)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_shown_and_logged_is_of_the_last_steps(small, tmp_path, monkeypatch, accumulate):
    steps, take = [], Stepper.take

    def noted(stepper, before, batch, rate):
        values = take(stepper, before, batch, rate)
        steps.append((*values.tolist(), rate))
        return values

    monkeypatch.setattr(Stepper, "take", noted)
    config, seen = small(steps=15, warmup=5, accumulate=accumulate), []
    train(config, tmp_path / "run", cpu=True, on_progress=seen.append)
    lines = [line for line in Run(tmp_path / "run").metrics() if "loss" in line]
    for shown, line, part in zip(seen, lines, (steps[:10], steps[10:]), strict=True):
        losses, hits, rates = zip(*part, strict=True)
        wanted = statistics.mean(losses), statistics.mean(hits)
        assert (shown.loss, shown.accuracy) == pytest.approx(wanted)
        assert (line["loss"], line["accuracy"]) == pytest.approx(wanted)
        assert line["learning_rate"] == rates[-1]
        assert shown.loss < 2 * math.log(10)  # of one example, not of a batch


def test_the_random_numbers_of_a_step_are_its_own(small, monkeypatch):
    """Dropout is another for each seed, step and process, and the same again."""
    batch = next(iter(Batches(load("digits").train, 8, pad_id=0)))
    weights = stepper(small()).model.state_dict()

    def loss(seed=0, before=0, process=0):
        step = stepper(small(seed=seed, dropout=0.5))
        step.model.load_state_dict(weights)
        monkeypatch.setattr(Accelerator, "process_index", process)
        return step.take(before, batch, 0.0)[0].item()

    losses = [loss(), loss(seed=1), loss(before=1), loss(process=1)]
    assert len({*losses}) == 4
    assert loss() == losses[0]


@pytest.mark.parametrize(("decay", "of_bias"), [(None, 0.1), (0.0, 0.0), (0.9, 0.9)])
def test_the_optimiser_is_that_of_the_config(small, decay, of_bias):
    config = small(weight_decay=0.1, bias_decay=decay, beta2=0.5, eps=0.1)
    groups = stepper(config)._optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, of_bias]
    assert {(*group["betas"], group["eps"]) for group in groups} == {(0.9, 0.5, 0.1)}
