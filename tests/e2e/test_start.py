"""The effects of a started server on its machine."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from tests.e2e.server import SHIPPED_CONFIG, Server

pytestmark = pytest.mark.server

ORCHARD = Path(sys.executable).parent / "orchard"


@pytest.fixture(scope="module")
def status(http: httpx.Client) -> dict[str, Any]:
    return http.get("/v1/status").json()


def pids(status: dict[str, Any]) -> dict[str, int]:
    """Deployment -> process."""
    return {name: status[name][0]["pid"] for name in ("ingress", "engines", "text", "mllm", "spec_prefill")}


def test_replicas_run_at_the_niceness_of_the_command(server: Server, status: dict[str, Any]):
    own = psutil.Process(server.pid).nice()
    assert {name: psutil.Process(pid).nice() for name, pid in pids(status).items()} == dict.fromkeys(pids(status), own)


def test_environment_variables_of_orchard_are_all_in_effect(server: Server, status: dict[str, Any]):
    assert status["config"]["effective"]["environment"] == []
    assert status["config"]["effective"]["spec_prefill"].startswith("on: draft_model demo")
    assert server.output.count("Effective configuration:") == 1


@pytest.mark.night("test_cli.py runs the command on a port in use, test_port.py two servers on a port")
def test_a_second_server_on_the_port_is_refused_with_the_pid_of_the_first(server: Server, tmp_path: Path):
    port = server.base_url.rpartition(":")[2]
    config = tmp_path / "serve_config.yaml"
    config.write_text(SHIPPED_CONFIG.read_text().replace("port: 8000", f"port: {port}"))
    done = subprocess.run([str(ORCHARD), "serve", "--config", str(config)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"port {port} is reserved by an Orchard server in process {server.pid} (" in done.stderr


def test_all_processes_of_a_server_of_one_machine_listen_on_loopback(server: Server):
    """So that it does not notice when an address of the machine changes, and no firewall asks."""
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    addresses = {
        (process.name(), connection.laddr.ip)
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {"raylet", "gcs_server"} <= {name for name, _ in addresses}
    assert {ip for _, ip in addresses} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, addresses


def test_a_call_to_a_replica_without_the_token_is_refused(status: dict[str, Any]):
    """Serve's replicas unpickle what they are sent."""
    for pid in pids(status).values():
        ports = {c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert ports
        assert all(grpc.StatusCode.UNAUTHENTICATED in codes for codes in refusals(ports).values()), refusals(ports)


def refusals(ports: set[int]) -> dict[int, set[grpc.StatusCode]]:
    codes: dict[int, set[grpc.StatusCode]] = {}
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method in ("/ray.serve.ASGIService/HandleRequest", "/ray.rpc.CoreWorkerService/PushTask"):
                try:
                    channel.unary_unary(method)(b"", timeout=10)
                except grpc.RpcError as error:
                    assert isinstance(error, grpc.Call)
                    codes.setdefault(port, set()).add(error.code())
    return codes
