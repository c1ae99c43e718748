"""The order of the data: a function of the seed and a number, and nothing else."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anytime.train.batches import Batches, Prefetcher, permute, validation_windows
from anytime.train.errors import UserError
from anytime.train.shards import Tokens, write_shard

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))

#: Context 64 in 1,000 tokens, seed 0: an epoch of 14 and the beginning of the next.
ORDER = [364, 300, 172, 236, 748, 556, 492, 812, 428, 876, 684, 620, 108, 44, 390, 454, 134, 70, 326, 774]


def keys(seed: int, count: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Tokens:
    """1,000 tokens whose ids are their positions, in three shards."""
    folder = tmp_path_factory.mktemp("tokens")
    for i, piece in enumerate(np.split(np.arange(1000), [10, 450])):
        write_shard(folder / f"train-{i}.bin", piece)
    return Tokens.open(folder, "train")


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**32))
def test_permute_is_a_bijection(n, seed):
    assert sorted(permute(np.arange(n), n, keys(seed)).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 255, 256, 257, 65537])
def test_permute_is_a_bijection_at_the_edges(n):
    assert sorted(permute(np.arange(n), n, keys(n)).tolist()) == list(range(n))


@given(n=st.integers(2**40, 2**62), index=st.lists(st.integers(0, 2**40 - 1), unique=True, max_size=50))
def test_permute_in_a_huge_range_stays_inside_and_one_to_one(n, index):
    found = permute(np.array(index, np.int64), n, keys(0)).tolist()
    assert len(set(found)) == len(index)
    assert all(0 <= i < n for i in found)


@pytest.mark.parametrize("n", [1000, 4096, 10007])
def test_permute_looks_random(n):
    """Against what a random permutation does: each bound is about four standard deviations."""
    orders = np.stack([permute(np.arange(n), n, keys(seed)) for seed in range(50)])
    for order in orders:
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 4 / np.sqrt(n)
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4 / np.sqrt(n)
        assert (order == np.arange(n)).sum() < 8  # fixed points: Poisson with mean 1
        assert (np.diff(order) == 1).sum() < 8
    # Where one place goes, over the seeds: uniform.
    assert abs(orders.mean(axis=0).mean() / ((n - 1) / 2) - 1) < 1e-12
    assert np.abs(orders.mean(axis=0) / n - 0.5).max() < 5 / np.sqrt(12 * 50)


def test_small_ranges_take_every_order():
    """All 24 permutations of four come up about equally often."""
    found = [tuple(permute(np.arange(4), 4, keys(seed)).tolist()) for seed in range(2400)]
    counts = np.unique(found, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert counts.min() > 50


@given(context=st.integers(1, 500), seed=st.integers(-5, 2**70), epoch=st.integers(0, 3))
def test_no_target_comes_twice_in_an_epoch(tokens, context, seed, epoch):
    batches = Batches(tokens, context, seed)
    n = batches.sequences_per_epoch
    block = batches.batch(epoch * n, n)
    assert block.shape == (n, context + 1)
    targets = block[:, 1:]
    assert len(np.unique(targets)) == targets.size
    assert targets.size > len(tokens) - 2 * context
    assert np.array_equal(np.diff(block, axis=1), np.ones((n, context)))  # windows are contiguous


@given(cuts=st.lists(st.integers(0, 200), max_size=5), first=st.integers(0, 150), context=st.integers(1, 90))
def test_the_order_does_not_depend_on_how_it_is_cut(tokens, cuts, first, context):
    """Batch sizes, changes of them on the way, and resuming anywhere: always the same sequences."""
    batches = Batches(tokens, context, seed=1)
    whole = batches.batch(0, first + sum(cuts))
    parts, at = [batches.batch(0, first)], first
    for count in cuts:
        parts.append(Batches(tokens, context, seed=1).batch(at, count))
        at += count
    assert np.array_equal(np.concatenate(parts), whole)


@given(world=st.integers(1, 6), share=st.integers(1, 7), first=st.integers(0, 100))
def test_the_ranks_make_up_the_batch(tokens, world, share, first):
    batches = Batches(tokens, 30, seed=2)
    shares = [batches.batch(first, world * share, rank, world) for rank in range(world)]
    assert np.array_equal(np.concatenate(shares), batches.batch(first, world * share))


def test_the_order_is_fixed_for_all_time(tokens):
    """A resumed run goes on with the same data under a later version; change these numbers and it would not."""
    assert Batches(tokens, 64, seed=0).starts(0, 20).tolist() == ORDER


def test_seeds_and_epochs_differ(tokens):
    n = Batches(tokens, 8, 0).sequences_per_epoch
    orders = [Batches(tokens, 8, seed).starts(epoch * n, n) for seed in range(4) for epoch in range(4)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one // 8 == other // 8).mean() < 0.15  # by chance 1 in 124
    assert len({int(order[0]) % 8 for order in orders}) > 3  # the offsets too


@pytest.mark.parametrize(("context", "fits"), [(500, True), (501, False)])
def test_the_least_data(tokens, context, fits):
    if fits:
        assert Batches(tokens, context, 0).sequences_per_epoch == 1
    else:
        with pytest.raises(UserError, match=r"train-0.bin and 2 more has 1000 tokens.*it takes 1002"):
            Batches(tokens, context, 0)


def test_what_cannot_be_shared_is_refused(tokens):
    with pytest.raises(UserError, match="10 sequences cannot be shared equally among 3"):
        Batches(tokens, 10, 0).batch(0, 10, 0, 3)
    with pytest.raises(UserError, match="context is 0"):
        Batches(tokens, 0, 0)


def test_an_unknown_token_is_found(tokens):
    assert Batches(tokens, 499, 0, vocabulary=1000).batch(0, 4).max() < 1000
    with pytest.raises(UserError, match=r"train-2\.bin has token 990 at position 540, but the vocabulary is 990"):
        Batches(tokens, 10, 0, vocabulary=990).batch(0, 99)


def test_ids_beyond_int32_are_found(tmp_path):
    write_shard(tmp_path / "train.bin", np.array([1, 2**32 - 1, 1, 1]), wide=True)
    with pytest.raises(UserError, match="token 4294967295 at position 1"):
        Batches(Tokens.open(tmp_path, "train"), 1, 0, vocabulary=10).batch(0, 3)


def test_validation_windows(tokens):
    assert validation_windows(tokens, 100, 3).tolist() == [0, 100, 200]
    assert validation_windows(tokens, 100, 50).tolist() == list(range(0, 900, 100))
    assert validation_windows(tokens, 999, 50).tolist() == [0]
    with pytest.raises(UserError, match="1000 tokens, too few for one window of context 1000"):
        validation_windows(tokens, 1000, 1)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(
    ("first", "rank", "world", "micro"), [(0, 0, 1, 12), (5, 0, 1, 4), (7, 1, 2, 3), (150, 2, 3, 2)]
)
def test_the_prefetcher_gives_the_micro_batches_in_order(tokens, device, first, rank, world, micro):
    batches = Batches(tokens, 13, seed=3)
    with Prefetcher(batches, first, 12, micro, device, rank, world) as prefetcher:
        for step in range(9):
            share = torch.from_numpy(batches.batch(first + 12 * step, 12, rank, world)).long()
            for block in share.split(micro):
                inputs, targets = next(prefetcher)
                assert inputs.device.type == torch.device(device).type
                assert inputs.is_contiguous()
                assert targets.is_contiguous()
                assert torch.equal(inputs.cpu(), block[:, :-1])
                assert torch.equal(targets.cpu(), block[:, 1:])


def test_a_batch_that_cannot_be_cut_is_refused(tokens):
    with pytest.raises(UserError, match=r"12 sequences cannot be cut into micro-batches of 5 on 2 processes.*of 10"):
        Prefetcher(Batches(tokens, 10, 0), 0, 12, 5, "cpu", 0, 2)


def prefetching() -> int:
    return sum(thread.name == "prefetcher" for thread in threading.enumerate())


def test_closing_ends_the_thread(tokens):
    before = prefetching()
    prefetcher = Prefetcher(Batches(tokens, 10, 0), 0, 4, 2, "cpu", depth=1)
    next(prefetcher)
    assert prefetching() == before + 1
    prefetcher.close()
    prefetcher.close()
    assert prefetching() == before
    with pytest.raises(RuntimeError, match="closed"):
        next(prefetcher)


def test_an_error_in_the_thread_is_raised_by_next(tokens):
    """As itself, after the batches before it, and again on every call."""
    batches = Batches(tokens, 10, 0, vocabulary=990)
    n = batches.sequences_per_epoch
    good = next(i for i in range(n) if batches.starts(i, 1)[0] + 11 > 990)
    with Prefetcher(batches, 0, 1, 1, "cpu") as prefetcher:
        for _ in range(good):
            next(prefetcher)
        for _ in range(2):
            with pytest.raises(UserError, match="but the vocabulary is 990"):
                next(prefetcher)
