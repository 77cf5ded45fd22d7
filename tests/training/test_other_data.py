"""A run, a grid and a search belong to the data that they were begun with."""

import json

import pytest
import torch

from fastrpb.compare import compare
from fastrpb.config import override
from fastrpb.data import Dataset, Split, load, task
from fastrpb.data.dataset import Sequences
from fastrpb.presets import preset
from fastrpb.report import collect, set_ups, write_report
from fastrpb.run import Run
from fastrpb.train import Interruption, train
from runs import PAIRS_OF_PAPERS, stop_at
from samples import REVIEWS, write_parquet, write_reviews

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Reviews, the same ones elsewhere, and others of the same number and lengths."""
    monkeypatch.setenv("FASTRPB_CACHE", str(tmp_path / "cache"))
    folders = [tmp_path / name for name in ("imdb", "copy", "other")]
    for folder in folders:
        write_reviews(folder)
    texts, labels = REVIEWS["test"]
    write_parquet(folders[-1] / "test.parquet", text=[x.upper() for x in texts], label=labels)
    return folders


def text(steps):
    return override(preset("text"), {**PAIRS_OF_PAPERS, "steps": steps})


def test_what_a_digest_depends_on(folders):
    one, copy, other = (load("text", folder) for folder in folders)
    assert one.digest() == copy.digest() != other.digest()
    for options in ({"max_length": 5}, {"validation": "test"}):
        assert load("text", folders[0], **options).digest() != one.digest()


def test_a_digest_is_of_the_examples():
    """Not of how they are held: in another order, with others beside them, beyond the cut."""
    facts = task("retrieval", 3)
    index, labels = torch.tensor([[0, 1], [1, 1]]), torch.tensor([0, 1])

    def digest(items, index, labels=labels):
        split = Split(facts.fit(Sequences.pack(items)), index, labels)
        return Dataset(facts, split, split, split.take(torch.arange(0))).digest()

    known = digest([b"abc", b"de"], index)
    assert known == digest([b"unused", b"de", b"abcdef"], torch.tensor([[2, 1], [1, 1]]))
    others = [
        digest([b"abd", b"de"], index),
        digest([b"abc", b"de"], index.flip(1)),
        digest([b"abc", b"de"], index.flip(0)),
        digest([b"abc", b"de"], index, labels.flip(0)),
    ]
    assert len({known, *others}) == 5


def test_a_run_goes_on_with_its_data_alone(folders, tmp_path):
    one, copy, other = folders
    run = tmp_path / "run"
    with pytest.raises(Interruption):
        train(text(20), run, data_dir=one, cpu=True, on_progress=stop_at(10))
    refused = pytest.raises(ValueError, match=r"run was started on other data; .*--data-dir")
    with refused:
        train(text(20), run, data_dir=other, cpu=True)
    record = train(text(20), run, data_dir=copy, cpu=True)
    with refused:
        train(text(20), run, data_dir=other, cpu=True)
    assert train(text(20), run, data_dir=one, cpu=True) == record


def test_a_record_from_before_data_were_written_down(folders, tmp_path):
    run = Run(tmp_path / "run")
    record = train(text(2), run.folder, data_dir=folders[0], cpu=True)
    del record["data"]
    run.result_file.write_text(json.dumps(record))
    assert train(text(2), run.folder, data_dir=folders[-1], cpu=True) == record


def test_a_table_has_results_of_one_data(folders, tmp_path, monkeypatch):
    one, _, other = folders
    configs = [text(2)]
    records = compare(configs, tmp_path / "runs", data_dir=one, cpu=True)
    assert len(records) == 1
    with pytest.raises(ValueError, match="runs has results of other data: text-sikf-fastrpb-s0"):
        compare(configs, tmp_path / "runs", data_dir=other, cpu=True)
    assert compare(configs, tmp_path / "runs", cpu=True) == records  # the table alone
    (tmp_path / "elsewhere").mkdir()
    other.rename(tmp_path / "elsewhere" / "imdb")
    monkeypatch.setenv("FASTRPB_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match="runs has results of other data"):
        compare([*configs, text(3)], tmp_path / "runs", cpu=True)


def test_a_grid_of_several_lengths_and_validations(folders, tmp_path):
    changes = {}, {"max_length": 5}, {"validation": "train"}
    configs = [override(text(2), change) for change in changes]
    options = {"data_dir": folders[0], "cpu": True}
    records = compare(configs, tmp_path / "runs", **options)
    assert len({record["data"] for record in records}) == 3
    assert compare(configs, tmp_path / "runs", **options) == records


def test_a_report_has_results_of_one_data_in_a_table(folders, tmp_path):
    one, copy, other = folders
    for seed, data in enumerate((one, copy, other)):
        config = override(text(2), {"seed": seed})
        train(config, tmp_path / "runs" / f"{seed}", data_dir=data, cpu=True)
    train(text(2), tmp_path / "more" / "0", data_dir=other, cpu=True)
    entries = collect([tmp_path / "runs", tmp_path / "more"])
    assert len(entries) == 4
    groups = set_ups(entries)
    seeds = {title: sorted(e.config["seed"] for e in group) for title, group in groups.items()}
    assert seeds == {"text": [0, 1], "text 2": [0, 2]}
    write_report([tmp_path / "runs"], tmp_path / "report")
    assert "Unlike text: data " in (tmp_path / "report" / "tables.md").read_text()


def test_a_search_has_one_data(folders, tmp_path):
    sweep = pytest.importorskip("fastrpb.sweep", exc_type=ImportError).sweep
    one, _, other = folders
    options = {"trials": 1, "low": 1e-4, "high": 1e-3, "cpu": True}
    sweep(text(2), tmp_path / "sweep", data_dir=one, **options)
    with pytest.raises(ValueError, match="sweep searches on other data"):
        sweep(text(2), tmp_path / "sweep", data_dir=other, **options)
