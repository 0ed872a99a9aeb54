"""Hosts on one machine: network namespaces behind a switch, with slow or long links between them.

    with hosts(4, rate="100mbit") as network:      # or delay=0.005, or neither
        processes = [network.start(host, command) for host in range(4)]

Nothing outside these namespaces is touched, and all of it goes when the block ends, however it ends (but for kill -9;
`hosts` is for the main thread, because it listens to SIGTERM). A rate is kept by
the kernel (`tc tbf`, at both ends of every host's link). The kernel here has no delay: with one, a process of its own
hands packets from host to host and lets each lie for as long (`python network.py …`, the switch).
"""

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

INTERFACE = "eth0"
MTU = 9000
"""As in the networks of clouds."""
_numbers = count()


class Network:
    """Some hosts that reach each other at `addresses`."""

    def __init__(self, names: list[str], hub: str, stack: ExitStack) -> None:
        self.names, self._hub, self._stack = names, hub, stack
        self.addresses = [_address(host) for host in range(len(names))]

    def start(self, host: int, command: list[str], environment: dict[str, str] | None = None, **more: Any) -> Any:
        """Start a process on a host; it is ended with the network, if it has not ended before."""
        words = ["ip", "netns", "exec", self.names[host], *command]
        ours = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
        process = subprocess.Popen(words, env={**os.environ, **ours, **(environment or {})}, **more)
        self._stack.callback(_end, process)
        return process

    def sent(self, host: int) -> int:
        """Bytes that a host has sent so far."""
        words = ["ip", "-n", self.names[host], "-s", "-j", "link", "show", INTERFACE]
        shown = subprocess.run(words, check=True, capture_output=True).stdout
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    @contextmanager
    def cut(self, host: int) -> Iterator[None]:
        """Nothing reaches this host, nor leaves it, as if its cable were pulled. Not where there is a delay."""
        _ip("-n", self._hub, "link", "set", f"port{host}", "down")
        try:
            yield
        finally:
            _ip("-n", self._hub, "link", "set", f"port{host}", "up")

    def enter(self, host: int) -> None:
        """Move the calling process, which must have but one thread, to a host."""
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        self.visit(host)

    def visit(self, host: int) -> None:
        """Move the calling thread alone to a host."""
        _enter(self.names[host])


@contextmanager
def hosts(number: int, rate: str | None = None, delay: float = 0.0) -> Iterator[Network]:
    """So many hosts: each sends and receives at `rate` (as tc writes it: 100mbit) at most, and packets arrive `delay`
    seconds after they were sent."""
    own = f"ss{os.getpid()}x{next(_numbers)}"
    names, hub = [f"{own}h{host}" for host in range(number)], f"{own}hub"
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)))
        for name in names:
            _add_namespace(name, stack)
        if delay:
            _join_by_process(names, delay, stack)
        else:
            _join_by_bridge(hub, names, rate, stack)
        if rate:
            for name in names:
                _limit(name, INTERFACE, rate)
        yield Network(names, hub, stack)


def missing() -> str | None:
    """Why there can be no hosts here; None if there can."""
    if not shutil.which("ip") or not shutil.which("tc"):
        return "ip and tc (iproute2) are not installed"
    try:
        with hosts(1):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made: {error}"


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _add_namespace(name: str, stack: ExitStack) -> None:
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "del", name)
    _ip("-n", name, "link", "set", "lo", "up")


def _join_by_bridge(hub: str, names: list[str], rate: str | None, stack: ExitStack) -> None:
    _add_namespace(hub, stack)
    _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
    _ip("-n", hub, "link", "set", "bridge", "mtu", str(MTU), "up")
    for host, name in enumerate(names):
        port = f"port{host}"
        _ip("-n", hub, "link", "add", port, "mtu", str(MTU), "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _ip("-n", hub, "link", "set", port, "master", "bridge", "up")
        _configure(host, name)
        if rate:
            _limit(hub, port, rate)


def _configure(host: int, name: str) -> None:
    _ip("-n", name, "addr", "add", f"{_address(host)}/24", "dev", INTERFACE)
    _ip("-n", name, "link", "set", INTERFACE, "mtu", str(MTU), "txqueuelen", "10000", "up")


def _limit(name: str, interface: str, rate: str) -> None:
    words = ["qdisc", "add", "dev", interface, "root", "tbf", "rate", rate, "burst", "256k", "latency", "100ms"]
    subprocess.run(["tc", "-n", name, *words], check=True, capture_output=True)


def _join_by_process(names: list[str], delay: float, stack: ExitStack) -> None:
    command = [sys.executable, str(Path(__file__)), str(delay), *names]
    switch = subprocess.Popen(command, stdout=subprocess.PIPE)
    stack.callback(_end, switch)
    assert switch.stdout, "it is a pipe"
    if switch.stdout.readline() != b"ready\n":
        raise OSError("the switch between the hosts did not start")
    for host, name in enumerate(names):
        _configure(host, name)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


# --- the switch: a process of its own --------------------------------------------------------------------------------

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


def _enter(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"the namespace {name} cannot be entered")


def _open_interface(name: str) -> int:
    """The other end of a host's interface: its packets are read and written here."""
    _enter(name)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def _switch(interfaces: list[int], delay: float) -> None:
    """Hand packets over by the last byte of their IPv4 destination; all lie equally long, so they stay in order."""
    lying: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = max(0.0, lying[0][0] - time.monotonic()) if lying else None
        for source in select.select(interfaces, [], [], wait)[0]:
            _collect(source, interfaces, lying, delay)
        while lying and lying[0][0] <= time.monotonic():
            _, target, packet = lying.popleft()
            with suppress(OSError):  # a host whose interface is down loses it
                os.write(target, packet)


def _collect(source: int, interfaces: list[int], lying: deque[tuple[float, int, bytes]], delay: float) -> None:
    for _ in range(64):  # then the others have their turn
        try:
            packet = os.read(source, MTU)
        except BlockingIOError:
            return
        host = packet[19] - 1
        if packet[0] >> 4 == 4 and host < len(interfaces):
            lying.append((time.monotonic() + delay, interfaces[host], packet))


def _main() -> None:
    interfaces = [_open_interface(name) for name in sys.argv[2:]]
    os.nice(-10)  # a link does not wait for a processor
    print("ready", flush=True)
    _switch(interfaces, float(sys.argv[1]))


if __name__ == "__main__":
    _main()
