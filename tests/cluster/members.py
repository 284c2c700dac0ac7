"""Members of a cluster that `orchard` itself makes: machines in network namespaces, each with a home of its own."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.namespaces import Machine, machines, why_there_are_none
from tests.cluster.test_partition import PORT, ROOT, Node

READY_S = 300.0
CONFIG = f"""\
http_options: {{host: 127.0.0.1, port: {PORT}}}
applications:
- name: orchard
  route_prefix: /
  import_path: deployments.app:build_app
  args: {{}}
"""
IN_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
"""A Python program that runs a command in a terminal of its own."""

WITH_SOURCES = f'for folder in deployments engine; do mount --bind "$0/$folder" {ROOT}/$folder || exit; done; exec "$@"'
"""A program of the shell that runs a command as if the checkout had the sources of another folder: `ip netns exec` has
given it mounts of its own."""


class Command:
    """A command on a machine."""

    def __init__(self, process: "Popen[str]", log: Path):
        self.process, self._log = process, log

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str, timeout_s: float = READY_S) -> None:
        wait_until(
            lambda: text in self.output or self.process.poll() is not None, timeout_s, lambda: self.output[-4000:]
        )
        assert text in self.output, self.output[-4000:]

    def wait(self) -> int:
        return self.process.wait(READY_S)


class Member:
    """One machine with a home of its own."""

    def __init__(self, machine: Machine, directory: Path, port: int = PORT):
        self.machine, self.node = machine, Node(machine, port=port)
        self.home = directory / machine.name
        self.home.mkdir()
        temporary = directory / machine.name.rpartition("-")[2]  # short, for the paths of Ray's sockets
        temporary.mkdir()
        self._directory = directory
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        cache = os.environ.get("UV_CACHE_DIR", str(Path.home() / ".cache" / "uv"))
        self.env |= {"RAY_TMPDIR": str(temporary), "HOME": str(self.home), "UV_CACHE_DIR": cache, "UV_OFFLINE": "1"}
        self._num_commands = 0
        self.sources: Path | None = None  # folder with deployments/ and engine/; None: those of this checkout

    def orchard(self, *words: str) -> Command:
        """Start a command; with a lower priority than others, Ray's agents may not start in the 15 s that they have."""
        return self.start([str(Path(sys.executable).parent / "orchard"), *words])

    def type(self, line: str) -> Command:
        """Start a line of a shell in the checkout, in a terminal, as a person does."""
        return self.start([sys.executable, "-c", IN_TERMINAL, "bash", "-c", f"cd {ROOT} && {line}"])

    def start(self, command: list[str]) -> Command:
        log = self._directory / f"{self.machine.name}-{self._num_commands}.log"
        self._num_commands += 1
        if self.sources is not None:
            command = ["bash", "-c", WITH_SOURCES, str(self.sources), *command]
        return Command(self.machine.start(command, self.env, log, niceness=0), log)

    def pids(self) -> dict[str, int]:
        """Deployment -> process of its replica on this machine."""
        status = self.node.get("/v1/status")
        own = status["ingress"][0]["node_id"]
        names = ("ingress", "engines", "text", "mllm")
        return {name: one["pid"] for name in names for one in status[name] if one["node_id"] == own}

    def num_engines(self) -> int:
        return len(self.node.get("/v1/status")["engines"])


@contextlib.contextmanager
def members(num_members: int, port: int = PORT, config: str = CONFIG) -> Iterator[list[Member]]:
    """So many machines without a cluster; the test is skipped where there are no network namespaces.

    Args:
        num_members: How many.
        port: Of the server on each.
        config: That `serve` reads.
    """
    if (reason := why_there_are_none()) is not None:
        if os.environ.get("ORCHARD_NAMESPACES") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    Path("/tmp/ray").mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="orh-", dir="/tmp"))
    (directory / "config.yaml").write_text(config)
    try:
        with machines(num_members) as made:
            yield [Member(machine, directory, port) for machine in made]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def serve(member: Member, dashboard: bool = False, tls: bool = True) -> Command:
    config = member.home.parent / "config.yaml"
    options = (*(() if dashboard else ("--no-dashboard",)), *(() if tls else ("--no-tls",)))
    return member.orchard("serve", "--cluster", "--interface", "eth0", "--config", str(config), *options)


def token_of(head: Member) -> str:
    """Return the token that a head prints for machines that join."""
    file = head.home / ".orchard" / "cluster" / "join_token"
    assert file.stat().st_mode & 0o777 == 0o600
    return file.read_text().strip()
