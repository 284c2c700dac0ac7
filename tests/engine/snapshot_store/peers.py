"""A server of snapshots, clients of it, and a relay between them that damages what the server sends."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from engine.snapshot_store.files import SnapshotFiles
from engine.snapshot_store.format import SnapshotMeta
from engine.snapshot_store.greeting import Identity
from engine.snapshot_store.snapshot_client import Fetched, SnapshotClient
from engine.snapshot_store.snapshot_server import SnapshotServer
from tests.engine.snapshot_store.snapshots import MODEL, WAIT_S, Tier

TOKEN = b"secret of the cluster"
ROOMY = 1 << 40

Damage = Callable[[bytes, int], bytes]


class Relay:
    """Passes bytes between clients and a server.

    Args:
        address: Of the server.
        damage: Gets what the server sends, and the number of bytes before it; returns what the client gets; if that is
            shorter, the connection ends.
    """

    def __init__(self, address: str, damage: Damage):
        self._server = address.rpartition(":")[0], int(address.rpartition(":")[2])
        self._damage = damage
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_passed = 0
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._server)
                threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()
                threading.Thread(target=self._damage_on, args=(server, client), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    def _damage_on(self, source: socket.socket, sink: socket.socket) -> None:
        with source, sink, contextlib.suppress(OSError):
            num_before = 0
            while data := source.recv(1 << 16):
                passed = self._damage(data, num_before)
                sink.sendall(passed)
                if len(passed) < len(data):
                    break
                num_before += len(data)
                self.num_passed = num_before
            for one in (source, sink):
                one.shutdown(socket.SHUT_RDWR)


def cut_at(position: int) -> Damage:
    """End the connection once `position` bytes have passed."""

    return lambda data, num_before: data[: position - num_before]


def flip_at(position: int) -> Damage:
    """Invert the byte at `position`."""

    def damage(data: bytes, num_before: int) -> bytes:
        index = position - num_before
        if not 0 <= index < len(data):
            return data
        return data[:index] + bytes([data[index] ^ 0xFF]) + data[index + 1 :]

    return damage


@dataclass
class Peers:
    """Two nodes: `there` has snapshots and a server, `here` gets them."""

    path: Path
    tiers: list[Tier] = field(default_factory=list)
    open: list[SnapshotServer | SnapshotClient | Relay] = field(default_factory=list)

    def files(self, name: str, max_bytes: float = 2**30, fingerprint: str = MODEL) -> SnapshotFiles:
        self.tiers.append(Tier(self.path / name))
        return self.tiers[-1].open(max_bytes, fingerprint)

    def serve(self, files: SnapshotFiles, fingerprint: str = MODEL, token: bytes = TOKEN, **more) -> SnapshotServer:
        server = SnapshotServer(files, Identity(token, fingerprint), "127.0.0.1", **more)
        self.open.append(server)
        return server

    def client(self, files: SnapshotFiles, fingerprint: str = MODEL, token: bytes = TOKEN) -> SnapshotClient:
        client = SnapshotClient(files, Identity(token, fingerprint))
        self.open.append(client)
        return client

    def relay(self, address: str, damage: Damage) -> Relay:
        self.open.append(Relay(address, damage))
        return self.open[-1]  # type: ignore[return-value]

    def close(self) -> None:
        for one in reversed(self.open):
            one.close()
        for tier in self.tiers:
            tier.close()


def fetch(client: SnapshotClient, address: str, meta: SnapshotMeta, max_bytes: int = ROOMY) -> Fetched:
    return client.fetch(address, meta.digest, meta.num_tokens, max_bytes).done.result(WAIT_S)


def bytes_of(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in os.listdir(path)}
