"""Checks before Ray starts: the cluster that would be joined, the API keys, the port, the GPU."""

import socket
from pathlib import Path

import psutil

from deployments.http.api_keys import ApiKeysError, read_api_keys
from deployments.serve_run.config_file import OrchardConfig
from deployments.serve_run.port import PortTaken, take_port
from deployments.serve_run.stop import say
from engine.device_lock import device_refusal

CONNECT_S = 2.0
RAY_PROCESSES = ("raylet", "gcs_server")


class CannotStart(Exception):
    pass


def check_keys(config: OrchardConfig) -> None:
    """For a server with a Ray cluster of its own. Raises CannotStart when its API keys cannot be read."""
    try:
        read_api_keys(config.args.http)
    except ApiKeysError as error:
        raise CannotStart(f"args.{error}") from None


def check_machine(config: OrchardConfig) -> None:
    """For a server with a Ray cluster of its own. Raises CannotStart when its port or its GPU is in use.

    The port is then this process's until it ends, see port.take_port.
    """
    engine = config.args.engine
    if (refusal := device_refusal(engine.device, engine.share_device)) is not None:
        raise CannotStart(refusal)
    try:
        take_port(config.host, config.port)
    except PortTaken as taken:
        raise CannotStart(str(taken)) from None


def finds_cluster(note: Path | None = None) -> bool:
    """Whether there is a Ray cluster that Ray joins by itself: the one that the last `ray start` here has noted.

    Ray waits minutes for one that is gone. If it was a cluster of this machine, and none of Ray's processes runs here
    any more, its note is removed, as a clean `ray stop` would have done.

    Raises:
        CannotStart: the cluster does not answer, but may come back, as when its head reboots.
    """
    note = _note() if note is None else note
    address = note.read_text().strip() if note.exists() else ""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return False
    host = host.strip("[]")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
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
        say(f"The Ray cluster at {address}, noted in {note}, is gone ({error}): starting without it.")
        return False


def _note() -> Path:
    from ray._common.utils import get_ray_address_file

    return Path(get_ray_address_file(None))


def _is_this_machine(host: str) -> bool:
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return host in own or host == "localhost"


def _ray_process() -> int | None:
    return next((p.pid for p in psutil.process_iter(["name"]) if p.info["name"] in RAY_PROCESSES), None)
