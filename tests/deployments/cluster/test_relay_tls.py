"""The relay of a member in a cluster with TLS: gRPC's processes of this machine reach the GCS, and no one else."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest

from deployments.cluster.ledger import revoke
from deployments.cluster.mutual_tls import MachineTls
from deployments.cluster.relay import GcsRelay
from tests.deployments.cluster.machines import HEAD
from tests.deployments.cluster.tls_machines import MEMBER, TlsHead, TlsMember

TIMEOUT_S = 20.0


class Gcs:
    """A server with the head's certificate, which gives back what it gets."""

    def __init__(self, tls: MachineTls):
        self._tls = tls
        self._server = socket.create_server((HEAD, 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self.alpn: list[str | None] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), self._tls.accept_machine(client) as encrypted:
            self.alpn.append(encrypted.selected_alpn_protocol())
            while said := encrypted.recv(65536):
                encrypted.sendall(said)

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def gcs(head: TlsHead) -> Iterator[Gcs]:
    made = Gcs(MachineTls(head.folder.tls))
    yield made
    made.close()


@pytest.fixture
def relay(member: TlsMember, gcs: Gcs) -> Iterator[GcsRelay]:
    made = GcsRelay(MEMBER, 0, gcs.address, member.tls)
    yield made
    made.stop()


def echoed(port: int, tls: MachineTls, text: bytes) -> bytes:
    """Return what comes back; b'' if the connection ends."""
    with socket.create_connection((MEMBER, port), TIMEOUT_S) as connection, tls.connect(connection) as encrypted:
        encrypted.sendall(text)
        got = b""
        while len(got) < len(text) and (said := encrypted.recv(65536)):
            got += said
        return got


def test_what_ray_sends_reaches_the_gcs_by_grpc_s_protocol(relay: GcsRelay, gcs: Gcs, member: TlsMember):
    text = bytes(range(256)) * 4096
    assert echoed(relay.port, member.tls, text) == text
    assert gcs.alpn == ["h2"]


def test_without_the_machine_s_certificate_nothing_is_relayed(relay: GcsRelay, gcs: Gcs, head: TlsHead):
    with socket.create_connection((MEMBER, relay.port), TIMEOUT_S) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while said := plain.recv(65536):
                assert said[:1] == b"\x15", "an alert of TLS"
    context = ssl.create_default_context(cadata=head.folder.tls.authority.read_text())
    with (
        socket.create_connection((MEMBER, relay.port), TIMEOUT_S) as connection,
        context.wrap_socket(connection, server_hostname=MEMBER) as guest,
    ):
        guest.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert guest.recv(65536) == b""
    assert gcs.alpn == []


def test_a_revoked_member_relays_nothing_to_a_gcs_that_asks_the_ledger(
    relay: GcsRelay, gcs: Gcs, head: TlsHead, member: TlsMember
):
    assert echoed(relay.port, member.tls, b"before") == b"before"
    revoke(head.folder, MEMBER)
    assert echoed(relay.port, member.tls, b"after") == b""


def test_a_gcs_of_another_machine_is_not_relayed_to(member: TlsMember):
    """A member that listens in place of the head has a certificate of the cluster, but of another address."""
    impostor = Gcs(member.tls)
    relay = GcsRelay(MEMBER, 0, impostor.address, member.tls)
    assert echoed(relay.port, member.tls, b"secret") == b"" and impostor.alpn == []
    relay.stop()
    impostor.close()
