"""How workers agree on an update: one file per exchange, one line each in the table."""

from collections.abc import Callable

from torch import nn

from slipstream.job.job import Exchange as Setting
from slipstream.train.exchange.allreduce import AllReduce
from slipstream.train.exchange.alone import Alone
from slipstream.train.exchange.base import Exchange

EXCHANGES: dict[str, Callable[[nn.Module, Setting], Exchange]] = {
    "allreduce": lambda model, setting: AllReduce(model, setting.bucket),
}


def build_exchange(setting: Setting, model: nn.Module, workers: int) -> Exchange:
    """The exchange that the job asks for; a single worker has nobody to exchange with."""
    return EXCHANGES[setting.kind](model, setting) if workers > 1 else Alone(model)


__all__ = ["EXCHANGES", "Exchange", "build_exchange"]
