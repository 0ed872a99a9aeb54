"""The order of samples is a pure function of the job; fetching ahead does not change it."""

import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data.mixing import BLOCK, MixedOrder, shares_of
from slipstream.data.order import RUN, WINDOW, Order, permute
from slipstream.data.stream import prefetch

patient = settings(deadline=None)  # a busy machine is no failure
keys = st.integers(0, 2**64 - 1)
orders = st.builds(
    Order,
    samples=st.integers(1, 1000),
    validation=st.floats(0, 1),
    seed=st.integers(0, 2**63 - 1),
    together=st.sampled_from([1, 1, 2, 3, 7, 400]),
)


@patient
@given(st.integers(1, 3000), keys)
def test_permute_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 65_535, 65_536, 65_537])
def test_permute_is_a_bijection_at_edges(size: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, key=7)), np.arange(size))


@patient
@given(st.integers(2**32, 2**62), keys, st.integers(0, 2**31))
def test_permute_works_at_any_size_without_storing_it(size: int, key: int, first: int) -> None:
    positions = np.concatenate([np.arange(first, first + 20), np.arange(size - 20, size)])
    sent = permute(positions, size, key)
    assert ((sent >= 0) & (sent < size)).all()
    assert len(set(sent.tolist())) == len(set(positions.tolist()))
    assert np.array_equal(permute(positions[3:5], size, key), sent[3:5])


@pytest.mark.parametrize("size", [5, 16, 100])
def test_permute_sends_every_position_everywhere_equally_often(size: int) -> None:
    trials = 1500
    sent = np.stack([permute(np.arange(size), size, key) for key in range(trials)])
    for position in range(0, size, max(1, size // 5)):
        counts = np.bincount(sent[:, position], minlength=size)
        chi_square = ((counts - trials / size) ** 2 / (trials / size)).sum()
        assert chi_square < size + 5 * np.sqrt(2 * size) + 10


def test_permute_leaves_no_trace_of_neighbours() -> None:
    """Neighbours before are strangers after: their correlation is within 5 standard errors of none."""
    sent = permute(np.arange(10_000), 10_000, key=3).astype(float)
    assert abs(np.corrcoef(sent[:-1], sent[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(sent, np.arange(10_000))[0, 1]) < 0.05


def test_order_never_changes() -> None:
    """A resumed run must see the samples of the run it continues, so these numbers are for ever."""
    order = Order(samples=20, validation=0.2, seed=42)
    assert order.indices(0, 20).tolist() == [9, 4, 5, 17, 12, 18, 2, 15, 1, 14, 19, 8, 10, 13, 6, 7, 15, 8, 6, 14]
    assert order.validation_indices().tolist() == [11, 0, 3, 16]


@patient
@given(orders, st.integers(0, 5))
def test_each_epoch_has_each_training_sample_once(order: Order, epoch: int) -> None:
    assert order.training >= 1
    assert order.training + order.held_out == order.samples
    seen = order.indices(epoch * order.training, order.training)
    assert sorted([*seen.tolist(), *order.validation_indices().tolist()]) == list(range(order.samples))


@patient
@given(orders, st.integers(0, 500), st.lists(st.integers(0, 40), max_size=6))
def test_reading_in_chunks_is_reading_as_a_whole(order: Order, start: int, chunks: list[int]) -> None:
    whole = order.indices(start, sum(chunks))
    starts = start + np.cumsum([0, *chunks])[: len(chunks)]
    parts = [order.indices(int(first), count) for first, count in zip(starts, chunks, strict=True)]
    assert whole.tolist() == [number for part in parts for number in part.tolist()]


@patient
@given(orders, st.integers(0, 5))
def test_a_window_needs_few_pages(order: Order, epoch: int) -> None:
    """A run may begin inside a page and then needs one more, and of one page a part is held out."""
    position, end = epoch * order.training, (epoch + 1) * order.training
    while position < end:
        window = order.window(position)
        assert window.start == position and len(window) <= WINDOW * RUN * order.together
        pages = set((order.indices(window.start, len(window)) // order.together).tolist())
        assert order.together == 1 or len(pages) <= WINDOW * (RUN + 1) + 2
        position = window.stop


def test_epochs_and_seeds_differ() -> None:
    order, other = Order(1000, 0.1, seed=0), Order(1000, 0.1, seed=1)
    assert not np.array_equal(order.indices(0, 900), order.indices(900, 900))
    assert not np.array_equal(order.indices(0, 900), other.indices(0, 900))
    assert set(order.validation_indices()) != set(other.validation_indices())


def test_held_out_is_rounded_and_leaves_a_sample() -> None:
    assert Order(1000, 0.0255, seed=0).held_out == 26
    assert Order(10, 1.0, seed=0).held_out == 9
    assert Order(10, 0.0, seed=0).validation_indices().tolist() == []


@patient
@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 5))
def test_prefetch_keeps_the_order(start: int, count: int, depth: int) -> None:
    assert list(prefetch(lambda step: step * step, start, start + count, depth)) == [
        step * step for step in range(start, start + count)
    ]


def test_prefetch_raises_where_the_result_was_awaited_with_the_original_traceback() -> None:
    def fetch_or_fail(step: int) -> int:
        if step == 3:
            raise KeyError("sample 3 is broken")
        return step

    batches = prefetch(fetch_or_fail, 0, 10)
    assert list(islice(batches, 3)) == [0, 1, 2]
    with pytest.raises(KeyError, match="sample 3 is broken") as caught:
        next(batches)
    assert "fetch_or_fail" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_prefetch_hands_over_even_an_exit() -> None:
    def leave(step: int) -> int:
        raise SystemExit(step)

    with pytest.raises(SystemExit):
        next(prefetch(leave, 0, 1))


def test_prefetch_is_ahead_but_not_further_than_asked() -> None:
    fetched: list[int] = []
    batches = prefetch(lambda step: fetched.append(step), 0, 100, depth=3)
    next(batches)
    _until(lambda: len(fetched) == 5)  # one taken, three ready, one in hand
    time.sleep(0.05)
    assert len(fetched) == 5
    batches.close()


@pytest.mark.parametrize("taken", [1, 7])
def test_prefetch_ends_its_thread_when_closed(taken: int) -> None:
    before = set(threading.enumerate())
    batches = prefetch(lambda step: step, 0, 10**9)
    assert list(islice(batches, taken)) == list(range(taken))
    (worker,) = set(threading.enumerate()) - before
    batches.close()
    worker.join(timeout=2)
    assert not worker.is_alive()


def test_a_process_ends_in_peace_while_samples_are_fetched() -> None:
    program = """
import torch
from slipstream.data.stream import prefetch
batches = prefetch(lambda step: torch.arange(2000).split([1] * 2000), 0, 10**9)
next(batches)
batches.close()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


mixes = st.lists(st.tuples(orders.filter(lambda order: order.training > 0), st.floats(0.01, 1)), min_size=2, max_size=4)


@settings(deadline=None, max_examples=20)
@given(mixes, st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.integers(1, 6000), st.integers(1, 900))
def test_a_mix_gives_each_its_share_and_keeps_its_order(parts, seed, start, count, step):
    mixed = MixedOrder(tuple(order for order, _ in parts), shares_of([weight for _, weight in parts]), seed)
    whole = mixed.indices(0, start + count)
    pieces = [mixed.indices(first, min(step, start + count - first)) for first in range(start, start + count, step)]
    assert np.array_equal(np.concatenate(pieces), whole[start:]), "from any point, in any pieces"
    first = 0
    for (order, _), share in zip(parts, mixed.shares, strict=True):
        mine = whole[(whole >= first) & (whole < first + order.samples)] - first
        assert np.array_equal(mine, order.indices(0, len(mine))), "its own order, epoch after epoch"
        blocks = (start + count) // BLOCK
        assert blocks * share <= len(mine) <= (blocks + 1) * share
        first += order.samples
    assert sum(mixed.shares) == BLOCK


def test_shares_follow_weights():
    assert shares_of([0.7, 0.3]) == (2867, 1229) and shares_of([1, 1, 1]) == (1366, 1365, 1365)
    with pytest.raises(ValueError, match="less than 1 in 4,096"):
        shares_of([1, 1e-5])
