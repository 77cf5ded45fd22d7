"""The real files, where they are: known sums and sizes."""

import pytest
import torch

from fastrpb.data import Batches, load
from samples import real_data


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("real")


@pytest.fixture
def real(shared_cache, monkeypatch):
    def load_real(name, folder, **options):
        monkeypatch.setenv("FASTRPB_CACHE", str(shared_cache))
        return load(name, real_data(folder), **options)

    return load_real


def test_mnist(real):
    dataset = real("mnist", "mnist", validation="test")
    assert (len(dataset.train), len(dataset.test)) == (60_000, 10_000)
    assert dataset.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert dataset.train.labels.bincount().tolist()[1] == 6742
    # The mean grey of MNIST's train images, known everywhere as 0.1307.
    train = dataset.train.sequences.tokens[: 60_000 * 784]
    assert round(train.float().mean(dtype=torch.float64).item() / 255, 4) == 0.1307


def test_cifar10(real):
    dataset = real("cifar10", "cifar10")
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (
        45_000,
        5_000,
        10_000,
    )
    assert dataset.validation.labels.bincount().tolist() == [500] * 10
    assert set(dataset.train.lengths.flatten().tolist()) == {1024}


def test_text(real):
    dataset = real("text", "imdb")
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (
        22_500,
        2_500,
        25_000,
    )
    assert dataset.validation.labels.bincount().tolist() == [1250, 1250]
    assert int(dataset.train.lengths.max()) == 1000
    longer = real("text", "imdb", max_length=4096)
    assert int(longer.train.lengths.max()) == 4096
    fraction = {}
    for pool in (1, 64):
        batches = Batches(dataset.train, 32, pad_id=dataset.task.pad_id, pool=pool)
        total = kept = 0
        for batch in batches:
            total += batch.mask.numel()
            kept += int(batch.mask.sum())
        fraction[pool] = 1 - kept / total
    assert fraction[1] > 0.1
    assert fraction[64] < 0.01


def test_retrieval(real):
    dataset = real("retrieval", "aan")
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (
        74_576,
        9_322,
        9_322,
    )
    assert len(dataset.train.sequences) == 9_729
    batch = next(iter(Batches(dataset.train, 4, pad_id=dataset.task.pad_id)))
    assert batch.tokens.shape == (4, 2, 4000)
