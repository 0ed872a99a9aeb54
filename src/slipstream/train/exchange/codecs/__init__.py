"""How a gradient is made smaller on the wire: one file per codec, one line each in the table."""

from collections.abc import Callable
from typing import Any

import torch

from slipstream.train.exchange.codecs.base import Codec
from slipstream.train.exchange.codecs.cast import Cast
from slipstream.train.exchange.codecs.int8 import Int8
from slipstream.train.exchange.codecs.onebit import OneBit
from slipstream.train.exchange.codecs.randomk import RandomK
from slipstream.train.exchange.codecs.topk import TopK

CODECS: dict[str, Callable[[Any], Codec]] = {
    "fp16": lambda _: Cast(torch.float16),
    "bf16": lambda _: Cast(torch.bfloat16),
    "int8": lambda setting: Int8(setting.block, at_random=not setting.feedback),
    "onebit": lambda setting: OneBit(setting.block),
    "topk": lambda setting: TopK(setting.part),
    "randomk": lambda setting: RandomK(round(1 / setting.part), scaled=not setting.feedback),
}
"""PowerSGD is not among them: its code is made in two turns, with the others between (`adding/low_rank.py`)."""

__all__ = ["CODECS", "Codec"]
