"""Which processes of a machine listen on TCP ports, and what a stranger gets there.

A stranger has no TLS, no certificate or that of another authority, or no token or a wrong one.

Usage, on the machine that asks: python -m tests.cluster.listeners IDENTITIES ADDRESS:PORT ...
"""

import contextlib
import http.client
import json
import re
import socket
import ssl
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from engine.snapshot_store.greeting import MAGIC, VERDICTS, VERSION
from tests.cluster.namespaces import Machine, ip

TIMEOUT_S = 5.0
WRONG = "Bearer 0123456789abcdef0123456789abcdef"
METHODS = (
    "/ray.rpc.NodeInfoGcsService/CheckAlive",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/NumPendingTasks",
    "/ray.rpc.ReporterService/HealthCheck",
    "/ray.rpc.RayletDriver/ClusterInfo",
    "/ray.serve.ASGIService/HandleRequest",
)
"""One method of each gRPC service of a node; an empty message asks for nothing."""
PATHS = ("/", "/metrics", "/api/local_raylet_healthz", "/api/healthz", "/api/version")
TLS_PATHS = ("/facts", "/member", "/head", "/log", "/sign", "/adopted")
"""Paths of the head and of members, none of which is answered without a proof of the token."""
NO_TLS, TLS_REFUSES = "no TLS", "TLS refuses"
GREETING_S = 0.5
CLAIM_BYTES = 138
"""Length of a client's greeting (engine/snapshot_store/greeting.py)."""
NO_SERVICE = {"UNAVAILABLE", "UNIMPLEMENTED", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN"}
"""Codes of a port that does not have the service, or does not speak gRPC."""
NO_CONNECTION = {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
"""Codes of a port that does not let a certificate in, or speaks something else in TLS."""

ROLES = {
    "gcs_server": r"gcs/gcs_server ",
    "raylet": r"raylet/raylet ",
    "agent": r"dashboard/agent\.py|^ray::DashboardAgent",
    "runtime environments": r"runtime_env/agent/main\.py|^ray::RuntimeEnvAgent",
    "client server": r"ray\.util\.client\.server",
    "dashboard": r"dashboard/dashboard\.py",
    "log monitor": r"log_monitor\.py",
    "monitor": r"autoscaler/.*monitor\.py",
    "store": r"deployments\.cluster\.gcs_store",
    "member process": r"deployments\.commands\.member_process",
    "serve": r"orchard serve ",
    "controller": r"^ray::ServeController",
    "HTTP proxy": r"^ray::ProxyActor",
    "engine": r"^ray::ServeReplica:orchard:ModelReplica",
    "replica": r"^ray::ServeReplica:orchard:",
    "worker": r"^ray::",
}
"""Kind of process -> pattern of its command line; the first one that matches."""


@dataclass(frozen=True)
class Listener:
    """A listening socket."""

    role: str
    address: str
    """Address on which it listens; 0.0.0.0 for all addresses of the machine."""
    port: int


def listeners(machine: Machine) -> list[Listener]:
    """Return the sockets that listen on a machine."""
    found = []
    for line in ip("netns", "exec", machine.name, "ss", "-ltnpH").splitlines():
        address, _, port = line.split()[3].rpartition(":")
        pid = re.search(r"pid=(\d+)", line)
        assert pid is not None, line
        address = address.strip("[]").removeprefix("::ffff:")
        found.append(Listener(role_of(int(pid[1])), "0.0.0.0" if address in ("*", "::") else address, int(port)))
    return found


def role_of(pid: int) -> str:
    title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return next((role for role, pattern in ROLES.items() if re.search(pattern, title)), f"unknown: {title[:200]}")


@dataclass(frozen=True)
class Identity:
    """Files with which a machine asks by TLS, and the token that it sends."""

    authority: str
    """Certificate of the authority that it trusts."""
    certificate: str = ""
    """'': it has none."""
    key: str = ""
    token: str = ""
    """'': it sends none."""


def ask_as_stranger(
    machine: Machine, targets: list[str], identities: dict[str, Identity]
) -> dict[str, dict[str, list[str]]]:
    """Ask from a machine; return what `answers` has found of each ADDRESS:PORT."""
    told = json.dumps({name: asdict(identity) for name, identity in identities.items()})
    program = [sys.executable, "-m", "tests.cluster.listeners", told, *targets]
    done = subprocess.run(["ip", "netns", "exec", machine.name, *program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def answers(target: str, identities: dict[str, Identity]) -> dict[str, list[str]]:
    """Return what a port answers, as words such as `GET /metrics 200`.

    Returns:
        For questions without TLS, with no token and a wrong one; and, where the port speaks TLS, for each identity.
    """
    said = {"no token": _answers(target, {}), "wrong token": _answers(target, {"authorization": WRONG})}
    if not _speaks_tls(target):
        return said
    return {
        "no token": said["no token"] or [NO_TLS],
        "wrong token": said["wrong token"] or [NO_TLS],
        **{name: _tls_answers(target, identity) for name, identity in identities.items()},
    }


def _speaks_tls(target: str) -> bool:
    """Tell whether a port answers the first message of TLS with one of TLS."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with _connected(target) as connection, context.wrap_socket(connection):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False


def _tls_answers(target: str, identity: Identity) -> list[str]:
    """Return what a port that speaks TLS answers a machine; `TLS refuses` if it answers nothing."""
    context = ssl.create_default_context(cafile=identity.authority)
    if identity.certificate:
        context.load_cert_chain(identity.certificate, identity.key)
    headers = {"authorization": f"Bearer {identity.token}"} if identity.token else {}
    said = []
    for path in TLS_PATHS:
        if (status := _http_status(target, path, headers, context)) is None:
            break
        said.append(f"GET {path} {status}")
    if not said and (word := _greeting(target, context)):
        said.append(word)
    if not said:
        files = [Path(name).read_bytes() if name else None for name in (identity.key, identity.certificate)]
        credentials = grpc.ssl_channel_credentials(Path(identity.authority).read_bytes(), *files)
        codes = {method: _grpc_code(target, method, headers, credentials) for method in METHODS}
        said += [f"{method} {code}" for method, code in codes.items() if code not in NO_CONNECTION]
    return said or [TLS_REFUSES]


def _greeting(target: str, context: ssl.SSLContext) -> str:
    """Return `snapshots` if the exchange of snapshots greets a machine, else ''."""
    host = target.rpartition(":")[0]
    with contextlib.suppress(OSError), _connected(target) as plain:  # noqa: SIM117
        with context.wrap_socket(plain, server_hostname=host) as encrypted:
            return "snapshots" if _is_greeted(encrypted) else ""
    return ""


def _connected(target: str) -> socket.socket:
    host, _, port = target.rpartition(":")
    return socket.create_connection((host, int(port)), TIMEOUT_S)


def _answers(target: str, headers: dict[str, str]) -> list[str]:
    said = []
    for path in PATHS:
        if (status := _http_status(target, path, headers)) is None:
            break
        said.append(f"GET {path} {status}")
    if not said and (word := _first_word(target)):
        said.append(word)
    if not said:
        codes = {method: _grpc_code(target, method, headers) for method in METHODS}
        said += [f"{method} {code}" for method, code in codes.items() if code not in NO_SERVICE]
    return said


def _http_status(target: str, path: str, headers: dict[str, str], context: ssl.SSLContext | None = None) -> int | None:
    host, _, port = target.rpartition(":")
    if context is None:
        connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
    else:
        connection = http.client.HTTPSConnection(host, int(port), timeout=TIMEOUT_S, context=context)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _first_word(target: str) -> str:
    """Return what the exchange of snapshots, or the store of the GCS, says to a stranger; '' if it is none of them."""
    host, _, port = target.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
        if _is_greeted(connection):
            connection.settimeout(TIMEOUT_S)
            connection.sendall(MAGIC + VERSION.to_bytes(2, "little") + bytes(CLAIM_BYTES - len(MAGIC) - 2))
            return f"snapshots {VERDICTS[connection.recv(1)[0]]}"
        connection.settimeout(TIMEOUT_S)
        connection.sendall(b"*1\r\n$4\r\nPING\r\n")
        if (said := connection.recv(64)).startswith((b"-", b"+")):
            return said.split()[0].decode()
    return ""


def _is_greeted(connection: socket.socket) -> bool:
    connection.settimeout(GREETING_S)
    try:
        return connection.recv(64).startswith(MAGIC)
    except TimeoutError:
        return False


def _grpc_code(
    target: str, method: str, headers: dict[str, str], credentials: grpc.ChannelCredentials | None = None
) -> str:
    with grpc.insecure_channel(target) if credentials is None else grpc.secure_channel(target, credentials) as channel:
        try:
            channel.unary_unary(method)(b"", timeout=TIMEOUT_S, metadata=tuple(headers.items()))
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            return error.code().name
    return "OK"


if __name__ == "__main__":
    KNOWN = {name: Identity(**fields) for name, fields in json.loads(sys.argv[1]).items()}
    json.dump({target: answers(target, KNOWN) for target in sys.argv[2:]}, sys.stdout)
