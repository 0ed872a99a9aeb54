"""Several datasets as one, mixed by weights: which of them a position of the run takes its sample from."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from slipstream.data.base import Batch, Dataset, Facts
from slipstream.data.order import Order, key_of, permute

BLOCK = 4096
"""Positions in a row that have exactly their share of every dataset."""


class Mixed:
    """Samples of several datasets, numbered one dataset after the other."""

    def __init__(self, parts: Sequence[Dataset], weights: Sequence[float]) -> None:
        self.parts, self.weights = tuple(parts), tuple(weights)
        self.facts: Facts = parts[0].facts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def expect(self, indices: np.ndarray) -> None:
        """These samples will be fetched soon."""
        for number, (part, rows) in enumerate(zip(self.parts, self._rows(indices), strict=True)):
            if hasattr(part, "expect"):
                part.expect(indices[rows] - self._first(number))

    def fetch(self, indices: np.ndarray) -> Batch:
        import torch

        rows = self._rows(indices)
        fetched = [
            part.fetch(indices[here] - self._first(n))
            for n, (part, here) in enumerate(zip(self.parts, rows, strict=True))
        ]
        place = torch.from_numpy(np.argsort(np.concatenate(rows), kind="stable"))
        known = [vars(batch) for batch in fetched]
        parts = {name: [each[name] for each in known] for name, part in known[0].items() if part is not None}
        return Batch(**{name: torch.cat(part)[place] for name, part in parts.items()})

    def _rows(self, indices: np.ndarray) -> list[np.ndarray]:
        """Which of these samples are in each dataset."""
        part = np.searchsorted(self._ends, indices, side="right")
        return [np.flatnonzero(part == number) for number in range(len(self.parts))]

    def _first(self, part: int) -> int:
        return int(self._ends[part]) - len(self.parts[part])


@dataclass(frozen=True)
class MixedOrder:
    """As `Order`, for a `Mixed`. Every dataset has its own order and its own epochs; of every BLOCK positions each has
    its share, and which these are follows from the seed. So a position says all, without a look at those before it."""

    orders: tuple[Order, ...]
    shares: tuple[int, ...]
    """Positions of a block that are each dataset's."""
    seed: int

    @property
    def held_out(self) -> int:
        """Samples for evaluation, of all datasets."""
        return sum(order.held_out for order in self.orders)

    @property
    def training(self) -> int:
        """Samples to train on, of all datasets: what an epoch of the mix is as long as."""
        return sum(order.training for order in self.orders)

    def indices(self, start: int, count: int) -> np.ndarray:
        """Numbers of the training samples at positions start … start + count - 1 of the run."""
        positions = np.arange(start, start + count)
        blocks, inside = np.divmod(positions, BLOCK)
        made = np.empty(count, np.int64)
        for block in range(start // BLOCK, (start + count - 1) // BLOCK + 1):
            here = np.flatnonzero(blocks == block)
            parts, ranks = (values[inside[here]] for values in _block(self, block))
            for number, order in enumerate(self.orders):
                if (mine := parts == number).any():
                    found = order.at(block * self.shares[number] + ranks[mine])
                    made[here[mine]] = found + self._first(number)
        return made

    def window(self, position: int) -> range:
        """Positions around this one for which every dataset needs about one window of its own."""
        sizes = [order.window_size * BLOCK // share for order, share in zip(self.orders, self.shares, strict=True)]
        size = max(1, min(sizes))
        return range(position // size * size, (position // size + 1) * size)

    def validation_indices(self) -> np.ndarray:
        """Numbers of the held-out samples, always in the same order."""
        found = [order.validation_indices() + self._first(number) for number, order in enumerate(self.orders)]
        return np.concatenate(found)

    def _first(self, part: int) -> int:
        return sum(order.samples for order in self.orders[:part])


def order_of(dataset: Dataset, validation: float, seed: int) -> Order | MixedOrder:
    """The order in which the samples of a dataset come."""
    if not isinstance(dataset, Mixed):
        return Order(len(dataset), validation, seed, getattr(dataset, "together", 1))
    orders = tuple(
        Order(len(part), validation, seed + number, getattr(part, "together", 1))
        for number, part in enumerate(dataset.parts)
    )
    return MixedOrder(orders, shares_of(dataset.weights), seed)


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Positions of a block for each weight. Raises ValueError where one is 0."""
    shares = apportion(weights, BLOCK)
    if (shares == 0).any():
        raise ValueError(f"data.prepared: weight {min(weights):g} is less than 1 in {BLOCK:,}; leave that dataset out")
    return tuple(shares.tolist())


def apportion(weights: Sequence[float], count: int) -> np.ndarray:
    """Whole numbers in proportion to the weights, `count` together: the largest remainders are rounded up."""
    exact = np.array(weights) / sum(weights) * count
    shares = np.floor(exact).astype(int)
    for number in np.argsort(shares - exact, kind="stable")[: count - shares.sum()]:
        shares[number] += 1
    return shares


@lru_cache(maxsize=4)
def _block(order: MixedOrder, block: int) -> tuple[np.ndarray, np.ndarray]:
    """For every position of a block its dataset, and how many of that dataset's were before it in the block."""
    slots = permute(np.arange(BLOCK), BLOCK, key_of(order.seed, f"mix, block {block}"))
    parts = np.searchsorted(np.cumsum(order.shares), slots, side="right")
    ranks = np.empty(BLOCK, np.int64)
    for number, share in enumerate(order.shares):
        ranks[parts == number] = np.arange(share)
    return parts, ranks
