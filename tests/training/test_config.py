import hashlib
import json
import math
from dataclasses import replace

import pytest

from fastrpb.config import RunConfig, differences, from_json, load_config, override, to_json
from fastrpb.data import TASKS
from fastrpb.presets import BEST, COLUMNS, ROWS, best, name_of, preset, with_row


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("row", ROWS)
def test_every_cell_of_the_tables_is_a_config_that_json_keeps(task, row):
    for position in COLUMNS:
        text, linear = task in ("text", "retrieval", "listops"), row != "softmax"
        if (position == "fastrpb2d" and text) or (position in ("rpe", "t5", "alibi") and linear):
            with pytest.raises(ValueError, match=f"position='{position}'"):
                preset(task, *with_row(row), position)
            continue
        config = preset(task, *with_row(row), position)
        assert from_json(to_json(config), "x") == config
        assert name_of(config) == f"{task}-{row}-{position}-s0"


def test_the_set_ups_of_the_paper():
    text = preset("text")
    assert (text.model.layers, text.model.dim, text.model.heads, text.model.mlp) == (
        4,
        256,
        4,
        1024,
    )
    assert (text.batch_size, text.steps, text.warmup, text.validation) == (8, 30_000, 8000, "test")
    cifar = preset("cifar10", position="sinespe").model
    assert (cifar.width, cifar.realizations, cifar.absolute) == (64, 32, "none")
    rates = [preset("mnist", "softmax", position=p).learning_rate for p in ("none", "fastrpb2d")]
    assert rates == [1.05e-4, 1.35e-4]


def test_schedules():
    config = preset("text")
    assert config.learning_rate_at(4000, 30_000) == pytest.approx(0.0125 / 2 / math.sqrt(8000))
    assert config.learning_rate_at(16_000, 30_000) == pytest.approx(0.0125 / math.sqrt(16_000))
    config = replace(config, schedule="linear", warmup=10, learning_rate=1.0)
    rates = [config.learning_rate_at(step, 110) for step in (5, 10, 11, 61, 110)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.01])
    config = replace(config, schedule="cosine")
    rates = [config.learning_rate_at(step, 110) for step in (5, 11, 61)]
    assert rates == pytest.approx([0.5, 1.0, 0.5])
    config = replace(config, schedule="constant", warmup=0)
    assert config.learning_rate_at(1, 110) == config.learning_rate_at(110, 110) == 1.0


def test_a_length_in_steps_replaces_one_in_epochs():
    config = override(preset("mnist"), {"steps": 5})
    assert (config.steps, config.epochs) == (5, None)
    config = override(config, {"epochs": 2})
    assert (config.steps, config.epochs) == (None, 2)


def test_a_name_does_not_depend_on_fields_that_are_as_ever():
    """A folder is found again after fields were added to the config."""
    config = override(preset("digits"), {"steps": 7})
    changed = differences(preset("digits"), config)
    digest = hashlib.blake2b(";".join(changed).encode(), digest_size=3).hexdigest()
    assert changed == ["epochs 12 → None", "steps None → 7"]
    assert name_of(config) == f"digits-sikf-fastrpb-s0-{digest}"


@pytest.mark.parametrize("task", BEST)
def test_the_best_set_ups(task):
    config = best(task)
    assert (config.task, config.model.attention) == (task, "linear")
    assert config.model.position in ("fastrpb", "fastrpb2d")
    assert name_of(override(config, {"seed": 2})) == f"{task}-best-s2"
    assert "best" not in name_of(override(config, {"warmup": 7}))
    assert config.keep == "last" or config.validation == "train"


def test_a_task_without_a_best_set_up():
    with pytest.raises(ValueError, match=r"no best set-up for 'digits', only for mnist"):
        best("digits")


def test_a_model_that_is_none():
    with pytest.raises(TypeError, match=r"model must be a ModelConfig, got {'layers': 1}"):
        RunConfig("digits", {"layers": 1}, epochs=1)  # pyright: ignore[reportArgumentType]


def test_a_bias_that_nobody_reads_is_not_trained():
    unread = override(preset("digits"), {"layers": 1, "pooling": "cls", "norm": "layer"})
    with pytest.raises(ValueError, match="FastRPB would change nothing; use pooling='mean'"):
        unread.check_bias_is_read()
    for change in ({"layers": 2}, {"pooling": "mean"}, {"position": "none"}):
        override(unread, change).check_bias_is_read()


def test_a_changed_config_has_another_name():
    plain, changed = preset("digits"), override(preset("digits"), {"layers": 3})
    assert name_of(changed).startswith(name_of(plain) + "-")
    assert name_of(changed) != name_of(override(plain, {"layers": 4}))
    assert differences(plain, changed) == ["layers 2 → 3"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lerning_rate": 1}, "no field 'lerning_rate'; did you mean learning_rate"),
        ({"vocab_size": 3}, "vocab_size is decided by the task digits"),
        ({"schedule": "linar"}, "schedule='linar'; did you mean linear"),
        ({"precision": "int4"}, "precision='int4'; choose from fp32"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"filters": 0}, "filters=0 must be at least 1"),
        ({"layers": 10**8}, "layers=100000000 must be at most 10000"),
        ({"mlp_dim": 0}, "mlp_dim=0 must be at least 1"),
        ({"bias_threshold": math.nan}, "bias_threshold=nan must be from 0"),
        ({"steps": 3, "epochs": 4}, "epochs=4 and steps=3"),
        ({"seed": -1}, "seed=-1 must be a whole number from 0"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 must be from 0"),
        ({"learning_rate": math.nan}, "learning_rate=nan"),
        ({"beta2": 1.0}, "beta2=1.0 must be from 0 to below 1"),
        ({"clip": "1"}, "clip must be a number"),
        ({"clip": 10**400}, "must be from 0 to below 1e"),
        ({"clip": 0}, "clip=0 leaves nothing of the gradients"),
        ({"eps": 0}, "eps=0 leaves nothing of the gradients"),
        ({"attention_dropout": 1.0}, "attention_dropout=1.0 must be from 0 to below 1"),
        ({"schedule": "rsqrt", "warmup": 0}, "warmup ≥ 1"),
        ({"accumulate": 3}, "batch_size=32 is not divisible by accumulate=3"),
        ({"keep": "best", "validation": "test"}, "choose the weights by the test split"),
        ({"max_length": 65}, "digits always has 64 pixels"),
        ({"position": "rpe"}, "linear attention never forms"),
        ({"compile": "yes"}, "compile='yes' must be true or false"),
        ({"head_norm": True, "batch_size": 4, "accumulate": 4}, "two examples a pass.*at least 8"),
    ],
)
def test_impossible_values(values, message):
    with pytest.raises((TypeError, ValueError), match=message):
        override(preset("digits"), values)


def test_a_truth_is_no_number():
    with pytest.raises(TypeError, match=r"learning_rate must be a number .* got True"):
        override(preset("digits"), {"learning_rate": True})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: "{", "is not the config of a run"),
        (lambda c: "[]", "needs the objects of a run and of its model"),
        (lambda c: c.replace("batch_size", "batchsize"), "did you mean batch_size"),
        (lambda c: c.replace('"batch_size": 32', '"batch_size": "32"'), "must be a whole number"),
        (lambda c: c.replace('"vocab_size": 17', '"vocab_size": 18'), "but the model has"),
        (lambda c: json.dumps({**json.loads(c), "task": "digit"}), "did you mean digits"),
    ],
)
def test_damaged_configs(tmp_path, change, message):
    path = tmp_path / "config.json"
    path.write_text(change(to_json(preset("digits"))))
    with pytest.raises(ValueError, match=message) as error:
        load_config(tmp_path)
    assert str(path) in str(error.value)


def test_a_config_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the config .*No such file"):
        load_config(tmp_path / "none.json")


def test_whole_numbers_are_the_same_run():
    whole = override(preset("digits"), {"clip": 1, "dropout": 0, "bias_reach": 4})
    real = override(preset("digits"), {"clip": 1.0, "dropout": 0.0, "bias_reach": 4.0})
    assert name_of(whole) == name_of(real)
    assert to_json(whole) == to_json(real)
