from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrpb.data import Batches, DataError, Split
from fastrpb.data.dataset import Sequences, corpus

PAD = 255


def texts(lengths):
    """A split whose example i is the byte i%200, as often as its length says."""
    items = [bytes([i % 200]) * n for i, n in enumerate(lengths)]
    return corpus({"all": (items, [i % 7 for i in range(len(items))])})["all"]


def lengths(count, seed=0):
    return torch.randint(1, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def padding(batches):
    masks = [batch.mask for batch in batches]
    return 1 - sum(int(m.sum()) for m in masks) / sum(m.numel() for m in masks)


def test_a_batch_is_the_examples_padded_to_the_longest():
    split = texts([3, 1, 2])
    (batch,) = Batches(split, 3, pad_id=PAD, shuffle=False, pool=1)
    order = [1, 2, 0]  # by length
    assert batch.rows.tolist() == order
    assert batch.tokens.tolist() == [[1, PAD, PAD], [2, 2, PAD], [0, 0, 0]]
    assert batch.mask.tolist() == [[True, False, False], [True, True, False], [True] * 3]
    assert batch.labels.tolist() == order
    assert (batch.tokens.dtype, batch.mask.dtype) == (torch.uint8, torch.bool)


def test_lengths_are_multiples_or_that_of_the_longest():
    split = texts([1, 4, 5, 7, 9, 10])
    batches = list(Batches(split, 2, pad_id=PAD, shuffle=False, multiple=4))
    assert [batch.tokens.shape[1] for batch in batches] == [4, 8, 10]
    assert batches[1].tokens.tolist()[0] == [2] * 5 + [PAD] * 3
    assert batches[1].mask.sum(1).tolist() == [5, 7]
    with pytest.raises(ValueError, match="multiple=0 must be at least 1"):
        Batches(split, 2, pad_id=PAD, multiple=0)


def test_pairs_are_padded_alike():
    sequences = Sequences.pack([b"a", b"bb", b"cccc"])
    split = Split(sequences, torch.tensor([[0, 1], [2, 0]]), torch.tensor([0, 1]))
    first, second = Batches(split, 1, pad_id=PAD, shuffle=False)
    assert first.tokens.tolist() == [[[97, PAD], [98, 98]]]
    assert first.mask.sum().item() == 3
    assert second.tokens.shape == (1, 2, 4)


@given(
    sizes=st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(1, 3)),
    pool=st.integers(1, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_every_example_once_and_ranks_make_up_the_batch(sizes, pool, shuffle, drop_last):
    count, share, world_size = sizes
    split, size = texts(lengths(count)), share * world_size
    drop_last = drop_last and size <= count
    options = {"pad_id": PAD, "seed": 3, "pool": pool, "shuffle": shuffle, "drop_last": drop_last}
    alone = Batches(split, size, **options)
    epoch = list(alone)
    rows = torch.cat([batch.rows for batch in epoch]).tolist()
    assert len(epoch) == len(alone)
    assert len(set(rows)) == len(rows)
    assert len(rows) == (count // size * size if drop_last else count)
    for batch in epoch:
        for tokens, mask, row in zip(batch.tokens, batch.mask, batch.rows, strict=True):
            assert torch.equal(tokens[mask], split[int(row)][0][0])
            assert (tokens[~mask] == PAD).all()
    ranks = [
        list(Batches(split, size, **options, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    for batch, *shares in zip(epoch, *ranks, strict=True):
        for rank, own in enumerate(shares):
            assert same(own, [part[rank::world_size] for part in batch])


@pytest.mark.parametrize("stop", [0, 1, 5, 9, 10, 11, 25])
def test_a_saved_position_goes_on_exactly(stop):
    split = texts(lengths(100))

    def endless(batches):
        while True:
            yield from batches

    def fresh():
        return Batches(split, 10, pad_id=PAD, seed=5)

    never_stopped = list(islice(endless(fresh()), 40))
    saved = fresh()
    list(islice(endless(saved), stop))
    state = saved.state_dict()
    resumed = fresh()
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.batch) == divmod(stop, 10)
    for expected, batch in zip(never_stopped[stop:], endless(resumed), strict=False):
        assert same(expected, batch)


def test_epochs_and_seeds_differ_and_repeat():
    split = texts(lengths(50))

    def rows(batches):
        return torch.cat([batch.rows for batch in batches]).tolist()

    batches = Batches(split, 5, pad_id=PAD, seed=1)
    first, second = rows(batches), rows(batches)
    assert first != second
    assert rows(Batches(split, 5, pad_id=PAD, seed=1)) == first
    assert rows(Batches(split, 5, pad_id=PAD, seed=2)) not in (first, second)


def test_a_position_of_other_batches_is_refused():
    split = texts(lengths(50))
    state = Batches(split, 5, pad_id=PAD).state_dict()
    with pytest.raises(
        DataError, match=r"saved position belongs to batch_size=5, .* batch_size=10"
    ):
        Batches(split, 10, pad_id=PAD).load_state_dict(state)
    with pytest.raises(DataError, match="examples=50, these batches have examples=40"):
        Batches(texts(lengths(40)), 5, pad_id=PAD).load_state_dict(state)
    with pytest.raises(DataError, match="seed=0, these batches have seed=1"):
        Batches(split, 5, pad_id=PAD, seed=1).load_state_dict(state)


def test_a_position_that_is_none_is_refused():
    batches = Batches(texts(lengths(50)), 5, pad_id=PAD)
    with pytest.raises(DataError, match="examples=None"):
        batches.load_state_dict({})
    for batch in (-3, 10, 10**6):
        with pytest.raises(DataError, match=f"batch {batch} of epoch 0, .* of 10 batches"):
            batches.load_state_dict({**batches.state_dict(), "batch": batch})


def test_buckets_save_padding():
    split = texts(lengths(2000))
    bucketed = padding(Batches(split, 8, pad_id=PAD))
    plain = padding(Batches(split, 8, pad_id=PAD, pool=1))
    assert plain > 0.3
    assert bucketed < 0.03
    assert padding(Batches(split, 8, pad_id=PAD, shuffle=False)) < 0.03


def test_impossible_batches():
    split = texts([1, 2, 3])
    with pytest.raises(ValueError, match=r"batch_size=3 must be a multiple of the 2 processes"):
        Batches(split, 3, pad_id=PAD, world_size=2)
    with pytest.raises(ValueError, match="rank=2 must be from 0 to world_size-1 = 1"):
        Batches(split, 2, pad_id=PAD, rank=2, world_size=2)
    with pytest.raises(ValueError, match="pad_id=-1"):
        Batches(split, 2, pad_id=-1)
    with pytest.raises(ValueError, match="pool=0"):
        Batches(split, 2, pad_id=PAD, pool=0)
    with pytest.raises(DataError, match="3 examples do not fill one batch of 4"):
        Batches(split, 4, pad_id=PAD, drop_last=True)
