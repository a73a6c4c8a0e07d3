"""The class-balanced sampler: uniform over clusters and within, one sequence for all ranks, and exact resumption."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from merope.curation.curate import Curation
from merope.datasets.sampler import ClusterSampler

SIZES = {0: 700, 2: 1, 5: 30, 6: 8}  # clips by cluster; clusters 1, 3 and 4 are empty


def skewed() -> Curation:
    """Clusters of very different sizes, shuffled; every tenth clip is a prototype, cluster 2 has none."""
    cluster = torch.cat([torch.full((size,), name) for name, size in SIZES.items()])
    cluster = cluster[torch.randperm(len(cluster), generator=torch.Generator().manual_seed(3))]
    prototype = torch.arange(len(cluster)) // 10 * 10
    prototype[cluster == 2] = int((cluster == 0).nonzero()[0]) // 10 * 10 + 10
    return Curation(cluster, prototype)


def chi_square(counts: torch.Tensor) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


def beyond_chance(cells: int) -> float:
    """Mean plus five standard deviations of chi-square with cells − 1 degrees of freedom."""
    return (cells - 1) + 5 * (2 * (cells - 1)) ** 0.5


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_uniform_over_clusters_and_within(seed: int) -> None:
    curation = skewed()
    drawn = torch.tensor(list(ClusterSampler(curation, epoch_length=80_000, seed=seed)))
    by_cluster = torch.bincount(curation.cluster[drawn], minlength=7)
    assert (by_cluster[[1, 3, 4]] == 0).all()
    assert chi_square(by_cluster[[0, 2, 5, 6]].double()) < beyond_chance(4)
    for name, size in SIZES.items():
        clips = (curation.cluster == name).nonzero().squeeze(-1)
        within = torch.bincount(drawn, minlength=len(curation.cluster))[clips]
        assert chi_square(within.double()) < beyond_chance(size) if size > 1 else int(within) > 0


def test_consecutive_draws_are_independent() -> None:
    curation = skewed()
    cluster = curation.cluster[torch.tensor(list(ClusterSampler(curation, epoch_length=40_000)))]
    pairs = torch.bincount(cluster[:-1:2] * 7 + cluster[1::2], minlength=49)
    assert chi_square(pairs[pairs > 0].double()) < beyond_chance(16)
    assert int((pairs > 0).sum()) == 16


def test_prototypes_only() -> None:
    curation = skewed()
    drawn = torch.tensor(list(ClusterSampler(curation, prototypes_only=True, epoch_length=20_000)))
    assert set(drawn.tolist()) == set(curation.kept.nonzero().squeeze(-1).tolist())
    by_cluster = torch.bincount(curation.cluster[drawn], minlength=7)
    present = curation.cluster[curation.kept].unique()
    assert chi_square(by_cluster[present].double()) < beyond_chance(len(present))


@given(st.integers(1, 9), st.integers(0, 200), st.integers(0, 5))
def test_ranks_share_one_sequence(world_size: int, extra: int, epoch: int) -> None:
    length = world_size + extra
    alone = ClusterSampler(skewed(), epoch_length=length, seed=4)
    alone.epoch = epoch
    sequence = list(alone)
    parts = []
    for rank in range(world_size):
        sampler = ClusterSampler(skewed(), epoch_length=length, seed=4, rank=rank, world_size=world_size)
        sampler.epoch = epoch
        assert len(sampler) == length // world_size
        parts.append(list(sampler))
    woven = list(itertools.chain.from_iterable(zip(*parts, strict=True)))
    assert woven == sequence[: length // world_size * world_size]


@given(st.integers(0, 60), st.integers(1, 3), st.integers(1, 3))
def test_resume_continues_the_same_sequence(drawn: int, world_size: int, later_world_size: int) -> None:
    """Over the borders of epochs, and with another number of ranks."""

    def ranks(count: int) -> list[ClusterSampler]:
        return [ClusterSampler(skewed(), epoch_length=24, seed=7, rank=r, world_size=count) for r in range(count)]

    def endless(sampler: ClusterSampler) -> Iterator[int]:
        while True:
            yield from sampler

    def weave(samplers: list[ClusterSampler], rounds: int) -> list[int]:
        streams = [endless(sampler) for sampler in samplers]
        return [next(stream) for _ in range(rounds) for stream in streams]

    reference = weave(ranks(1), 240)  # 24 draws divide by 1, 2 and 3: no rank count drops any
    first = ranks(world_size)
    before = weave(first, drawn)
    states = [sampler.state_dict() for sampler in first]
    assert all(state == states[0] for state in states)
    second = ranks(later_world_size)
    for sampler in second:
        sampler.load_state_dict(states[0])
    rest = 24 - states[0]["position"]  # of this epoch; the next one follows where its end is not lost to rounding
    after = weave(second, rest // later_world_size + (5 if rest % later_world_size == 0 else 0))
    assert before == reference[: len(before)]
    assert after == reference[len(before) : len(before) + len(after)]


def test_epochs_and_seeds_differ_and_repeat() -> None:
    sampler = ClusterSampler(skewed(), epoch_length=50)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.epoch = 0
    assert list(sampler) == first
    assert list(ClusterSampler(skewed(), epoch_length=50, seed=1)) not in (first, second)


def test_state_of_a_loader_that_fetches_ahead() -> None:
    sampler = ClusterSampler(skewed(), epoch_length=64, seed=2)
    sequence = list(ClusterSampler(skewed(), epoch_length=64, seed=2))
    loader = DataLoader(torch.arange(739), batch_size=4, sampler=sampler, num_workers=1, prefetch_factor=4)
    batches = iter(loader)
    used = torch.cat([next(batches) for _ in range(3)]).tolist()
    assert used == sequence[:12]
    state = sampler.state_dict(epoch=0, position=12)
    assert sampler.position > state["position"]
    resumed = ClusterSampler(skewed(), epoch_length=64, seed=2)
    resumed.load_state_dict(state)
    assert torch.cat(list(DataLoader(torch.arange(739), batch_size=4, sampler=resumed))).tolist() == sequence[12:]


def test_default_epoch_is_as_long_as_there_are_clips() -> None:
    assert len(ClusterSampler(skewed())) == sum(SIZES.values())
    assert len(ClusterSampler(skewed(), prototypes_only=True)) == int(skewed().kept.sum())


def test_bad_input_is_named() -> None:
    for match, arguments in {
        r"rank must be in \[0, world_size = 2\), got 2": {"rank": 2, "world_size": 2},
        "epoch_length must be at least one draw for each of 4 ranks, got 3": {"epoch_length": 3, "world_size": 4},
        "seed must be": {"seed": -1},
    }.items():
        with pytest.raises(ValueError, match=match):
            ClusterSampler(skewed(), **arguments)
    empty = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="curation must be at least one clip"):
        ClusterSampler(Curation(empty, empty))


def test_state_of_another_run_is_refused() -> None:
    sampler, other = ClusterSampler(skewed()), skewed()
    other.cluster[0] = 1
    for match, foreign in {
        "seed": ClusterSampler(skewed(), seed=1),
        "epoch_length": ClusterSampler(skewed(), epoch_length=10),
        "fingerprint": ClusterSampler(other),
    }.items():
        with pytest.raises(ValueError, match=rf"state\['{match}'\] must be"):
            sampler.load_state_dict(foreign.state_dict())
    for name, value in (("epoch", "1"), ("position", None), ("position", -2)):
        with pytest.raises(ValueError, match=rf"state\['{name}'\] must be an int ≥ 0"):
            sampler.load_state_dict(sampler.state_dict() | {name: value})
    with pytest.raises(ValueError, match=r"state\['seed'\] must be 0 like this sampler's, got None"):
        sampler.load_state_dict({})
