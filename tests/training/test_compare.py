import json
import math
import multiprocessing
import os
import re
import threading
import time
from multiprocessing import Pipe

import pytest
import torch

from apart import APART  # noqa: F401, its processes start the grid's too
from fastrpb.compare import _places, _train_apart, compare, finished, grid, left_out
from fastrpb.data import DataError
from fastrpb.presets import name_of
from fastrpb.records import append_result, read_lines
from fastrpb.report import collect
from fastrpb.run import BusyError, Run
from fastrpb.tables import cells, on_test
from fastrpb.train import train
from runs import record_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_mean_and_standard_deviation_over_the_seeds():
    made = [
        {
            "config": {"model": {"attention": a, "features": "sikf", "position": "none"}},
            "metrics": {"test": {"accuracy": x}},
        }
        for a, x in [("linear", 0.5), ("linear", 0.7), ("softmax", 0.9)]
    ]
    table = cells(made, on_test("accuracy"))
    assert table["sikf", "none"] == pytest.approx((60.0, 200**0.5, 2))
    assert str(table["sikf", "none"]) == "60.00 ± 14.14"
    assert str(table["softmax", "none"]) == "90.00"


def test_runs_do_not_nest(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match="is a run itself; choose another folder by --out"):
        compare(grid("digits", ["sikf"], ["none"], [0], {}), tmp_path, cpu=True)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_neither_do_single_runs(small, tmp_path):
    train(small(steps=1), tmp_path / "outer", cpu=True)
    with pytest.raises(ValueError, match="outer is a run itself; choose another folder by --out"):
        train(small(steps=1), tmp_path / "outer/inner", cpu=True)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')  # of another program
    train(small(steps=1), tmp_path / "beside", cpu=True)


def test_a_grid_keeps_the_options_and_the_seeds():
    configs = grid("digits", ["softmax", "sikf"], ["none", "alibi"], [0, 5], {"layers": 1})
    assert len(configs) == 6
    assert {c.seed for c in configs} == {0, 5}
    assert {c.model.layers for c in configs} == {1}


def test_a_grid_without_configs_or_jobs(small, tmp_path):
    with pytest.raises(ValueError, match="no configs to compare"):
        compare([], tmp_path)
    with pytest.raises(ValueError, match="jobs=0 must be at least 1"):
        compare([small()], tmp_path, jobs=0)


def test_what_a_grid_cannot_have():
    rows, positions = ["softmax", "sikf"], ["none", "rpe"]
    configs = grid("digits", rows, positions, [0], {})
    assert left_out(rows, positions, configs) == ["Linear, SIKF with RPE"]
    assert left_out(["softmax"], positions, configs) == []


def test_a_grid_has_each_run_once_and_none_whose_bias_is_not_read():
    assert len(grid("digits", ["sikf", "sikf"], ["none"], [0, 0, 1], {})) == 2
    with pytest.raises(ValueError, match="FastRPB would change nothing"):
        grid("digits", ["sikf"], ["none", "fastrpb"], [0], {"layers": 1, "pooling": "cls"})


def test_a_run_that_fails_does_not_end_the_others(small, tmp_path):
    bad = small(steps=50, learning_rate=1e30, warmup=0)
    good, events = small(steps=2), []
    found = compare([bad, good], tmp_path, cpu=True, on_event=lambda c, e: events.append((c, e)))
    assert [r["steps"] for r in found] == [2]
    (failure,) = [e for c, e in events if isinstance(e, str)]
    assert "the loss is" in failure


def test_a_record_from_before_a_field_existed_still_counts(small, tmp_path):
    config = small(steps=2)
    (record,) = compare([config], tmp_path, cpu=True)
    for path in (tmp_path / "results.jsonl", tmp_path / name_of(config) / "result.json"):
        old = json.loads(path.read_text())
        del old["config"]["bias_rate"], old["config"]["model"]["bias_dropout"]
        path.write_text(json.dumps(old) + "\n")
    stand = tmp_path.stat().st_mtime_ns
    assert [r["seconds"] for r in compare([config], tmp_path, cpu=True)] == [record["seconds"]]
    assert tmp_path.stat().st_mtime_ns == stand
    assert [entry.name for entry in collect([tmp_path])] == [name_of(config)]


def test_a_run_of_another_process_is_waited_for(small, tmp_path):
    config, events = small(steps=2), []
    started = threading.Event()

    def other():
        with Run(tmp_path / name_of(config)).locked():
            started.set()
            time.sleep(2)
            append_result(tmp_path / "results.jsonl", record_of(config))

    thread = threading.Thread(target=other)
    thread.start()
    started.wait()
    found = compare([config], tmp_path, cpu=True, on_event=lambda c, e: events.append(e))
    thread.join()
    assert [record["name"] for record in found] == ["x"]
    assert events == []  # it was not trained here


def test_stopped_it_saves_and_goes_on(small, tmp_path):
    config, seen = small(steps=1000, save_every=100_000), []

    def stop(config, event):
        seen.append(event)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare([config], tmp_path, cpu=True, on_event=stop)
    (first, saved) = Run(tmp_path / name_of(config)).steps()
    assert first == 0 < saved < 1000
    assert len(compare([config], tmp_path, cpu=True)) == 1


def test_many_append_at_once(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"name": "old", "config": 0}\n{"name": "cut of')
    threads = [
        threading.Thread(
            target=append_result,
            args=(path, {"name": str(i % 20), "config": {"image": (8, 8), "i": i % 20}}),
        )
        for i in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["name"] for line in lines) == sorted(["old", *map(str, range(20))])


def test_a_run_that_was_trained_again_replaces_its_line(tmp_path):
    for seconds in (1, 2):
        record = {"name": "a", "config": {"image": (8, 8)}, "seconds": seconds}
        append_result(tmp_path / "results.jsonl", record)
    assert [line["seconds"] for line in read_lines(tmp_path / "results.jsonl")] == [2]


def test_a_number_beyond_floats_is_no_point_of_a_curve(tmp_path):
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    run.metrics_file.write_text(f'{{"step": 1, "accuracy": 0.5, "loss": 1{"0" * 400}}}\n')
    assert run.metrics() == []


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"config": 1}\n{"a"\n{"config": 2}\n')
    with pytest.raises(ValueError, match=r"results.jsonl: line 2 is damaged"):
        list(read_lines(tmp_path / "results.jsonl"))
    assert list(read_lines(tmp_path / "none.jsonl")) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"name": None},
        {"metrics": {}},
        {"metrics": {"test": {"accuracy": "high", "f1": 0.4}}},
        {"metrics": {"test": {"accuracy": math.nan, "f1": 0.4}}},
        {"versions": {}},
        {"name": "a/b"},
        {"seconds": None},
        {"steps": "two"},
        {"tokens_per_second": None},
        {"revision": 1},
        {"config": {"model": 1}},
        {"config": {"task": "digits", "model": {}}},
    ],
)
def test_a_line_that_is_no_record_is_named(small, tmp_path, changes):
    lines = [record_of(small()), {**record_of(small()), **changes}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    with pytest.raises(ValueError, match=r"results.jsonl: line 2 is no record of a run; remove it"):
        finished([small()], tmp_path)


def test_a_run_whose_process_was_ended_has_no_result(small, tmp_path):
    config, events = small(steps=4000, save_every=100_000), []

    def end(config, event):
        events.append(event)
        if len(events) == 1:
            (worker,) = multiprocessing.active_children()
            worker.terminate()

    assert compare([config], tmp_path, cpu=True, on_event=end) == []
    assert re.match(r"stopped at step \d+ of 4000, and saved", str(events[-1]))


def ends_without_a_word(*_):
    """Instead of training."""


def test_a_run_whose_process_said_nothing_has_no_result(small, tmp_path, monkeypatch):
    monkeypatch.setattr("fastrpb.compare._train_apart", ends_without_a_word)
    events = []
    compare([small()], tmp_path, cpu=True, on_event=lambda config, event: events.append(event))
    assert events == ["its process ended with code 0"]


def busy_at_first(pipe, config, folder, *rest):
    """As where another process has just looked whether it is; it ends when the next has begun."""
    if config.seed or folder.exists():
        return _train_apart(pipe, config, folder, *rest)
    folder.mkdir()
    pipe.send(BusyError("another process is training"))
    for _ in range(400):
        if (folder / "config.json").exists():
            return None
        time.sleep(0.05)
    return None


def test_a_run_that_was_busy_for_a_moment_is_trained(small, tmp_path, monkeypatch):
    monkeypatch.setattr("fastrpb.compare._train_apart", busy_at_first)
    configs, events = [small(steps=2, seed=seed) for seed in (0, 1)], []
    found = compare(configs, tmp_path, jobs=2, cpu=True, on_event=lambda c, e: events.append(e))
    assert len(found) == 2
    assert not [event for event in events if isinstance(event, str)]


def test_a_grid_looks_for_work_only_where_it_can_start_some(small, tmp_path, monkeypatch):
    looks, busy = [], Run.busy
    monkeypatch.setattr(Run, "busy", lambda run: looks.append(run) or busy(run))
    configs = [small(steps=100, seed=seed) for seed in range(3)]
    assert len(compare(configs, tmp_path, cpu=True)) == 3
    assert len(looks) <= 2 * len(configs)


def test_missing_data_are_told_once_and_no_run_is_begun(tmp_path):
    configs = grid("mnist", ["sikf"], ["none", "fastrpb"], [0, 1], {})
    with pytest.raises(DataError, match="nowhere"):
        compare(configs, tmp_path / "runs", data_dir=tmp_path / "nowhere", cpu=True)
    assert not (tmp_path / "runs").exists()


def test_one_config_on_two_data_has_two_lines(tmp_path):
    path = tmp_path / "results.jsonl"
    for data in ("one", "other", "one"):
        append_result(path, {"name": "a", "config": {}, "data": data})
    assert [line["data"] for line in read_lines(path)] == ["other", "one"]


def test_of_two_data_the_records_of_these_count(small, tmp_path):
    config = small(steps=2)
    (record,) = compare([config], tmp_path, cpu=True)
    append_result(tmp_path / "results.jsonl", {**record, "data": "0" * 16, "seconds": 77.0})
    more = small(steps=3)
    found = compare([config, more], tmp_path, cpu=True)
    assert found[0]["seconds"] == record["seconds"]


def test_gpus_are_taken_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _places(3) == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert _places(3) == ["5", "7", "5"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert _places(2) == ["", ""]


def test_a_job_sees_its_gpu_and_its_share_of_the_cores(small, tmp_path, monkeypatch):
    def look(*_, **__):
        return {"gpu": os.environ["CUDA_VISIBLE_DEVICES"], "threads": torch.get_num_threads()}

    monkeypatch.setattr("fastrpb.compare.train", look)
    monkeypatch.setattr("fastrpb.compare.keep_freed_memory", lambda: None)
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.set_num_threads(4)
    mine, its = Pipe()
    _train_apart(its, small(), tmp_path, None, True, "5", 2)
    assert mine.recv() == {"gpu": "5", "threads": 2}
