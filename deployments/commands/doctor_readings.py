"""Readings: what `orchard doctor` looks at on this machine. A reading that cannot be taken is None."""

import contextlib
import errno
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from deployments.cluster.cluster_view import ClusterView, NoView, read_view
from deployments.cluster.folder import ClusterFolder, FolderError
from deployments.commands.connection import DEFAULT_URL, Connection, Refused, Unreachable
from deployments.commands.models_on_disk import hub_folder
from deployments.commands.output import CommandError
from deployments.http.api_keys import ApiKeysError, read_api_keys
from deployments.serve_run.config_file import ConfigError, OrchardConfig, read_config
from deployments.serve_run.effective import url_of
from deployments.serve_run.environment import hidden_files
from deployments.serve_run.port import PortTaken, check_port

CONNECT_S = 3.0
COMMAND_S = 10.0
MODEL_CHECK_S = 120.0
RAY_PROCESSES = ("raylet", "gcs_server")
CHECKED_PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "ray", "transformers", "tokenizers", "huggingface-hub")
HUB = "https://huggingface.co"


@dataclass(frozen=True, kw_only=True)
class Readings:
    """Readings of the machine and the server. Fields that only one system has are None elsewhere."""

    system: str  # As platform.system() names it: Darwin or Linux.
    machine: str  # Such as arm64.
    python: tuple[int, int]
    macos: tuple[int, ...] | None = None
    is_translated: bool | None = None  # Whether Rosetta runs this Python.
    hidden_files: str | None = None  # Why Python ignores `.pth` files.
    total_bytes: int = 0
    available_bytes: int = 0
    pressure: int | None = None  # Level of macOS's memory pressure: 1 normal, 2 warning, 4 critical.
    wired_limit_mb: int | None = None  # The sysctl iogpu.wired_limit_mb; 0: the system's own limit.
    sleep_minutes: int | None = None  # Idle minutes until the Mac sleeps; 0: never.
    is_low_power: bool | None = None
    peer: str | None = None  # HOST:PORT of another machine.
    peer_errno: int | None = None  # Why it cannot be reached; 0: it can.
    peer_seconds: float = 0.0  # Until the connection or its error.
    config_path: str | None = None
    config_mistakes: str | None = None
    port_problem: str | None = None  # Why the server's port cannot be used.
    server_url: str = ""
    server_problem: str | None = None  # Why the server does not answer; None: it does.
    server_unready: str | None = None  # Why it serves no requests yet; None: it does.
    ray_dir: str = "/tmp"
    ray_note: str | None = None  # Address of the cluster that `ray start` has noted.
    ray_answers: bool = False  # Whether something listens at that address.
    ray_pids: tuple[int, ...] = ()
    token_mode: int | None = None  # Mode of ~/.ray/auth_token.
    is_token_exposed: bool = False  # Whether other users of this machine can read it.
    cluster: ClusterView | None = None  # None: this machine belongs to no cluster of Orchard's.
    cluster_problem: str | None = None  # Why the cluster is not known.
    hard_open_files: int | None = None  # None: unlimited.
    disk: dict[str, int] = field(default_factory=dict)  # Folder to its free bytes.
    hub_problem: str | None = None  # None: reachable, or not asked.
    asked_hub: bool = False
    model: str = "demo"
    model_problem: str | None = None  # None: it can be served here, or was not checked.
    checked_model: bool = False
    keys_file: str | None = None
    keys_problem: str | None = None
    versions: dict[str, tuple[str | None, str]] = field(default_factory=dict)  # Package to installed and pinned.


def take(
    config_path: str | None, url: str | None, peer: str | None, asks_hub: bool, checks_model: bool, key: str | None
) -> Readings:
    """Take all readings.

    Args:
        config_path: The server's configuration; None: there is none.
        url: The server's URL; None: that of the configuration.
        peer: HOST:PORT of another machine of the cluster.
        asks_hub: Whether to connect to the hub.
        checks_model: Whether to check the configured model, which takes seconds.
        key: API key.
    """
    config, mistakes = _config(config_path)
    host, port = ("127.0.0.1", 8000) if config is None else (config.host, config.port)
    server_url = url or (DEFAULT_URL if config is None else url_of(config))
    problem, unready = _server(server_url, key)
    model = "demo" if config is None else config.args.engine.model
    is_mac = platform.system() == "Darwin"
    memory = psutil.virtual_memory()
    ray_dir = os.environ.get("RAY_TMPDIR") or "/tmp"
    note = _text(Path(ray_dir) / "ray" / "ray_current_cluster")
    peer = peer or (note if note and not note.startswith("127.") else None)
    peer_errno, peer_seconds = _reach(peer) if peer else (None, 0.0)
    keys_file = None if config is None else config.args.http.api_keys_file
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    cluster, cluster_problem = _cluster()
    return Readings(
        system=platform.system(),
        machine=platform.machine(),
        python=sys.version_info[:2],
        macos=tuple(map(int, platform.mac_ver()[0].split("."))) if is_mac else None,
        is_translated=_sysctl("sysctl.proc_translated") == 1 if is_mac else None,
        hidden_files=hidden_files() if is_mac else None,
        total_bytes=memory.total,
        available_bytes=memory.available,
        pressure=_sysctl("kern.memorystatus_vm_pressure_level") if is_mac else None,
        wired_limit_mb=_sysctl("iogpu.wired_limit_mb") if is_mac else None,
        sleep_minutes=_power("sleep") if is_mac else None,
        is_low_power=_power("lowpowermode") == 1 if is_mac else None,
        peer=peer,
        peer_errno=peer_errno,
        peer_seconds=peer_seconds,
        config_path=config_path,
        config_mistakes=mistakes,
        port_problem=_port_problem(host, port),
        server_url=server_url,
        server_problem=problem,
        server_unready=unready,
        ray_dir=ray_dir,
        ray_note=note,
        ray_answers=bool(note) and _reach(note)[0] == 0,
        ray_pids=tuple(p.pid for p in psutil.process_iter(["name"]) if p.info["name"] in RAY_PROCESSES),
        token_mode=_mode(token := Path.home() / ".ray" / "auth_token"),
        is_token_exposed=_is_exposed(token),
        cluster=cluster,
        cluster_problem=cluster_problem,
        hard_open_files=None if hard == resource.RLIM_INFINITY else hard,
        disk=_disk((hub_folder(), Path(ray_dir))),
        hub_problem=_hub_problem() if asks_hub else None,
        asked_hub=asks_hub,
        model=model,
        model_problem=_model_problem(model) if checks_model else None,
        checked_model=checks_model,
        keys_file=keys_file,
        keys_problem=None if config is None else _keys_problem(config),
        versions=_versions(),
    )


def _config(path: str | None) -> tuple[OrchardConfig | None, str | None]:
    if path is None:
        return None, None
    try:
        return read_config(path), None
    except ConfigError as error:
        return None, str(error)


def _server(url: str, key: str | None) -> tuple[str | None, str | None]:
    try:
        Connection(url, key, CONNECT_S).get("/health/ready")
    except Unreachable as error:
        return str(error), None
    except Refused as refused:
        return None, str(refused)
    except CommandError as error:
        return str(error), None
    return None, None


def _cluster() -> tuple[ClusterView | None, str | None]:
    try:
        return read_view(ClusterFolder()), None
    except (NoView, FolderError) as reason:
        return None, str(reason)


def _port_problem(host: str, port: int) -> str | None:
    try:
        check_port(host, port)
    except PortTaken as taken:
        return str(taken)
    return None


def _reach(address: str) -> tuple[int, float]:
    """Return the error number of a connection to HOST:PORT, 0 if there is one, and the seconds that it took."""
    parts, began = urlsplit(f"//{address}"), time.monotonic()
    try:
        socket.create_connection((parts.hostname or "", parts.port or 22), CONNECT_S).close()
        return 0, time.monotonic() - began
    except TimeoutError:
        return errno.ETIMEDOUT, time.monotonic() - began
    except (OSError, ValueError) as error:
        return getattr(error, "errno", None) or errno.EINVAL, time.monotonic() - began


def _hub_problem() -> str | None:
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or HUB)
    found, _ = _reach(f"{endpoint.hostname}:{endpoint.port or (443 if endpoint.scheme == 'https' else 80)}")
    return None if found == 0 else f"{endpoint.geturl()}: {os.strerror(abs(found))}"


def _model_problem(model: str) -> str | None:
    command = [sys.executable, "-m", "engine", "--check", "--model", model]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MODEL_CHECK_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {MODEL_CHECK_S:.0f} s"
    return None if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")


def _keys_problem(config: OrchardConfig) -> str | None:
    try:
        read_api_keys(config.args.http)
    except ApiKeysError as error:
        return error.message
    return None


def _versions() -> dict[str, tuple[str | None, str]]:
    """Return the installed and the pinned version of each package that computes or serves."""
    found = {}
    for line in importlib.metadata.requires("orchard-mlx") or ():
        match = re.match(r"([A-Za-z0-9-]+)(?:\[[^\]]*\])?==([^;\s]+)\s*$", line)
        if match and match[1] in CHECKED_PACKAGES:
            try:
                installed = importlib.metadata.version(match[1])
            except importlib.metadata.PackageNotFoundError:
                installed = None
            found[match[1]] = installed, match[2]
    return found


def _disk(folders: tuple[Path, ...]) -> dict[str, int]:
    found = {}
    for folder in folders:
        there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
        with contextlib.suppress(OSError):
            found[str(folder)] = shutil.disk_usage(there).free
    return found


def _mode(path: Path) -> int | None:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None


def _is_exposed(path: Path) -> bool:
    """Tell whether others may read a file and pass all folders above it."""
    mode = _mode(path)
    folders = [_mode(folder) or 0 for folder in path.parents]
    readable = (stat.S_IRGRP, stat.S_IXGRP), (stat.S_IROTH, stat.S_IXOTH)
    return mode is not None and any(mode & read and all(one & enter for one in folders) for read, enter in readable)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _sysctl(name: str) -> int | None:
    said = _output("sysctl", "-n", name)
    return int(said) if said is not None and said.strip().isdigit() else None


def _power(name: str) -> int | None:
    """Return a setting of the power source in use."""
    match = re.search(rf"^\s*{name}\s+(\d+)", _output("pmset", "-g") or "", re.MULTILINE)
    return None if match is None else int(match[1])


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
