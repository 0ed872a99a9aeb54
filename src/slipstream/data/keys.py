"""Keys of users, which wrap the keys of datasets. Where a user's key is, the environment says; it is never written."""

import base64
import binascii
import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slipstream.data.checks import need_extra
from slipstream.data.vault import Vault

if TYPE_CHECKING:
    from slipstream.data.aes import Aes

KEY, KEY_FILE, KEY_SERVICE = "SLIPSTREAM_DATA_KEY", "SLIPSTREAM_DATA_KEY_FILE", "SLIPSTREAM_DATA_KEY_SERVICE"
BYTES = 32
_PURPOSE = b"slipstream dataset key"


class UserKey(Protocol):
    """What wraps the keys of datasets."""

    name: str
    """What the manifest calls it; it tells nothing of the key."""

    def wrap(self, key: bytes) -> str:
        """The key of a dataset as it may be shown to anybody."""
        ...

    def unwrap(self, wrapped: str) -> bytes:
        """That key again. Raises ValueError."""
        ...


class OwnKey:
    """32 bytes that the user keeps; AES-256-GCM with a random nonce wraps by them."""

    def __init__(self, text: str, where: str) -> None:
        key = _parse(text, where)
        self.name = hashlib.sha256(_PURPOSE + key).hexdigest()[:16]
        self._cipher = cipher_of(key, where)

    def wrap(self, key: bytes) -> str:
        stored, record = self._cipher.encrypt(key, _PURPOSE)
        return (stored + record).hex()

    def unwrap(self, wrapped: str) -> bytes:
        data = bytes.fromhex(wrapped)
        opened = self._cipher.decrypt(data[:BYTES], _PURPOSE, data[BYTES:])
        if opened is None or len(opened) != BYTES:
            raise ValueError("its wrapped key is damaged")
        return opened


def cipher_of(key: bytes, user: str) -> "Aes":
    """AES by this key; `user` is what needs it."""
    need_extra("cryptography", "cryptography", "encrypt", user)
    from slipstream.data.aes import Aes

    return Aes(key)


def new_key() -> str:
    """A fresh key, as text."""
    return base64.b64encode(secrets.token_bytes(BYTES)).decode()


def user_key(needed_for: str) -> tuple[UserKey, str]:
    """The user's key, and the variable that says where it is. Raises ValueError if there is none or more than one."""
    given = [variable for variable in SOURCES if os.environ.get(variable)]
    if not given:
        raise ValueError(
            f"{needed_for} needs a key: set {KEY} (base64 or hex of 32 bytes; `slipstream data new-key` makes one), "
            f"{KEY_FILE} (a file that holds it) or {KEY_SERVICE} (such as vault:NAME)"
        )
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are both set; which key is meant? Remove one")
    return SOURCES[given[0]](os.environ[given[0]]), given[0]


def _of_file(path: str) -> OwnKey:
    try:
        return OwnKey(Path(path).read_text(encoding="utf-8"), f"{KEY_FILE} ({path})")
    except OSError as error:
        raise ValueError(f"{KEY_FILE}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{KEY_FILE}: {path} is no text; it must hold 32 bytes as base64 or hex") from None


def _of_service(text: str) -> UserKey:
    kind, _, name = text.partition(":")
    if kind not in SERVICES or not name:
        raise ValueError(f"{KEY_SERVICE} must be {' or '.join(f'{known}:NAME' for known in SERVICES)}")
    return SERVICES[kind](name)


def _parse(text: str, where: str) -> bytes:
    """Never says what the text was: it may be nearly the key."""
    text = text.strip()
    try:
        key = bytes.fromhex(text) if len(text) == 2 * BYTES else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raise ValueError(f"{where} is neither base64 nor hex; `slipstream data new-key` makes a key") from None
    if len(key) != BYTES:
        raise ValueError(f"{where} holds {len(key)} bytes instead of {BYTES}; `slipstream data new-key` makes a key")
    return key


SERVICES: dict[str, Callable[[str], UserKey]] = {"vault": Vault}
SOURCES: dict[str, Callable[[str], UserKey]] = {
    KEY: lambda text: OwnKey(text, KEY),
    KEY_FILE: _of_file,
    KEY_SERVICE: _of_service,
}
