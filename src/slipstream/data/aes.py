"""AES-256-GCM by the package cryptography (extra [encrypt]); imported only where something is encrypted."""

import secrets

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

_NONCE, _TAG = 12, 16
RECORD = _NONCE + _TAG
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

    def decrypt(self, stored: bytes | memoryview, place: bytes, record: bytes) -> memoryview | None:
        """It again, or None where anything has changed. 1 MiB takes an eighth of a millisecond."""
        if len(record) != RECORD:
            return None
        working = Cipher(self._key, GCM(record[:_NONCE], record[_NONCE:])).decryptor()
        working.authenticate_additional_data(place)
        opened = np.empty(len(stored) + _TAG, np.uint8)  # the library wants room for a block more
        try:
            size = working.update_into(stored, opened.data)
            working.finalize()  # only now it is known to be what was encrypted
        except InvalidTag:
            return None
        return opened.data[:size]
