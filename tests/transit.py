"""A key service on this machine that answers as the transit engine of Vault does (no such server can be had here)."""

import base64
import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

TOKEN = "s.not-to-be-seen"


class Transit:
    """POST /v1/transit/encrypt/:name and /v1/transit/decrypt/:name, as its documentation has them."""

    def __init__(self, *names: str) -> None:
        keys = {name: AESGCM(secrets.token_bytes(32)) for name in names}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = reply(self.path, self.headers.get("X-Vault-Token"), body, keys)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def reply(path: str, token: str | None, body: Any, keys: dict[str, AESGCM]) -> tuple[int, dict[str, Any]]:
    if token != TOKEN:
        return 403, {"errors": ["permission denied"]}
    call, name = path.removeprefix("/v1/transit/").split("/")
    if name not in keys:
        return 400, {"errors": ["encryption key not found"]}
    if call == "encrypt":
        nonce = secrets.token_bytes(12)
        sealed = nonce + keys[name].encrypt(nonce, base64.b64decode(body["plaintext"], validate=True), None)
        return 200, {"data": {"ciphertext": f"vault:v1:{base64.b64encode(sealed).decode()}", "key_version": 1}}
    sealed = base64.b64decode(body["ciphertext"].removeprefix("vault:v1:"))
    try:
        opened = keys[name].decrypt(sealed[:12], sealed[12:], None)
    except InvalidTag:
        return 400, {"errors": ["cipher: message authentication failed"]}
    return 200, {"data": {"plaintext": base64.b64encode(opened).decode()}}
