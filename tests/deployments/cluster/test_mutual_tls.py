"""Machines of a cluster with TLS: who gets a certificate, and who is refused, on loopback and without Ray."""

import base64
import contextlib
import socket
import ssl
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from deployments.cluster import ports, proof_server
from deployments.cluster.certificates import (
    MAX_REQUEST_CHARS,
    Authority,
    RequestRefused,
    days_left,
    new_key,
    signing_request,
)
from deployments.cluster.facts import read_checkpoint
from deployments.cluster.folder import ClusterFolder, FolderError
from deployments.cluster.head_service import LOG_PATH, MEMBER_PATH
from deployments.cluster.issuing import SIGN_PATH, read_authority, write_certificate
from deployments.cluster.join_client import HeadClient, HeadRefused, enrol, guest_client
from deployments.cluster.join_server import FACTS_PATH, JoinServer
from deployments.cluster.join_token import BadToken, JoinToken, read_join_token, renew_join_token
from deployments.cluster.ledger import Ledger, fingerprint_of, note_issued, revoke
from deployments.cluster.mutual_tls import GuestTls, MachineTls, machine_tls, machine_tls_in
from deployments.cluster.proof_client import NoAnswer, NotOfCluster, ProofClient, Revoked
from deployments.cluster.proof_server import ProofServer
from deployments.serve_run.head_secrets import head_secrets
from tests.deployments.cluster.machines import HEAD, THIRD
from tests.deployments.cluster.tls_machines import MEMBER, TlsHead, TlsMember

WAIT_S = 20.0


def certified(folder: ClusterFolder, authority: Authority, address: str, days: float = 1) -> TlsMember:
    """Return the machine of a folder with another certificate, which the ledgers know."""
    key = new_key()
    certificate = authority.issue(signing_request(key, address), address, days)
    note_issued(folder, certificate, address)
    write_certificate(folder, key, certificate)
    return TlsMember(folder)


def test_a_machine_that_joins_gets_a_certificate_of_its_own_key_and_the_token(head: TlsHead, member: TlsMember):
    tls = member.folder.tls
    assert member.folder.token() == head.folder.token() != head.join_token.secret
    for file in (tls.authority, tls.certificate, tls.key, tls.ledger, member.folder.token_file):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not tls.authority_key.exists() and not member.folder.join_token.exists()
    assert tls.key.read_text() not in head.folder.tls.ledger.read_text()
    assert [one.address for one in Ledger(tls.ledger).machines()] == [HEAD, MEMBER]
    assert days_left(tls.certificate.read_text()) > 365
    assert member.head_client(head).facts().seen_address == MEMBER, "without the token, by its certificate"
    body, _ = member.client().ask(MEMBER_PATH, 2**20)
    assert b'"term": 1' in body


def test_a_machine_that_joins_again_gets_a_new_certificate_and_the_old_one_opens_nothing(
    head: TlsHead, member: TlsMember
):
    again = member.head_client(head)
    enrol(member.folder, again, None, MEMBER)
    with pytest.raises(NotOfCluster, match="its certificate was replaced"):
        member.client().ask(MEMBER_PATH, 2**20)
    assert TlsMember(member.folder).client().ask(MEMBER_PATH, 2**20)[0]
    assert [one.address for one in Ledger(head.folder.tls.ledger).machines()] == [HEAD, MEMBER]


def test_a_head_with_another_certificate_is_recognized_before_anything_is_sent(head: TlsHead):
    token = head.join_token
    another = JoinToken(token.secret, fingerprint_of(Authority.new().certificate))
    with pytest.raises(HeadRefused, match="is not the head that the token is of: its certificate has the fingerprint"):
        guest_client(head.address, another)
    assert guest_client(head.address, token).facts()


def test_a_token_with_another_secret_gets_no_certificate(head: TlsHead):
    another = JoinToken("0" * 64, head.join_token.fingerprint)
    client = guest_client(head.address, another)
    for ask in (client.facts, lambda: client.enrol(MEMBER)):
        with pytest.raises(HeadRefused, match="the token is not that of this cluster"):
            ask()
    assert [one.address for one in Ledger(head.folder.tls.ledger).machines()] == [HEAD]


def test_a_guest_gets_only_what_joining_needs(head: TlsHead):
    guest = GuestTls(head.folder.tls.authority.read_text())
    for secret in (head.join_token.secret, head.folder.token()):
        client = ProofClient(HEAD, ports.JOIN, secret, tls=guest)
        for path in (MEMBER_PATH, LOG_PATH):
            with pytest.raises(NotOfCluster, match="it has no certificate of this cluster"):
                client.ask(path, 2**20)
    with pytest.raises(NotOfCluster, match="the token is not that"):
        ProofClient(HEAD, ports.JOIN, head.folder.token(), tls=guest).ask(FACTS_PATH, 2**20)


def test_a_guest_with_the_token_copies_the_model_and_one_without_it_gets_no_file(head: TlsHead, tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"weight": np.ones((8, 8), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    head.models = [(str(folder), None)]
    model = read_checkpoint(str(folder), None)
    guest = guest_client(head.address, head.join_token)
    files = {file.name: guest.model_piece(model, file, 0) for file in guest.model_files(model).files}
    assert files == {path.name: path.read_bytes() for path in folder.iterdir()}
    stranger = guest_client(head.address, JoinToken("0" * 64, head.join_token.fingerprint))
    with pytest.raises(HeadRefused, match="the token is not that of this cluster"):
        stranger.model_files(model)
    with pytest.raises(HeadRefused, match="the token is not that of this cluster"):
        stranger.model_piece(model, guest.model_files(model).files[0], 0)


def test_a_certificate_is_issued_only_for_the_address_that_asks(head: TlsHead):
    client = guest_client(head.address, head.join_token)
    with pytest.raises(HeadRefused, match=f"a certificate for {THIRD} is asked for from {MEMBER}"):
        client.enrol(THIRD)
    guest = ProofClient(HEAD, ports.JOIN, head.join_token.secret, tls=GuestTls(head.folder.tls.authority.read_text()))
    with pytest.raises(NotOfCluster, match="the signing request cannot be read"):
        guest.ask(f"{SIGN_PATH}?address={MEMBER}&request=none", 2**20)


@pytest.mark.parametrize("request_of", ["no request", "x" * (MAX_REQUEST_CHARS + 1)], ids=["text", "long"])
def test_what_is_no_request_is_not_signed(request_of: str):
    with pytest.raises(RequestRefused, match="signing request"):
        Authority.new().issue(request_of, MEMBER)


def test_a_changed_request_is_not_signed():
    begin, *lines, end = signing_request(new_key(), MEMBER).splitlines()
    der = bytearray(base64.b64decode("".join(lines)))
    der[-1] ^= 1  # of the signature
    changed = "\n".join([begin, base64.b64encode(der).decode(), end])
    with pytest.raises(RequestRefused, match="is not signed with its own key"):
        Authority.new().issue(changed, MEMBER)


def test_a_revoked_machine_is_refused_at_once_by_the_head_and_by_members_and_cannot_join_again(
    head: TlsHead, member: TlsMember, tmp_path: Path
):
    old = head.join_token
    assert member.client().ask(MEMBER_PATH, 2**20)[0]
    assert revoke(head.folder, MEMBER) == 1 and revoke(head.folder, MEMBER) == 0
    renew_join_token(head.folder, old.fingerprint)
    with pytest.raises(Revoked, match="its certificate was revoked"):
        member.client().ask(MEMBER_PATH, 2**20)
    with pytest.raises(HeadRefused, match="its certificate was revoked"):
        member.head_client(head).facts()
    with pytest.raises(HeadRefused, match="the token is not that of this cluster"):
        guest_client(head.address, old).enrol(MEMBER)
    with pytest.raises(Revoked):
        member.watch().tick()
    back = head.join(tmp_path / "back")
    assert back.client().ask(MEMBER_PATH, 2**20)[0], "with the new token"


def test_members_hear_of_a_new_and_of_a_revoked_machine_from_the_head(head: TlsHead, member: TlsMember):
    authority, ledger = read_authority(head.folder), Ledger(member.folder.tls.ledger)
    watch = member.watch()
    assert watch.tick()
    certificate = authority.issue(signing_request(new_key(), THIRD), THIRD)
    der = ssl.PEM_cert_to_DER_cert(certificate)
    assert ledger.standing(der) == "unknown", "the authority's signature alone opens nothing"
    note_issued(head.folder, certificate, THIRD)
    assert watch.tick() and ledger.standing(der) == "admitted"
    revoke(head.folder, THIRD)
    assert watch.tick() and ledger.standing(der) == "revoked"


def test_a_member_that_copies_the_log_gets_the_authority_s_key(head: TlsHead, member: TlsMember):
    watch, key = member.watch(), member.folder.tls.authority_key
    for _ in range(2):
        watch.tick()
    assert key.read_text() == head.folder.tls.authority_key.read_text() and stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_member_with_the_authority_s_key_goes_on_as_the_head_with_its_own_certificate(
    head: TlsHead, member: TlsMember
):
    with pytest.raises(FolderError, match=r"authority\.pem and its key, cannot be read.*--new-cluster"):
        head_secrets(member.folder, MEMBER, has_tls=True)
    watch, before = member.watch(), member.folder.tls.certificate.read_text()
    for _ in range(2):
        watch.tick()
    head_secrets(member.folder, MEMBER, has_tls=True)
    token = read_join_token(member.folder)
    assert member.folder.tls.certificate.read_text() == before
    assert token is not None and token.fingerprint == head.join_token.fingerprint
    issued = read_authority(member.folder).issue(signing_request(new_key(), THIRD), THIRD)
    note_issued(member.folder, issued, THIRD)
    assert [one.address for one in Ledger(member.folder.tls.ledger).machines()] == [HEAD, MEMBER, THIRD]


def test_a_revoked_machine_with_the_authority_s_key_cannot_pass_itself_off_as_the_head(
    head: TlsHead, member: TlsMember, tmp_path: Path
):
    rogue = ClusterFolder(tmp_path / "rogue")
    rogue.make()
    rogue.write(rogue.tls.authority, head.folder.tls.authority.read_text())
    as_head = certified(rogue, read_authority(head.folder), HEAD)
    rogue.write(rogue.tls.ledger, head.folder.tls.ledger.read_text())
    with pytest.raises(NotOfCluster, match="its certificate was replaced, or this machine does not know it yet"):
        ProofClient(HEAD, ports.JOIN, head.folder.token(), tls=as_head.tls).ask(MEMBER_PATH, 2**20)
    server = ProofServer(HEAD, 0, head.folder.token(), {}, as_head.tls)
    server.start()
    with pytest.raises(NotOfCluster, match="its certificate is unknown"):
        member.client(HEAD, server.port).ask(MEMBER_PATH, 2**20)
    server.stop()


def test_a_certificate_of_another_authority_is_refused_by_both_ends(head: TlsHead, member: TlsMember, tmp_path: Path):
    other = ClusterFolder(tmp_path / "other")
    other.make()
    other.write_token(head.folder.token())
    authority = Authority.new()
    other.write(other.tls.authority, head.folder.tls.authority.read_text())
    stranger = certified(other, authority, MEMBER)
    with pytest.raises((NotOfCluster, NoAnswer)):
        stranger.client().ask(MEMBER_PATH, 2**20)
    other.write(other.tls.authority, authority.certificate)
    server = ProofServer(MEMBER, 0, head.folder.token(), {}, TlsMember(other).tls)
    server.start()
    with pytest.raises(NotOfCluster, match="its certificate is refused"):
        member.client(MEMBER, server.port).ask(MEMBER_PATH, 2**20)
    server.stop()


def test_an_expired_certificate_is_refused_by_both_ends(head: TlsHead, member: TlsMember):
    expired = certified(member.folder, read_authority(head.folder), MEMBER, days=-0.5)
    note_issued(head.folder, member.folder.tls.certificate.read_text(), MEMBER)
    with pytest.raises((NotOfCluster, NoAnswer)):
        expired.client().ask(MEMBER_PATH, 2**20)
    server = ProofServer(MEMBER, 0, head.folder.token(), {}, expired.tls)
    server.start()
    with pytest.raises(NotOfCluster, match="certificate has expired"):
        ProofClient(MEMBER, server.port, "token", tls=GuestTls(head.folder.tls.authority.read_text())).ask("/", 1)
    server.stop()


def test_a_member_cannot_pass_itself_off_as_the_machine_of_another_address(head: TlsHead, member: TlsMember):
    server = ProofServer(THIRD, 0, head.folder.token(), {}, member.tls)
    server.start()
    with pytest.raises(NotOfCluster, match=r"its certificate is refused \(.*127\.0\.0\.5"):
        member.client(THIRD, server.port).ask(MEMBER_PATH, 2**20)
    server.stop()


def hello(size: int) -> Callable[[socket.socket], None]:
    """Send so many bytes of the first message of a handshake, and wait for the end of the connection."""

    def send(connection: socket.socket) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname=HEAD)
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        with contextlib.suppress(ConnectionResetError):
            connection.sendall(outgoing.read()[:size])
            connection.recv(1)

    return send


def test_half_a_handshake_ends_and_others_are_answered_meanwhile(
    head: TlsHead, member: TlsMember, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(proof_server, "TIMEOUT_S", 1.0)
    with contextlib.ExitStack() as stack:
        threads = []
        for size in range(0, 300, 300 // (proof_server.MAX_CONNECTIONS - 1)):
            connection = stack.enter_context(socket.create_connection((HEAD, ports.JOIN), WAIT_S))
            threads.append(threading.Thread(target=hello(size), args=(connection,)))
            threads[-1].start()
        assert len(threads) >= proof_server.MAX_CONNECTIONS - 1
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "the server waits for ever"
    assert member.client().ask(MEMBER_PATH, 2**20)[0]


def test_tls_and_its_absence_are_told_apart(head: TlsHead, member: TlsMember):
    with pytest.raises(NoAnswer):
        ProofClient(HEAD, ports.JOIN, head.folder.token()).ask(MEMBER_PATH, 2**20)
    with pytest.raises(HeadRefused, match="no head answers"):
        HeadClient(head.address, head.join_token.secret).facts()
    plain = JoinServer(HEAD, 0, head.folder.token(), dict)
    plain.start()
    with pytest.raises(NotOfCluster, match="it does not speak TLS"):
        member.client(HEAD, plain.port).ask(MEMBER_PATH, 2**20)
    with pytest.raises(HeadRefused, match="it does not speak TLS"):
        guest_client(f"{HEAD}:{plain.port}", head.join_token)
    plain.stop()


def test_a_recorder_on_the_way_reads_no_secret(head: TlsHead, tmp_path: Path):
    """All bytes of a join and of a report, both ways."""
    recorded = bytearray()
    with socket.create_server((MEMBER, 0)) as listener:
        listener.settimeout(WAIT_S)
        stopped = threading.Event()
        thread = threading.Thread(target=record, args=(listener, recorded, stopped))
        thread.start()
        token, folder = head.join_token, ClusterFolder(tmp_path / "member")
        client = guest_client(f"{MEMBER}:{listener.getsockname()[1]}", token)
        enrol(folder, client, token, MEMBER)
        stopped.set()
        socket.create_connection(listener.getsockname()).close()
        thread.join(WAIT_S)
    assert len(recorded) > 4000 and token.fingerprint is not None
    secrets = (token.secret, folder.token(), "certificate", "address", "X-Orchard")
    assert [secret for secret in secrets if secret.encode() in recorded] == []


def record(listener: socket.socket, recorded: bytearray, stopped: threading.Event) -> None:
    """Pass connections on to the head, and keep what passes."""

    def passes(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                recorded.extend(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    while True:
        client, _ = listener.accept()
        if stopped.is_set():
            client.close()
            return
        with client, socket.create_connection((HEAD, ports.JOIN)) as server:
            back = threading.Thread(target=passes, args=(server, client))
            back.start()
            passes(client, server)
            back.join(WAIT_S)


def test_broken_files_are_named(member: TlsMember):
    files = member.folder.tls
    for file, text in ((files.key, "no key"), (files.authority, "no certificate"), (files.certificate, "nothing")):
        kept = file.read_text()
        file.write_text(text)
        with pytest.raises(FolderError, match=r"machine\.pem, cannot be used: .*`orchard join HEAD --token TOKEN`"):
            machine_tls(member.folder)
        file.write_text(kept)
    files.ledger.write_text("[1]")
    with pytest.raises(FolderError, match=r"machines\.json cannot be read"):
        Ledger(files.ledger).machines()


def test_ray_s_processes_find_their_certificate_in_their_environment(member: TlsMember, tmp_path: Path):
    environ = {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_CERT": str(member.folder.tls.certificate)}
    assert isinstance(machine_tls_in(environ), MachineTls)
    assert machine_tls_in({}) is None
    assert machine_tls_in({**environ, "RAY_TLS_SERVER_CERT": str(tmp_path / "own.pem")}) is None, "another cluster's"


@pytest.mark.parametrize(
    ("text", "said"), [("0" * 64, "an earlier version"), ("orchard1-" + "0" * 64, "of 73 characters"), ("", "of 0")]
)
def test_what_is_no_token_is_refused_with_the_remedy(text: str, said: str):
    with pytest.raises(BadToken, match=f"{said}.*join_token"):
        JoinToken.parse(text)
    token = JoinToken("0" * 64, None)
    assert JoinToken.parse(str(token)) == token and "0000" not in repr(token)
