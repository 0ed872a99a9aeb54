"""Human units: `20M` tokens, `6h`, `$50`, `80GB`, `1%`, and spans of a run such as `5%` or `200 steps`."""

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer, PlainValidator, WithJsonSchema

_THOUSANDS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}  # "m" means minutes
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_QUANTITY = re.compile(r"^\s*([0-9][0-9_,]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([a-zA-Z%]*)\s*$")


def _quantity(text: str, what: str, example: str) -> tuple[float, str]:
    match = _QUANTITY.match(text)
    if not match:
        raise ValueError(f"{text!r} is not {what}; write for example {example}")
    return float(match[1].replace("_", "").replace(",", "")), match[2]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def parse_count(value: Any) -> int:
    """`20M`, `1_000`, `2e6`: a whole number."""
    if _number(value):
        amount = float(value)
    elif isinstance(value, str):
        amount, unit = _quantity(value, "a count", "1000, 20k or 20M")
        if unit not in _THOUSANDS:
            raise ValueError(f"{value!r} is not a count; write for example 1000, 20k or 20M")
        amount *= _THOUSANDS[unit]
    else:
        raise ValueError(f"{value!r} is not a count; write for example 1000, 20k or 20M")
    if amount < 1 or round(amount) != amount:
        raise ValueError(f"{value!r} is not a whole number of at least 1")
    return round(amount)


def parse_duration(value: Any) -> float:
    """`90s`, `30m`, `6h`, `2d`: seconds. A bare number has no unit, and guessing one costs money."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, str):
        amount, unit = _quantity(value, "a duration", "90s, 30m, 6h or 2d")
        if unit.lower() in _SECONDS and amount > 0:
            return amount * _SECONDS[unit.lower()]
    raise ValueError(f"{value!r} is not a duration; write for example 90s, 30m, 6h or 2d")


def parse_money(value: Any) -> float:
    """`$50`, `$1,200`, `12.5`: US dollars."""
    if _number(value):
        amount = float(value)
    elif isinstance(value, str):
        amount, unit = _quantity(value.strip().removeprefix("$"), "an amount of money", "$50")
        if unit not in _THOUSANDS:
            raise ValueError(f"{value!r} is not an amount of money; write for example $50")
        amount *= _THOUSANDS[unit]
    else:
        raise ValueError(f"{value!r} is not an amount of money; write for example $50")
    if not 0 < amount < float("inf"):
        raise ValueError(f"{value!r} is not a positive amount of money")
    return amount


def parse_bytes(value: Any) -> int:
    """`25MB`, `80GB`, `1GiB`: bytes."""
    if isinstance(value, str):
        amount, unit = _quantity(value, "a size", "25MB or 80GB")
        if unit.lower() in _BYTES and amount > 0:
            return round(amount * _BYTES[unit.lower()])
    elif _number(value) and value >= 1 and value == int(value):
        return int(value)
    raise ValueError(f"{value!r} is not a size; write for example 25MB or 80GB")


def parse_fraction(value: Any) -> float:
    """`1%` or `0.01`: a part of a whole, from 0 to 1."""
    if _number(value):
        amount = float(value)
    elif isinstance(value, str):
        amount, unit = _quantity(value, "a fraction", "1% or 0.01")
        if unit not in ("", "%"):
            raise ValueError(f"{value!r} is not a fraction; write for example 1% or 0.01")
        amount = amount / 100 if unit else amount
    else:
        raise ValueError(f"{value!r} is not a fraction; write for example 1% or 0.01")
    if not 0 <= amount <= 1:
        raise ValueError(f"{value!r} is outside 0% to 100%")
    return amount


SpanUnit = Literal["run", "samples", "steps", "seconds"]


@dataclass(frozen=True)
class Span:
    """A stretch of a run: a part of it (`5%`), `10k samples`, `200 steps` or a time (`10m`)."""

    amount: float
    unit: SpanUnit

    def __str__(self) -> str:
        if self.unit == "run":
            return f"{self.amount * 100:g}%"
        if self.unit == "seconds":
            return f"{self.amount:g}s"
        return f"{int(self.amount)} {self.unit}"

    def samples(self, total: int) -> int:
        """The span in samples, for a run of `total` samples."""
        assert self.unit in ("run", "samples"), "the job file admits only these here"
        return min(total, round(self.amount * total)) if self.unit == "run" else int(self.amount)


def _parse_span(value: Any, bare: SpanUnit, units: tuple[SpanUnit, ...]) -> Span:
    if isinstance(value, Span):
        span = value
    elif _number(value):
        span = Span(parse_count(value), bare)
    elif isinstance(value, str):
        span = _parse_span_text(value.strip(), bare)
    else:
        raise ValueError(f"{value!r} is not a span; write for example {_span_examples(units)}")
    if span.unit not in units:
        raise ValueError(f"{value!r} cannot be used here; write for example {_span_examples(units)}")
    return span


def _parse_span_text(text: str, bare: SpanUnit) -> Span:
    if text.endswith("%"):
        return Span(parse_fraction(text), "run")
    for word, unit in (("steps", "steps"), ("step", "steps"), ("samples", "samples"), ("sample", "samples")):
        if text.endswith(word):
            return Span(parse_count(text.removesuffix(word)), unit)  # type: ignore[arg-type]
    if bare != "samples" and text[-1:].lower() in _SECONDS:
        return Span(parse_duration(text), "seconds")
    return Span(parse_count(text), bare)


def _span_examples(units: tuple[SpanUnit, ...]) -> str:
    examples = {"run": "5%", "samples": "10k samples", "steps": "200 steps", "seconds": "10m"}
    return " or ".join(examples[unit] for unit in units)


def _schema(kind: str, example: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": kind}, {"type": "string", "examples": [example]}]})


Count = Annotated[int, BeforeValidator(parse_count), _schema("integer", "20M")]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(lambda seconds: f"{seconds:g}s"),
    WithJsonSchema({"type": "string", "examples": ["6h"]}),
]
Money = Annotated[float, BeforeValidator(parse_money), _schema("number", "$50")]
Bytes = Annotated[int, BeforeValidator(parse_bytes), _schema("integer", "25MB")]
Fraction = Annotated[float, BeforeValidator(parse_fraction), _schema("number", "5%")]
SampleSpan = Annotated[
    Span,
    PlainValidator(lambda value: _parse_span(value, "samples", ("run", "samples"))),
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
