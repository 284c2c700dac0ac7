"""`orchard revoke` and `orchard leave --forget`; cluster/test_mutual_tls.py has what a revoked machine is answered."""

import subprocess
from pathlib import Path

import pytest

from deployments.cluster.certificates import new_key, signing_request
from deployments.cluster.folder import HEAD_LOCK, ClusterFolder
from deployments.cluster.issuing import read_authority
from deployments.cluster.join_token import read_join_token
from deployments.cluster.ledger import Ledger, note_issued
from deployments.cluster.membership import write_membership
from deployments.serve_run.head_secrets import head_secrets
from engine.process_lock import ProcessLock
from tests.deployments.commands.conftest import Orchard

HEAD, MEMBER = "10.0.0.1", "10.0.0.2"


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    """The folder of a head whose cluster has one more machine."""
    folder = ClusterFolder(tmp_path / "home" / ".orchard" / "cluster")
    folder.make()
    head_secrets(folder, HEAD, has_tls=True)
    folder.store_log.write_bytes(b"")
    folder.note_started({"address": HEAD, "tls": True})
    certificate = read_authority(folder).issue(signing_request(new_key(), MEMBER), MEMBER)
    note_issued(folder, certificate, MEMBER)
    return folder


def test_a_machine_is_revoked_and_the_token_replaced(orchard: Orchard, folder: ClusterFolder):
    before = read_join_token(folder)
    status, _, noted = orchard("revoke", MEMBER)
    assert status == 0 and f"The certificate of {MEMBER} is revoked" in noted and "--new-cluster" in noted
    after = read_join_token(folder)
    assert before is not None and after is not None and str(folder.join_token) in noted
    assert after.fingerprint == before.fingerprint and after.secret != before.secret and after.secret not in noted
    assert [one.revoked_s is not None for one in Ledger(folder.tls.ledger).machines()] == [False, True]
    status, shown, _ = orchard("revoke")
    assert status == 0 and [line.split()[0] for line in shown.splitlines()] == [HEAD, MEMBER]
    assert shown.splitlines()[0].endswith("valid") and "revoked 20" in shown.splitlines()[1]
    status, _, noted = orchard("revoke", MEMBER)
    assert status == 1 and f"{MEMBER} has no valid certificate; the other machines with one: none" in noted
    assert read_join_token(folder) == after


def test_what_cannot_be_revoked_is_named(orchard: Orchard, folder: ClusterFolder):
    for address, said in ((HEAD, "is the head itself"), ("10.0.0.9", f"the other machines with one: {MEMBER}")):
        status, _, noted = orchard("revoke", address)
        assert status == 1 and said in noted
    folder.tls.authority_key.unlink()
    status, _, noted = orchard("revoke", MEMBER)
    assert status == 1 and "not the head of a cluster with TLS" in noted


def test_a_machine_that_leaves_for_good_deletes_its_secrets(orchard: Orchard, folder: ClusterFolder):
    folder.forget_cluster()
    tls, agent = folder.tls, subprocess.Popen(["sleep", "600"])
    kept = (folder.token_file, tls.certificate, tls.key, tls.authority)
    write_membership(folder, 0, HEAD, "http://127.0.0.1:8000", agent.pid)
    assert orchard("leave")[0] == 0
    agent.wait(10)
    assert all(file.exists() for file in kept), "it can join again without a token"
    assert not tls.authority_key.exists()
    status, _, noted = orchard("leave", "--forget")
    assert status == 0 and "no token and no certificate" in noted
    assert not any(file.exists() for file in (*kept, folder.join_token, tls.ledger))


def test_the_secrets_of_a_head_are_not_forgotten(orchard: Orchard, folder: ClusterFolder):
    lock = ProcessLock(folder.path / HEAD_LOCK)
    agent = subprocess.Popen(["sleep", "600"])
    write_membership(folder, 0, HEAD, "http://127.0.0.1:8000", agent.pid)
    status, _, noted = orchard("leave", "--forget", "--force")
    assert status == 2 and "--forget would delete what the head of this machine needs" in noted
    assert folder.tls.key.exists() and agent.poll() is None
    agent.kill()
    agent.wait()
    lock.release()
