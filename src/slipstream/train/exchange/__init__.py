"""How workers agree on an update: one file per exchange, one line each in the table."""

from collections.abc import Callable
from functools import partial

from torch import nn

from slipstream.job.exchange import Exchange as Setting
from slipstream.plan import Network
from slipstream.train.exchange.adding import build_adder, is_coded
from slipstream.train.exchange.allreduce import AllReduce
from slipstream.train.exchange.alone import Alone
from slipstream.train.exchange.base import Exchange, Sum
from slipstream.train.exchange.sharded import Sharded

EXCHANGES: dict[str, Callable[[list[Sum], Setting, Network | None, int], Exchange]] = {
    "allreduce": lambda sums, setting, network, seed: AllReduce(
        sums, setting.bucket, partial(build_adder, setting, network), partial(is_coded, setting), seed
    ),
}


def build_exchange(
    setting: Setting, sums: list[Sum], sharded: list[nn.Module], network: Network | None, seed: int
) -> Exchange:
    """The exchange that the job asks for; weights that are shared out have their own, and one worker needs none."""
    if sharded:
        return Sharded(sharded, sums)
    return EXCHANGES[setting.kind](sums, setting, network, seed) if sums else Alone()


__all__ = ["EXCHANGES", "Exchange", "Sum", "build_exchange"]
