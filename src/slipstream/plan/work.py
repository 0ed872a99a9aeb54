"""What one step of a model consists of, in numbers: matrix products, attention, other traffic, parameters.

Every field may be a number or a numpy column of them, so that one formula serves one plan and a million candidates.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from slipstream.job.models import DecoderModel

Number = Any
"""A float, or a numpy column of them."""


_ONE_PASS = 32
"""Of sizes of heads, which are powers of two, the smallest that can be turned so: train/kernels/rotary.py."""


@dataclass(frozen=True)
class Product:
    """A matrix product of the forward: for each sample, [rows, k] times [k, n]."""

    rows: Number
    n: Number
    k: Number
    split: Literal["n", "k", "no"] = "no"
    """Which of them tensor workers share out."""


@dataclass(frozen=True)
class Matrix:
    """Weights of n rows and k columns, of which there are so many in a model."""

    n: Number
    k: Number
    count: Number = 1
    split: Literal["n", "k", "no"] = "no"
    """Which of them tensor workers share out."""


@dataclass(frozen=True)
class Work:
    """A model as a row of equal blocks between a table and a head. One that is not so is a single block."""

    layers: Number
    tokens: Number
    """Rows of the residual stream in a sample."""
    stream: Number
    """Width of the residual stream."""
    inner: Number
    """Numbers for each token between the products of the feed-forward part."""
    keys: Number
    """Width of keys, which is that of values."""
    heads: Number
    block: tuple[Product, ...]
    head: tuple[Product, ...]
    attention: Number
    """FLOPs of a block's attention for each sample in the forward, what causality hides not counted."""
    outputs: Number
    """Scores for each token that the loss takes."""
    kept_stream: Number
    """Numbers that a block's backward needs for each token, of those that lie along the residual stream: half of them
    are what norms take, half what they give to products."""
    kept_inside: Number
    """The same, of those that tensor workers share out."""
    fused: Number
    """Of these, what a compiler need not keep, because it follows at once from its neighbours."""
    products_inside: Number
    """Numbers for each token that a block's products and attention give, of those that tensor workers share out."""
    block_parameters: Number
    table_parameters: Number
    """Looked up before the first block."""
    head_parameters: Number
    """After the last block; none where the table serves again."""
    middle: Number = 0
    """Numbers for each token that the last product of the feed-forward part takes."""
    turned: Number = 0
    """Numbers for each token that rotary positions make: a compiler keeps them beside the whole projection, of which
    values are a part, where they are not made in one pass with values."""
    in_one_pass: Number = 0
    """1 where heads have a size that admits that."""
    matrices: tuple[Matrix, ...] = ()
    """What codecs make smaller: of all parameters those that are not biases, norms and the like."""

    @property
    def parameters(self) -> Number:
        """Of the whole model."""
        return self.layers * self.block_parameters + self.table_parameters + self.head_parameters

    @property
    def flops(self) -> Number:
        """Of forward and backward for each sample, without recomputation: backward does each product twice."""
        blocks = sum(2 * part.rows * part.n * part.k for part in self.block) + self.attention
        return 3 * (self.layers * blocks + sum(2 * part.rows * part.n * part.k for part in self.head))


def decoder_work(
    layers: Number,
    hidden: Number,
    heads: Number,
    kv_heads: Number,
    inner: Number,
    inward: Number,
    vocabulary: Number,
    sequence: Number,
    small: tuple[Number, Number, Number] = (0, 0, 0),
    tied: Number = False,
    places: Number = 0,
    rotary: bool = False,
) -> Work:
    """A decoder. `inward` is the number of products into the feed-forward part: 2 where one of them is a gate.

    `small` are the parameters beside the matrices: of a block, beside the table, and beside the head. `places` are the
    positions that have a row of weights each.
    """
    keys = hidden * kv_heads / heads
    block = (
        Product(sequence, hidden + 2 * keys, hidden, "n"),
        Product(sequence, hidden, hidden, "k"),
        Product(sequence, inward * inner, hidden, "n"),
        Product(sequence, hidden, inner, "k"),
    )
    matrices = (
        Matrix(hidden + 2 * keys, hidden, layers, "n"),
        Matrix(hidden, hidden, layers, "k"),
        Matrix(inner, hidden, layers * inward, "n"),
        Matrix(hidden, inner, layers, "k"),
        Matrix(vocabulary, hidden, 2 - tied, "n"),
        Matrix(places, hidden),
    )
    return Work(
        layers=layers,
        tokens=sequence,
        stream=hidden,
        inner=inward * inner,
        keys=keys,
        heads=heads,
        block=block,
        head=(Product(sequence, vocabulary, hidden, "n"),),
        attention=2 * sequence * sequence * hidden,
        outputs=vocabulary,
        kept_stream=4 * hidden,  # what each norm takes and gives
        kept_inside=2 * hidden
        + 2 * keys
        + inward * inner
        + inward * inner,  # q, k, v, attended; in and out of the middle
        fused=(inward - 1) * inner,  # the gate's activation
        products_inside=2 * hidden + 2 * keys + inward * inner,
        block_parameters=sum(part.n * part.k for part in block) + small[0],
        table_parameters=(vocabulary + places) * hidden + small[1],
        head_parameters=vocabulary * hidden * (1 - tied) + small[2],
        middle=inner,
        turned=rotary * (hidden + keys),
        matrices=matrices,
    )


def work_of_decoder(model: DecoderModel, vocabulary: int, sequence: int) -> Work:
    """Our decoder, every parameter counted."""
    hidden, inner, bias = model.hidden, model.inner, int(model.bias)
    kv_heads = model.kv_heads or model.heads
    inward = 2 if model.activation == "swiglu" else 1
    norm = hidden * (1 + (bias if model.norm == "layer" else 0))
    biases = bias * (hidden + 2 * hidden * kv_heads // model.heads + hidden + inward * inner + hidden)
    places = (model.context or sequence) if model.positions == "learned" else 0
    small = (2 * norm + biases, 0, norm)
    size = hidden // model.heads
    work = decoder_work(
        model.layers, hidden, model.heads, kv_heads, inner, inward, vocabulary, sequence, small, model.tied, places,
        model.positions == "rotary",
    )  # fmt: skip
    return replace(work, in_one_pass=int(size >= _ONE_PASS and not size & (size - 1)))
