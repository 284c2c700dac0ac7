"""The member process: belongs to a machine that has joined a cluster, from `orchard join` to `orchard leave`.

Run by its supervisor, with MemberSettings as JSON on its standard input. It starts Ray, relays it to the head, copies
the head's log, and tells the other machines which one is the head. With `alone_after_s` it ends Ray when the head has
been silent for so long, and serves alone until the head answers again.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from deployments.cluster import ports
from deployments.cluster.folder import ClusterFolder, FolderError
from deployments.cluster.head_watch import ASK_S, HEAD_PATH, HeadWatch
from deployments.cluster.headship import Headship, read_headship
from deployments.cluster.join_client import HeadClient, HeadRefused, compare_with_head
from deployments.cluster.members import Report
from deployments.cluster.membership import Membership, read_membership, write_membership
from deployments.cluster.model_copy import missing_models
from deployments.cluster.mutual_tls import machine_tls
from deployments.cluster.proof_client import Revoked
from deployments.cluster.proof_server import ProofServer
from deployments.cluster.ray_node import NodeOptions, RayFailed, RayNode
from deployments.cluster.relay import GcsRelay
from deployments.commands.alone import AloneServer, end_leftover, note_of_ray
from deployments.commands.connection import KEY_VARIABLE, Connection
from deployments.commands.leaving import await_in_flight
from deployments.commands.member_supervisor import AGAIN
from deployments.commands.output import CommandError, say

OUTPUT = "member.log"
TICK_S = 2.0
ALONE_TICK_S = 5.0
AGAIN_S = 30.0
"""Pause between two attempts to join again, or to start the server that serves alone."""
MAX_STEADY_S = 120.0
"""A machine that serves alone joins again when the head has answered for as long as it was silent, but for no longer
than this: so long gRPC pauses before it tries a machine again, and until then the head's GCS takes a Ray for dead."""
STATUS_S = 10.0
END_S = 90.0
"""Time for the member process to end Ray, or the server that it has started."""
FAILED = 1


class CannotJoin(Exception):
    """The machine no longer agrees with its head; the message is for the operator."""


@dataclass(frozen=True)
class MemberSettings:
    """The facts that the process is started with."""

    head: str
    """HOST[:PORT] as it was given to `orchard join`."""
    gcs: str
    """ADDRESS:PORT of the head's GCS."""
    term: int
    """Term of that head, see cluster/headship.py."""
    address: str
    """Address of this machine."""
    url: str
    """URL of the server on this machine."""
    resources: dict[str, float]
    object_store_bytes: int
    alone_after_s: float | None = None
    ray_environ: dict[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of Ray, beside those of this process."""


class MemberProcess:
    """The process. `run` returns when it is to end."""

    def __init__(self, settings: MemberSettings, folder: ClusterFolder):
        """Bind the ports. Raises OSError, FolderError."""
        self._settings = settings
        self._folder = folder
        self._joined_s = time.time()
        self._membership: Membership | None = None
        self._node_id = ""
        self._again_at = self._steady_at = 0.0
        self._problem = ""
        self._stop = threading.Event()
        token, tls = folder.token(), machine_tls(folder)
        head, noted = Headship(settings.gcs.rpartition(":")[0], settings.term), read_headship(folder)
        if noted is not None and noted.term > head.term:
            head = noted  # it has changed since this machine has joined
        self._tls = tls
        self._relay = GcsRelay(settings.address, ports.RELAY, (head.address, ports.GCS), tls)
        self._watch = HeadWatch(folder, token, head, self._report, self._on_new_head, tls)
        self._server = ProofServer(settings.address, ports.MEMBER, token, {HEAD_PATH: self._watch.answer}, tls)
        self._ray = self._new_ray()
        self._alone: AloneServer | None = None

    def run(self, is_again: bool = False) -> None:
        """Start Ray, and watch the head until `end`.

        Args:
            is_again: Whether a process before this one was killed: its Ray goes on if it runs, and is started else when
                the head answers.

        Raises:
            RayFailed: Ray does not start.
            FolderError: A file cannot be written.
        """
        self._server.start()
        try:
            if is_again:
                self._attach()
            else:
                self._start_ray()
            while not self._stop.wait(ALONE_TICK_S if self._alone else TICK_S):
                self._tick_or_log()
        finally:
            self._server.stop()
            if self._alone is not None:
                self._alone.stop()
            self._ray.stop()
            self._relay.stop()

    def end(self) -> None:
        """Let `run` return."""
        self._stop.set()

    def _tick_or_log(self) -> None:
        """Tick, and log a problem once, until it is another one or Ray has been started."""
        try:
            self._tick()
        except Revoked as revoked:
            _log(f"{revoked}. Ray ends on this machine.")
            self.end()
        except (CannotJoin, FolderError, OSError, RayFailed) as problem:
            if (text := str(problem)) != self._problem:
                _log(text)
            self._problem = text

    def _tick(self) -> None:
        is_answered, now = self._watch.tick(), time.monotonic()
        if not is_answered:
            self._steady_at = now + min(self._watch.silent_s, MAX_STEADY_S)
        limit, may_start = self._settings.alone_after_s, now >= self._again_at
        is_back = is_answered and (self._alone is None or now >= self._steady_at)
        if self._alone is None and self._ray.has_ended and self._membership is not None:
            _log("Ray has ended on this machine. It is started again while the head answers.")
            self._membership, self._node_id = None, ""
        if self._membership is None and is_back and may_start:
            self._again_at = time.monotonic() + AGAIN_S
            self._join_again()
        elif self._alone is not None and self._alone.has_ended and may_start:
            self._again_at = time.monotonic() + AGAIN_S
            _log("The server that serves alone has ended; it is started again.")
            self._alone.start()
        elif self._alone is None and limit is not None and self._watch.silent_s > limit:
            self._serve_alone()

    def _start_ray(self) -> None:
        self._ray = self._new_ray()
        self._ray.start()
        self._note_ray()

    def _attach(self) -> None:
        end_leftover(self._folder)
        found = read_membership(self._folder)
        if found is not None and found.is_running:
            self._ray.attach(found.pid)
            self._note_ray()

    def _note_ray(self) -> None:
        write_membership(self._folder, self._ray.pid, self._settings.head, self._settings.url, os.getpid())
        self._membership, self._node_id, self._problem = read_membership(self._folder), "", ""

    def _new_ray(self) -> RayNode:
        settings = self._settings
        options = NodeOptions(
            settings.address, settings.resources, settings.object_store_bytes, f"{settings.address}:{ports.RELAY}"
        )
        return RayNode(options, {**os.environ, **settings.ray_environ}, self._folder.ray_output)

    def _serve_alone(self) -> None:
        _log(f"The head has been silent for {self._watch.silent_s:.0f} s: this machine leaves, and serves alone.")
        member = self._membership
        if member is not None and (node_id := member.node_id()) is not None:
            try:
                await_in_flight(Connection(member.url, os.environ.get(KEY_VARIABLE), STATUS_S), node_id)
            except CommandError as error:
                _log(f"Whether answers are running is not known: {error}")
        self._ray.stop()
        note_of_ray(os.environ).unlink(missing_ok=True)  # else the server takes the relay for a running cluster
        write_membership(self._folder, 0, self._settings.head, self._settings.url, os.getpid())
        self._membership, self._node_id = None, ""
        self._alone = AloneServer(self._folder)
        self._alone.start()

    def _join_again(self) -> None:
        """Start Ray again if this machine still agrees with the head. Raises CannotJoin, RayFailed, FolderError."""
        if (difference := self._difference()) is not None:
            raise CannotJoin(f"This machine does not join again: {difference}")
        _log("The head answers: this machine joins it again.")
        if self._alone is not None:
            self._alone.stop()
        try:
            self._start_ray()
        except RayFailed:
            if self._alone is not None:
                self._alone.start()
            raise
        self._alone = None

    def _difference(self) -> str | None:
        """Return why this machine may not join the head; None if it may."""
        head = HeadClient(self._watch.headship.address, self._folder.token(), ASK_S, self._tls)
        try:
            answer = head.facts()
            lines = compare_with_head(head, answer, self._settings.address)
        except HeadRefused as refused:
            return str(refused)
        found = [f"{line.name}: {line.text}" for line in lines if not line.is_green]
        for model in missing_models(answer.facts.checkpoints):
            found.append(f"{model.model} is not on this machine; `orchard leave` and `orchard join` copy it")
        return "; ".join(found) or None

    def _report(self) -> Report:
        if not self._node_id and self._membership is not None:
            self._node_id = self._membership.node_id() or ""
        return Report(self._settings.address, self._node_id, self._joined_s, None)

    def _on_new_head(self, headship: Headship) -> None:
        _log(f"The head is now {headship.address} (term {headship.term}).")
        self._relay.connect_to((headship.address, ports.GCS))


def start_agent(settings: MemberSettings, folder: ClusterFolder) -> "subprocess.Popen[str]":
    """Start the process under its supervisor; both outlive this process."""
    with (folder.path / OUTPUT).open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "deployments.commands.member_supervisor"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(settings)) + "\n")
    process.stdin.close()
    return process


def end_agent(member: Membership) -> None:
    """End the process, and with it Ray or the server on this machine."""
    if not member.has_agent:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(member.agent_pid)
        process.terminate()
        try:
            process.wait(END_S)
        except psutil.TimeoutExpired:
            process.kill()


def _log(text: str) -> None:
    say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


def main() -> int:
    """Run the process; return the exit status."""
    fields: dict[str, Any] = json.loads(sys.stdin.read())
    settings = MemberSettings(**fields)
    try:
        member = MemberProcess(settings, ClusterFolder())
    except FolderError as problem:
        say(str(problem))
        return FAILED
    except OSError as problem:
        say(f"Ports {ports.RELAY} and {ports.MEMBER} of {settings.address} cannot be used: {problem}")
        return FAILED
    signal.signal(signal.SIGTERM, lambda signum, frame: member.end())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        member.run(is_again=AGAIN in sys.argv[1:])
    except (RayFailed, FolderError) as problem:
        say(str(problem))
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
