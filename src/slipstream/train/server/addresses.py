"""Where servers listen, and the word by which those of a run know each other: a fleet says both in the environment."""

import os
import secrets
import socket

SERVERS = "SLIPSTREAM_SERVERS"
"""`host:port,host:port`: an address for each server, at which it listens and workers find it."""
TOKEN = "SLIPSTREAM_TOKEN"

Address = tuple[str, int]


def addresses(servers: int) -> list[Address]:
    """As the fleet has said."""
    named = os.environ.get(SERVERS, "").split(",")
    split = [name.rpartition(":") for name in named if name]
    if len(split) != servers or not all(host and port.isdigit() for host, _, port in split):
        raise ValueError(f"{SERVERS} must name {servers} servers as host:port, and is {os.environ.get(SERVERS)!r}")
    return [(host.strip("[]"), int(port)) for host, _, port in split]


def token() -> str:
    """The run's own."""
    return os.environ[TOKEN]


def on_this_machine(servers: int) -> dict[str, str]:
    """For a fleet on one machine: free ports, and a new token."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(servers)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return {SERVERS: ",".join(f"127.0.0.1:{port}" for port in ports), TOKEN: secrets.token_hex(16)}
