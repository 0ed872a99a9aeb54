"""Samples from a folder of images, one folder in it for each class."""

import hashlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.data.checks import existing_folder, need_extra
from slipstream.data.holding import Numbers, Samples

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
"""Names of files that are images, in lower or upper case."""


class ImageFolder:
    """Images as bytes, red, green and blue apart: [3, height, width]."""

    costly = True

    def __init__(self, root: str, size: int | None) -> None:
        need_extra("PIL", "Pillow", "images", root)
        import PIL

        self._size = size
        self._folder = existing_folder(root, "SOURCE")
        names = class_folders(self._folder)
        found = [sorted(_images(self._folder / name)) for name in names]
        for name, files in zip(names, found, strict=True):
            if not files:
                raise ValueError(f"{self._folder / name} has no image ({', '.join(SUFFIXES)}); a class must have one")
        self._files = [file for files in found for file in files]
        self._classes = np.repeat(np.arange(len(names)), [len(files) for files in found])
        shape = decode(self._files[0], size).shape
        decoder = f"Pillow {PIL.__version__}"
        self.holds = Samples(
            Numbers("|u1", shape), Numbers("<i8", ()), len(names), tuple(names), white=255, decoder=decoder
        )
        self.identity: dict[str, Any] = {"images": self._stamp(), "size": size, "decoder": decoder}

    def __len__(self) -> int:
        return len(self._files)

    def reader(self, numbers: np.ndarray) -> Callable[[], np.ndarray]:
        files = [self._files[number] for number in numbers.tolist()]
        return partial(_read, files, self._classes[numbers], self._size, self.holds.dtype)

    def _stamp(self) -> str:
        """A change to any file changes it."""
        stamp = hashlib.sha256()
        for file in self._files:
            stat = Path(file).stat()
            stamp.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return stamp.hexdigest()


def _read(files: list[str], classes: np.ndarray, size: int | None, dtype: np.dtype) -> np.ndarray:
    items = np.empty(len(files), dtype)
    items["target"] = classes
    for place, file in enumerate(files):
        image = decode(file, size)
        if image.shape != dtype["inputs"].shape:
            (_, height, width), (_, high, wide) = image.shape, dtype["inputs"].shape
            raise ValueError(
                f"{file} has {width} × {height} pixels, but the first image has {wide} × {high}; give --size, to which "
                "all are resized"
            )
        items["inputs"][place] = image
    return items


def class_folders(root: Path) -> list[str]:
    """Names of the folders in this one, sorted."""
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))


def has_images(root: Path) -> bool:
    """Whether folders in this one hold images."""
    return any(next(_images(root / name), None) for name in class_folders(root))


def is_image(name: str) -> bool:
    """Whether a file of this name is one."""
    return name.lower().endswith(SUFFIXES)


def decode(file: str, size: int | None) -> np.ndarray:
    """The bytes of an image, upright; with a size the square in its middle, resized to it."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError("it has more than 8 bits for a colour; convert it")
            if size:
                image.draft("RGB", (2 * size, 2 * size))  # a large JPEG is decoded smaller, in a fraction of the time
            upright = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{file} cannot be read as an image: {error}") from None
    if size:
        upright = ImageOps.fit(upright, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(upright).transpose(2, 0, 1)


def _images(folder: Path) -> Iterator[str]:
    """All images in a folder and below it."""
    for place, _, names in os.walk(folder):
        yield from (os.path.join(place, name) for name in names if is_image(name))  # noqa: PTH118
