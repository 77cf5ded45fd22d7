"""Which runs and records a report takes for one, and which for seeds of one cell."""

import json
import re
from dataclasses import asdict

import pytest

from fastrpb.config import override
from fastrpb.presets import name_of
from fastrpb.records import same_config
from fastrpb.report import collect, set_ups, write_report
from fastrpb.run import Run
from fastrpb.train import train
from runs import record_of, small

pytestmark = pytest.mark.usefixtures("one_thread")


def test_only_seeds_share_a_cell(tmp_path):
    """Another learning rate in the same cell is another set-up; in another cell it is a preset."""
    rates = [("none", 0, 1e-3), ("none", 1, 1e-3), ("fastrpb", 0, 2e-3), ("none", 0, 5e-3)]
    for position, seed, rate in rates:
        config = small(position=position, seed=seed, learning_rate=rate, steps=2)
        train(config, tmp_path / name_of(config), cpu=True)
    groups = set_ups(collect([tmp_path]))
    assert [len(group) for group in groups.values()] in ([3, 1], [2, 2])
    for group in groups.values():
        cells = {}
        for entry in group:
            cells.setdefault(entry.config["model"]["position"], set()).add(
                entry.config["learning_rate"]
            )
        assert all(len(rates) == 1 for rates in cells.values())


def test_set_ups_of_one_cell_that_differ_in_their_own_fields(tmp_path):
    for rate in (1e-3, 1e-2):
        train(small(steps=2, learning_rate=rate), tmp_path / f"{rate}", cpu=True)
    content = write_report([tmp_path], tmp_path / "report").read_text()
    (note,) = re.findall(r"Unlike digits: (.*)\.</p>", content)
    assert note == "learning_rate 0.001 → 0.01"


def test_every_run_has_a_name_of_its_own(tmp_path):
    folders = [tmp_path / name for name in ("a/foo", "b/foo", "c/foo-2")]
    for seed, folder in enumerate(folders):
        folder.mkdir(parents=True)
        Run(folder).open(small(seed=seed))
    assert len({entry.name for entry in collect(folders)}) == 3


def test_a_run_whose_config_was_edited_is_left_out(tmp_path):
    """Its numbers are those of the config that was trained."""
    run = Run(tmp_path / "run")
    train(small(steps=2), run.folder, cpu=True)
    run.config_file.write_text(run.config_file.read_text().replace('"steps": 2', '"steps": 3'))
    told = []
    (entry,) = collect([tmp_path], told.append)  # its line of results.jsonl
    assert entry.config["steps"] == 2
    assert entry.run is None
    assert "steps 2 → 3" in str(told[0])


def test_a_record_that_does_not_name_its_data_counts_once(tmp_path):
    record = record_of(small())
    again = {**record, "data": "d1"}
    for i, records in enumerate(([record, again], [again, record])):
        path = tmp_path / f"{i}.jsonl"
        path.write_text("".join(json.dumps(x) + "\n" for x in records))
        (entry,) = collect([path])
        assert entry.record["data"] == "d1"
    run = Run(tmp_path / "run")
    train(small(), run.folder, cpu=True)
    told = run.result()
    run.result_file.write_text(json.dumps({x: told[x] for x in told if x != "data"}))
    (tmp_path / "results.jsonl").write_text(json.dumps(told) + "\n")
    (entry,) = collect([run.folder, tmp_path / "results.jsonl"])
    assert entry.run is not None  # its curves and weights
    assert entry.record["data"] == told["data"]
    others = tmp_path / "others.jsonl"
    lines = [record, {**again, "config": asdict(small(seed=1))}]
    others.write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert len(collect([others])) == 2


def test_softmax_attention_has_no_features_to_tell_runs_apart():
    configs = [small(attention="softmax", position="none")]
    configs.append(override(small(features="relu", position="none"), {"attention": "softmax"}))
    assert configs[0] == configs[1]
    old = asdict(configs[0])
    old["model"]["features"] = "relu"  # as they were written
    assert same_config(old) == same_config(asdict(configs[0]))


def test_a_note_has_what_differs_alone(tmp_path):
    """Of a folder and of a line of a file, whose images are written in other ways."""
    train(small(steps=2), tmp_path / "run", cpu=True)
    path = tmp_path / "others.jsonl"
    path.write_text(json.dumps(record_of(small(steps=3))) + "\n")
    write_report([tmp_path / "run", path], tmp_path / "report")
    assert "Unlike digits: steps 2 → 3." in (tmp_path / "report" / "tables.md").read_text()


def test_what_may_not_be_read_is_left_out_and_told(tmp_path, monkeypatch):
    Run(tmp_path / "mine").open(small())
    (tmp_path / "private").mkdir()
    exists = Run.exists

    def refused(run):
        if run.folder.name == "private":
            raise PermissionError(13, "Permission denied", str(run.config_file))
        return exists(run)

    monkeypatch.setattr(Run, "exists", refused)
    told = []
    assert [entry.name for entry in collect([tmp_path], told.append)] == ["mine"]
    assert str(told[0]) == f"{tmp_path}/private/config.json: Permission denied"
