"""Data: from what the job names to batches, in one order, from any point."""

from collections.abc import Callable
from typing import Any, NamedTuple

from slipstream.data.base import IGNORED, Batch, Dataset, Facts
from slipstream.data.images import check_digits, check_mnist, open_digits, open_mnist
from slipstream.data.imported import check_import, open_import
from slipstream.data.order import Order
from slipstream.data.prepared import check_prepared, open_prepared, prepared_ids, prepared_tokenizer
from slipstream.data.store import Notify
from slipstream.data.stream import prefetch
from slipstream.data.synthetic import open_synthetic
from slipstream.data.tables import check_table, open_table
from slipstream.data.text import check_text, mask_of, open_text, prepare_text, text_info, text_tokenizer
from slipstream.data.tokens import check_tokens, open_tokens
from slipstream.job import Job
from slipstream.job.data import (
    DataSection,
    DigitsData,
    ImportData,
    MnistData,
    PreparedData,
    SyntheticData,
    TableData,
    TextData,
    TokenData,
)

__all__ = [
    "IGNORED",
    "Batch",
    "Dataset",
    "Facts",
    "Order",
    "expected_facts",
    "mask_id",
    "open_dataset",
    "prefetch",
    "prepare",
    "text_info",
    "tokenizer_json",
]


class _Source(NamedTuple):
    check: Callable[[Any], None]
    """Refuses what cannot work (a missing file, a missing package) quickly, before anything is launched."""
    open: Callable[[Any, Job], Dataset]


_SOURCES: dict[type[DataSection], _Source] = {
    TextData: _Source(check_text, open_text),
    TokenData: _Source(check_tokens, open_tokens),
    PreparedData: _Source(check_prepared, open_prepared),
    TableData: _Source(check_table, open_table),
    DigitsData: _Source(check_digits, open_digits),
    MnistData: _Source(check_mnist, open_mnist),
    SyntheticData: _Source(lambda _: None, open_synthetic),
    ImportData: _Source(check_import, open_import),
}


def prepare(job: Job, notify: Notify) -> None:
    """Do once, before workers start, what they all need: check that the data is there, and tokenise text.

    Runs in the launcher and never imports torch. `notify` receives short lines for a person to read.
    """
    _SOURCES[type(job.data)].check(job.data)
    if isinstance(job.data, TextData):
        prepare_text(job.data, job, notify)


def tokenizer_json(job: Job) -> bytes | None:
    """The `tokenizer.json` of a job whose data has been prepared, if it has one."""
    if isinstance(job.data, PreparedData):
        return prepared_tokenizer(job.data)
    return text_tokenizer(job).read_bytes() if isinstance(job.data, TextData) else None


def mask_id(job: Job) -> int:
    """The id that hides a token, for a job on text that has been prepared."""
    if isinstance(job.data, PreparedData):
        return mask_of(prepared_ids(job.data), "the tokeniser of data.prepared")
    return mask_of(text_info(job), f"data.tokenizer: {getattr(job.data, 'tokenizer', None)}")


def expected_facts(job: Job) -> Facts:
    """What the data will be like; where the job itself says so, the data need not be there."""
    if isinstance(job.data, TextData | TokenData):
        vocabulary = getattr(job.model, "vocabulary", None) or job.data.vocabulary
        if vocabulary:
            return Facts((job.data.sequence,), vocabulary, tokens=True)
    prepare(job, lambda _: None)
    return open_dataset(job).facts


def open_dataset(job: Job) -> Dataset:
    """The dataset of a job that has been prepared; on every worker the same."""
    return _SOURCES[type(job.data)].open(job.data, job)
