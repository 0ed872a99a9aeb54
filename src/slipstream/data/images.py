"""Small images with classes: scikit-learn's digits, and MNIST from its IDX files."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from slipstream.data.arrays import Arrays
from slipstream.data.base import Dataset
from slipstream.data.checks import existing_folder, need_extra
from slipstream.job import Job
from slipstream.job.data import DigitsData, MnistData

_IMAGES, _LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def check_digits(data: DigitsData) -> None:
    need_extra("sklearn", "scikit-learn", "digits", f"data.source {data.source}")


def open_digits(data: DigitsData, _job: Job) -> Dataset:
    check_digits(data)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return _dataset(pixels.reshape(-1, 8, 8), labels, white=16)


def check_mnist(data: MnistData) -> None:
    for name in (_IMAGES, _LABELS):
        _find(data, name)


def open_mnist(data: MnistData, _job: Job) -> Dataset:
    pixels, classes, _ = read_mnist(data)
    return _dataset(pixels, classes, white=255)


def is_mnist(folder: Path) -> bool:
    """Whether MNIST's files are in this folder."""
    return any((folder / name).is_file() for name in (_IMAGES, f"{_IMAGES}.gz"))


def read_mnist(data: MnistData) -> tuple[np.ndarray, np.ndarray, tuple[Path, Path]]:
    """Pixels, classes, and the files that they are from."""
    images, labels = _find(data, _IMAGES), _find(data, _LABELS)
    pixels, classes = read_idx(images, dimensions=3), read_idx(labels, dimensions=1)
    if len(pixels) != len(classes) or not len(pixels):
        raise ValueError(f"data.path: {images} has {len(pixels):,} images, but {labels} has {len(classes):,} labels")
    return pixels, classes, (images, labels)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An IDX file of bytes: 0, 0, 8 (a byte each), the number of dimensions, their sizes, then the bytes."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"data.path: {path} is cut off or damaged ({error}); download it again") from None
    head = 4 + 4 * dimensions
    if len(content) >= 4 and content[:4] != bytes((0, 0, 8, dimensions)):
        raise ValueError(
            f"data.path: {path} is not an IDX file of bytes in {dimensions} dimensions; it begins with {content[:4]!r}"
        )
    shape = np.frombuffer(content[4:head], dtype=">u4").tolist() if len(content) >= head else None
    if shape is None or len(content) != head + math.prod(shape):
        expected = f"{head + math.prod(shape):,}" if shape else f"at least {head}"
        raise ValueError(f"data.path: {path} has {len(content):,} bytes instead of {expected}; download it again")
    return np.frombuffer(content, dtype=np.uint8, offset=head).reshape(shape)


def _find(data: MnistData, name: str) -> Path:
    folder = existing_folder(data.path, "data.path")
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise ValueError(f"data.path: there is neither {name} nor {name}.gz in {folder}")


def _dataset(pixels: np.ndarray, labels: np.ndarray, white: int) -> Dataset:
    """Grey images from 0 (black) to 1, with one channel."""
    images = pixels[:, None].astype(np.float32) / np.float32(white)
    return Arrays(images, labels.astype(np.int64), outputs=int(labels.max()) + 1)
