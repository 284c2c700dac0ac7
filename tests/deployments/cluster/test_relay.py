"""The relay between Ray's processes of a member and the GCS, over loopback."""

import socket
import threading
from collections.abc import Iterator

import pytest

from deployments.cluster.relay import GcsRelay

HOST = "127.0.0.1"
TIMEOUT_S = 20.0


class Echo:
    """A server that answers each message with its name in front."""

    def __init__(self, name: bytes):
        self._name = name
        self._server = socket.create_server((HOST, 0))
        self.address: tuple[str, int] = self._server.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client:
            while said := client.recv(65536):
                client.sendall(self._name + said)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture
def old() -> Iterator[Echo]:
    made = Echo(b"old ")
    yield made
    made.close()


@pytest.fixture
def new() -> Iterator[Echo]:
    made = Echo(b"new ")
    yield made
    made.close()


@pytest.fixture
def relay(old: Echo) -> Iterator[GcsRelay]:
    made = GcsRelay(HOST, 0, old.address)
    yield made
    made.stop()


def connect(relay: GcsRelay) -> socket.socket:
    return socket.create_connection((HOST, relay.port), TIMEOUT_S)


def ask(client: socket.socket, said: bytes) -> bytes:
    client.sendall(said)
    return client.recv(65536)


def test_a_new_target_ends_connections_and_answers_the_next_ones(relay: GcsRelay, old: Echo, new: Echo):
    with connect(relay) as one, connect(relay) as other:
        assert [ask(one, b"1"), ask(other, b"2"), ask(one, b"3")] == [b"old 1", b"old 2", b"old 3"]
        relay.connect_to(old.address)
        assert ask(one, b"4") == b"old 4", "nothing has changed"
        relay.connect_to(new.address)
        assert one.recv(100) == other.recv(100) == b""
    with connect(relay) as one:
        assert ask(one, b"5") == b"new 5" and relay.target == new.address


def test_a_target_that_is_away_ends_the_connection_and_may_come_back(relay: GcsRelay, new: Echo):
    with socket.create_server((HOST, 0)) as closed:
        away = closed.getsockname()
    relay.connect_to(away)
    with connect(relay) as one:
        assert one.recv(100) == b""
    relay.connect_to(new.address)
    with connect(relay) as one:
        assert ask(one, b"1") == b"new 1"


def test_another_machine_is_not_relayed(old: Echo):
    own = "127.0.0.2"
    try:
        relay = GcsRelay(own, 0, old.address)
    except OSError:
        pytest.skip(f"{own} is no address of this machine")
    try:
        with socket.create_connection((own, relay.port), TIMEOUT_S, source_address=("127.0.0.3", 0)) as stranger:
            assert stranger.recv(100) == b""
        with socket.create_connection((own, relay.port), TIMEOUT_S, source_address=(own, 0)) as client:
            assert ask(client, b"1") == b"old 1"
    finally:
        relay.stop()
