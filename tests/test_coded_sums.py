"""Sums of codes over real processes: the same with all workers, nothing lost, and no more bytes than were said."""

from typing import Any

import numpy as np
import pytest

from summing import CODECS, sum_among

SIZES = [2, 3, 4, 5, 8]
EXACT = ("fp16", "int8", "topk", "randomk")
WITH_MEMORY = (*EXACT, "bf16", "onebit", "powersgd")
OVERHEAD = 10_000
"""Bytes of gloo's own in a step: a few dozen a message, of which it sends many. Gradients are 345,000."""
Seen = dict[tuple[int, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return sum_among(SIZES, tmp_path_factory.mktemp("meet"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("codec", CODECS)
def test_all_workers_have_the_same_bits(codec: str, size: int, seen: Seen) -> None:
    workers = seen[size, codec]
    assert len(workers) == size
    assert len({worker["last"] for worker in workers}) == 1
    assert np.abs(workers[0]["sums"]).max() > 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("codec", WITH_MEMORY)
def test_what_was_summed_and_what_is_remembered_are_all_there_was(codec: str, size: int, seen: Seen) -> None:
    workers = seen[size, codec]
    given = sum(worker["given"] for worker in workers)
    found = workers[0]["sums"] + sum(worker["memory"] for worker in workers)
    if codec in EXACT:
        assert np.array_equal(found, given)
    else:
        # The sum of bf16 numbers is rounded on its way, to 8 bits; that alone is not remembered.
        assert np.allclose(found, given, rtol=0, atol=3 * 99 * size * 2**-8 if codec == "bf16" else 0.01)
    assert codec in ("fp16", "bf16") or any(np.any(worker["memory"]) for worker in workers)


@pytest.mark.parametrize("codec", CODECS)
def test_a_worker_sends_what_is_said_and_no_more_than_a_ring_however_many_they_are(codec: str, seen: Seen) -> None:
    for size in SIZES:
        for worker in seen[size, codec]:
            assert worker["said"] <= worker["written"] <= worker["said"] + OVERHEAD, size
            assert worker["said"] <= 0.55 * worker["plain"], size


@pytest.mark.parametrize("codec", ["int8 at random", "fp16 alone"])
def test_without_memory_a_sum_is_about_right(codec: str, seen: Seen) -> None:
    for size in SIZES:
        given = sum(worker["given"] for worker in seen[size, codec])
        assert np.abs(seen[size, codec][0]["sums"] - given).max() < 0.05 * np.abs(given).max()
