"""How workers agree on an update: one file per exchange, one line each in the table."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from slipstream.job.exchange import AnyExchange as Setting
from slipstream.job.servers import Server
from slipstream.plan import Network
from slipstream.train.exchange.adding import build_adder, is_coded
from slipstream.train.exchange.allreduce import AllReduce
from slipstream.train.exchange.alone import Alone
from slipstream.train.exchange.base import Exchange, Sum
from slipstream.train.exchange.local import Local
from slipstream.train.exchange.sharded import Sharded

EXCHANGES: dict[str, Callable[[list[Sum], Any, Network | None, int], Exchange]] = {
    "allreduce": lambda sums, setting, network, seed: AllReduce(
        sums, setting.bucket, partial(build_adder, setting, network), partial(is_coded, setting), seed
    ),
    "local": Local,
}


def build_exchange(
    setting: Setting, sums: list[Sum], sharded: list[nn.Module], network: Network | None, seed: int
) -> Exchange:
    """The exchange that the job asks for; weights that are shared out have their own, and one worker needs none."""
    if sharded:
        return Sharded(sharded, sums)
    if not sums or isinstance(setting, Server):  # a server's workers know of no others
        return Alone()
    return EXCHANGES[setting.kind](sums, setting, network, seed)


__all__ = ["EXCHANGES", "Exchange", "Sum", "build_exchange"]
