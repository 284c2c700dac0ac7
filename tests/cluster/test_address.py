"""A server of one machine lives on when the machine's address goes away, as when a Mac joins another Wi-Fi."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.namespaces import Machine, ip, machines, why_there_are_none
from tests.e2e.server import ROOT, SHIPPED_CONFIG, START_TIMEOUT_S

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.night("tests/e2e/test_start.py sees that all processes of a server listen on loopback alone"),
]

URL = "http://127.0.0.1:8000"
BODY = {"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "What is 12 + 30?"}]}


@pytest.fixture
def machine() -> Iterator[Machine]:
    if (reason := why_there_are_none()) is not None:
        if os.environ.get("ORCHARD_NAMESPACES") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    with machines(1) as made:
        yield made[0]


@pytest.fixture
def temp_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="orc-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def status_of(machine: Machine) -> int:
    """Ask from within the machine; return the HTTP status."""

    def ask() -> int:
        return httpx.post(f"{URL}/v1/chat/completions", json=BODY, timeout=60, trust_env=False).status_code

    return machine.submit(ask).result(timeout=90)


def test_a_server_answers_after_the_address_and_the_interface_of_its_machine_are_gone(machine: Machine, temp_dir: Path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAY_TMPDIR": str(temp_dir), "HOME": str(temp_dir)}
    log = temp_dir / "serve.log"
    command = [str(Path(sys.executable).parent / "orchard"), "serve", "--config", str(SHIPPED_CONFIG), "--no-dashboard"]
    assert SHIPPED_CONFIG.parent == ROOT
    server = machine.start(command, env, log)
    wait_until(
        lambda: server.poll() is not None or "Orchard is ready" in log.read_text(),
        START_TIMEOUT_S,
        lambda: log.read_text()[-4000:],
    )
    assert server.poll() is None, log.read_text()[-4000:]
    assert status_of(machine) == 200
    ip("-n", machine.name, "addr", "del", f"{machine.address}/24", "dev", "eth0")
    assert [status_of(machine) for _ in range(3)] == [200] * 3
    ip("-n", machine.name, "link", "set", "eth0", "down")
    assert [status_of(machine) for _ in range(3)] == [200] * 3
    assert server.poll() is None, log.read_text()[-4000:]
