"""How much of a machine's promise a training program gets: the planner's constants, and where they come from.

They were fitted together to published step times by `scripts/fit_rates.py`, and are kept in `tables/rates.csv` with
what they mean; docs/planner.md tells which rows were used and how well the fit predicts sources that it has not seen.
"""

import csv
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Rates:
    """Parts of a peak, counts and seconds that no data sheet tells."""

    matrix_16: float
    """Part of the peak that a large product reaches in 16 bits and more."""
    matrix_8: float
    """The same in 8 bits."""
    matrix_4: float
    """The same in 4 bits."""
    matrix_traffic: float
    """How often a product's matrices travel to and from memory, beyond what its arithmetic hides."""
    matrix_start: float
    """Seconds that a product takes to fill a machine and to leave it, when all its units are not busy."""
    attention: float
    """Part of the 16-bit peak that fused attention reaches."""
    attention_length: float
    """Tokens of a sequence, on one worker, at which it reaches half of that."""
    scores_traffic: float
    """How often the scores travel where attention is not fused."""
    stream_traffic: float
    """How often the residual stream travels in a block's forward, beside the products."""
    inner_traffic: float
    """The same for what is between the products of the feed-forward part."""
    unfused_traffic: float
    """How much more both are in programs that fuse no element-wise operations."""
    eager_traffic: float
    """The same in a program that compiles its blocks, on layouts where it cannot. Not fitted: llama-1b on an H200, with
    and without the compiler."""
    bandwidth: float
    """Part of the memory's bandwidth that such operations reach."""
    launch: float
    """Seconds that the processor takes to hand a block's forward to an accelerator, which is a floor to it."""
    unfused_launch: float
    """The same where nothing is fused."""
    link: float
    """Part of the bandwidth inside a machine that collectives reach."""
    link_latency: float
    """Seconds that a collective inside a machine takes at least."""
    tensor_hidden: float
    """Part of the tensor axis' communication that hides behind computation."""
    network: float
    """Part of the bandwidth between machines that collectives reach."""
    network_latency: float
    """Seconds that a message between machines takes at least."""
    gradients_hidden: float
    """Part of the exchange of gradients and weights that can hide behind computation."""
    optimizer_bytes: float
    """Bytes that an update moves for each parameter."""
    loss_traffic: float
    """How often the scores of the head travel, at 4 bytes."""
    step: float
    """Seconds of a step beside all this."""
    spread: float
    """What each doubling of workers adds, as a part: the slowest is waited for."""


@cache
def fitted_rates() -> Rates:
    """The constants that the package comes with."""
    table = files("slipstream.plan") / "tables" / "rates.csv"
    with table.open() as file:
        found = {row["name"]: float(row["value"]) for row in csv.DictReader(file)}
    return Rates(**{field.name: found[field.name] for field in fields(Rates)})
