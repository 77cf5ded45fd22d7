import copy

import pytest
import torch
from torch import nn

from fastrpb import Classifier, ModelConfig
from fastrpb.norms import BatchNorm, LayerNorm, PooledNorm


def kept_tokens():
    torch.manual_seed(0)
    x = torch.randn(3, 7, 5) * 4 + 2
    mask = torch.arange(7) < torch.tensor([[7], [4], [1]])
    return x, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_norm_is_that_of_the_kept_tokens(dtype):
    x, mask = kept_tokens()
    x = x.to(dtype)
    norm, plain = BatchNorm(5, dtype=dtype), nn.BatchNorm1d(5, dtype=dtype)
    with torch.no_grad():
        norm.weight.uniform_(), norm.bias.uniform_()
    plain.load_state_dict(norm.state_dict())
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, wanted = norm(one, mask)[mask], plain(other[mask])
    torch.testing.assert_close(got, wanted)
    g = torch.randn_like(wanted)
    torch.testing.assert_close(
        torch.autograd.grad(got, [one, norm.weight, norm.bias], g),
        torch.autograd.grad(wanted, [other, plain.weight, plain.bias], g),
    )
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[name], value)
    norm.eval(), plain.eval()
    torch.testing.assert_close(norm(x, mask)[mask], plain(x[mask]))


def test_without_a_mask_all_tokens_count():
    x, mask = kept_tokens()
    torch.testing.assert_close(BatchNorm(5)(x), BatchNorm(5)(x, torch.ones_like(mask)))
    torch.testing.assert_close(BatchNorm(5)(x), nn.BatchNorm1d(5)(x.flatten(0, 1)).view_as(x))
    assert torch.equal(LayerNorm(5)(x, mask), nn.LayerNorm(5)(x))


def test_all_of_it_masked_stays_finite():
    x, mask = kept_tokens()
    norm = BatchNorm(5)
    assert norm(x, mask & False).isfinite().all()
    assert all(value.isfinite().all() for value in norm.state_dict().values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precisions_come_back_as_they_were(dtype):
    x, mask = kept_tokens()
    norm = BatchNorm(5)
    y = norm(x.to(dtype), mask)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), BatchNorm(5)(x, mask), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_padding_changes_nothing_of_a_model_in_training(pooling):
    sizes = {"vocab_size": 11, "max_length": 9, "dim": 16, "layers": 2, "heads": 2, "dropout": 0.0}
    model = Classifier(ModelConfig(norm="batch", pooling=pooling, **sizes))
    tokens, mask = torch.randint(11, (4, 9)), torch.arange(9) < torch.tensor([[9], [5], [2], [1]])
    other = torch.where(mask, tokens, (tokens + 3) % 11)
    torch.testing.assert_close(model(tokens, mask), model(other, mask))


def test_a_batch_of_one_is_normed_by_the_averages():
    norm = PooledNorm(4)
    norm(torch.randn(16, 4) * 3 + 2)
    before = copy.deepcopy(norm.state_dict())
    x = torch.randn(1, 4)
    y = norm(x)
    assert all(torch.equal(x, before[name]) for name, x in norm.state_dict().items())
    torch.testing.assert_close(y, norm.eval()(x))


def test_padding_does_not_count_even_as_nan():
    x, mask = kept_tokens()
    clean, spoiled = BatchNorm(5), BatchNorm(5)
    inputs = [x, x.masked_fill(~mask.unsqueeze(-1), torch.nan)]
    one, other = (x.requires_grad_() for x in inputs)
    y, z = clean(one, mask)[mask], spoiled(other, mask)[mask]
    torch.testing.assert_close(z, y)
    torch.testing.assert_close(spoiled.running_var, clean.running_var)
    g = torch.randn_like(y)
    grads = [torch.autograd.grad(*pair, g)[0][mask] for pair in ((y, one), (z, other))]
    torch.testing.assert_close(*grads)


def test_one_kept_token_is_its_own_mean():
    norm = BatchNorm(2)
    x = torch.tensor([[[10.0, -4.0], [3.0, 3.0]]])
    assert norm(x, torch.tensor([[True, False]]))[0, 0].tolist() == [0.0, 0.0]
    torch.testing.assert_close(norm.running_mean, torch.tensor([1.0, -0.4]))


def test_gradients_of_a_batch_without_a_mask_and_then_one_with():
    x, mask = kept_tokens()
    norm, wanted = BatchNorm(5), BatchNorm(5)
    x.requires_grad_()
    whole = torch.ones_like(mask)
    g = torch.randn_like(x)
    (mixed,) = torch.autograd.grad(norm(x) + norm(x, whole), x, g)
    (masked,) = torch.autograd.grad(wanted(x, whole) + wanted(x, whole), x, g)
    torch.testing.assert_close(mixed, masked, rtol=1e-4, atol=1e-5)
