"""AES-256-GCM by the package cryptography (extra [encrypt]); imported only where something is encrypted."""

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

_NONCE = 12
RECORD = _NONCE + 16
"""Bytes that are kept beside what was encrypted."""


class Aes:
    """One key.

    Nonces are random and stored, not counted: a preparation that was killed goes on under the same key and writes the
    pages of its last shard again, maybe from other text, and under a nonce that follows from the page's number this
    would give both texts away. Of 2^32 random nonces, which is 4 PiB of pages, two are the same with a probability
    below 2^-32 (NIST SP 800-38D, 8.3).
    """

    def __init__(self, key: bytes) -> None:
        assert len(key) == 32
        self._key = AES(key)

    def encrypt(self, data: bytes | memoryview, place: bytes) -> tuple[bytes, bytes]:
        """What to store, and its record; it can be opened only as what `place` says."""
        nonce = secrets.token_bytes(_NONCE)
        working = Cipher(self._key, GCM(nonce)).encryptor()
        working.authenticate_additional_data(place)
        stored = working.update(data) + working.finalize()
        return stored, nonce + working.tag

    def decrypt(self, stored: bytes, place: bytes, record: bytes) -> bytes | None:
        """It again; None where anything has changed."""
        into = memoryview(bytearray(len(stored) + 16))
        return bytes(into[: len(stored)]) if self.decrypt_into(into, stored, place, record) else None

    def decrypt_into(self, into: memoryview, stored: bytes | memoryview, place: bytes, record: bytes) -> bool:
        """Into memory that has room for a block more, which the library wants; False where anything has changed. 1 MiB
        takes 0.11 to 0.25 ms, as memory is warm or cold; newer versions of the library let other threads run."""
        if len(record) != RECORD:
            return False
        working = Cipher(self._key, GCM(record[:_NONCE], record[_NONCE:])).decryptor()
        working.authenticate_additional_data(place)
        try:
            working.update_into(stored, into)
            working.finalize()  # only now it is known to be what was encrypted
        except InvalidTag:
            return False
        return True
