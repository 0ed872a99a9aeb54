"""A key that never leaves its service: the transit engine of HashiCorp Vault; OpenBao has the same calls."""

import base64
import json
import os
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

_TIMEOUT = 10.0
_ENGINE = "transit"


class Vault:
    """Where the service is, and who one is, say the variables that its own program reads: VAULT_ADDR, VAULT_TOKEN."""

    def __init__(self, name: str) -> None:
        self._key = name
        self.name = f"vault:{name}"
        missing = [variable for variable in ("VAULT_ADDR", "VAULT_TOKEN") if not os.environ.get(variable)]
        if missing:
            raise ValueError(f"{self.name} needs {' and '.join(missing)} in the environment")
        self._address, self._token = os.environ["VAULT_ADDR"].rstrip("/"), os.environ["VAULT_TOKEN"]
        if not self._address.startswith(("http://", "https://")):
            raise ValueError("VAULT_ADDR must begin with https:// or http://")

    def wrap(self, key: bytes) -> str:
        return self._ask("encrypt", {"plaintext": base64.b64encode(key).decode()}, "ciphertext")

    def unwrap(self, wrapped: str) -> bytes:
        return base64.b64decode(self._ask("decrypt", {"ciphertext": wrapped}, "plaintext"))

    def _ask(self, call: str, values: dict[str, str], answer: str) -> str:
        url = f"{self._address}/v1/{_ENGINE}/{call}/{quote(self._key, safe='')}"
        request = Request(url, json.dumps(values).encode(), {"X-Vault-Token": self._token})
        try:
            with urlopen(request, timeout=_TIMEOUT) as reply:
                return str(json.load(reply)["data"][answer])
        except HTTPError as error:
            raise ValueError(f"{url} answered {error.code}: {_reason(error)}") from None
        except (URLError, TimeoutError, ConnectionError) as error:
            raise ValueError(f"{url} does not answer: {getattr(error, 'reason', error)}") from None
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{url} did not answer as a transit engine does; is VAULT_ADDR right?") from None


def _reason(error: HTTPError) -> str:
    try:
        found: Any = json.load(error)["errors"]
        return "; ".join(map(str, found)) or error.reason
    except (ValueError, KeyError, TypeError):
        return error.reason
