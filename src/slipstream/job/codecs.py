"""`exchange.codec:` how a gradient is made smaller on the wire. Small tensors travel as they are.

`feedback`: what a code leaves out is kept by the worker and added to its next gradient (error feedback; Karimireddy et
al. 2019, arXiv 1901.09847), so that nothing is lost, only late. What is late does most harm at the start, when
gradients change fast: hence `warmup` (as in Tang et al. 2021, arXiv 2102.02888).
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from slipstream.job.base import Named, Shorthand, choice, refuse
from slipstream.job.units import Count, Fraction, SampleSpanOrZero, Span


class _Codec(Named):
    warmup: SampleSpanOrZero = Span(0.0, "run")
    """Until then gradients travel as they are: over the first part of the run (`10%`) or this many samples."""

    @model_validator(mode="after")
    def _check(self) -> "_Codec":
        never = self.warmup.unit == "run" and self.warmup.amount >= 1
        refuse(
            ["warmup 100% is the whole run: nothing would ever be coded; leave out the codec, or less"] if never else []
        )
        return self


class Fp16(_Codec):
    """Half of the bytes: numbers of 16 bits, summed as such. Sums above 65,504 overflow."""

    name: Literal["fp16"]
    """The codec's name."""
    feedback: bool = False
    """Whether a worker keeps what its own rounding leaves out; what the sum rounds is not kept."""


class Bf16(_Codec):
    """Half of the bytes: numbers of 16 bits with the range of fp32 and 8 bits of precision, summed as such."""

    name: Literal["bf16"]
    """The codec's name."""
    feedback: bool = False
    """Whether a worker keeps what its own rounding leaves out; what the sum rounds is not kept."""


class Int8(_Codec):
    """A quarter of the bytes: whole numbers of 8 bits and a scale for each block (Alistarh et al. 2017, arXiv
    1610.02132), rounded at random so that the mean is right; to the nearest where feedback makes up for it."""

    name: Literal["int8"]
    """The codec's name."""
    block: Count = 256
    """Numbers that share a scale."""
    feedback: bool = False
    """Whether a worker keeps what a code leaves out, for the next step."""


class OneBit(_Codec):
    """About one bit a number: its sign, and the mean size of each block (Seide et al. 2014, doi
    10.21437/Interspeech.2014-274; Bernstein et al. 2018, arXiv 1802.04434)."""

    name: Literal["onebit"]
    """The codec's name."""
    block: Count = 64
    """Numbers that share a scale."""
    warmup: SampleSpanOrZero = Span(0.2, "run")
    """Until then gradients travel as they are: over the first part of the run or this many samples."""
    feedback: bool = True
    """Whether a worker keeps what a code leaves out, for the next step."""


class TopK(_Codec):
    """The largest of every 256 numbers alone, and where they stand (Aji and Heafield 2017, arXiv 1704.05021): three
    bytes for each."""

    name: Literal["topk"]
    """The codec's name."""
    part: Fraction = Field(default=0.25, ge=0.004, lt=0.33)
    """Part of the numbers that is sent, from one in 256 to a third, where int8 would send as little."""
    warmup: SampleSpanOrZero = Span(0.2, "run")
    """Until then gradients travel as they are: over the first part of the run or this many samples."""
    feedback: bool = True
    """Whether a worker keeps what a code leaves out, for the next step."""


class RandomK(_Codec):
    """Some numbers of a bucket, chosen at random and by all workers alike, so that their places need not be sent (Stich
    et al. 2018, arXiv 1809.07599): one of each row of 1/part."""

    name: Literal["randomk"]
    """The codec's name."""
    part: Fraction = Field(default=0.5, ge=0.001, le=0.5)
    """Part of the numbers that is sent, rounded to one in a whole number."""
    warmup: SampleSpanOrZero = Span(0.3, "run")
    """Until then gradients travel as they are: over the first part of the run or this many samples."""
    feedback: bool = True
    """Whether a worker keeps what a code leaves out, for the next step; otherwise what is sent is multiplied by 1/part,
    so that the mean is right."""


class PowerSgd(_Codec):
    """A product of two thin matrices for each matrix (Vogels et al. 2019, arXiv 1905.13727)."""

    name: Literal["powersgd"]
    """The codec's name."""
    rank: Count = 8
    """Columns of the thin matrices."""
    warm: bool = True
    """Whether a step begins with the directions that the last one found; otherwise with random ones."""
    warmup: SampleSpanOrZero = Span(0.3, "run")
    """Until then gradients travel as they are: over the first part of the run or this many samples."""
    feedback: bool = True
    """Whether a worker keeps what a code leaves out, for the next step."""


AnyCodec = Fp16 | Bf16 | Int8 | OneBit | TopK | RandomK | PowerSgd
Codec = Annotated[
    Annotated[Fp16, Tag("fp16")]
    | Annotated[Bf16, Tag("bf16")]
    | Annotated[Int8, Tag("int8")]
    | Annotated[OneBit, Tag("onebit")]
    | Annotated[TopK, Tag("topk")]
    | Annotated[RandomK, Tag("randomk")]
    | Annotated[PowerSgd, Tag("powersgd")],
    choice("name", shorthand=True),
    Shorthand(),
]


SMALL = 1024
"""Tensors of fewer numbers travel as they are, and so do those of one dimension: biases and norms."""


def is_worth_coding(codec: AnyCodec, rows: Any, columns: Any) -> Any:
    """Whether a matrix of this shape goes through the codec; of columns of shapes, which of them do."""
    large = rows * columns >= SMALL
    if isinstance(codec, PowerSgd):  # two thin matrices must be a good deal smaller than the one
        return large & (2 * codec.rank * (rows + columns) <= rows * columns)
    return large


def never_coding(codec: AnyCodec | None, samples: int, last: int) -> list[str]:
    """Why a run of so many samples, whose last step begins after `last` of them, ends before its codec, if it has one,
    codes anything; nothing if it does not."""
    if codec is None or codec.warmup.samples(samples) <= last:
        return []
    return [
        f"exchange.codec.warmup {codec.warmup} is the whole run of {samples} samples, up to its last step: nothing "
        "would ever be coded; make it shorter, or leave out the codec"
    ]


def coding_nothing(codec: AnyCodec | None, matrices: Iterable[tuple[float, float]]) -> list[str]:
    """Why none of a model's matrices, by rows and columns, goes through a codec; nothing if one does, or without a
    codec."""
    if codec is None or any(is_worth_coding(codec, rows, columns) for rows, columns in matrices):
        return []
    if isinstance(codec, PowerSgd):
        return [
            f"exchange.codec.rank {codec.rank}: no matrix of this model is so large that two thin ones would be half "
            "of it at most, so nothing would ever be coded; lower it, or leave out the codec"
        ]
    return [
        f"exchange.codec {codec.name}: no matrix of this model has {SMALL} numbers, and smaller ones travel as they "
        "are, so nothing would ever be coded; leave it out"
    ]
