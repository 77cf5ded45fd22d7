import json
import random
import subprocess
import time

import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch._dynamo.utils import counters
from torch._inductor.exc import InductorError

from fastrpb import load_model, provenance
from fastrpb.config import override, to_json
from fastrpb.data import Batch, Batches, load
from fastrpb.evaluate import Metrics, _scores, evaluate_run, load_run, predict
from fastrpb.parts import build, classify, seed_from, to_device
from fastrpb.presets import preset
from fastrpb.provenance import _revision
from fastrpb.run import Run
from fastrpb.step import _compile
from fastrpb.train import Interruption, train
from runs import PAIRS_OF_PAPERS, stop_at, weights
from samples import REVIEWS, write_papers, write_reviews

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_steps_are_those_of_a_plain_loop(small, tmp_path):
    """AdamW, the schedule, clipping and the order of the batches, against torch by hand."""
    config = small(
        **{"steps": 5, "dropout": 0.0, "clip": 0.5, "warmup": 3},
        **{"weight_decay": 0.1, "bias_rate": 3.0, "bias_decay": 0.9},
    )
    train(config, tmp_path / "run", cpu=True)
    seed_from("weights", config.seed)
    model = build(config)
    w = [p for name, p in model.named_parameters() if name.endswith("bias.w")]
    rest = [p for name, p in model.named_parameters() if not name.endswith("bias.w")]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": w, "weight_decay": 0.9}]
    optimizer = torch.optim.AdamW(groups, eps=config.eps)
    data = load("digits")
    batches = Batches(data.train, 8, pad_id=data.task.pad_id, seed=config.seed, drop_last=True)
    for step, batch in zip(range(1, 6), batches, strict=False):
        for group, factor in zip(optimizer.param_groups, (1, 3), strict=True):
            group["lr"] = factor * config.learning_rate_at(step, 5)
        optimizer.zero_grad()
        logits = model(batch.tokens, batch.mask)
        torch.nn.functional.cross_entropy(logits, batch.labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for name, x in weights(tmp_path / "run").items():
        torch.testing.assert_close(x, model.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_the_record(small, tmp_path):
    config = small(steps=20)
    record = train(config, tmp_path / "run", cpu=True)
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == json.loads(
        json.dumps(record)
    )
    (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    assert json.loads(line) == json.loads(json.dumps(record))
    assert record["config"]["seed"] == 0
    assert record["tokens_per_second"] == pytest.approx(20 * 8 * 64 / record["seconds"])
    assert record["peak_memory_bytes"] > 50 * 2**20
    assert record["versions"]["torch"] == torch.__version__
    (tmp_path / "results.jsonl").unlink()
    assert train(config, tmp_path / "run", cpu=True) == json.loads(line)  # not trained again
    assert (tmp_path / "results.jsonl").read_text() == line + "\n"  # but mended
    assert evaluate_run(tmp_path / "run", cpu=True)._asdict() == record["metrics"]["test"]
    model = load_model(tmp_path / "run" / "model.safetensors")
    assert record["parameters"] == sum(p.numel() for p in model.parameters())


def test_the_seconds_are_those_of_all_steps(small, tmp_path, monkeypatch):
    def slowly(*inputs):
        time.sleep(0.02)
        return classify(*inputs)

    monkeypatch.setattr("fastrpb.step.classify", slowly)
    assert train(small(steps=20), tmp_path / "run", cpu=True)["seconds"] >= 20 * 0.02


def test_a_length_in_epochs_and_a_validation_after_each(small, tmp_path):
    config, seen = override(small(batch_size=600), {"epochs": 2}), []  # of two batches each
    record = train(
        config, tmp_path / "run", cpu=True, on_validation=lambda step, _: seen.append(step)
    )
    assert (record["steps"], seen) == (4, [2, 4])


def test_metrics_against_counting_by_hand(small, tmp_path):
    config = small(steps=60, learning_rate=1e-2)
    record = train(config, tmp_path / "run", cpu=True)
    _, model = load_run(tmp_path / "run")
    test = load("digits").test
    tokens = torch.stack([test[i][0][0] for i in range(len(test))])
    guess = model(tokens).argmax(-1)
    metrics = Metrics(**record["metrics"]["test"])
    assert metrics.accuracy == pytest.approx((guess == test.labels).double().mean().item())
    f1 = []
    for c in range(10):
        both = ((guess == c) & (test.labels == c)).sum()
        f1.append(2 * both / ((guess == c).sum() + (test.labels == c).sum()))
    assert metrics.f1 == pytest.approx(torch.stack(f1).mean().item(), abs=1e-6)
    loss = torch.nn.functional.cross_entropy(model(tokens), test.labels)
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-5)


def test_macro_f1_of_a_known_table():
    assert _scores(torch.tensor([[2, 0, 0], [1, 1, 0], [0, 0, 0]])) == pytest.approx(
        (0.75, 11 / 15)
    )


def test_it_learns(small, tmp_path):
    config = small(steps=150, learning_rate=5e-3, batch_size=32, dim=32, pooling="mean")
    assert train(config, tmp_path / "run", cpu=True)["metrics"]["test"]["accuracy"] > 0.6


def test_the_best_weights_are_kept(small, tmp_path):
    config = small(steps=60, eval_every=10, learning_rate=2e-2, schedule="constant", keep="best")
    seen = {}
    record = train(config, tmp_path / "a", cpu=True, on_validation=lambda s, m: seen.update({s: m}))
    best = max(seen, key=lambda step: (seen[step].accuracy, -step))
    assert record["weights_of_step"] == best
    assert record["metrics"]["validation"] == seen[best]._asdict()
    assert best < 60, "a run whose best is its last shows nothing"
    shown = evaluate_run(tmp_path / "a", "validation", cpu=True)
    assert shown == pytest.approx(seen[best])
    assert (
        train(override(config, {"keep": "last"}), tmp_path / "b", cpu=True)["weights_of_step"] == 60
    )


def test_accumulation_changes_nothing_but_rounding(small, tmp_path):
    config = small(steps=10, dropout=0.0)
    train(config, tmp_path / "one", cpu=True)
    train(override(config, {"accumulate": 4}), tmp_path / "four", cpu=True)
    one, four = weights(tmp_path / "one"), weights(tmp_path / "four")
    for name, x in one.items():
        torch.testing.assert_close(four[name], x, rtol=1e-3, atol=1e-5)


def test_bf16(small, tmp_path):
    config = small(steps=20, precision="bf16")
    train(config, tmp_path / "bf16", cpu=True)
    train(override(config, {"precision": "fp32"}), tmp_path / "fp32", cpu=True)
    bf16, fp32 = weights(tmp_path / "bf16"), weights(tmp_path / "fp32")
    assert {x.dtype for x in bf16.values()} == {torch.float32}
    assert any(not torch.equal(bf16[name], x) for name, x in fp32.items())


def test_compiled_it_learns_the_same(small, tmp_path):
    plain = train(small(steps=3, dropout=0.0), tmp_path / "plain", cpu=True)
    torch.compiler.reset()
    counters.clear()
    config = small(steps=3, dropout=0.0, compile=True)
    compiled = train(config, tmp_path / "compiled", cpu=True)
    assert counters["stats"]["unique_graphs"] == 1  # for training alone
    test = [record["metrics"]["test"]["loss"] for record in (plain, compiled)]
    assert test[0] == pytest.approx(test[1], rel=1e-4)


def test_what_is_compiled(monkeypatch):
    """Images as a whole; else blocks, which all lengths share."""
    calls = []
    compiled = lambda module, **options: calls.append((type(module).__name__, options))  # noqa: E731
    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    for task in ("mnist", "retrieval"):
        config = override(preset(task), {"layers": 2, "dim": 8, "heads": 1})
        _compile(build(config), config)
    assert calls == [("Classifier", {}), *[("Block", {"dynamic": True})] * 2]


def test_without_a_compiler(small, tmp_path, monkeypatch):
    def compile_here(*_, **__):
        raise InductorError(FileNotFoundError("no compiler"), None)

    monkeypatch.setattr("fastrpb.step.classify", compile_here)
    words = (
        "here: FileNotFoundError: no compiler; remove the run's folder and begin again with --no-"
    )
    with pytest.raises(ValueError, match=words):
        train(small(steps=1), tmp_path / "run", cpu=True)


@pytest.mark.parametrize(("pooling", "count"), [("mean", 1), ("cls", 2)])  # the last: CLS alone
def test_one_compiled_block_serves_short_lengths_too(pooling, count):
    """Those at which W is formed; and its gradients are those of the block as it is."""
    changes = {"dim": 8, "layers": 3, "heads": 2, "mlp_dim": 8, "max_length": 99, "dropout": 0.0}
    config = override(preset("text"), {**changes, "pooling": pooling})
    model = build(config)
    batches = [torch.randint(255, (2, length)) for length in (20, 33, 47, 60)]

    def outcome(tokens):
        logits = model(tokens)
        w = model.encoder.blocks[1].attention.bias.w
        return logits, *torch.autograd.grad(logits.square().sum(), w)

    wanted = [outcome(tokens) for tokens in batches]
    graphs = []
    backend = lambda graph, _: graphs.append(graph) or graph.forward  # noqa: E731
    torch.compiler.reset()
    for block in model.encoder.blocks:
        block.compile(dynamic=True, backend=backend)
    torch.testing.assert_close([outcome(tokens) for tokens in batches], wanted)
    assert len(graphs) == count


def test_clipping(small, tmp_path):
    config = small(steps=5, clip=1e-12, eps=1.0)  # a tiny gradient against a large eps: no step
    train(config, tmp_path / "still", cpu=True)
    train(override(config, {"steps": 1}), tmp_path / "first", cpu=True)
    for name, x in weights(tmp_path / "first").items():
        torch.testing.assert_close(weights(tmp_path / "still")[name], x, rtol=0, atol=1e-10)


def test_another_config_is_refused_with_its_differences(small, tmp_path):
    train(small(steps=2), tmp_path / "run", cpu=True)
    with pytest.raises(ValueError, match="another config: seed 0 → 1; steps 2 → 3"):
        train(small(steps=3, seed=1), tmp_path / "run", cpu=True)


def test_a_checkpoint_is_read_to_be_used(small, tmp_path):
    config, run = small(steps=20), Run(tmp_path / "run")
    with pytest.raises(Interruption):
        train(config, run.folder, cpu=True, on_progress=stop_at(10))
    assert not load_run(run.folder)[1].training
    run.config_file.write_text(to_json(override(config, {"seed": 1})))
    with pytest.raises(ValueError, match="another config: seed 0 → 1"):
        load_run(run.folder)


def test_a_folder_of_something_else(small, tmp_path):
    (tmp_path / "photo.jpg").write_text("")
    with pytest.raises(ValueError, match="has files but no run"):
        train(small(steps=2), tmp_path, cpu=True)
    assert [p.name for p in tmp_path.iterdir()] == ["photo.jpg"]


def test_a_word_is_no_config(tmp_path):
    with pytest.raises(TypeError, match=r"config must be a RunConfig, .* got 'digits'"):
        train("digits", tmp_path / "run")


def test_the_random_numbers_of_the_caller_stay_theirs(small, tmp_path):
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    train(small(steps=2), tmp_path / "run", cpu=True)
    evaluate_run(tmp_path / "run", cpu=True)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_a_seed_decides_what_noise_shows(small, tmp_path):
    """Encodings that draw it give the same metrics and probabilities again."""
    train(small(steps=2, position="sinespe", realizations=4), tmp_path / "run", cpu=True)
    Image.new("L", (8, 8), 99).save(tmp_path / "digit.png")
    shown = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        shown.append(evaluate_run(tmp_path / "run", cpu=True))
        torch.manual_seed(seed)
        shown.append(predict(tmp_path / "run", [str(tmp_path / "digit.png")]))
    assert shown[:2] == shown[2:]


def test_missing_data_leave_no_folder(tmp_path):
    config = override(preset("text"), {"steps": 1})
    with pytest.raises(ValueError, match="there is no folder"):
        train(config, tmp_path / "run", data_dir=tmp_path / "none", cpu=True)
    assert not (tmp_path / "run").exists()


def test_tensorboard_and_unknown_logs(small, tmp_path):
    config, folder = small(steps=40), tmp_path / "run"
    with pytest.raises(Interruption):
        train(config, folder, cpu=True, trackers=["tensorboard"], on_progress=stop_at(20))
    train(config, folder, cpu=True, trackers=["tensorboard"])
    (events,) = (folder / "tensorboard").iterdir()
    reader = EventAccumulator(str(events)).Reload()
    steps = [x.step for x in reader.Scalars("train/loss")]
    assert steps == sorted({*steps})
    assert {10, 20, 30, 40} <= {*steps}
    with pytest.raises(ValueError, match="unknown tracker='tensorbord'; did you mean tensorboard"):
        train(config, tmp_path / "other", cpu=True, trackers=["tensorbord"])
    with pytest.raises(ValueError, match="needs the package wandb"):
        train(config, tmp_path / "other", cpu=True, trackers=["wandb"])


def test_predictions_of_an_image(small, tmp_path):
    train(small(steps=2), tmp_path / "run", cpu=True)
    tokens = load("digits").test[0][0][0]
    image = Image.frombytes("L", (8, 8), bytes((tokens.float() * 255 / 16).round().byte().tolist()))
    image.save(tmp_path / "digit.png")
    found = predict(tmp_path / "run", [str(tmp_path / "digit.png")])
    _, model = load_run(tmp_path / "run")
    expected = model(tokens.unsqueeze(0)).softmax(-1).squeeze(0)
    assert [name for name, _ in found] == [str(i.item()) for i in expected.argsort(descending=True)]
    assert sum(p for _, p in found) == pytest.approx(1)
    with pytest.raises(ValueError, match="digits takes the path of an image, got 2 inputs"):
        predict(tmp_path / "run", ["a.png", "b.png"])


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_goes_along_where_there_is_padding(pair, padded):
    shape = (3, 2, 5) if pair else (3, 5)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[-1, ..., -1] = not padded
    tokens = torch.randint(9, shape, dtype=torch.uint8)
    got = []
    model = lambda *inputs: got.extend(inputs)  # noqa: E731
    batch = Batch(tokens, mask, torch.zeros(3), torch.arange(3))
    labels, *inputs = to_device(batch, torch.device("cpu"))
    assert labels is batch.labels
    classify(model, *inputs)
    wanted = [tokens, mask] if padded else [tokens]
    wanted = [part for x in wanted for part in x.unbind(1)] if pair else wanted
    assert len(got) == len(wanted)
    assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


def test_pairs_of_documents(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTRPB_CACHE", str(tmp_path / "cache"))
    write_papers(tmp_path / "aan")
    config = override(preset("retrieval"), {**PAIRS_OF_PAPERS, "steps": 3})
    train(config, tmp_path / "run", data_dir=tmp_path / "aan", cpu=True)
    assert len(predict(tmp_path / "run", ["one paper", "another"])) == 2

    # Compiled, with batches of few lengths, it learns the same.
    shapes = []

    def noted(model, tokens, mask):
        shapes.append(tokens.shape)
        return classify(model, tokens, mask)

    monkeypatch.setattr("fastrpb.step.classify", noted)
    monkeypatch.setattr("fastrpb.train._LENGTHS", 4)
    config = override(config, {"compile": True})
    train(config, tmp_path / "few", data_dir=tmp_path / "aan", cpu=True)
    assert sorted(shapes) == [(1, 2, 12), (1, 2, 13), (1, 2, 13)]
    torch.testing.assert_close(weights(tmp_path / "few"), weights(tmp_path / "run"))


def test_padding_is_no_token(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTRPB_CACHE", str(tmp_path / "cache"))
    write_reviews(tmp_path / "imdb")
    texts, _ = REVIEWS["train"]  # all of them: validation="test" holds nothing out
    config = override(preset("text"), {**PAIRS_OF_PAPERS, "batch_size": len(texts), "steps": 2})
    record = train(config, tmp_path / "run", data_dir=tmp_path / "imdb", cpu=True)
    tokens = 2 * sum(len(text.encode()) for text in texts)
    assert record["tokens_per_second"] * record["seconds"] == pytest.approx(tokens)


@pytest.mark.parametrize(("few", "alike"), [(0.01, False), (1.0, True)])
def test_one_compiled_program_or_one_without_masks_as_well(tmp_path, monkeypatch, few, alike):
    monkeypatch.setenv("FASTRPB_CACHE", str(tmp_path / "cache"))
    write_reviews(tmp_path / "imdb")
    padded, masked = [], []

    def noted(model, tokens, mask=None):
        masked.append(mask is not None)
        padded.append(tokens.eq(255).any().item())
        return classify(model, tokens, mask)

    monkeypatch.setattr("fastrpb.step.classify", noted)
    monkeypatch.setattr("fastrpb.step._FEW", few)
    monkeypatch.setattr("fastrpb.step._compile", lambda *_: None)
    config = override(preset("text"), {**PAIRS_OF_PAPERS, "steps": 12, "compile": True})
    train(config, tmp_path / "run", data_dir=tmp_path / "imdb", cpu=True)
    assert len(set(padded)) == 2
    assert masked == (padded if alike else 12 * [True])


def test_the_folder_one_stands_in(small, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.chdir(folder)
    record = train(small(steps=1), ".", cpu=True)
    assert json.loads((tmp_path / "results.jsonl").read_text())["metrics"] == record["metrics"]
    assert not (folder / "results.jsonl").exists()


def test_an_evaluation_takes_four_times_what_training_holds_at_once(small, tmp_path, monkeypatch):
    sizes = []

    def counted(model, tokens, mask=None):
        sizes.append((model.training, len(tokens)))
        return classify(model, tokens, mask)

    for module in ("evaluate", "step"):
        monkeypatch.setattr(f"fastrpb.{module}.classify", counted)
    train(small(steps=1, batch_size=32, accumulate=32), tmp_path / "run", cpu=True)
    assert max(size for training, size in sizes if training) == 1
    assert max(size for training, size in sizes if not training) == 4


def test_accumulation_is_that_of_the_config(small, tmp_path, monkeypatch):
    train(small(steps=3, clip=0.1), tmp_path / "a", cpu=True)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    train(small(steps=3, clip=0.1), tmp_path / "b", cpu=True)
    wanted, got = (weights(tmp_path / name) for name in "ab")
    assert all(torch.equal(got[name], x) for name, x in wanted.items())


def test_the_revision_is_that_of_the_beginning(small, tmp_path, monkeypatch):
    def commit(progress):
        monkeypatch.setattr("fastrpb.provenance._revision", lambda: "later")

    assert (
        train(small(steps=2), tmp_path / "run", cpu=True, on_progress=commit)["revision"] != "later"
    )


def test_the_revision_is_of_a_clone_of_the_source_alone(tmp_path, monkeypatch):
    def git(*words):
        names = ("-c", "user.name=x", "-c", "user.email=x@x")
        command = ["git", "-C", str(tmp_path), *names, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    source = tmp_path / "run.py"
    source.write_text("1")
    monkeypatch.setattr(provenance, "__file__", str(source))
    assert _revision() is None
    git("init")
    git("commit", "--allow-empty", "-m", "of something else")
    assert _revision() is None
    git("add", "run.py")
    git("commit", "-m", "of the source")
    assert _revision() == git("rev-parse", "HEAD")
    source.write_text("2")
    assert _revision() == git("rev-parse", "HEAD") + "+"


@pytest.mark.parametrize(
    ("changes", "processes", "words"),
    [
        ({"batch_size": 8}, 3, "batch_size=8 is not divisible by 3 processes times accumulate=1"),
        (
            {"batch_size": 8, "accumulate": 4, "head_norm": True},
            2,
            "batch_size=8 leaves one for each of 2 processes times accumulate=4; use at least 16",
        ),
    ],
)
def test_batches_that_do_not_part(small, changes, processes, words):
    with pytest.raises(ValueError, match=words):
        small(**changes).check_parts(processes)
    small(**{**changes, "batch_size": 48}).check_parts(processes)


def test_a_run_of_batches_that_do_not_part_is_not_begun(small, tmp_path, monkeypatch):
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(ValueError, match=r"batch_size=8 .* 2 processes times accumulate=8"):
        train(small(batch_size=8, accumulate=8), tmp_path / "run", cpu=True)
    assert not (tmp_path / "run").exists()
