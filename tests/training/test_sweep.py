import math
import os
import signal
import threading
import time
from datetime import datetime, timedelta

import pytest
import torch

from apart import APART
from fastrpb.data import load
from fastrpb.evaluate import Metrics
from fastrpb.run import Run
from fastrpb.train import Interruption

optuna = pytest.importorskip("optuna")
from fastrpb.sweep import _open, _queue_again, sweep  # noqa: E402

DIGEST = load("digits").digest()


def rates(config):
    """Those that a search tries by default."""
    return config.learning_rate / 10, config.learning_rate * 10


TrialState = optuna.trial.TrialState
pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_interrupted_trial_goes_on(small, tmp_path):
    config = small(steps=40, eval_every=20)

    def stop(name, progress):
        if progress.step == 30:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interruption):
        sweep(config, tmp_path, trials=1, cpu=True, on_progress=stop)
    (folder,) = tmp_path.glob("rate-*")
    assert Run(folder).steps()[-1] == 30
    seen = []
    best = sweep(config, tmp_path, trials=1, cpu=True, on_progress=lambda n, p: seen.append(p.step))
    assert seen[0] > 30
    assert f"rate-{best.learning_rate!r}" == folder.name
    states = [trial.state for trial in _open(config, tmp_path, DIGEST, rates(config)).trials]
    assert states == [TrialState.FAIL, TrialState.COMPLETE]


def die(config, folder):
    def kill(name, progress):
        if progress.step == 20:
            os.kill(os.getpid(), signal.SIGKILL)

    sweep(config, folder, trials=1, cpu=True, on_progress=kill)


def test_a_killed_trial_goes_on(small, tmp_path):
    config = small(steps=30, save_every=10)
    process = APART.Process(target=die, args=(config, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    sweep(config, tmp_path, trials=1, cpu=True)
    assert len(list(tmp_path.glob("rate-*"))) == 1


def test_a_trial_of_a_worker_that_was_killed_as_it_took_it(small, tmp_path):
    config = small(steps=10)
    study = _open(config, tmp_path, DIGEST, rates(config))
    for minutes in (0, 2):
        fixed = {"fixed_params": {"learning_rate": 1e-3 * (1 + minutes)}}
        began = datetime.now() - timedelta(minutes=minutes)
        trial = optuna.trial.create_trial(state=TrialState.RUNNING, system_attrs=fixed)
        trial.datetime_start = began
        study.add_trial(trial)
    again = _open(config, tmp_path, DIGEST, rates(config))
    _queue_again(again, tmp_path)
    waiting = again.get_trials(states=[TrialState.WAITING])
    assert [x.system_attrs["fixed_params"]["learning_rate"] for x in waiting] == [3e-3]


def test_diverging_rates_are_cut_short_and_the_best_is_of_validation(small, tmp_path):
    config, words = small(steps=20, eval_every=10), {}
    with pytest.raises(ValueError, match="the loss diverged at every learning rate"):
        sweep(config, tmp_path / "a", trials=2, low=1e29, high=1e30, cpu=True)
    best = sweep(
        config, tmp_path / "b", trials=3, cpu=True, on_trial=lambda n, w: words.update({n: w})
    )
    study = _open(config, tmp_path / "b", DIGEST, rates(config))
    assert best.learning_rate == study.best_params["learning_rate"]
    record = Run(tmp_path / "b" / f"rate-{best.learning_rate!r}").result()
    assert study.best_value == record["metrics"]["validation"]["accuracy"]
    assert len(words) == 3


def test_the_most_accurate_of_rates_of_all_orders(small, tmp_path, monkeypatch):
    tried = {}

    def trained(config, *_, **__):
        rate = config.learning_rate
        tried[rate] = 1 / (1 + abs(math.log10(rate / 1e-4)))
        return {"metrics": {"validation": {"accuracy": tried[rate]}}}

    monkeypatch.setattr("fastrpb.sweep.train", trained)
    best = sweep(small(), tmp_path, trials=12, low=1e-8, high=1.0, cpu=True)
    assert best.learning_rate == max(tried, key=tried.__getitem__)
    first = [*tried][:10]  # at random, evenly by the logarithm
    assert sum(rate < 1e-2 for rate in first) > 1


def test_a_trial_under_the_median_is_cut_short(small, tmp_path, monkeypatch):
    accuracies, runs, words = iter([0.9] * 5 + [0.1]), [], []

    def trained(config, folder, *, on_validation, **_):
        runs.append(Run(folder))
        runs[-1].checkpoints.mkdir(parents=True)
        runs[-1].checkpoint(1).touch()
        accuracy = next(accuracies)
        on_validation(1, Metrics(1 - accuracy, accuracy, 0.5))
        return {"metrics": {"validation": {"accuracy": accuracy}}}

    monkeypatch.setattr("fastrpb.sweep.train", trained)
    sweep(small(), tmp_path, trials=6, cpu=True, on_trial=lambda _, said: words.append(said))
    assert words == ["validation accuracy 90.00%"] * 5 + ["cut short"]
    assert [run.steps() for run in runs] == [[1]] * 5 + [[]]  # it will not go on


def test_a_journal_and_a_lock_that_a_killed_worker_left(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small(steps=5)
    sweep(config, "study", trials=1, cpu=True)
    journal = tmp_path / "study" / "study.journal"
    journal.write_bytes(journal.read_bytes() + b'{"op_code": 5, "wor')
    sweep(config, "study", trials=2, cpu=True)
    assert len(list((tmp_path / "study").glob("rate-*"))) == 2
    assert not list((tmp_path / "study").glob("worker-*"))


def test_a_damaged_journal_is_one_sentence(small, tmp_path):
    sweep(small(steps=2), tmp_path, trials=1, cpu=True)
    journal = tmp_path / "study.journal"
    first, *rest = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([first, "garbage\n", *rest]))
    with pytest.raises(ValueError, match=r"study.journal: line 2 is damaged; remove it"):
        sweep(small(steps=2), tmp_path, trials=2, cpu=True)


def test_the_best_config_keeps_the_validation_that_was_asked_for(small, tmp_path):
    best = sweep(small(steps=3, validation="test"), tmp_path, trials=1, cpu=True)
    assert best.validation == "test"


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 0.1), (0.1, float("inf"))])
def test_impossible_ranges(small, tmp_path, low, high):
    with pytest.raises(ValueError, match=r"low=.* and high=.* must be positive"):
        sweep(small(), tmp_path, low=low, high=high, cpu=True)


def test_a_search_without_trials(small, tmp_path):
    with pytest.raises(ValueError, match="trials=0 must be at least 1"):
        sweep(small(), tmp_path, trials=0)


def test_two_workers_share_a_study(small, tmp_path):
    config = small(steps=10)
    workers = [APART.Process(target=work, args=(config, tmp_path)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    study = _open(config, tmp_path, DIGEST, rates(config))
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 4
    found = {(tmp_path / f"{worker.pid}.txt").read_text() for worker in workers}
    assert found == {str(study.best_params["learning_rate"])}  # each waits for the last trial


def work(config, folder):
    torch.set_num_threads(1)
    best = sweep(config, folder, trials=4, cpu=True)
    (folder / f"{os.getpid()}.txt").write_text(str(best.learning_rate))


def test_a_trial_of_a_killed_worker_is_taken_over(small, tmp_path):
    """By one that waits for it, having none of its own."""
    config = small(steps=30, save_every=10)
    other = APART.Process(target=hang, args=(config, tmp_path))
    other.start()
    while not [steps for run in tmp_path.glob("rate-*") if (steps := Run(run).steps())]:
        time.sleep(0.05)
    threading.Timer(1, other.kill).start()
    sweep(config, tmp_path, trials=1, cpu=True)
    other.join()
    assert len(list(tmp_path.glob("rate-*"))) == 1


def hang(config, folder):
    torch.set_num_threads(1)
    sweep(config, folder, trials=1, cpu=True, on_progress=lambda n, p: time.sleep(1000))


def test_why_a_trial_was_cut_off_is_told_though_the_disk_is_full(small, tmp_path, monkeypatch):
    def refuse(error):
        def refusing(*_, **__):
            raise error

        return refusing

    monkeypatch.setattr("fastrpb.sweep.train", refuse(ValueError("cannot write")))
    monkeypatch.setattr("optuna.Study.tell", refuse(OSError("No space left on device")))
    with pytest.raises(ValueError, match="cannot write"):
        sweep(small(), tmp_path, trials=1, cpu=True)
    assert not list(tmp_path.glob("worker-*"))


def test_a_study_has_one_range(small, tmp_path):
    config = small(steps=2)
    sweep(config, tmp_path, trials=1, low=1e-4, high=1e-3, cpu=True)
    with pytest.raises(ValueError, match=r"rates from 0\.0001 to 0\.001, not from 1 to 2; choose"):
        sweep(config, tmp_path, trials=1, low=1, high=2, cpu=True)
    assert sweep(config, tmp_path, trials=1, low=1e-4, high=1e-3, cpu=True).learning_rate >= 1e-4


def test_a_study_does_not_lie_in_a_run(small, tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match="is a run itself; choose another folder by --out"):
        sweep(small(steps=2), tmp_path, trials=1, cpu=True)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
