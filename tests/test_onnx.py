"""ONNX files in onnxruntime give what PyTorch gives, at batches and lengths not traced."""

import subprocess
import sys

import onnxruntime
import pytest
import torch

from fastrpb import (
    Classifier,
    FastRPB,
    LanguageModel,
    ModelConfig,
    PairClassifier,
    save_model,
    softmax_attention,
)
from fastrpb.onnx import export, translations

SMALL = {
    "vocab_size": 11,
    "max_length": 60,
    "num_classes": 3,
    "dim": 12,
    "layers": 1,
    "heads": 2,
    "num_features": 8,
    "bias_init": "normal",
}
LANGUAGE = {"causal": True, "pooling": "mean"}
IMAGE = {"position": "fastrpb2d", "image": (6, 10)}


def run(session, names, inputs):
    (y,) = session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})
    return torch.from_numpy(y)


def batch(size, length):
    lengths = torch.randint(1, length + 1, (size, 1))
    return torch.randint(11, (size, length)), torch.arange(length) < lengths


def test_a_model_of_ones_own(tmp_path):
    """Long enough for the product to be an operator of this library."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rpb = FastRPB(2, 700)

        def forward(self, q, k, v):
            return softmax_attention(q, k, v) + self.rpb(v)

    layer, inputs, names = Layer().eval(), torch.randn(3, 1, 2, 700, 8).unbind(), ["q", "k", "v"]
    settings = {"dynamo": True, "opset_version": 20, "verbose": False, "input_names": names}
    program = torch.onnx.export(layer, inputs, custom_translation_table=translations(), **settings)
    program.save(tmp_path / "layer.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "layer.onnx")
    with torch.no_grad():
        torch.testing.assert_close(
            run(session, names, inputs), layer(*inputs), rtol=1e-4, atol=1e-5
        )
    with pytest.raises(TypeError, match=r"not Layer; .*fastrpb\.onnx\.translations\(\)"):
        export(layer, tmp_path / "layer.onnx")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Classifier, {"norm": "batch", "bias_threshold": 0.05, "bias_envelope": True}),
        (Classifier, {"attention": "softmax", **IMAGE, "bias_kind": "full"}),
        (Classifier, {**IMAGE, "bias_symmetric": True, "attention_gelu": True}),
        (Classifier, {"attention": "softmax", "position": "rpe"}),
        (Classifier, {"attention": "softmax", "position": "rpe", **LANGUAGE, "head_norm": True}),
        (LanguageModel, LANGUAGE),
        (LanguageModel, {**LANGUAGE, "features": "elu1", "position": "rope"}),
    ],
)
def test_onnxruntime_gives_what_pytorch_gives(kind, changes, tmp_path):
    model = kind(ModelConfig(**{**SMALL, **changes})).eval()
    torch.nn.init.normal_(model.encoder.embedding.weight)
    session = onnxruntime.InferenceSession(export(model, tmp_path / "model.onnx"))
    image = changes.get("position") == "fastrpb2d"
    shape = ["batch", 60 if image else "length"]
    assert [(x.name, x.shape) for x in session.get_inputs()] == [("tokens", shape), ("mask", shape)]
    sizes = [(1, 60), (5, 60)] if image else [(1, 1), (2, 60), (5, 33), (1, 17)]
    for size, length in sizes:
        tokens, mask = batch(size, length)
        with torch.no_grad():
            wanted = model(tokens, mask)
        got = run(session, ["tokens", "mask"], (tokens, mask))
        seen = mask if kind is LanguageModel else torch.ones(size, dtype=torch.bool)
        torch.testing.assert_close(got[seen], wanted[seen], rtol=1e-4, atol=1e-5)
    tokens[0, 0] = -1  # which must not be the last of the vocabulary
    with pytest.raises(Exception, match=r"out of (data )?bounds|invalid index"):
        run(session, ["tokens", "mask"], (tokens, mask))
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_long_sequences_and_other_dtypes(tmp_path):
    """The DFT keeps its precision, and no N×N matrix stands in the file."""
    others = {"filters": 4, "features": "favor", "absolute": "none", "pooling": "mean"}
    settings = {**SMALL, **others, "max_length": 5000, "bias_init": "local"}
    model = Classifier(ModelConfig(**settings)).eval()
    torch.nn.init.normal_(model.encoder.embedding.weight)
    path = export(model.bfloat16(), tmp_path / "model.onnx")
    assert path.stat().st_size < 1_000_000
    session = onnxruntime.InferenceSession(path)
    tokens, mask = batch(2, 4999)
    with torch.no_grad():
        wanted = model.float()(tokens, mask)
    got = run(session, ["tokens", "mask"], (tokens, mask))
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
    with pytest.raises(Exception, match="invalid index found, index = 5000"):
        run(session, ["tokens", "mask"], batch(1, 5001))


def command(*words):
    return subprocess.run(
        [sys.executable, "-m", "fastrpb", "export", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_command_and_pairs_with_lengths_of_their_own(tmp_path):
    model = PairClassifier(ModelConfig(**SMALL, head_norm=True, pairing="interact")).eval()
    (tmp_path / "run").mkdir()
    save_model(model, tmp_path / "run" / "model.safetensors")
    done = command(tmp_path / "run", tmp_path / "out.onnx")
    assert (done.returncode, done.stderr) == (0, "")
    assert "out.onnx" in done.stdout
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx")
    names = ["first", "second", "first_mask", "second_mask"]
    assert [x.name for x in session.get_inputs()] == names
    (a, mask_a), (b, mask_b) = batch(3, 20), batch(3, 47)
    inputs = (a, b, mask_a, mask_b)
    with torch.no_grad():
        wanted = model(*inputs)
    torch.testing.assert_close(run(session, names, inputs), wanted, rtol=1e-4, atol=1e-5)


def test_mistakes_get_one_sentence(tmp_path):
    failed = command(tmp_path / "nothing", tmp_path / "out.onnx")
    assert failed.returncode == 2
    assert f"there is no folder {tmp_path / 'nothing'}" in failed.stderr
    model = Classifier(ModelConfig(**SMALL))
    save_model(model, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    failed = command(tmp_path, tmp_path / "model.safetensors")
    assert (failed.returncode, (tmp_path / "model.safetensors").read_bytes()) == (2, before)
    assert "the name of an ONNX file ends in .onnx" in failed.stderr
    model = Classifier(ModelConfig(**SMALL, position="sinespe"))
    with pytest.raises(ValueError, match="draws new random codes"):
        export(model, tmp_path / "out.onnx")
    with pytest.raises(TypeError, match=r"export one of Classifier, .* not Encoder"):
        export(model.encoder, tmp_path / "out.onnx")
    with pytest.raises(FileNotFoundError, match="no folder"):
        export(model, tmp_path / "nowhere" / "out.onnx")
    with pytest.raises(ValueError, match=r"is a folder; name a file in it, as .*model\.onnx"):
        export(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("max_length", [1, 300])
def test_causal_with_large_keys_to_come(max_length, tmp_path):
    """What is large later must not make what was there before vanish; more chunks than traced."""
    settings = {**SMALL, **LANGUAGE, "max_length": max_length, "position": "none"}
    settings["absolute"] = "none"
    model = LanguageModel(ModelConfig(**settings)).eval()
    torch.nn.init.normal_(model.encoder.embedding.weight)
    with torch.no_grad():
        model.encoder.blocks[0].attention.qkv.weight[12:24] *= 300
    session = onnxruntime.InferenceSession(export(model, tmp_path / "model.onnx"))
    for length in {1, max_length}:
        tokens, mask = batch(3, length)
        with torch.no_grad():
            wanted = model(tokens, mask)
        got = run(session, ["tokens", "mask"], (tokens, mask))
        torch.testing.assert_close(got[mask], wanted[mask], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_models_of_few_tokens(length, tmp_path):
    model = Classifier(ModelConfig(**{**SMALL, "max_length": length})).eval()
    session = onnxruntime.InferenceSession(export(model, tmp_path / "model.onnx"))
    tokens, mask = batch(3, length)
    with torch.no_grad():
        torch.testing.assert_close(
            run(session, ["tokens", "mask"], (tokens, mask)), model(tokens, mask)
        )
