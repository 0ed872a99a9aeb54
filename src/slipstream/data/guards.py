"""How the bytes of a prepared dataset are kept so that a change is seen: with checksums, or encrypted."""

from typing import Protocol

from slipstream.data.manifest import Manifest, Seal

try:
    from zlib_ng.zlib_ng import crc32  # the same numbers in a tenth of the time
except ImportError:
    from zlib import crc32

Bytes = bytes | memoryview
SPARE = 16
"""Bytes: decryption wants room for a block more than it fills."""


class Guard(Protocol):
    """Closes what is written and opens what is read. A page keeps its length; what opens it is its record."""

    record: int
    """Bytes of a record."""

    @property
    def seal(self) -> Seal | None:
        """What the manifest must say to open it again."""
        ...

    def close_page(self, shard: str, start: int, data: Bytes) -> tuple[Bytes, bytes]:
        """What to store for the page that begins at this byte of a shard, and its record."""
        ...

    def open_page(self, shard: str, start: int, stored: Bytes, record: bytes, into: memoryview) -> bool:
        """Put the page into this memory, which has `SPARE` bytes more; False where anything has changed."""
        ...

    def close_piece(self, name: str, start: int, data: bytes) -> bytes:
        """What to append to another file, at this byte of it."""
        ...

    def open_file(self, name: str, stored: bytes) -> bytes | None:
        """All pieces of that file, one after the other; None where anything has changed."""
        ...

    def sign(self, manifest: Manifest) -> Manifest:
        """The manifest as it is written."""
        ...


class Checksums:
    """All is stored as it is, and the record of a page is its CRC-32; of other files the manifest has the SHA-256."""

    record = 4
    seal = None

    def close_page(self, shard: str, start: int, data: Bytes) -> tuple[Bytes, bytes]:  # noqa: ARG002
        return data, crc32(data).to_bytes(4, "little")

    def open_page(self, shard: str, start: int, stored: Bytes, record: bytes, into: memoryview) -> bool:  # noqa: ARG002
        into[: len(stored)] = stored
        return self.is_whole(stored, record)

    def is_whole(self, stored: Bytes, record: bytes) -> bool:
        """Whether a page is what was written."""
        return crc32(stored) == int.from_bytes(record, "little")

    def close_piece(self, name: str, start: int, data: bytes) -> bytes:  # noqa: ARG002
        return data

    def open_file(self, name: str, stored: bytes) -> bytes | None:  # noqa: ARG002
        return stored

    def sign(self, manifest: Manifest) -> Manifest:
        return manifest


CHECKSUMS = Checksums()
