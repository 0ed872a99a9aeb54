"""What a dataset can be prepared from: which kind of source a name is, and what prepares it."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from slipstream.data.array_samples import mnist_samples, npy_samples
from slipstream.data.documents import STDLIB, named_like
from slipstream.data.fetching import here
from slipstream.data.image_samples import ImageFolder, has_images, is_image
from slipstream.data.images import is_mnist
from slipstream.data.making import Making
from slipstream.data.manifest import Manifest
from slipstream.data.preparing import prepare_text, size_of, text_sources
from slipstream.data.sampling import SampleSource, prepare_samples
from slipstream.data.token_rows import prepare_rows, token_rows


@dataclass(frozen=True)
class Options:
    """What a user may say about the sources; none has an effect on all of them."""

    tokenizer: str | None = None
    vocabulary: int | None = None
    field: str | None = None
    query: str | None = None
    targets: str | None = None
    size: int | None = None
    workers: int | None = None


class Preparation(NamedTuple):
    """What is ready to be made."""

    total: int | None
    """What progress is counted in: bytes of text, or items. None where nobody knows: a database does not say."""
    rate: Callable[[int, float], str]
    """Items and speed, for a person to read."""
    make: Callable[[Making], Manifest]


class _Kind(NamedTuple):
    name: str
    takes: Callable[[str], bool]
    """Whether a source is of this kind."""
    options: tuple[str, ...]
    begin: Callable[[Sequence[str], Options], Preparation]


def preparation(sources: Sequence[str], options: Options) -> Preparation:
    """What these sources need. Raises ValueError for what cannot be."""
    found = [here(name) for name in sources]
    targets, of_targets = here(options.targets) if options.targets else ([], None)
    if targets:
        options = replace(options, targets=targets[0])
    ready = _preparation([name for names, _ in found for name in names], options)
    copies = [folder for folder in (*(folder for _, folder in found), of_targets) if folder]
    return ready._replace(make=partial(_make, ready.make, copies))


def _make(make: Callable[[Making], Manifest], copies: Sequence[Path], making: Making) -> Manifest:
    made = make(making)
    for folder in copies:  # kept until here: the same command may have to go on
        shutil.rmtree(folder, ignore_errors=True)
    return made


def _preparation(names: Sequence[str], options: Options) -> Preparation:
    kinds = [next(kind for kind in _KINDS if kind.takes(name)) for name in names]
    for name, kind in zip(names, kinds, strict=True):
        if kind is not kinds[0]:
            raise ValueError(f"{names[0]} is {kinds[0].name} and {name} is {kind.name}; prepare them apart")
    for field in fields(options):
        if getattr(options, field.name) is not None and field.name not in kinds[0].options:
            raise ValueError(f"--{field.name} has no effect on {kinds[0].name}; remove it")
    return kinds[0].begin(names, options)


def _is_image_folder(name: str) -> bool:
    folder = Path(name)
    if name == STDLIB or not folder.is_dir():
        return False
    text = next(folder.rglob("*.txt"), None)
    if has_images(folder):
        if text:
            raise ValueError(
                f"{name} holds images and text ({text}); prepare a folder of images alone, or name the text: "
                f"'{name}/**/*.txt'"
            )
        return True
    if not text and (image := next((path for path in folder.iterdir() if is_image(path.name)), None)):
        raise ValueError(
            f"{name} holds images ({image.name}), but no folder for each class; put those of each class into a folder "
            "in it, named as the class"
        )
    return False


def _text(names: Sequence[str], options: Options) -> Preparation:
    sources = text_sources(names, options.tokenizer, options.vocabulary, options.field, options.query)
    return Preparation(
        size_of(sources),
        lambda tokens, speed: f"{tokens / 1e6:,.1f}M tokens, {speed / 1e6:.1f} MB/s",
        partial(prepare_text, sources),
    )


def _arrays(names: Sequence[str], options: Options) -> Preparation:
    """With targets samples, without tokens."""
    if options.targets is None:
        return _tokens(names, options)
    if options.tokenizer or options.vocabulary:
        raise ValueError("--tokenizer and --vocabulary have no effect on samples; remove them")
    return _samples(npy_samples(_only(names), options.targets))


def _tokens(names: Sequence[str], options: Options) -> Preparation:
    files = [path for name in names for path in named_like(name)]
    if not files:
        raise ValueError(f"SOURCE: no file is named like that: {', '.join(names)}")
    rows = token_rows(files, options.tokenizer, options.vocabulary)
    return Preparation(
        rows.tokens,
        lambda tokens, speed: f"{tokens / 1e6:,.1f}M tokens, {speed / 1e6:,.1f}M/s",
        partial(prepare_rows, rows),
    )


def _samples(source: SampleSource) -> Preparation:
    return Preparation(
        len(source), lambda samples, speed: f"{samples:,} samples, {speed:,.0f}/s", partial(prepare_samples, source)
    )


def _only(names: Sequence[str]) -> str:
    if len(names) > 1:
        raise ValueError(f"samples are prepared from one source at a time, not from {', '.join(names)}")
    return names[0]


_KINDS = (
    _Kind("an .npy file", lambda name: name.endswith(".npy"), ("tokenizer", "vocabulary", "targets"), _arrays),
    _Kind(
        "a folder of MNIST's files", lambda name: is_mnist(Path(name)), (),
        lambda names, _: _samples(mnist_samples(_only(names))),
    ),
    _Kind(
        "a folder of images", _is_image_folder, ("size", "workers"),
        lambda names, options: _samples(ImageFolder(_only(names), options.size)),
    ),
    _Kind("text", lambda _: True, ("tokenizer", "vocabulary", "field", "query", "workers"), _text),
)  # fmt: skip
"""The first that takes a source prepares it."""
