"""Human units: what is written is what is meant, exactly, and what could be misread is refused."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from slipstream.job.units import (
    Count,
    Duration,
    Interval,
    SampleSpan,
    SampleSpanOrZero,
    Span,
    StepInterval,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_fraction,
    parse_money,
    parse_number,
)

INF, NAN = float("inf"), float("nan")
LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (1, 1), (64, 64), (2e6, 2_000_000), ("64", 64), (" 64 ", 64), ("1_000", 1000), ("1,000", 1000),
        ("1,234,567", 1_234_567), ("20k", 20_000), ("20K", 20_000), ("20M", 20_000_000), ("20 M", 20_000_000),
        ("3B", 3 * 10**9), ("3G", 3 * 10**9),
        ("1.5T", 1_500_000_000_000), ("2e6", 2_000_000), ("1.001k", 1001), (".5k", 500), ("4.35M", 4_350_000),
        (2**53 + 1, 2**53 + 1), (LARGEST, LARGEST),
    ],
)  # fmt: skip
def test_counts(written: Any, meant: int) -> None:
    assert parse_count(written) == meant
    assert isinstance(parse_count(written), int)


@pytest.mark.parametrize(
    "written",
    [0, -3, 1.5, True, None, [], {}, INF, -INF, NAN, 10**400, LARGEST + 1, "", "k", "20X", "20m", "1.5", "0", "-3",
     "1,5", "1,50k", "1,0000", "20 Mio", "2 k M", "1e400", "1e9999", "0x10", "٣", "1 000", "twenty", "50%"],
)  # fmt: skip
def test_what_is_no_count(written: Any) -> None:
    with pytest.raises(ValueError, match=r"is not a count; write|whole number of at least 1|too large"):
        parse_count(written)


@given(st.integers(1, LARGEST))
def test_every_count_is_read_exactly(count: int) -> None:
    assert (
        parse_count(count) == parse_count(str(count)) == parse_count(f"{count:,}") == parse_count(f"{count:_}") == count
    )


@given(st.integers(1, 10**6))
def test_thousandths_of_a_million_are_exact(thousands: int) -> None:
    assert parse_count(f"{thousands // 1000}.{thousands % 1000:03}M") == thousands * 1000


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("90s", 90), ("30m", 1800), ("6h", 21600), ("6 h", 21600), ("6H", 21600), ("2d", 172800), ("1w", 604800),
        ("1.5h", 5400), ("0.1s", 0.1), ("1,000s", 1000), (timedelta(minutes=5), 300), (timedelta(microseconds=1), 1e-6),
    ],
)  # fmt: skip
def test_durations(written: Any, seconds: float) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize(
    "written",
    [6, 6.0, 0, True, None, [], INF, "6", "0h", "-6h", "h", "6x", "6 parsecs", "6h30m", "1e400h", timedelta()],
)
def test_what_is_no_duration(written: Any) -> None:
    with pytest.raises(ValueError, match="is not a duration; write for example 90s, 30m, 6h or 2d"):
        parse_duration(written)


@given(st.floats(1e-9, 1e12))
def test_a_duration_is_written_so_that_it_reads_back(seconds: float) -> None:
    adapter = TypeAdapter(Duration)
    assert adapter.validate_python(adapter.dump_python(seconds)) == seconds


@pytest.mark.parametrize(
    ("written", "dollars"),
    [
        ("$50", 50),
        ("50", 50),
        (50, 50),
        (12.5, 12.5),
        ("$1,200", 1200),
        ("$ 5", 5),
        (" $5 ", 5),
        ("$1.5k", 1500),
        ("$0.99", 0.99),
    ],
)
def test_money(written: Any, dollars: float) -> None:
    assert parse_money(written) == dollars


@pytest.mark.parametrize(
    "written",
    [0, -5, True, None, [], INF, NAN, 10**400, "", "$", "$0", "$-5", "€50", "50 EUR", "$1,50", "lots", "$$5", "1e999"],
)
def test_what_is_no_money(written: Any) -> None:
    with pytest.raises(ValueError, match=r"amount of money; write for example \$50"):
        parse_money(written)


@pytest.mark.parametrize(
    ("written", "size"),
    [(1, 1), (25_000_000, 25_000_000), ("25MB", 25_000_000), ("25 mb", 25_000_000), ("80GB", 80 * 10**9),
     ("1GiB", 2**30), ("1.5KiB", 1536), ("1TB", 10**12), ("64B", 64), ("100", 100), (1e3, 1000)],
)  # fmt: skip
def test_bytes(written: Any, size: int) -> None:
    assert parse_bytes(written) == size


@pytest.mark.parametrize(
    "written", [0, -1, 1.5, True, None, INF, NAN, 10**400, "0GB", "0.3B", "25X", "25 M", "GB", "-1GB", "1e400GB"]
)
def test_what_is_no_size(written: Any) -> None:
    with pytest.raises(ValueError, match="is not a size; write for example 25MB or 80GB"):
        parse_bytes(written)


@pytest.mark.parametrize(
    ("written", "part"),
    [
        (0, 0),
        (1, 1),
        (0.01, 0.01),
        ("1%", 0.01),
        ("1 %", 0.01),
        ("12.5%", 0.125),
        ("100%", 1),
        ("0.3", 0.3),
        ("7%", 0.07),
    ],
)
def test_fractions(written: Any, part: float) -> None:
    assert parse_fraction(written) == part


@pytest.mark.parametrize(
    "written", [2, -0.1, True, None, [], INF, NAN, "150%", "-5%", "%", "5", "1k", "5 apples", "a half"]
)
def test_what_is_no_fraction(written: Any) -> None:
    with pytest.raises(ValueError, match=r"write for example 1% or 0\.01"):
        parse_fraction(written)


@pytest.mark.parametrize(
    ("written", "number"),
    [(3, 3), (0.1, 0.1), ("3e-4", 3e-4), ("-1", -1), ("1_000", 1000), (-0.0, 0)],
)
def test_numbers(written: Any, number: float) -> None:
    assert parse_number(written) == number


@pytest.mark.parametrize("written", [True, None, [], {}, INF, NAN, 10**400, "", "nan", "inf", "fast", "1,5", "5%"])
def test_what_is_no_number(written: Any) -> None:
    with pytest.raises(ValueError, match=r"is not a number; write for example 0\.1 or 3e-4"):
        parse_number(written)


# --- spans -----------------------------------------------------------------------------------------------------------

SAMPLES, SAMPLES_OR_ZERO, INTERVAL, STEPS = map(TypeAdapter, (SampleSpan, SampleSpanOrZero, Interval, StepInterval))
ALL = ("samples", "samples or zero", "interval", "steps")
ADAPTERS = dict(zip(ALL, (SAMPLES, SAMPLES_OR_ZERO, INTERVAL, STEPS), strict=True))


@pytest.mark.parametrize(
    ("kind", "written", "span"),
    [
        *((kind, "5%", Span(0.05, "run")) for kind in ALL),
        *((kind, "100%", Span(1, "run")) for kind in ALL),
        ("samples", 500, Span(500, "samples")),
        ("samples", "10k", Span(10_000, "samples")),
        ("samples", "10k samples", Span(10_000, "samples")),
        ("samples", "1 sample", Span(1, "samples")),
        ("samples or zero", 0, Span(0, "samples")),
        ("samples or zero", "0%", Span(0, "run")),
        ("interval", 200, Span(200, "steps")),
        ("interval", "200 steps", Span(200, "steps")),
        ("interval", "1 step", Span(1, "steps")),
        ("interval", "10m", Span(600, "seconds")),
        ("interval", "1M", Span(1_000_000, "steps")),
        ("interval", "90 s", Span(90, "seconds")),
        ("steps", "1k steps", Span(1000, "steps")),
        ("steps", Span(3, "steps"), Span(3, "steps")),
    ],
)
def test_spans(kind: str, written: Any, span: Span) -> None:
    assert ADAPTERS[kind].validate_python(written) == span


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        *((kind, junk) for kind in ALL for junk in (-1, 0.5, True, None, [], "", "%", "steps", "80 parsecs", "150%")),
        *((kind, zero) for kind in ("samples", "interval", "steps") for zero in (0, "0%", "0 steps", "0s")),
        ("samples", "200 steps"),
        ("samples", "10m"),
        ("samples or zero", "-1%"),
        ("interval", "10k samples"),
        ("steps", "10m"),
        ("steps", "10 samples"),
        ("steps", Span(600, "seconds")),
        ("interval", Span(0.0, "run")),
    ],
)  # fmt: skip
def test_what_is_no_span(kind: str, written: Any) -> None:
    with pytest.raises(ValidationError, match="write for example"):
        ADAPTERS[kind].validate_python(written)


@given(
    st.one_of(
        st.builds(Span, st.floats(0, 1), st.just("run")),
        st.builds(Span, st.integers(0, LARGEST), st.just("samples")),
    )
)
def test_a_span_of_samples_is_written_so_that_it_reads_back(span: Span) -> None:
    assert SAMPLES_OR_ZERO.validate_python(str(span)) == span
    assert SAMPLES_OR_ZERO.validate_python(SAMPLES_OR_ZERO.dump_python(span)) == span


@given(
    st.one_of(
        st.builds(Span, st.floats(1e-300, 1), st.just("run")),
        st.builds(Span, st.integers(1, LARGEST), st.just("steps")),
        st.builds(Span, st.floats(1e-9, 1e12), st.just("seconds")),
    )
)
def test_an_interval_is_written_so_that_it_reads_back(span: Span) -> None:
    assert INTERVAL.validate_python(str(span)) == span


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (Span(0.05, "run"), "5%"),
        (Span(0.1, "run"), "10%"),
        (Span(1 / 3, "run"), "33.33333333333333%"),
        (Span(0.0, "run"), "0%"),
        (Span(600.0, "seconds"), "600s"),
        (Span(1234567.5, "seconds"), "1234567.5s"),
        (Span(20_000, "steps"), "20000 steps"),
    ],
)
def test_a_span_reads_well(span: Span, text: str) -> None:
    assert str(span) == text


@given(st.floats(0, 1), st.integers(1, 10**12))
def test_a_part_of_a_run_is_never_more_than_the_run(part: float, total: int) -> None:
    assert 0 <= Span(part, "run").samples(total) <= total


# --- no value at all makes a parser do anything but return or raise ValueError ----------------------------------------

ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()),
    st.from_regex(r"[$]?[0-9]{1,4}[.,]?[0-9]{0,3}(e[0-9]{1,3})? ?[a-zA-Z%]{0,3}", fullmatch=True),
)  # fmt: skip


@pytest.mark.parametrize("parse", [parse_number, parse_count, parse_duration, parse_money, parse_bytes, parse_fraction])
@given(value=ANYTHING)
def test_a_parser_returns_a_finite_number_or_refuses(parse: Callable[[Any], float], value: Any) -> None:
    try:
        number = parse(value)
    except ValueError as error:
        assert "write for example" in str(error) or "whole number" in str(error) or "too large" in str(error)
    else:
        assert abs(number) < INF


def test_a_refusal_does_not_print_pages() -> None:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(Count).validate_python("9" * 10_000)
    assert len(refused.value.errors()[0]["msg"]) < 200
