"""Human units: `20M` tokens, `6h`, `$50`, `80GB`, `1%`, and spans of a run such as `5%` or `200 steps`."""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer, PlainValidator, WithJsonSchema

from slipstream.job.base import shown

_THOUSANDS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}  # "m" means minutes
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_PARTS = {"": Decimal(1), "%": Decimal("0.01")}
_LARGEST = 2**63 - 1  # what an integer of a tensor holds
_QUANTITY = re.compile(
    r"\s*((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?\s*([a-zA-Z%]*)\s*"
)


def _amount(value: Any, units: Mapping[str, int | Decimal], what: str, example: str) -> Decimal:
    """A quantity in its base unit, exactly as written: `1.001k` is 1001. A bare number has the empty unit."""
    if _number(value) and "" in units and (isinstance(value, int) or math.isfinite(value)):
        return Decimal(value)
    if isinstance(value, str) and (match := _QUANTITY.fullmatch(value)):
        digits, exponent, unit = match[1].replace("_", "").replace(",", ""), match[2] or "", match[3]
        unit = unit if unit in units else unit.lower()
        if unit in units:
            return Decimal(digits + exponent) * units[unit]
    raise ValueError(f"{shown(value)} is not {what}; write for example {example}")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def parse_number(value: Any) -> float:
    """`0.1`, `3e-4` (which YAML takes for text): any finite number."""
    try:
        number = float(value) if _number(value) or isinstance(value, str) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{shown(value)} is not a number; write for example 0.1 or 3e-4")
    return number


def parse_count(value: Any, least: int = 1) -> int:
    """`20M`, `1_000`, `2e6`: a whole number."""
    amount = _amount(value, _THOUSANDS, "a count", "1000, 20k or 20M")
    if amount > _LARGEST:
        raise ValueError(f"{shown(value)} is too large; the largest count is {_LARGEST:,}")
    if amount < least or amount % 1:
        raise ValueError(f"{shown(value)} is not a whole number of at least {least}")
    return int(amount)


def parse_duration(value: Any) -> float:
    """`90s`, `30m`, `6h`, `2d`: seconds. A bare number has no unit, and guessing one costs money."""
    if isinstance(value, timedelta):
        value = f"{plain(value.total_seconds())}s"
    seconds = float(_amount(value, _SECONDS, "a duration", "90s, 30m, 6h or 2d"))
    if not 0 < seconds < math.inf:
        raise ValueError(f"{shown(value)} is not a duration; write for example 90s, 30m, 6h or 2d")
    return seconds


def parse_money(value: Any) -> float:
    """`$50`, `$1,200`, `12.5`: US dollars."""
    text = value.strip().removeprefix("$") if isinstance(value, str) else value
    try:
        dollars = float(_amount(text, _THOUSANDS, "money", "$50"))
    except ValueError:
        raise ValueError(f"{shown(value)} is not an amount of money; write for example $50") from None
    if not 0 < dollars < math.inf:
        raise ValueError(f"{shown(value)} is not a positive amount of money; write for example $50")
    return dollars


def parse_bytes(value: Any, least: int = 1) -> int:
    """`25MB`, `80GB`, `1GiB`: bytes."""
    amount = _amount(value, _BYTES, "a size", "25MB or 80GB")
    if not least <= amount <= _LARGEST or (_number(value) and amount % 1):
        raise ValueError(f"{shown(value)} is not a size; write for example 25MB or 80GB")
    return round(amount)


def parse_fraction(value: Any) -> float:
    """`1%` or `0.01`: a part of a whole, from 0 to 1."""
    amount = _amount(value, _PARTS, "a fraction", "1% or 0.01")
    if not 0 <= amount <= 1:
        raise ValueError(f"{shown(value)} is outside 0% to 100%; write for example 1% or 0.01")
    return float(amount)


def plain(number: float, times: int = 1) -> str:
    """A number in digits that read back as the same number."""
    return format((Decimal(repr(float(number))) * times).normalize(), "f")


SpanUnit = Literal["run", "samples", "steps", "seconds"]


@dataclass(frozen=True)
class Span:
    """A stretch of a run: a part of it (`5%`), `10k samples`, `200 steps` or a time (`10m`)."""

    amount: float
    unit: SpanUnit

    def __str__(self) -> str:
        if self.unit == "run":
            return f"{plain(self.amount, times=100)}%"
        if self.unit == "seconds":
            return f"{plain(self.amount)}s"
        return f"{int(self.amount)} {self.unit}"

    def samples(self, total: int) -> int:
        """The span in samples, for a run of `total` samples."""
        assert self.unit in ("run", "samples"), "the job file admits only these here"
        return min(total, round(self.amount * total)) if self.unit == "run" else int(self.amount)


def _parse_span(value: Any, bare: SpanUnit, units: tuple[SpanUnit, ...], least: int = 1) -> Span:
    span: Span | None = None
    if isinstance(value, Span):
        span = value
    elif isinstance(value, str) and value.strip().endswith("%"):
        span = Span(parse_fraction(value), "run")
    else:
        with suppress(ValueError):
            span = _parse_stretch(value, bare, least)
    if span is None or span.unit not in units or (least and not span.amount):
        raise ValueError(f"{shown(value)} cannot be used here; write for example {_span_examples(units)}")
    return span


def _parse_stretch(value: Any, bare: SpanUnit, least: int) -> Span:
    if not isinstance(value, str):
        return Span(parse_count(value, least), bare)
    text = value.strip()
    words: dict[str, SpanUnit] = {"steps": "steps", "step": "steps", "samples": "samples", "sample": "samples"}
    for word, unit in words.items():
        if text.endswith(word):
            return Span(parse_count(text.removesuffix(word), least), unit)
    if text[-1:] in _SECONDS:  # but 1M is a million
        return Span(parse_duration(text), "seconds")
    return Span(parse_count(text, least), bare)


def _span_examples(units: tuple[SpanUnit, ...]) -> str:
    examples = {"run": "5%", "samples": "10k samples", "steps": "200 steps", "seconds": "10m"}
    return " or ".join(examples[unit] for unit in units)


def _schema(kind: str, example: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": kind}, {"type": "string", "examples": [example]}]})


Number = Annotated[float, BeforeValidator(parse_number), _schema("number", "3e-4")]
Count = Annotated[int, BeforeValidator(parse_count), _schema("integer", "20M")]
CountOrZero = Annotated[int, BeforeValidator(lambda value: parse_count(value, least=0)), _schema("integer", "20M")]
Seed = Annotated[int, BeforeValidator(lambda value: parse_count(value, least=0)), WithJsonSchema({"type": "integer"})]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(lambda seconds: f"{plain(seconds)}s"),
    WithJsonSchema({"type": "string", "examples": ["6h"]}),
]
Money = Annotated[float, BeforeValidator(parse_money), _schema("number", "$50")]
Bytes = Annotated[int, BeforeValidator(parse_bytes), _schema("integer", "25MB")]
BytesOrZero = Annotated[int, BeforeValidator(lambda value: parse_bytes(value, least=0)), _schema("integer", "0B")]
Fraction = Annotated[float, BeforeValidator(parse_fraction), _schema("number", "5%")]
SampleSpan = Annotated[
    Span,
    PlainValidator(lambda value: _parse_span(value, "samples", ("run", "samples"))),
    PlainSerializer(str),
    _schema("integer", "2%"),
]
SampleSpanOrZero = Annotated[
    Span,
    PlainValidator(lambda value: _parse_span(value, "samples", ("run", "samples"), least=0)),
    PlainSerializer(str),
    _schema("integer", "2%"),
]
Interval = Annotated[
    Span,
    PlainValidator(lambda value: _parse_span(value, "steps", ("run", "steps", "seconds"))),
    PlainSerializer(str),
    _schema("integer", "5%"),
]
StepInterval = Annotated[
    Span,
    PlainValidator(lambda value: _parse_span(value, "steps", ("run", "steps"))),
    PlainSerializer(str),
    _schema("integer", "5%"),
]
