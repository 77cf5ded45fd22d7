"""One vector a sequence: the mean of what is kept, of pairs of any kind."""

import pytest
import torch

from fastrpb import Classifier, ModelConfig, PairClassifier

SMALL = {"vocab_size": 9, "max_length": 32, "dim": 16, "layers": 2, "heads": 2, "dropout": 0.0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_mean_of_kept_tokens_is_that_of_float64(dtype):
    """Sums of thousands of half precisions are beyond them, and so is their count."""
    encoder = Classifier(ModelConfig(**SMALL, pooling="mean")).encoder
    x = (20 + torch.randn(2, 70_000, 3)).to(dtype)
    mask = torch.arange(70_000) < torch.tensor([[70_000], [777]])
    wanted = torch.stack([row[keep].double().mean(0) for row, keep in zip(x, mask, strict=True)])
    torch.testing.assert_close(encoder.pooled(x, mask), wanted.to(dtype))


def test_padding_does_not_count_even_as_nan():
    model = Classifier(ModelConfig(**SMALL, pooling="mean", absolute="none")).eval()
    embedded, mask = torch.randn(1, 8, 16), torch.arange(8)[None] < 6
    spoiled = embedded.masked_fill(~mask.unsqueeze(-1), torch.nan)
    torch.testing.assert_close(model(spoiled, mask), model(embedded, mask))


def test_a_pair_of_ids_and_embeddings():
    model = PairClassifier(ModelConfig(**SMALL)).eval()
    ids = torch.randint(9, (2, 8))
    torch.testing.assert_close(model(model.encoder.embedding(ids), ids), model(ids, ids))


def test_a_batch_norm_of_pairs_where_one_has_a_mask():
    model = PairClassifier(ModelConfig(**SMALL, norm="batch"))
    ids, whole = torch.randint(9, (2, 8)), torch.ones(2, 8, dtype=torch.bool)
    gradients = []
    for masks in ((None, whole), (whole, whole)):
        model.zero_grad()
        model(ids, ids, *masks).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
