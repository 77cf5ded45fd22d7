import dataclasses
import itertools
import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel

from fastrpb import (
    Classifier,
    LanguageModel,
    ModelConfig,
    PairClassifier,
    load_model,
    save_model,
)
from fastrpb.dropout import Dropout
from fastrpb.model_config import ON_LOGITS

SMALL = {
    "vocab_size": 11,
    "max_length": 24,
    "num_classes": 3,
    "dim": 16,
    "layers": 2,
    "heads": 2,
    "image": (4, 6),
    "num_features": 8,
    "realizations": 6,
    "sines": 2,
    "kernel_size": 5,
    "dropout": 0.0,
}
POSITIONS = ("none", "fastrpb", "fastrpb2d", "sinespe", "convspe", "rope", *ON_LOGITS)
PAIRS = [
    *itertools.product(["softmax"], ["sikf"], POSITIONS),
    *itertools.product(["linear"], ["sikf", "elu1", "relu", "dpfp", "favor"], POSITIONS[:6]),
]
pairs = pytest.mark.parametrize(("attention", "features", "position"), PAIRS)


def config(**changes):
    return ModelConfig(**{**SMALL, **changes})


def batch(n=24):
    mask = torch.ones(4, n, dtype=torch.bool)
    mask[1, 17:] = False
    return torch.randint(11, (4, n)), mask


@pairs
def test_every_pair_trains_all_its_parameters(attention, features, position):
    """What DDP asks for: no parameter without a gradient."""
    model = Classifier(config(attention=attention, features=features, position=position))
    logits = model(*batch())
    assert logits.shape == (4, 3)
    torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 0])).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name


@pairs
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_masks_go_all_the_way_through(attention, features, position, pooling):
    """What stands under the mask changes nothing."""
    model = Classifier(
        config(attention=attention, features=features, position=position, pooling=pooling)
    ).eval()
    tokens, mask = batch()
    other = torch.where(mask, tokens, torch.randint(11, (4, 24)))
    assert not torch.equal(other, tokens)
    results = []
    for x in (tokens, other):
        torch.manual_seed(5)  # stochastic encodings draw the same codes
        results.append(model(x, mask))
    torch.testing.assert_close(*results)
    torch.manual_seed(5)
    assert (model(tokens) - results[0])[1].abs().max() > 1e-6


def pooled_and_gradients(model, pool, tokens, mask):
    torch.manual_seed(5)
    vector = pool(tokens, mask)
    grads = torch.autograd.grad(vector.square().sum(), model.parameters(), allow_unused=True)
    return vector, [
        torch.zeros_like(p) if g is None else g
        for g, p in zip(grads, model.parameters(), strict=True)
    ]


@pairs
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_cls_alone_in_the_last_block_is_what_it_is_among_all(attention, features, position, norm):
    words = {"attention": attention, "features": features, "position": position}
    encoder = Classifier(config(**words, norm=norm)).encoder.double()
    tokens, mask = batch()
    made = []
    last = encoder.blocks[-1].mlp
    last.register_forward_hook(lambda module, inputs, output: made.append(output.shape[1]))
    alone = pooled_and_gradients(encoder, encoder.pool, tokens, mask)
    among = pooled_and_gradients(encoder, lambda *x: encoder(*x)[:, 0], tokens, mask)
    torch.testing.assert_close(alone, among)
    assert made == [1 if norm == "layer" else 25, 25]


@pytest.mark.parametrize("position", ["none", "fastrpb", "rope", "sinespe"])
@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_language_model_is_causal(attention, position):
    model = LanguageModel(
        config(attention=attention, position=position, causal=True, pooling="mean")
    ).eval()
    tokens, _ = batch()
    later = tokens.clone()
    later[:, 15:] = (later[:, 15:] + 1) % 11
    results = []
    for x in (tokens, later):
        torch.manual_seed(5)
        results.append(model(x))
    assert results[0].shape == (4, 24, 11)
    torch.testing.assert_close(results[0][:, :15], results[1][:, :15], rtol=1e-4, atol=1e-5)
    assert (results[0][:, 15:] - results[1][:, 15:]).abs().max() > 1e-3


@pytest.mark.parametrize("position", ["fastrpb", "fastrpb2d"])
def test_settings_of_the_bias(position):
    settings = {"position": position, "bias_reach": 8.0, "bias_threshold": 0.1, "bias_dropout": 0.2}
    for envelope in (False, True):
        encoder = Classifier(config(**settings, bias_envelope=envelope)).encoder
        for block in encoder.blocks:
            rpb = block.attention.bias
            assert rpb.envelope == ((1.0, 8.0) if envelope else None)
            assert (rpb.threshold, rpb.dropout, rpb.prefix) == (0.1, 0.2, 1)
    assert not rpb.symmetric
    mirrored = Classifier(config(position=position, bias_symmetric=True)).encoder
    assert all(block.attention.bias.symmetric for block in mirrored.blocks)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_symmetric_bias_makes_mirror_images_one(symmetric):
    settings = {"position": "fastrpb2d", "bias_kind": "full", "absolute": "none"}
    model = Classifier(config(**settings, bias_symmetric=symmetric, pooling="mean")).double()
    pixels = torch.randint(11, (3, 4, 6))
    difference = (model(pixels.flatten(1)) - model(pixels.flip(2).flatten(1))).abs().max()
    assert difference < 1e-12 if symmetric else difference > 1e-6


def test_attention_dropout_is_its_own_setting_and_of_training():
    model = Classifier(config(attention="softmax", attention_dropout=0.5, dropout=0.2))
    attend = model.encoder.blocks[0].attention.attend
    assert attend.dropout == 0.5
    q, k, v = torch.randn(2, 4, 30, 8), torch.randn(2, 4, 30, 8), torch.ones(2, 4, 30, 1)
    assert attend(q, k, v, None).std() > 0.05
    torch.testing.assert_close(attend.eval()(q, k, v, None), v)


def test_where_dropout_acts():
    """On the embeddings, after the attention, in and after the MLP."""
    model = Classifier(config(dropout=0.1, layers=1, pooling="mean"))
    shapes = []
    for x in model.modules():
        if isinstance(x, Dropout):
            x.register_forward_hook(lambda module, inputs, y: shapes.append(tuple(y.shape)))
    model(*batch())
    assert sorted(shapes) == [*3 * [(4, 24, 16)], (4, 24, 64)]


def test_gelu_of_attention_and_bias():
    plain = Classifier(config(filters=16)).encoder.blocks[0].attention
    bent = Classifier(config(filters=16, attention_gelu=True)).encoder.blocks[0].attention
    bent.load_state_dict(plain.state_dict())
    x = torch.randn(2, 25, 16)
    seen = []
    plain.out.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    plain(x)
    torch.testing.assert_close(bent(x), plain.out(torch.nn.functional.gelu(seen[0])))


def test_a_head_that_norms_what_is_pooled():
    torch.manual_seed(0)
    model = Classifier(config(head_norm=True))
    tokens, mask = batch()
    seen = []
    model.head[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(tokens, mask)
    torch.testing.assert_close(seen[0].mean(0), torch.zeros(16), rtol=0, atol=1e-5)
    pooled = model.encoder.pool(tokens, mask)
    expected = (pooled - pooled.mean(0)) / (pooled.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-4)
    pairs = PairClassifier(config(head_norm=True, pairing="interact"))
    assert pairs.head[0].num_features == 64


def test_smooth_embeddings_of_near_ids_are_alike():
    sizes = {"vocab_size": 256, "dim": 512, "heads": 1, "filters": None}
    plain = config(**sizes, absolute="none", embedding_init="smooth")
    weight = Classifier(plain).encoder.embedding.weight.detach()
    assert weight.std().item() == pytest.approx(1, abs=0.05)
    alike = torch.nn.functional.cosine_similarity(weight[:1], weight)
    assert alike[1] > 0.99
    assert alike[64:].abs().max() < 0.5
    assert alike.diff()[:32].max() < 0  # the farther, the less alike
    learned = config(**sizes, absolute="learned", embedding_init="smooth")
    assert Classifier(learned).encoder.embedding.weight.std().item() == pytest.approx(
        0.02, rel=0.05
    )


def test_pairs_that_interact():
    model = PairClassifier(config(pairing="interact"))
    (first, mask_a), (second, mask_b) = batch(), batch()
    a, b = model.encoder.pool(first, mask_a), model.encoder.pool(second, mask_b)
    expected = model.head(torch.cat([a, b, a * b, a - b], -1))
    torch.testing.assert_close(model(first, second, mask_a, mask_b), expected)
    assert model.head[0].in_features == 4 * 16


def test_pair_classifier_shares_its_encoder():
    model = PairClassifier(config())
    (a, mask_a), (b, mask_b) = batch(), batch()
    logits = model(a, b, mask_a, mask_b)
    assert logits.shape == (4, 3)
    other_a, other_b = (a + 1) % 11, (b + 1) % 11
    for changed in ((other_a, b), (a, other_b)):
        assert (model(*changed, mask_a, mask_b) - logits).abs().max() > 1e-6
    for x, y in ((torch.where(mask_a, a, other_a), b), (a, torch.where(mask_b, b, other_b))):
        torch.testing.assert_close(model(x, y, mask_a, mask_b), logits)
    sizes = [layer.out_features for layer in model.head if isinstance(layer, torch.nn.Linear)]
    assert sizes == [64, 32, 3]
    assert sum(name.startswith("encoder.embedding") for name in model.state_dict()) == 1


@pytest.mark.parametrize(
    ("norm", "training", "lengths", "masked", "calls"),
    [
        ("layer", True, (24, 24), (True, True), 1),
        ("layer", True, (24, 24), (False, False), 1),
        ("layer", True, (24, 24), (True, False), 2),
        ("layer", True, (24, 17), (True, True), 2),
        ("batch", True, (24, 24), (False, False), 2),  # statistics of each
        ("batch", False, (24, 24), (True, True), 1),
    ],
)
def test_two_documents_of_one_length_are_one_batch(norm, training, lengths, masked, calls):
    model = PairClassifier(config(norm=norm, image=None)).train(training)
    (a, mask_a), (b, mask_b) = batch(), batch()
    pairs = [(a, mask_a), (b, mask_b.flip(0))]
    tokens = [x[:, :length] for (x, _), length in zip(pairs, lengths, strict=True)]
    masks = [
        mask[:, :length] if some else None
        for (_, mask), length, some in zip(pairs, lengths, masked, strict=True)
    ]
    expected = model.head(
        torch.cat([model.encoder.pool(*each) for each in zip(tokens, masks, strict=True)], -1)
    )
    seen = []
    model.encoder.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(model(*tokens, *masks), expected)
    assert len(seen) == calls


@pytest.mark.parametrize("filters", [1, 2, 8, 16])
def test_filters_are_their_own_setting(filters):
    model = Classifier(config(filters=filters))
    assert model.encoder.blocks[0].attention.bias.w.shape == (filters, 2 * 24 - 1)
    model(*batch()).sum().backward()


def test_bias_acts_on_channels_in_their_order():
    """One filter per channel with w = δ_0·c gives y_c = c·v_c."""
    model = Classifier(config(filters=16, pooling="mean", attention="softmax"))
    layer = model.encoder.blocks[0].attention
    x = torch.randn(2, 24, 16)
    before = layer(x)
    with torch.no_grad():
        layer.bias.w.zero_()
        plain = layer(x)
        layer.bias.w[:, 23] = torch.arange(16.0)
        biased = layer(x)
    v = layer.qkv(x).chunk(3, -1)[2]
    wanted = plain + torch.nn.functional.linear(v * torch.arange(16.0), layer.out.weight)
    torch.testing.assert_close(biased, wanted, rtol=1e-4, atol=1e-4)
    assert (before - plain).abs().max() > 1e-3


def test_image_bias_skips_the_cls_token():
    model = Classifier(config(position="fastrpb2d", bias_kind="full"))
    bias = model.encoder.blocks[0].attention.bias
    assert bias.prefix == 1
    assert bias.w.shape == (2, 7, 11)
    model(batch()[0]).sum().backward()


def test_qkv_width_may_differ_from_the_model_width():
    model = Classifier(config(qkv_dim=8, mlp_dim=20))
    assert model.encoder.blocks[0].attention.qkv.out_features == 24
    assert model(*batch()).shape == (4, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    tokens, mask = batch()
    for attention in ("softmax", "linear"):
        model = Classifier(config(attention=attention))
        with torch.autocast("cpu", dtype):
            logits = model(tokens, mask)
        exact = model(tokens, mask)
        assert logits.isfinite().all()
        torch.testing.assert_close(logits.float(), exact, rtol=0.1, atol=0.1)
        logits.float().sum().backward()


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("position", ["fastrpb", "fastrpb2d"])
def test_compiles_to_one_graph(attention, position):
    torch.compiler.reset()
    model = Classifier(config(attention=attention, position=position)).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens, mask = batch()
    torch.testing.assert_close(compiled(tokens, mask), model(tokens, mask))


def test_checkpointing_changes_nothing():
    plain, saving = Classifier(config()), Classifier(config(checkpoint=True))
    saving.load_state_dict(plain.state_dict())
    tokens, mask = batch()
    for model in (plain, saving):
        model(tokens, mask).square().sum().backward()
    for a, b in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_distributed_data_parallel(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Classifier(config()))
        for _ in range(2):  # an unused parameter stops the second pass
            model(*batch()).sum().backward()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Classifier(config(features="favor", position="fastrpb2d")),
        lambda: PairClassifier(config(image=None)),
        lambda: LanguageModel(config(causal=True, pooling="mean", absolute="sinusoidal")),
    ],
)
def test_save_and_load(make, tmp_path):
    model = make()
    save_model(model, tmp_path / "model.safetensors")
    other = load_model(tmp_path / "model.safetensors")
    assert type(other) is type(model)
    assert other.config == model.config
    for (name, a), (_, b) in zip(
        model.state_dict().items(), other.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name
    assert not other.training
    save_model(model.bfloat16(), tmp_path / "model.safetensors")
    half = load_model(tmp_path / "model.safetensors")
    assert next(half.parameters()).dtype == torch.bfloat16
    tokens = torch.zeros(2, half.config.max_length, dtype=torch.int64)
    assert half(*(1 + isinstance(half, PairClassifier)) * [tokens]).dtype == torch.bfloat16
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_files_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_model(Classifier(config()), path)
    weights = load_file(path)
    meta = {"model": "Classifier", "config": json.dumps(dataclasses.asdict(config()))}
    save_file({**weights, "extra": torch.ones(1)}, path, meta)
    with pytest.raises(ValueError, match=r'model.safetensors.*Unexpected key.*"extra"'):
        load_model(path)
    save_file({k: x for k, x in weights.items() if k != "encoder.cls"}, path, meta)
    with pytest.raises(ValueError, match=r'Missing key.*"encoder.cls"'):
        load_model(path)
    save_file(weights, path)
    with pytest.raises(ValueError, match="no model of fastrpb"):
        load_model(path)
    save_model(Classifier(config()), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_model(path)
    for bad in ({"model": "Classifier"}, {**meta, "config": "{"}, {**meta, "config": '{"x": 1}'}):
        save_file(weights, path, bad)
        with pytest.raises(ValueError, match=r"model.safetensors does not fit its own config"):
            load_model(path)
    with pytest.raises(FileNotFoundError, match="is a folder"):
        load_model(tmp_path)


def test_wrapped_models_are_not_saved_unreadably(tmp_path):
    model = Classifier(config())
    for wrong in (torch.compile(model), model.encoder):
        with pytest.raises(TypeError, match="save one of Classifier"):
            save_model(wrong, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_favor_features_differ_by_layer_and_follow_the_seed():
    torch.manual_seed(1)
    first, second = (
        block.attention.attend.phi.projection
        for block in Classifier(config(features="favor")).encoder.blocks
    )
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    again = Classifier(config(features="favor")).encoder.blocks[0].attention.attend.phi.projection
    assert torch.equal(first, again)


def test_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_model(Classifier(config()), path)
    before = path.read_bytes()

    def full_disk(weights, part, meta):
        part.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_model(Classifier(config()), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *[({"position": p}, f"'{p}' adds to the logits.*linear attention") for p in ON_LOGITS],
        ({"attention": "cosine"}, "attention='cosine'; choose from softmax, linear"),
        ({"features": "exp"}, "features='exp'; choose from sikf"),
        ({"position": "fastrpb3d"}, "position='fastrpb3d'"),
        ({"heads": 3}, "heads=3 must divide the width 16"),
        ({"filters": 5}, "filters=5 must divide the width 16"),
        ({"filters": 0}, "filters=0"),
        ({"position": "fastrpb2d", "image": None}, "needs image"),
        ({"position": "fastrpb2d", "image": 4}, "needs image.*got 4"),
        ({"bias_reach": 0.5}, "bias_reach=0.5"),
        ({"pairing": "sum"}, "pairing='sum'; choose from concat, interact"),
        ({"embedding_init": "rff"}, "embedding_init='rff'; choose from normal, smooth"),
        ({"position": "fastrpb2d", "image": (5, 5)}, "5×5 has 25 pixels, but max_length=24"),
        ({"position": "fastrpb2d", "causal": True, "pooling": "mean"}, "cannot be causal"),
        ({"bias_symmetric": True, "causal": True, "pooling": "mean"}, "choose one of causal and"),
        ({"layers": 0}, "layers=0"),
        ({"qkv_dim": 0}, "qkv_dim=0"),
        ({"mlp_dim": 0}, "mlp_dim=0"),
        ({"kernel_size": 0}, "kernel_size=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"causal": True}, "CLS token comes first and sees nothing"),
        ({"max_length": 0}, "max_length=0"),
    ],
)
def test_impossible_configs_say_why(changes, words):
    with pytest.raises(ValueError, match=words):
        config(**changes)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m(torch.zeros(2, 25, dtype=torch.long)), "25 tokens exceed max_length=24"),
        (lambda m: m(torch.full((2, 24), 11)), "from 11 to 11; vocab_size allows 0 to 10"),
        (lambda m: m(torch.full((2, 24), -1)), "from -1 to -1"),
        (lambda m: m(torch.zeros(2, 0, dtype=torch.long)), r"\(2, 0\)"),
        (lambda m: m(torch.zeros(2, 24)), r"ids, got torch.float32 \(2, 24\)"),
        (lambda m: m(torch.zeros(24, dtype=torch.long)), r"\(24,\)"),
        (
            lambda m: m(torch.zeros(2, 24, dtype=torch.long), torch.ones(2, 23) > 0),
            r"mask must be .*\(2, 24\), got \(2, 23\)",
        ),
        (lambda m: LanguageModel(config()), "causal=True"),
    ],
)
def test_bad_input(call, words):
    model = Classifier(config())
    with pytest.raises(ValueError, match=words):
        call(model)


@pytest.mark.parametrize("changes", [{"pooling": "mean"}, {"norm": "batch"}])
def test_cls_alone_needs_a_cls_and_no_others(changes):
    encoder = Classifier(config(**changes)).encoder
    with pytest.raises(ValueError, match="cls_alone=True needs pooling='cls' and norm="):
        encoder(*batch(), cls_alone=True)


def test_large_weights_that_nobody_reads_in_float16():
    model = Classifier(config(max_length=24)).half().eval()
    torch.nn.init.constant_(model.encoder.blocks[-1].attention.bias.w, 6e4)  # their sum overflows
    assert model(*batch()).isfinite().all()
    assert model.train()(*batch()).isfinite().all()
