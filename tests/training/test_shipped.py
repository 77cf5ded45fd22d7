"""The trained model of the package, and the records behind the pages."""

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch

from fastrpb.config import from_json, override, to_json
from fastrpb.evaluate import load_run, predict
from fastrpb.figures import biases, weights_of
from fastrpb.files import SHIPPED, shipped_or
from fastrpb.model import Classifier
from fastrpb.presets import BEST, COLUMNS, ROWS, best, preset
from fastrpb.records import same_config
from fastrpb.run import Run
from fastrpb.tables import cells, on_test

ROOT = Path(__file__).parents[2]
PAPER = (ROOT / "docs/reproduction.md").read_text(encoding="utf-8")
BEYOND = (ROOT / "docs/best.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def records(name):
    return [json.loads(line) for line in (ROOT / "results" / name).read_text().splitlines()]


def percent(value):
    return f"{100 * value:.2f}"


def test_it_reads_a_seven():
    (digit, probability), *_ = predict("mnist", [str(ROOT / "docs/seven.png")])
    assert digit == "7"
    assert probability > 0.9


def test_a_damaged_one_comes_with_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr("fastrpb.run.SHIPPED", tmp_path)
    run = Run(tmp_path / "mnist")
    run.folder.mkdir()
    run.model_file.write_bytes(b"half")
    with pytest.raises(ValueError, match=r"not a whole safetensors.*; install the package again"):
        run.model()


def test_it_is_small_and_its_record_is_in_the_results():
    folder = SHIPPED / "mnist"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 5e6
    record = json.loads((folder / "result.json").read_text())
    assert record in records("mnist-best.jsonl")
    config, model = load_run("mnist")
    assert same_config(record["config"]) == same_config(json.loads(to_json(config)))
    assert config == best("mnist")
    assert sum(p.numel() for p in model.parameters()) == record["parameters"]
    assert all(x.isfinite().all() for x in model.state_dict().values() if x.is_floating_point())
    card = (folder / "README.md").read_text(encoding="utf-8")
    test = record["metrics"]["test"]
    assert f"{percent(test['accuracy'])}% of 10,000 (macro F1 {percent(test['f1'])})" in card
    assert f"{record['parameters']:,} weights" in card


def test_its_filters_are_sparse_and_have_grown_outward():
    config, trained = load_run("mnist")
    zeros = [(weights_of(bias) == 0).float().mean().item() for bias in biases(trained)]
    assert sum(zeros) / len(zeros) == pytest.approx(19 / 20, abs=0.01)
    assert "19 of 20 weights" in BEYOND
    now, first = (
        [100 * far_part(weights_of(bias)) for bias in biases(model)]
        for model in (trained, Classifier(config.model))
    )
    for page in (PAPER, BEYOND):
        shares = rf"{min(now):.0f} to {max(now):.0f}% of the squares.*, (\d+)% at the start"
        (at_the_start,) = re.findall(shares, page)
        assert float(at_the_start) == pytest.approx(sum(first) / len(first), abs=2)


def far_part(w):
    """Of the squares of the weights, those farther than 3 pixels."""
    distances = (torch.arange(n) - n // 2 for n in w.shape[1:])
    far = torch.cartesian_prod(*distances).float().norm(dim=1).view(w.shape[1:]) > 3
    return (w[:, far].square().sum() / w.square().sum()).item()


def test_a_run_comes_before_a_shipped_name_and_other_folders_do_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("mnist")
    folder.mkdir()
    assert shipped_or(folder) == SHIPPED / "mnist"
    (folder / "config.json").touch()
    assert shipped_or(folder) == folder


def test_it_is_not_trained_over():
    before = sorted(SHIPPED.rglob("*"))
    with (
        pytest.raises(ValueError, match="mnist comes with the package; train your own: --config"),
        Run(SHIPPED / "mnist").locked(),
    ):
        pytest.fail("the folder was locked")
    assert sorted(SHIPPED.rglob("*")) == before


def test_an_empty_input():
    with pytest.raises(ValueError, match="mnist takes the path of an image, but an input is empty"):
        predict("mnist", [""])


def row(*cells):
    return f"| {' | '.join(map(str, cells))} |"


@pytest.mark.parametrize("task", BEST)
def test_the_best_runs_are_those_of_the_records(task):
    runs = records(f"{task}-best.jsonl")
    assert sum(line.startswith(f"| {task}, seed") for line in BEYOND.splitlines()) == len(runs)
    for record in runs:
        config = from_json(json.dumps(record["config"]), "the record")
        # How often a run is saved changes nothing.
        assert replace(config, save_every=500) == replace(best(task), seed=config.seed)
        validation, test = record["metrics"].values()
        assert (
            row(
                *(f"{task}, seed {config.seed}", percent(test["accuracy"]), percent(test["f1"])),
                *(percent(validation["accuracy"]), f"{record['seconds']:.0f}"),
                *(f"{record['peak_memory_bytes'] / 2**20:.0f}", f"{record['parameters']:,}"),
            )
            in BEYOND
        )


@pytest.mark.parametrize(
    ("task", "paper", "metric"),
    [
        ("mnist", "MNIST, F1 | 98.27 (Original, FastRPB)", "f1"),
        ("cifar10", "CIFAR10, grey | 42.94 (SIKF, convSPE)", "accuracy"),
        ("text", "IMDB, bytes | 63.95 (ReLU, FastRPB)", "accuracy"),
        ("retrieval", "AAN, bytes | 67.19 (SIKF, FastRPB)", "accuracy"),
        ("listops", "ListOps | 20.67 (DPFP, None), without brackets", "accuracy"),
    ],
)
def test_what_stands_beside_the_papers_figures(task, paper, metric):
    first, *_ = records(f"{task}-best.jsonl")
    ours = percent(first["metrics"]["test"][metric])
    assert f"| {paper} | {ours}" in BEYOND
    assert re.search(rf"(\| |to ){ours}\b", README)


# The metric of a task's table, and where in its lines our figures stand.
CELLS = {
    "mnist": ("f1", slice(1, None)),
    **dict.fromkeys(("text", "retrieval", "listops", "cifar10"), ("accuracy", slice(1, None, 2))),
}


@pytest.mark.parametrize("task", CELLS)
def test_the_cells_are_of_the_papers_set_up(task):
    for record in records(f"{task}.jsonl"):
        config = from_json(json.dumps(record["config"]), "the record")
        model = config.model
        plain = preset(task, model.attention, model.features, model.position)
        ours = {"precision": "bf16", "compile": True, "save_every": 100_000}
        ours |= {"eval_every": record["steps"], "seed": config.seed}
        assert config == override(plain, ours)


@pytest.mark.parametrize("task", CELLS)
def test_the_cells_on_the_page_are_those_of_the_records(task):
    """A line has a cell, `row + column`, or two, without and with FastRPB; – is yet to run."""
    runs = records(f"{task}.jsonl")
    metric, ours_at = CELLS[task]
    values = (
        {key: str(cell) for key, cell in cells(runs, on_test(metric)).items()},
        {key: f"{cell.mean:.0f}" for key, cell in cells(runs, lambda r: r["seconds"]).items()},
        {
            key: f"{cell.mean / 2**20:.0f}"
            for key, cell in cells(runs, lambda r: r["peak_memory_bytes"]).items()
        },
    )
    shown = {}
    for line in PAPER.splitlines():
        label, *numbers = line.strip("| ").split(" | ")
        if label.startswith(tuple(f"{task}, {words}" for words in ROWS.values())):
            shown[label] = numbers[ours_at]  # beside the paper's
    there = [x for first, *_ in shown.values() for x in first.split(" → ") if x != "–"]
    assert len(there) == len(values[0])
    for name, position in values[0]:
        label = f"{task}, {ROWS[name]}"
        if position in ("none", "fastrpb"):
            both = (name, "none"), (name, "fastrpb")
            ours = [" → ".join(of.get(cell, "–") for cell in both) for of in values]
        else:
            label, ours = f"{label} + {COLUMNS[position]}", [of[name, position] for of in values]
        assert shown[label] == ours


@pytest.mark.parametrize(
    ("task", "name"), [("text", "IMDB"), ("cifar10", "CIFAR10"), ("mnist", "MNIST")]
)
def test_the_readme_shows_what_the_bias_adds(task, name):
    shown = cells(records(f"{task}.jsonl"), on_test(CELLS[task][0]))
    pairs = [
        (shown[row, "none"].mean, shown[row, "fastrpb"].mean)
        for row in ROWS
        if {(row, "none"), (row, "fastrpb")} <= set(shown)
    ]
    gains = [after - before for before, after in pairs]
    assert re.search(rf"{min(gains):.1f} to {max(gains):.1f}[^,]* on {name}", README)


FIRST = {"normal": "noise at all distances", "zero": "zero", "local": "local noise"}


def of_first_weights(name):
    """Test accuracies by seed, for each of the first weights that a page's table names."""
    accuracies = {}
    for record in sorted(records(name), key=lambda record: record["config"]["seed"]):
        config = from_json(json.dumps(record["config"]), "the record")
        first = FIRST[config.model.bias_init] + ", not trained" * (config.bias_rate == 0)
        first = "no bias" if config.model.position == "none" else first
        accuracy = 100 * record["metrics"]["test"]["accuracy"]
        accuracies.setdefault(first, {}).setdefault(config.model.position, []).append(accuracy)
    assert set(accuracies) == {*FIRST.values(), "no bias", "local noise, not trained"}
    return accuracies


def test_what_the_first_weights_do_is_of_the_records():
    for name, by_position in of_first_weights("text-inits.jsonl").items():
        (of_seeds,) = by_position.values()
        assert row(name, ", ".join(map("{:.2f}".format, of_seeds))) in PAPER
    of_mnist = {
        name: [f"{accuracy:.2f}" for of_seeds in by_position.values() for accuracy in of_seeds]
        for name, by_position in of_first_weights("mnist-inits.jsonl").items()
    }
    of_digits = {
        name: [f"{mean(x):.2f} ± {stdev(x):.2f}" for x in by_position.values()]
        for name, by_position in of_first_weights("digits-inits.jsonl").items()
    }
    for name, of_seeds in of_mnist.items():
        assert f"| {name} | {', '.join(of_seeds)} | {' | '.join(of_digits[name])} |" in PAPER
    assert row(*of_digits["no bias"], *of_digits["local noise"]) in README


def test_other_positions_are_of_the_records():
    def of_seeds(task):
        """Test accuracies of seeds 0, 1, ... by the position, the absolute one and the first w."""
        found = {}
        both = [*records(f"{task}-inits.jsonl"), *records(f"{task}-positions.jsonl")]
        for record in sorted(both, key=lambda record: record["config"]["seed"]):
            config = from_json(json.dumps(record["config"]), "the record")
            model = config.model
            first = model.bias_init + "!" * (config.bias_rate == 0)
            key = model.position, model.absolute, first if model.position == "fastrpb" else ""
            found.setdefault(key, []).append(percent(record["metrics"]["test"]["accuracy"]))
        return found

    mnist, text = of_seeds("mnist"), of_seeds("text")
    cells = {
        "none": [("none", "none", "")] * 2,
        "RoPE": [("rope", "none", "")] * 2,
        "absolute": [("none", "learned", ""), ("none", "sinusoidal", "")],
        "FastRPB": [("fastrpb", "none", "local")] * 2,
        "FastRPB and absolute": [("fastrpb", "learned", "local"), None],
        "FastRPB 2D, full, and absolute": [("fastrpb2d", "learned", ""), None],
    }
    full = {"absolute": "absolute (MNIST: learned, text: sinusoids)"}
    for name, (pixels, letters) in cells.items():
        seeds = ", ".join(mnist[pixels])
        assert (
            f"| {full.get(name, name)} | {seeds} | {text[letters][0] if letters else ''}" in PAPER
        )
    firsts = {
        "FastRPB, w begins as zero": "zero",
        "FastRPB, as noise at all distances": "normal",
        "FastRPB, as noise nearby (the default)": "local",
        "FastRPB, as noise nearby, not trained": "local!",
    }
    shown = {name: cells[name] for name in ("none", "RoPE", "absolute", "FastRPB and absolute")}
    shown |= {name: [("fastrpb", "none", first)] * 2 for name, first in firsts.items()}
    for name, (pixels, letters) in shown.items():
        assert row(name, text[letters][0] if letters else "–", mnist[pixels][0]) in README


def test_the_parts_of_retrieval_are_of_the_records():
    runs = records("retrieval-parts.jsonl")
    for record in runs:
        model = from_json(json.dumps(record["config"]), "the record").model
        sees = {"interact": "also product and difference", "concat": "two vectors"}[model.pairing]
        assert model.head_norm == (model.norm == "batch")
        positions = {"none": "none", "fastrpb": "FastRPB"}[model.position]
        positions += {"none": "", "sinusoidal": ", sinusoids"}[model.absolute]
        pooled = {"cls": "CLS", "mean": "mean"}[model.pooling]
        accuracy = percent(record["metrics"]["test"]["accuracy"])
        assert row(sees, pooled, model.norm, positions, accuracy) in PAPER
    assert len(runs) == 6
    first = [r for r in runs if r["config"]["model"]["pairing"] == "interact"]
    gain = abs(first[0]["metrics"]["test"]["accuracy"] - first[1]["metrics"]["test"]["accuracy"])
    assert f"gains {100 * gain:.1f} points" in README


def test_the_levers_of_mnist_are_those_of_the_records():
    for record in records("mnist-levers.jsonl"):
        config, (validation, test) = record["config"], record["metrics"].values()
        model = config["model"]
        numbers = (
            *(config["bias_rate"], model["bias_threshold"], model["dropout"]),
            *(model["bias_dropout"], config["weight_decay"]),
        )
        figures = (percent(x["accuracy"]) for x in (validation, test))
        assert row(*(f"{x:g}" for x in numbers), *figures) in BEYOND


@pytest.mark.parametrize("task", ["cifar10", "text", "retrieval", "listops"])
def test_the_runs_on_the_way_are_those_of_the_records(task):
    runs = records(f"{task}-levers.jsonl")
    assert sum(line.startswith(f"| {task} |") for line in BEYOND.splitlines()) == len(runs)
    for record in runs:
        config = from_json(json.dumps(record["config"]), "the record")
        model = config.model
        assert (
            row(
                *(task, f"{model.layers} × {model.dim}", model.max_length, model.norm),
                *("yes" if x else "no" for x in (model.head_norm, model.bias_envelope)),
                *(f"{x:g}" for x in (model.bias_reach, config.bias_rate, config.learning_rate)),
                *(config.batch_size, record["steps"]),
                *(percent(split["accuracy"]) for split in record["metrics"].values()),
                f"{record['seconds']:.0f}",
            )
            in BEYOND
        )
