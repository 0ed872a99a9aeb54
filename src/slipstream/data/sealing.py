"""Encrypted datasets: AES-256-GCM under a key of the dataset's own, which the user's key wraps."""

import json
import secrets
import struct
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from slipstream.data.guards import CHECKSUMS, Bytes, Guard
from slipstream.data.keys import BYTES, cipher_of, user_key
from slipstream.data.manifest import MANIFEST, Manifest, Seal
from slipstream.data.writing import unfinished_seal

_RECORD = 28
"""A nonce and a tag."""
_LENGTH = struct.Struct("<Q")


class Sealed:
    """Every page is encrypted by itself. What is authenticated with it is the dataset, the file and the place in it, so
    that it opens nowhere else."""

    record = _RECORD

    def __init__(self, seal: Seal, key: bytes) -> None:
        self.seal, self._cipher = seal, cipher_of(key, "an encrypted dataset")

    def close_page(self, shard: str, start: int, data: Bytes) -> tuple[Bytes, bytes]:
        return self._cipher.encrypt(data, self._place(shard, start))

    def open_page(self, shard: str, start: int, stored: Bytes, record: bytes, into: memoryview) -> bool:
        return self._cipher.decrypt_into(into, stored, self._place(shard, start), record)

    def close_piece(self, name: str, start: int, data: bytes) -> bytes:
        stored, record = self._cipher.encrypt(data, self._place(name, start))
        return _LENGTH.pack(len(stored)) + record + stored

    def open_file(self, name: str, stored: bytes) -> bytes | None:
        opened = []
        for start, record, piece in _pieces(stored):
            data = self._cipher.decrypt(piece, self._place(name, start), record)
            if data is None:
                return None
            opened.append(data)
        return b"".join(opened)

    def sign(self, manifest: Manifest) -> Manifest:
        """The manifest with a proof that who wrote it had the key."""
        _, record = self._cipher.encrypt(b"", self._whole(manifest))
        return replace(manifest, seal=replace(self.seal, proof=record.hex()))

    def has_signed(self, manifest: Manifest) -> bool:
        """Whether this is the manifest that was signed."""
        assert manifest.seal is not None
        try:
            proof = bytes.fromhex(manifest.seal.proof)
        except ValueError:
            return False
        return self._cipher.decrypt(b"", self._whole(manifest), proof) is not None

    def _whole(self, manifest: Manifest) -> bytes:
        values = {**asdict(manifest), "seal": None}
        return self._place(MANIFEST, 0) + json.dumps(values, sort_keys=True).encode()

    def _place(self, name: str, start: int) -> bytes:
        return f"{self.seal.dataset}/{name}/{start}\n".encode()


def guard_to_write(folder: Path, encrypt: bool) -> Guard:
    """What closes a dataset that is made in this folder: where a preparation goes on, what has closed the rest."""
    seal = unfinished_seal(folder, encrypt)
    if not encrypt:
        return CHECKSUMS
    return open_seal(seal, str(folder)) if seal else _new_seal()


def _new_seal() -> Sealed:
    user, _ = user_key("--encrypt")
    key = secrets.token_bytes(BYTES)
    return Sealed(Seal(dataset=secrets.token_hex(16), key=user.name, wrapped=user.wrap(key), proof=""), key)


def open_seal(seal: Seal, where: str) -> Sealed:
    """Of a dataset that is there. Raises ValueError without the right key."""
    user, variable = user_key(f"{where} is encrypted, and")
    if user.name != seal.key:
        raise ValueError(
            f"{where} was encrypted for key {seal.key}, and {variable} is key {user.name}; give the key that it was "
            "prepared with"
        )
    try:
        key = user.unwrap(seal.wrapped)
    except ValueError as error:
        raise ValueError(f"{where} cannot be opened by {variable}: {error}") from None
    return Sealed(seal, key)


def guard_of(manifest: Manifest, where: str) -> Guard:
    """What opens a dataset. Raises ValueError without the right key, or if the manifest is not the one it was given."""
    if manifest.seal is None:
        return CHECKSUMS
    sealed = open_seal(manifest.seal, where)
    if not sealed.has_signed(manifest):
        raise ValueError(f"{where}/{MANIFEST} is damaged: it is not what was prepared; copy it again")
    return sealed


def _pieces(stored: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Where each piece of a file begins, its record, and itself."""
    start = 0
    while start < len(stored):
        head = stored[start : start + _LENGTH.size]
        size = _LENGTH.unpack(head.ljust(_LENGTH.size, b"\0"))[0]
        first = start + _LENGTH.size + Sealed.record
        yield start, stored[start + _LENGTH.size : first], stored[first : first + size]
        start = first + size
