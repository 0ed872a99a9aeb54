"""Adding up over links: right for any number of workers, size and type, the same bits each time and on every worker."""

import multiprocessing as mp
import os
import zlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.plan import Network
from slipstream.train.exchange.adding import ALGORITHMS
from slipstream.train.exchange.adding.choose import worth_trying
from slipstream.train.exchange.adding.hierarchical import place_in_levels
from slipstream.train.exchange.adding.links import Links, PointToPoint
from slipstream.train.exchange.adding.timing import Race, seconds_of, time_ways, trials_of
from slipstream.train.exchange.adding.tree import place_in_tree

WORKERS = range(2, 10)
SIZES = {  # some smaller than the number of workers, some exchanged whole, some in several segments
    torch.float64: (0, 1, 5, 1_003),
    torch.float32: (3, 200_003),
    torch.bfloat16: (40_001,),
    torch.float16: (1_003,),
}
Case = tuple[str, int, str, int]
Checksums = dict[Case, tuple[int, int]]
Tried = dict[str, dict[int, float]]
BUCKETS = (2**20, 2**12)


def numbers(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Rounded at every addition."""
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def whole_numbers(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """So small that their sums are exact in every type."""
    return torch.randint(-9, 10, (size,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def check(algorithm: str, group: dist.ProcessGroup, size: int, dtype: torch.dtype) -> tuple[int, int]:
    """Add up twice at once; a checksum of each."""
    rank, workers = group.rank(), group.size()
    exact, first = whole_numbers(rank, size, dtype), numbers(rank, size, dtype)
    second = first.clone()
    adder = PointToPoint(ALGORITHMS[algorithm], Links(group, [rank * 3 // workers for rank in range(workers)]))
    for sum_under_way in [adder.start(flat) for flat in (exact, first, second)]:
        sum_under_way.wait()
    expected = sum(whole_numbers(other, size, torch.float64) for other in range(workers))
    assert torch.equal(exact.double(), expected), f"{algorithm} of {size} {dtype} over {workers} is wrong"
    return tuple(zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) for flat in (first, second))  # type: ignore[return-value]


def try_ways() -> Tried:
    """Where all ways together take so long that a round with less comes first for the larger bucket."""
    network = Network(nodes=tuple(rank // 3 for rank in range(max(WORKERS))), latency=1e-5, bandwidth=1e9)
    with patch("slipstream.train.exchange.adding.timing._LONG", 0.005):
        return time_ways(network, ALGORITHMS, dict.fromkeys(BUCKETS, 1.0), lambda: True)


def serve(rank: int, store: str, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=max(WORKERS))
    patch("slipstream.train.exchange.adding.links.SEGMENT", 2**17).start()  # so that few numbers are several segments
    found: Checksums = {}
    try:
        for workers in WORKERS:
            group = dist.new_group(list(range(workers)))
            for algorithm in ALGORITHMS if rank < workers else ():
                for dtype, sizes in SIZES.items():
                    for size in sizes:
                        found[algorithm, workers, str(dtype), size] = check(algorithm, group, size, dtype)
        results.put((rank, (found, try_ways())))
    except BaseException as error:
        results.put((rank, error))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Checksums, Tried]]:
    """By each worker. All cases run in one set of processes, whose start takes longer than they do."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["slipstream.train.loop"])
    results = context.Queue()
    store = str(tmp_path_factory.mktemp("store") / "store")
    processes = [
        context.Process(target=serve, args=(rank, store, results), daemon=True) for rank in range(max(WORKERS))
    ]
    for process in processes:
        process.start()
    try:
        found: dict[int, Any] = {}
        while len(found) < len(processes):
            rank, result = results.get(timeout=120)
            if isinstance(result, BaseException):
                raise AssertionError(f"rank {rank}") from result
            found[rank] = result
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [found[rank] for rank in range(max(WORKERS))]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sums_are_exact_and_the_same_each_time_on_every_worker(algorithm: str, served: Any) -> None:
    checksums = [found for found, _ in served]
    for case, (first, second) in checksums[0].items():
        if case[0] == algorithm:
            assert first == second, case
            assert {found[case] for found in checksums[: case[1]]} == {(first, second)}, case
    assert sum(case[0] == algorithm for case in checksums[0]) == len(WORKERS) * sum(map(len, SIZES.values()))


def test_buckets_are_tried_at_their_own_size_and_all_workers_know_the_same(served: Any) -> None:
    first, *others = [tried for _, tried in served]
    assert {size for sizes in first.values() for size in sizes} == set(BUCKETS)
    assert all(tried == first for tried in others)
    assert all(seconds > 0 for sizes in first.values() for seconds in sizes.values())


@given(
    st.lists(st.integers(4, 2**28), min_size=1, max_size=40),
    st.integers(1, 10**6),
    st.sampled_from([1e-4, 0.025, 0.5]),
    st.sampled_from([4e8, 1.25e7]),
    st.sampled_from([(8, 1), (32, 2), (128, 1)]),
)
def test_a_longer_run_has_longer_trials_of_few_sizes(
    buckets: list[int], steps: int, latency: float, bandwidth: float, hosts: tuple[int, int]
) -> None:
    nodes = tuple(node for node in range(hosts[0]) for _ in range(hosts[1]))
    network = Network(nodes=nodes, latency=latency, bandwidth=bandwidth)
    trials, longer = trials_of(buckets, steps, network), trials_of(buckets, 2 * steps, network)
    assert 1 <= len(trials) <= 6 and list(trials) == sorted(trials, reverse=True) == list(longer)
    assert max(trials) <= max(buckets)
    assert all(0 < trials[size] <= longer[size] <= min(60, 2 * trials[size]) for size in trials)
    assert all(seconds >= min(6, steps / 100) for seconds in trials.values())
    spent = steps * sum(min(worth_trying(bucket, network).values()) for bucket in buckets)
    assert sum(trials.values()) < 1.001 * (spent + steps * len(trials)) / 100, "a short run has short trials"
    assert seconds_of(trials, network) >= sum(trials.values())


class Clock:
    """A meeting whose sums take as long as it says."""

    clock, over = 0.0, False

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds = seconds

    def time(self, adder: Any, _: Tensor, _before: float, _row: float) -> list[float]:
        took = self.seconds(adder)
        self.clock += took
        return [took]


def race(seconds: Callable[[int], float], ways: int) -> Race:
    numbers: dict[str, Any] = {str(number): number for number in range(ways)}
    return Race(numbers, 8, Clock(seconds))  # type: ignore[arg-type]


@given(st.lists(st.floats(0.001, 0.5), min_size=2, max_size=5))
def test_who_is_far_behind_in_a_round_with_less_drops_out(seconds: list[float]) -> None:
    left = race(lambda number: seconds[number], len(seconds)).close()
    near = [str(number) for number, each in enumerate(seconds) if each < 1.5 * min(seconds)]
    assert set(near) <= left.keys() and not any(seconds[int(name)] > 2 * min(seconds) for name in left)


@given(st.lists(st.floats(0.1, 1.0), min_size=2, max_size=5), st.lists(st.floats(1.0, 1.7), min_size=10, max_size=10))
def test_first_rounds_do_not_decide(seconds: list[float], slower: list[float]) -> None:
    """Memory and links come into use in them."""

    def take(number: int) -> float:
        rounds[number] += 1
        return seconds[number] * (slower[number * 2 + rounds[number] - 1] if rounds[number] <= 2 else 1.0)

    rounds = [0] * len(seconds)
    found = race(take, len(seconds)).run(patience=60.0)
    assert seconds[int(min(found, key=lambda name: found[name]))] == pytest.approx(min(seconds))
    assert found == pytest.approx({name: seconds[int(name)] for name in found}, rel=0.71)
    assert sum(each * count for each, count in zip(seconds, rounds, strict=True)) < 61


@given(st.integers(2, 100))
def test_every_worker_is_an_inner_node_of_one_tree_at_most(size: int) -> None:
    trees = [[place_in_tree(number, rank, size) for rank in range(size)] for number in (0, 1)]
    for tree in trees:
        (root,) = [place for place in tree if place.parent is None]
        assert root.height == size.bit_length() - 1
        for rank, place in enumerate(tree):
            assert len(place.children) <= 2
            for child in place.children:
                assert tree[child].parent == rank
                assert tree[child].height < place.height and tree[child].down == place.down + 1
        assert sum(len(place.children) for place in tree) == size - 1
    assert not any(first.children and second.children for first, second in zip(*trees, strict=True))


@given(st.lists(st.integers(0, 4), min_size=2, max_size=30))
def test_machines_stand_in_rows_below_the_trees(nodes: list[int]) -> None:
    for number in (0, 1):
        places = [place_in_levels(number, rank, tuple(nodes)) for rank in range(len(nodes))]
        assert sum(place.parent is None for place in places) == 1
        assert sum(len(place.children) for place in places) == len(nodes) - 1
        for rank, place in enumerate(places):
            for child in place.children:
                assert places[child].parent == rank
                assert places[child].height < place.height and places[child].down == place.down + 1
        between = [rank for rank, place in enumerate(places) if any(nodes[rank] != nodes[c] for c in place.children)]
        assert all(nodes.index(nodes[rank]) == rank for rank in between), "only the first of a machine"
