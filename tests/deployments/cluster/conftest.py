"""A head with TLS and a machine that has joined it, for the tests of encrypted connections."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployments.cluster.machines import choose_ports
from tests.deployments.cluster.tls_machines import TlsHead, TlsMember


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TlsHead]:
    choose_ports(monkeypatch)
    made = TlsHead(tmp_path / "head")
    yield made
    made.stop()


@pytest.fixture
def member(head: TlsHead, tmp_path: Path) -> TlsMember:
    return head.join(tmp_path / "member")
